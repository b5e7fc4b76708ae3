"""A training step, action by action: each stage's forward and backward by themselves.

::

    x ── forward ──┬── y ── loss ──┬── value
                   └── tape        └── tape ── backward ── grad y ┐
    grad x ── backward (tape of the stage) ───────────────────────┘

A stage's forward records an autograd graph of its own: what comes in is cut off from what has made
it, what goes out is handed on without history. A :class:`Tape` keeps both ends until the backward.
Gradients of parameters go into ``.grad`` there and then, so that they are summed in the order in
which the backwards run.

The backward may be done in two halves (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): a
module that :func:`defer` runs gives the gradient of its input at once, and those of its parameters
later.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.ir._torch import gradient_hooks, pytree, run_backward
from fxpipe.ir.hooks import all_are_watched
from fxpipe.runtime.checkpoint import CheckpointOptions, Handle, checkpointed
from fxpipe.runtime.copy import moved
from fxpipe.runtime.dependency import flattened, leaves_in, mapped
from fxpipe.runtime.microbatch import weighted_sum
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.penalty import Penalty, homes_of, leaves_of, penalties
from fxpipe.runtime.shared import share
from fxpipe.runtime.streams import CALLER, await_made, device_of, pass_on, stream

Deferred = tuple[GradientEdge | Tensor, Tensor, list[Tensor]]
"""Where a backward begins, the gradient there, and the parameters that it is for."""
_recording = threading.local()  # .tape: that of the forward which runs in this thread


class Tape:
    """The autograd graph of one forward, by its two ends: the arguments and the results.

    A backward starts at the results and leaves gradients at the arguments; parameters get theirs in
    ``.grad`` as in any backward.
    """

    def __init__(self) -> None:
        self.found: list[Tensor | None] = []  # gradients, one for each leaf of the arguments
        self.build: Callable[[list[Any]], Any] = tuple  # the arguments, from their leaves
        self.results: list[list[Any]] = []  # the leaves of each result
        self.handle: Handle | None = None  # of a checkpointed forward
        self.repeat: Callable[..., tuple[Any, ...]] | None = None  # the same, not checkpointed
        self.deferred: list[Deferred] = []  # gradients of parameters, to be computed
        self.later: list[Callable[[], Iterable[Deferred]]] = []  # compute some that are added to it
        self.stage: nn.Module | None = None
        self.penalties: list[Penalty] = []  # gradients of its parameters that the loss has brought
        self.homes: dict[Tensor, Tape] = {}  # of a loss: the parameters in it, and whose they are
        self.is_elsewhere = False  # whether it only stands for one of another process

    def record(self, function: Callable[..., tuple[Any, ...]], args: Any) -> tuple[Any, ...]:
        """Run a function, recording its graph. Returns its results, detached from that graph."""
        leaves, self.build = flattened(args)
        self.found = [None] * len(leaves)
        outer, _recording.tape = getattr(_recording, "tape", None), self
        try:
            return self._record(function, leaves)
        finally:
            _recording.tape = outer

    def _record(
        self, function: Callable[..., tuple[Any, ...]], leaves: list[Any]
    ) -> tuple[Any, ...]:
        anchor = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            own = [
                _GraphEntry.apply(anchor, (leaf,), self.found, i) if _is_inner(leaf) else leaf  # type: ignore[no-untyped-call]
                for i, leaf in enumerate(leaves)
            ]
            results = function(*self.build(own))
            self.results = [leaves_in(result) for result in results]
            return tuple(mapped(_cut_off, result) for result in results)

    def backward(self, grads: Sequence[Any], inputs: Sequence[Tensor] | None = None) -> Any:
        """The gradients of the arguments, from those of the results (None: there is none).

        Those of parameters are added to theirs. ``inputs``: for these leaves only.
        """
        roots, given = [], []
        for leaves, grad in zip(self.results, grads, strict=True):
            for leaf, each in zip(leaves, leaves_in(grad), strict=False):
                if each is not None and _has_history(leaf):
                    roots.append(leaf)
                    given.append(each)
        self.results = []
        if self.penalties:
            self._begin_at_penalties(roots, given)
        if roots and inputs != []:
            run_backward(tuple(roots), tuple(given), tuple(inputs or ()))
        found, self.found = self.found, []
        return self.build(found)

    def _begin_at_penalties(self, roots: list[Tensor], given: list[Tensor]) -> None:
        """Let the gradients that the loss has for parameters of this stage (see
        :mod:`fxpipe.runtime.penalty`) be summed with those of the stage itself: in this backward if
        it reaches the parameter, else in its second half."""
        reached = set(leaves_of(roots))
        for parameter, grad in self.penalties:
            if gradient_hooks(parameter)[0]:  # they have seen it when it was made
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            elif parameter in reached:
                roots.append(parameter)
                given.append(grad)
            else:
                self.deferred.append((parameter, grad, [parameter]))
        self.penalties = []


class _GraphEntry(torch.autograd.Function):
    """Where a value comes into a graph of its own, and its gradient is left.

    A leaf would not do: autograd lays the gradient of a leaf out like the leaf, in a copy if need
    be, and kernels may sum in another order when memory is laid out otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: tuple[Tensor], found: list[Tensor | None], index: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.found, ctx.index = found, index
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        ctx.found[ctx.index] = grads[0]
        return None, None, None, None


