"""Measured cost: each node is run on its device, forward and backward, and timed.

::

    round 1 (to warm up)   conv 5.1 ms   bn 0.9 ms   relu 0.3 ms ...
    round 2                conv 4.2 ms   bn 0.7 ms   relu 0.2 ms ...   the median of these is the
    round 3                conv 4.1 ms   bn 0.7 ms   relu 0.2 ms ...   cost; equal nodes share one

What is measured is one micro-batch, of the size that the pipeline will run: a part of its time does
not depend on how many rows it has. In each round all forwards run first and then all backwards, as
in training, so that the caches of the processor are as cold as they will be there. Products are
computed in the precision that the user has set. On an accelerator the time is that of the device
(``passes/cost/timer.py``). The model is left as it was: gradients are not accumulated, and
buffers and random states are put back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, fx

from fxpipe.ir.cost import Cost
from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.graph import COST, NO_BACKWARD, VALUE, WRITES, is_work, mutable, stage_nodes
from fxpipe.ir.precision import users_precision
from fxpipe.ir.tensors import tensors_of, with_tensors
from fxpipe.runtime.microbatch import scatter
from fxpipe.runtime.random import RandomState
from fxpipe.runtime.writes import same_values
from passes.common.signature import signature
from passes.cost.analytic import ADAM, AnalyticCost
from passes.cost.timer import HostTimer, timer_of
from passes.cost.work import BACKWARD, microbatches

ROUNDS = 25  # the most rounds after the warm-up


@dataclass(frozen=True)
class MeasuredCost:
    """Model graph with fake values (pass "alias") → the same, with a :class:`Cost` at each node.

    Times are those of the first micro-batch, times the number of micro-batches; bytes and FLOPs are
    those of :class:`AnalyticCost`. A graph of which pass "rows" does not know that it takes other
    batch sizes runs with all rows.

    Args:
        inputs: real inputs of the model, one for each placeholder.
        in_dims: the batch dimension of each input; None for one that all micro-batches share, and
            in place of the tuple if nothing is to be cut.
        threads: the number of intra-op threads to measure with, as many as a lane has; None: those
            that are set. With all threads of the process the kernels of a small model are slower
            than with a lane's, by orders of magnitude where other processes take the cores.
        device: the device on which to measure; None: the model's. Tensors on other devices are
            copied to it, node by node.
        budget_s: no round begins after this many seconds. The first one, a warm-up, always runs to
            its end, and counts if it is the only one.
        spec, optimizer_states, chunks, training: as ``device``, ``optimizer_states``, ``chunks``
            and ``training`` of :class:`AnalyticCost`.

    Raises ValueError for a model on "meta", which computes nothing.
    """

    name: ClassVar[str] = "cost"
    inputs: tuple[Any, ...]
    device: torch.device | None = None
    budget_s: float = 10.0
    spec: DeviceSpec = CPU_CORE
    optimizer_states: float = ADAM
    chunks: int = 1
    training: bool = True
    in_dims: tuple[int | None, ...] | None = None
    threads: int | None = None

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        device = self.device or next(
            (t.device for t in tensors_of([*gm.parameters(), *self.inputs])), None
        )
        if device is not None and device.type == "meta":
            raise ValueError(
                'costs="measured" runs the model, which is on "meta" or would be moved there: give '
                'a model and inputs with values, and real devices, or costs="analytic"'
            )
        gm = AnalyticCost(self.spec, self.optimizer_states, self.chunks, self.training)(gm)
        work = list(stage_nodes(gm.graph))
        keys = {node: signature(gm, node) or node for node in work}
        found: dict[Any, list[_Seconds]] = {}
        inputs, count = self._inputs(gm.graph)
        for timed in self._rounds(gm, device, inputs):
            for node in work:
                found.setdefault(keys[node], []).append(timed[node])
        for node in work:
            forward, backward, adding = map(statistics.median, zip(*found[keys[node]], strict=True))
            estimate: Cost = node.meta[COST]
            node.meta[COST] = replace(
                estimate,
                forward_s=forward * count,
                again_s=forward * count * estimate.part_again,
                backward_s=backward * count + adding * (count - 1),
                accumulation_s=adding,
            )
        return gm

    def _inputs(self, graph: fx.Graph) -> tuple[tuple[Any, ...], int]:
        """The inputs of one micro-batch, and how many such micro-batches there are."""
        if self.in_dims is None or microbatches(graph) is None:
            return self.inputs, 1
        pairs = zip(self.inputs, self.in_dims, strict=True)
        return tuple(scatter(value, dim, self.chunks)[0] for value, dim in pairs), self.chunks

    def _rounds(
        self, gm: fx.GraphModule, device: torch.device | None, inputs: Sequence[Any]
    ) -> list[dict[fx.Node, _Seconds]]:
        """The seconds that each node takes, for each round; the warm-up is left out unless it is
        the only round."""
        rounds: list[dict[fx.Node, _Seconds]] = []
        end = time.perf_counter() + self.budget_s
        console = Console(stderr=True)  # standard output may be redirected to a file
        progress = Progress(console=console, transient=True, disable=not console.is_terminal)
        as_it_runs = _as_it_was(gm, device), intra_op_threads(self.threads), users_precision()
        with ExitStack() as stack:
            for each in (*as_it_runs, progress):
                stack.enter_context(each)
            timer = timer_of(device)
            for _ in progress.track(range(1 + ROUNDS), description="measuring"):
                if rounds and time.perf_counter() > end:
                    break
                timing = _TimingInterpreter(gm, device, timer, self.training)
                timing.run(*inputs)
                rounds.append(timing.finish())
        return rounds[1:] or rounds


_Seconds = tuple[float, float, float]  # forward, backward, and to accumulate gradients


@dataclass
class _TimedForward:
    """A node whose forward has run: its time, and the tensors with which its backward is run."""

    node: fx.Node
    forward_s: float
    outputs: list[Tensor]
    inputs: list[Tensor]
    parameters: set[int]  # the ids of those inputs that are parameters


class _TimingInterpreter(fx.Interpreter):
    """Runs and times the forward of each node, and then the backward of each, the last node first.
    The values between nodes are detached, so that each backward is that of one node."""

    def __init__(
        self,
        gm: fx.GraphModule,
        device: torch.device | None,
        timer: HostTimer,
        training: bool = True,
    ) -> None:
        super().__init__(gm)
        self.device, self.timer, self.training = device, timer, training
        self.tapes: list[_TimedForward] = []
        self.moved: dict[str, Tensor] = {}  # tensors of the next module, copied to the device

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and time it if it is part of a stage."""
        if not is_work(n):
            return self._here(super().run_node(n))
        arguments = fx.map_arg((n.args, n.kwargs), self._argument)
        sources = [source for source in n.all_input_nodes if source.op == "get_attr"]
        parameters = tensors_of([self.env[source] for source in sources])
        if n.op == "call_module":
            parameters += self._move_in(str(n.target))
        leaves = [t for t in tensors_of(arguments) if t.requires_grad]
        run = getattr(self, n.op)
        with torch.set_grad_enabled(self.training):
            args, kwargs = with_tensors(lambda t: t.clone() if WRITES in n.meta else t, arguments)
            call = partial(run, n.target, *mutable((args, kwargs)))
            result, ahead = self.timer.time((n, "forward"), call)
        given = [t for t in tensors_of(result) if t.grad_fn is not None]
        own = {id(t) for t in parameters}
        wanted = list({id(t): t for t in (*leaves, *parameters) if t.requires_grad}.values())
        if NO_BACKWARD in n.meta:
            given = []
        self.tapes.append(_TimedForward(n, ahead, given, wanted, own))
        return with_tensors(lambda t: t.detach(), result)

    def finish(self) -> dict[fx.Node, _Seconds]:
        """Run all backwards. Returns the seconds of every node, forward and backward."""
        seconds = {}
        while self.tapes:
            tape = self.tapes.pop()
            seconds[tape.node] = tape.forward_s, *self._backward(tape)
        return seconds

    def _backward(self, tape: _TimedForward) -> tuple[float, float]:
        """The seconds of a backward, and of adding its gradients of parameters to others."""
        if not tape.outputs or not tape.inputs:
            return 0.0, 0.0
        gradients = [torch.ones_like(t) for t in tape.outputs]
        try:
            found, seconds = self.timer.time(
                (tape.node, "backward"),
                lambda: torch.autograd.grad(
                    tape.outputs, tape.inputs, gradients, allow_unused=True
                ),
            )
        except RuntimeError as error:
            if not is_the_models(error):  # such as an out-of-memory error
                raise
            # PyTorch's reentrant checkpoint refuses autograd.grad: estimate its backward.
            return BACKWARD * tape.forward_s, 0.0
        pairs = [
            (gradient.contiguous(), tensor)  # which stands for the gradient that is there
            for gradient, tensor in zip(found, tape.inputs, strict=True)
            if id(tensor) in tape.parameters
            and gradient is not None
            and gradient.layout == torch.strided
        ]
        if not pairs:
            return seconds, 0.0
        _, adding = self.timer.time(
            (tape.node, "adding"), lambda: [gradient.add_(other) for gradient, other in pairs]
        )
        return seconds, adding

    def _move_in(self, path: str) -> list[Tensor]:
        """Copy a module's tensors to the device, for :meth:`call_module`. Returns those that want
        gradients."""
        module = self.fetch_attr(path)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        moved = {name: self._here(tensor) for name, tensor in state.items()}
        self.moved = moved if any(moved[name] is not state[name] for name in state) else {}
        return [tensor for tensor in moved.values() if tensor.requires_grad]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a module with its parameters and buffers on the device that is measured."""
        if not self.moved:
            return super().call_module(target, args, kwargs)
        return torch.func.functional_call(self.fetch_attr(target), self.moved, args, kwargs)

    def _argument(self, node: fx.Node) -> Any:
        """The value of a node as an argument: its tensors are leaves of autograd, which want
        gradients where those of the model would."""
        value, shown = self.env[node], node.meta.get(VALUE)
        if node.op == "get_attr":
            return value
        wants = iter([t.requires_grad for t in tensors_of(shown)])
        return with_tensors(lambda t: t.detach().requires_grad_(next(wants, False)), value)

    def _here(self, value: Any) -> Any:
        """The value with its tensors on the device; those that are copied are leaves of autograd,
        and want gradients if the originals do."""
        if self.device is None:
            return value
        return with_tensors(
            lambda t: (
                t
                if t.device == self.device
                else t.detach().to(self.device).requires_grad_(t.requires_grad)
            ),
            value,
        )


@contextmanager
def _as_it_was(gm: fx.GraphModule, device: torch.device | None) -> Iterator[None]:
    """Put back, at the end of the ``with`` block, the values of buffers and the states of random
    number generators, which measuring changes."""
    buffers = [(buffer, buffer.clone()) for buffer in gm.buffers()]
    state = RandomState(() if device is None else (device,))
    with torch.no_grad():
        try:
            yield
        finally:
            state.put_back()
            for buffer, before in buffers:
                if not same_values(buffer, before):  # a backward of the user's may need its version
                    buffer.copy_(before)


@contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """Inside the ``with`` block kernels of the CPU run with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