@contextmanager
def _recorded_by(tape: Tape | None) -> Iterator[None]:
    """In this thread, let :func:`defer` put parameters' gradients off to this tape's second half;
    with None it puts nothing off."""
    outer, _recording.tape = getattr(_recording, "tape", None), tape
    try:
        yield
    finally:
        _recording.tape = outer


def recording() -> Tape | None:
    """The tape to whose second half parameters' gradients may be put off in this thread, if any."""
    return getattr(_recording, "tape", None)


def _has_history(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_inner(value: Any) -> bool:
    """Whether its gradient is handed on: a parameter, or a replica of one, gathers its own."""
    if type(value) is Tensor:  # which no parameter is; to ask whether it is one takes longer
        return value.requires_grad
    return _has_history(value) and not isinstance(value, nn.Parameter)


def _cut_off(value: Any) -> Any:
    """The value detached. It requires a gradient if it had a history, so that the next stage knows
    whether a gradient is wanted."""
    return value.detach().requires_grad_() if _is_inner(value) else value


def forward(
    stage: nn.Module, args: tuple[Any, ...], passed: Sequence[int], single: bool, checkpoint: bool
) -> tuple[tuple[Any, ...], Tape]:
    """Run a stage. Gives its results, and after them the arguments that are ``passed`` on.

    ``single``: the stage returns one result, not a tuple of them.
    """
    tape = Tape()
    tape.stage = stage

    def results(own: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Made last: in the backward, what comes from behind is the first of a sum.
        return (
            *((own,) if single else own),
            *(mapped(_through, args[i]) for i in passed),
        )

    def run(*args: Any) -> tuple[Any, ...]:
        return results(stage.forward(*args), args)

    def run_checkpointed(*args: Any) -> tuple[Any, ...]:
        with _recorded_by(None):  # its graph may never be gone through
            seeded = CheckpointOptions(preserve_rng_state=False)  # what draws is given a seed
            own, tape.handle = checkpointed(stage.forward, *args, options=seeded)
        return results(own, args)

    tape.repeat = run if checkpoint else None
    return tape.record(run_checkpointed if checkpoint else run, args), tape


def _through(value: Any) -> Any:
    return value.view_as(value) if _has_history(value) else value


def loss(
    function: nn.Module, output: Any, target: Any, number: int, stages: Sequence[Tape]
) -> tuple[Tensor, Tape]:
    """The loss of a micro-batch: ``function(output, target)``, a scalar.

    ``stages``: their tapes, which are given the gradients of parameters that are in the loss.
    """
    tape = Tape()

    def run(output: Any) -> tuple[Tensor]:
        value = function(output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else (f"a {type(value).__name__}")
            )
            raise ValueError(
                f"the loss of micro-batch {number} is {what}: a scalar tensor is needed; give "
                "loss_fn(output, target) that returns one"
            )
        if value.is_complex():  # backward() refuses it too: a gradient of it is no descent
            raise ValueError(
                f"the loss of micro-batch {number} is of {value.dtype}: a real number is needed; "
                "give loss_fn(output, target) that returns its absolute value, say"
            )
        if not value.requires_grad:
            raise ValueError(
                f"the loss of micro-batch {number} does not depend on any parameter that requires "
                "a gradient"
            )
        return (value,)

    (value,) = tape.record(run, (output,))
    homes = homes_of(leaves_of(*tape.results), [stage.stage for stage in stages])
    tape.homes = {parameter: stages[home] for parameter, home in homes.items()}
    if any(stage.is_elsewhere for stage in tape.homes.values()):
        raise ValueError(
            "the loss depends on a parameter of a stage that another rank has (by a penalty on "
            "weights, say), whose gradient would stay here: leave it to the optimizer "
            "(weight_decay), or compute such a loss with all stages in one process"
        )
    return value.detach(), tape


def elsewhere(stage: nn.Module) -> Tape:
    """A tape that stands for that of a stage which another process runs."""
    tape = Tape()
    tape.stage, tape.is_elsewhere = stage, True
    return tape


def loss_backward(tape: Tape, weight: float, scale: Tensor | None) -> Any:
    """The gradient of a loss's output, weighted by the micro-batch's part of the mini-batch."""
    ((value,),) = tape.results
    if not weight:  # its gradient may be none: that of a mean over nothing
        tape.homes = {}
        return tape.backward((None,))[0]
    grad = torch.full_like(value, weight)
    if scale is not None:
        grad = grad * scale.to(grad)
    inputs, homes = None, tape.homes
    if homes:
        for penalty in penalties(value, grad, list(homes)):
            homes[penalty[0]].penalties.append(penalty)
        inputs = [leaf for leaf in leaves_of([value]) if leaf not in homes]
        tape.homes = {}
    (found,) = tape.backward((grad,), inputs)
    return found


def added(first: Any, second: Any) -> Any:
    """Two gradients of one value, each of which may be None or have others inside."""
    if first is None or second is None:
        return second if first is None else first
    return first + second if isinstance(first, Tensor) else pytree.tree_map(added, first, second)


def backward(tape: Tape, grads: Sequence[Any]) -> Any:
    """The whole backward of a stage: gradients of its arguments, and into its parameters."""
    found = tape.backward(grads)
    weight_grad(tape)
    return found


def backward_input(tape: Tape, grads: Sequence[Any]) -> Any:
    """The first half of a backward: the gradients of the arguments, and of those parameters that
    are not deferred."""
    return tape.backward(grads)


def weight_grad(tape: Tape) -> None:
    """The second half: the gradients that have been deferred, in the order of the backward."""
    deferred, tape.deferred = tape.deferred, []
    later, tape.later = tape.later, []
    deferred += itertools.chain.from_iterable(compute() for compute in later)
    if deferred:
        ends, grads, parameters = zip(*deferred, strict=True)
        run_backward(ends, grads, tuple(itertools.chain(*parameters)))


def replay(tape: Tape, halved: bool = False) -> None:
    """Run a checkpointed stage again, ahead of its backward.

    ``halved``: of its backward in halves. Then a new graph takes the place of the first, one in
    which gradients are deferred.
    """
    if tape.handle is None or tape.repeat is None:  # it is not checkpointed
        return
    if not halved:
        tape.handle.recompute()
        return
    with tape.handle.again() as inputs:
        if inputs is not None:
            args, _ = inputs
            tape.record(tape.repeat, args)


def send(values: Sequence[Any], source: str, target: str) -> tuple[Any, ...]:
    """Values without history on the target stream's device."""
    device = device_of(target)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        arrived = moved(value, device, source)
        result = arrived.detach()
        pass_on(arrived, result)
        return result.requires_grad_(value.requires_grad)

    return tuple(mapped(move, value) for value in values)


def replicate(parameter: Tensor, target: str, user: str) -> Tensor:
    """A leaf with the parameter's value, on the target stream's device, for the user stream."""
    value = moved(parameter.detach(), device_of(target), CALLER)
    await_made(stream(user), value)
    return nn.Parameter(value, parameter.requires_grad)


def gathered(replica: Tensor) -> Tensor | None:
    """The gradient that the backwards have summed up in a replica; None if there was none."""
    return replica.grad


def accumulate(parameter: Tensor, grad: Tensor | None) -> None:
    """Add a gradient to a parameter's, as a backward does it, with its hooks."""
    if grad is not None:
        with torch.enable_grad():
            torch.autograd.backward(share(parameter), grad)


def optimize(stepping: Stepping | None, stage: nn.Module, shared: Sequence[str]) -> None:
    """Let an optimizer step the parameters of one stage, if there is one.

    ``shared``: those that it has, but are another stage's.
    """
    if stepping is not None:
        others = {id(stage.get_parameter(name)) for name in shared}
        stepping.part([p for p in stage.parameters() if id(p) not in others])


def weights(parts: Sequence[Tensor], dim: int | None, summed: bool = False) -> tuple[float, ...]:
    """Each micro-batch's part of the mini-batch; of a loss that is a sum all of it."""
    if summed:
        return (1.0,) * len(parts)
    if dim is None:
        return (1 / len(parts),) * len(parts)
    total = sum(part.shape[dim] for part in parts)
    return tuple(part.shape[dim] / total for part in parts)


def average(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the mini-batch."""
    total: Tensor = weighted_sum(losses, weights)
    return total


class _Deferred(torch.autograd.Function):
    """Runs a function in a graph of its own, whose backward can be had in two parts.

    Its parameters are known to that graph only: the outer one leads to them in no other way.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tape: Tape,
        function: Callable[..., Tensor],
        parameters: list[Tensor],
        args: list[Any],
        kwargs: dict[str, Any],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.parameters, ctx.starts = tape, parameters, []

        def own(value: Any) -> Any:
            if _is_inner(value):
                value = _cut_off(value)
                ctx.starts.append(value)
            return value

        with torch.enable_grad():
            given = [own(value) for value in args]  # in the order of the tensors
            named = {name: own(value) for name, value in kwargs.items()}
            output = function(*given, **named)
        # Where the way back begins, and not the output, which may be long gone by then.
        ctx.end = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        end, starts, parameters = ctx.end, ctx.starts, ctx.parameters
        ctx.end = ctx.starts = ctx.parameters = None
        found: tuple[Tensor | None, ...] = (None,) * max(1, len(starts))
        if grad is not None and starts:
            retain = bool(parameters)
            found = run_backward(
                (end,), (grad,), tuple(starts), retain_graph=retain, accumulate=False
            )
        if grad is not None and parameters:
            ctx.tape.deferred.append((end, grad, parameters))
        return None, None, None, None, None, *found


def defer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module; in a backward of two halves, the gradients of its parameters, and of those
    among the arguments, come in the second. Outside of a step this is a plain call, and where
    somebody has hooks on all modules, whose backward would come by them twice.

    The halves cost this Python more than the whole, at each operator, which has just swept it out
    of the caches: nothing is done here that can be left, such as to look into nested arguments.
    """
    tape = recording()
    if tape is None or not torch.is_grad_enabled() or all_are_watched():
        return module(*args, **kwargs)
    values = (*args, *kwargs.values())
    given = [value for value in values if _has_history(value)]
    own = module.parameters() if module._modules else module._parameters.values()
    parameters = [p for p in own if p is not None and p.requires_grad]
    parameters += [value for value in given if isinstance(value, nn.Parameter)]
    if not parameters:
        return module(*args, **kwargs)
    tensors = [value for value in given if not isinstance(value, nn.Parameter)]
    if not tensors:  # then something has to make this part of the graph
        tensors = [torch.empty(0, requires_grad=True)]
    return _Deferred.apply(tape, module, parameters, args, kwargs, *tensors)  # type: ignore[no-untyped-call]
