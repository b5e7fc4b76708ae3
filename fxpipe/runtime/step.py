"""A training step, action by action: each stage's forward and backward by themselves.

::

    x ── forward ──┬── y ── loss ──┬── value
                   └── tape        └── tape ── backward ── grad y ┐
    grad x ── backward (tape of the stage) ───────────────────────┘

The forward of each stage records a separate autograd graph: its arguments are detached from the
graph that made them, and its results are detached before the next stage gets them. A :class:`Tape`
keeps the two ends of that graph until the stage's backward runs. Each backward adds the gradients
of parameters to ``.grad`` at once, so they are summed in the order in which the backwards run.

A backward may run in two halves (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). For a module
that :func:`defer` has run, the first half computes the gradients of the module's inputs, and the
second half, which may run much later, those of its parameters.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpipe.ir._torch import SET_GRAD_ENABLED, lean, node_type, pytree, run_backward
from fxpipe.ir.hooks import all_are_watched
from fxpipe.ir.tensors import memory_bytes, no_scalar
from fxpipe.runtime.checkpointing.offload import Offload
from fxpipe.runtime.checkpointing.rerun import Rerun
from fxpipe.runtime.checkpointing.selective import keeping_products
from fxpipe.runtime.copy import moved
from fxpipe.runtime.dependency import flattened, leaves_in, mapped
from fxpipe.runtime.microbatch import weighted_sum
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.penalty import Penalty, homes_of, leaves_of, penalties
from fxpipe.runtime.shared import share
from fxpipe.runtime.streams import CALLER, await_made, device_of, is_of_cpu, pass_on, stream

Deferred = tuple[GradientEdge | Tensor, Tensor, list[Tensor]]
"""A backward that is put off to the second half: the tensor, or edge of the graph, at which it
starts, the gradient there, and the parameters whose gradients it computes."""
_recording = threading.local()  # .tape: the tape of the forward that runs in this thread


class Tape:
    """The autograd graph of one forward, held by its two ends: the arguments and the results.

    A backward starts at the results and gives the gradients of the arguments. It adds the gradients
    of parameters to ``.grad``, as any backward does.
    """

    def __init__(self, stage: nn.Module | None = None) -> None:
        self.stage = stage
        self.grads: list[Tensor | None] = []  # gradients, one for each leaf of the arguments
        self.build: Callable[[list[Any]], Any] = tuple  # makes the arguments from their leaves
        self.results: list[list[Any]] = []  # of each result the leaves, or where they were made
        self.rerun: Rerun | None = None  # makes the forward's call again; None: not checkpointed
        self.moves: Offload | None = None  # moves activations to the host; None: they stay
        self.deferred: list[Deferred] = []  # backwards that the second half runs
        self.later: list[Callable[[], Iterable[Deferred]]] = []  # give more of these, in that half
        self.penalties: list[Penalty] = []  # the loss's gradients for parameters of this stage
        self.homes: dict[Tensor, Tape] = {}  # by parameters within the loss: their stages' tapes
        self.is_elsewhere = False  # whether the stage runs in another process, and records nothing

    def record(self, function: Callable[..., tuple[Any, ...]], args: Any) -> tuple[Any, ...]:
        """Run a function, recording its graph. Returns its results, detached from that graph."""
        leaves, self.build = flattened(args)
        grads: list[Tensor | None] = [None] * len(leaves)
        self.grads = grads
        outer, _recording.tape = getattr(_recording, "tape", None), self
        was_enabled = torch.is_grad_enabled()
        SET_GRAD_ENABLED(True)
        try:
            for i, leaf in enumerate(leaves):
                if _is_inner(leaf):
                    leaves[i] = _GraphEntry.apply(_ANCHOR, (leaf,), grads, i)  # type: ignore[no-untyped-call]
            results = function(*self.build(leaves))
            self.results = [leaves_in(result) for result in results]
            if self.stage is not None:
                self.results = [[_end(leaf) for leaf in leaves] for leaves in self.results]
            return tuple([mapped(_cut_off, result) for result in results])
        finally:
            SET_GRAD_ENABLED(was_enabled)
            _recording.tape = outer

    def record_ends(
        self, function: Callable[..., tuple[Any, ...]], args: Any
    ) -> tuple[tuple[Any, ...], list[list[Any]]]:
        """As :meth:`record`. Returns the results, and the ends of the graph for each of them."""
        return self.record(function, args), self.results

    def backward(self, grads: Sequence[Any], inputs: Sequence[Tensor] | None = None) -> Any:
        """Run the backward. Returns the gradients of the arguments, and adds those of parameters to
        ``.grad``.

        Args:
            grads: the gradient of each result; None for a result that has none.
            inputs: the leaves of the graph to which the backward goes; None for all.
        """
        roots: list[Any] = []
        given: list[Tensor] = []
        for leaves, grad in zip(self.results, grads, strict=True):
            if grad is None:
                continue
            for leaf, each in zip(leaves, leaves_in(grad), strict=False):
                if each is not None and (type(leaf) is GradientEdge or _has_history(leaf)):
                    roots.append(leaf)
                    given.append(each)
        self.results = []
        if self.penalties:
            self._begin_at_penalties(roots, given)
        if roots and inputs != []:
            run_backward(tuple(roots), tuple(given), tuple(inputs or ()))
        of_arguments, self.grads = self.grads, []
        return self.build(of_arguments)

    def _begin_at_penalties(self, roots: list[Any], given: list[Tensor]) -> None:
        """Let the backward add the gradients that the loss itself has for parameters of this stage
        (see :mod:`fxpipe.runtime.penalty`): this backward also starts at such a parameter if it
        reaches the parameter anyway; otherwise the second half adds the gradient."""
        reached = set(leaves_of(roots))
        for parameter, grad in self.penalties:
            if parameter in reached:
                roots.append(parameter)
                given.append(grad)
            else:
                self.deferred.append((parameter, grad, [parameter]))
        self.penalties = []


_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
"""A tensor for which autograd records a node that is given its values within a tuple, where
autograd does not see them. One for all, as the graph would get a node of its own for each."""


@lean
class _GraphEntry(torch.autograd.Function):
    """Lets an autograd graph begin at a value. Its backward puts the value's gradient into a list.

    A leaf, whose ``.grad`` could be read, would not do: autograd gives the gradient of a leaf the
    leaf's memory layout, in a copy if need be, and the next kernel may then sum in another order.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: tuple[Tensor], results: list[Tensor | None], index: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.results, ctx.index = results, index
        return value[0].detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        ctx.results[ctx.index] = grads[0]
        return None, None, None, None


_ENTRY: type = node_type(_GraphEntry)
"""The type of the nodes at which autograd graphs of tapes begin."""


def recording() -> Tape | None:
    """The tape of the forward that runs in this thread, whose backward may have a second half. None
    if no forward is recorded, or nothing may be put off in it."""
    return getattr(_recording, "tape", None)


def _end(leaf: Any) -> Any:
    """The edge of the autograd graph at which the backward from a result starts.

    A tape that kept the result itself would keep its memory, too, until the backward, though the
    result has long been sent to another stage. A tensor subclass has a backward of its own, which
    needs the result.
    """
    is_made = type(leaf) is Tensor and leaf.grad_fn is not None
    return get_gradient_edge(leaf) if is_made else leaf


def _has_history(value: Any) -> bool:
    # To ask isinstance whether it is a Tensor takes longer.
    return (type(value) is Tensor or isinstance(value, Tensor)) and value.requires_grad


def _is_inner(value: Any) -> bool:
    """Whether the backward hands the value's gradient to the stage that made the value. Parameters,
    and replicas of parameters, keep theirs in ``.grad``."""
    if type(value) is Tensor:  # so it is no parameter; to ask isinstance takes longer
        return value.requires_grad
    return _has_history(value) and not isinstance(value, nn.Parameter)


def _cut_off(value: Any) -> Any:
    """The value detached. It requires a gradient if it had a history, so that the next stage knows
    whether a gradient is wanted."""
    return value.detach().requires_grad_() if _is_inner(value) else value


def forward(
    stage: nn.Module,
    args: tuple[Any, ...],
    passed: Sequence[int],
    single: bool,
    checkpoint: bool | str,
) -> tuple[tuple[Any, ...], Tape]:
    """Run a stage. Returns its results and its tape.

    Args:
        args: what the stage takes.
        passed: indices of the arguments that later stages need, too. They follow the results, so
            that the gradients from those later stages come back through this stage's backward.
        single: whether the stage returns one result, and not a tuple of them.
        checkpoint: whether the forward keeps no activations, and :func:`replay` runs it again
            (:mod:`fxpipe.runtime.checkpointing.rerun`); "selective": it does so with the results of
            products that the forward has kept; or "offload": :func:`offload` moves them to the
            host.
    """
    tape = Tape(stage)

    def run(*args: Any) -> tuple[Any, ...]:
        outputs = stage.forward(*args)
        results = (outputs,) if single else tuple(outputs)
        # The views are made after the stage has used the arguments. The backward runs in reverse,
        # so that the gradient from later stages comes first when an argument's are summed.
        return (*results, *(mapped(_view, args[i]) for i in passed)) if passed else results

    if not checkpoint:
        return tape.record(run, args), tape
    if checkpoint == "offload":
        tape.moves = Offload(stage, args)
        with tape.moves.saving():
            return tape.record(run, args), tape

    rerun = Rerun(
        stage, run, args, keeping_products(once=True) if checkpoint == "selective" else None
    )
    results = rerun.first(tape.record_ends)
    tape.results = [[] for _ in results]  # this frees the graph
    if any(map(_has_history, itertools.chain.from_iterable(map(leaves_in, results)))):
        tape.rerun = rerun
    return results, tape


def _view(value: Any) -> Any:
    return value.view_as(value) if _has_history(value) else value


def loss(
    function: nn.Module, output: Any, target: Any, number: int, stages: Sequence[Tape]
) -> tuple[Tensor, Tape]:
    """The loss of a micro-batch: ``function(output, target)``, a scalar, and its tape.

    ``number`` is the micro-batch's. ``stages`` are the tapes of all stages: if the loss depends
    directly on a stage's parameter (by a penalty on weights, say), :func:`loss_backward` leaves
    that gradient with the stage's tape.

    Raises ValueError for a loss that is no real scalar, that depends on no parameter, or that
    depends directly on a parameter of a stage in another process, or on a tensor within a stage:
    what the gradient of such a tensor adds to that of the stage's arguments would be lost.
    """
    tape = Tape()

    def run(output: Any) -> tuple[Tensor]:
        value = function(output, target)
        if what := no_scalar(value):
            more = ""
            if isinstance(value, Mapping | tuple | list):
                more = ", and nothing beside it: compute what else you want to know from pipe(x)"
            raise ValueError(
                f"the loss of micro-batch {number} is {what}: a scalar tensor is needed; give "
                f"loss_fn(output, target) that returns one{more}"
            )
        if value.is_complex():  # backward() refuses it too: complex numbers have no order
            raise ValueError(
                f"the loss of micro-batch {number} is of {value.dtype}: a real number is needed; "
                "give loss_fn(output, target) that returns its absolute value, say"
            )
        if not value.requires_grad:
            raise ValueError(
                f"the loss of micro-batch {number} does not depend on any parameter that requires "
                "a gradient: compute it from the output, without detach() and no_grad(), and leave "
                "a parameter to be trained"
            )
        return (_by_itself(value),)

    (value,) = tape.record(run, (output,))
    entries: list[Any] = []
    leaves = leaves_of(tape.results[0], _ENTRY, entries)
    if any(entry.results is not tape.grads for entry in entries):
        raise ValueError(
            f"the loss of micro-batch {number} depends on a tensor within a stage, which a hook or "
            "a module of the model has kept in a Python object: its gradient does not get to the "
            "stages ahead. Let the forward of the model, or of a module around it, return the "
            "tensor beside the output, and let loss_fn take it from there; or, where it needs no "
            "gradient, detach it"
        )
    homes = homes_of(leaves, [stage.stage for stage in stages])
    tape.homes = {parameter: stages[home] for parameter, home in homes.items()}
    if any(stage.is_elsewhere for stage in tape.homes.values()):
        raise ValueError(
            "the loss depends directly on a parameter (by a penalty on weights, say) whose stage "
            "is on another rank, which would not get this gradient: leave the penalty to the "
            "optimizer (weight_decay), or run all stages in one process"
        )
    return value.detach(), tape


def _by_itself(value: Tensor) -> Tensor:
    """A value of one element with no more memory than it needs: the loss that ``F.mse_loss``
    returns lies within the memory of the losses of all elements, and a step keeps the losses of all
    micro-batches."""
    return value.clone() if memory_bytes(value) > value.element_size() else value


def elsewhere(stage: nn.Module) -> Tape:
    """An empty tape for a stage that another process runs."""
    tape = Tape(stage)
    tape.is_elsewhere = True
    return tape


def loss_backward(tape: Tape, weight: float, scale: Tensor | None) -> Any:
    """Run the backward of a micro-batch's loss. Returns the gradient of the model's output.

    Args:
        tape: what :func:`loss` has recorded.
        weight: the factor by which the micro-batch's loss counts in the loss of the mini-batch.
        scale: a factor for all gradients (a gradient scaler's), or None.
    """
    ((value,),) = tape.results
    if not weight:  # not computed and multiplied by 0: a mean over nothing has the gradient NaN
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
    (of_output,) = tape.backward((grad,), inputs)
    return of_output


def added(first: Any, second: Any) -> Any:
    """The sum of two gradients of one value. Each is a tensor, a pytree of tensors, or None."""
    if first is None or second is None:
        return second if first is None else first
    return first + second if isinstance(first, Tensor) else pytree.tree_map(added, first, second)


def backward(tape: Tape, grads: Sequence[Any]) -> Any:
    """Run the whole backward of a stage. Returns the gradients of the stage's arguments, and adds
    those of its parameters to ``.grad``. A checkpointed stage is run again now, unless
    :func:`replay` has done so."""
    replay(tape)
    of_arguments = tape.backward(grads)
    if tape.deferred or tape.later:
        weight_grad(tape)
    return of_arguments


def backward_input(tape: Tape, grads: Sequence[Any]) -> Any:
    """Run the first half of a backward. Returns the gradients of the stage's arguments, and adds to
    ``.grad`` those of parameters that are not deferred. A checkpointed stage is run again now,
    unless :func:`replay` has done so."""
    replay(tape)
    return tape.backward(grads)


def weight_grad(tape: Tape) -> None:
    """Run the second half of a backward: compute the gradients of parameters that the first half
    has put off, in the same order, and add them to ``.grad``."""
    deferred, tape.deferred = tape.deferred, []
    later, tape.later = tape.later, []
    deferred += itertools.chain.from_iterable(compute() for compute in later)
    if deferred:
        ends, grads, parameters = zip(*deferred, strict=True)
        run_backward(ends, grads, tuple(itertools.chain(*parameters)))


def replay(tape: Tape) -> None:
    """Run a checkpointed stage again, ahead of its backward, which uses the graph that the tape
    records now. A stage whose results require no gradient is not run again."""
    rerun, tape.rerun = tape.rerun, None
    if rerun is not None:
        rerun.again(tape.record_ends)


def offload(tape: Tape, source: str, share: float) -> None:
    """Begin to move the activations that the tape has recorded, or a share of their bytes, from the
    source stream's device to the host's memory."""
    device = device_of(source)
    if tape.moves is not None and device is not None:
        tape.moves.out(device, share)


def reload(tape: Tape) -> None:
    """Begin to bring the activations of a tape back to their device, for the backward, which waits
    for them."""
    if tape.moves is not None:
        tape.moves.restore()


def send(values: Sequence[Any], source: str, target: str) -> tuple[Any, ...]:
    """The values, moved to the target stream's device and without their autograd history. A tensor
    still says, by ``requires_grad``, whether a gradient is wanted for it."""
    device, is_host = device_of(target), is_of_cpu(target)
    if is_host and source != CALLER and all(map(_may_be_shared, values)):
        return tuple(values)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_host and value.device == device:  # it is there, and no stream makes it
            result = value.detach()
        else:
            arrived = moved(value, device, source)
            result = arrived.detach()
            pass_on(arrived, result)
        return result.requires_grad_() if value.requires_grad else result

    return tuple([mapped(move, value) for value in values])


def _may_be_shared(value: Any) -> bool:
    """Whether a stage on the host can be given a value of another such stage as it is: a tensor
    there without history. A view of it would cost as much as a small layer, since each operator
    gives other lanes their turn in the interpreter."""
    return value is None or (type(value) is Tensor and value.is_cpu and value.grad_fn is None)


def replicate(parameter: Tensor, target: str, user: str) -> Tensor:
    """A parameter of the same value on the target stream's device. The ``user`` stream waits until
    the value is there."""
    value = moved(parameter.detach(), device_of(target), CALLER)
    await_made(stream(user), value)
    return nn.Parameter(value, parameter.requires_grad)


def gathered(replica: Tensor) -> Tensor | None:
    """The gradient that backwards have summed up in a replica of a parameter; None without any."""
    return replica.grad


def accumulate(parameter: Tensor, grad: Tensor | None) -> None:
    """Add a gradient to a parameter's ``.grad``, by a backward that calls the parameter's hooks."""
    if grad is not None:
        with torch.enable_grad():
            torch.autograd.backward(share(parameter), grad)


def optimize(
    stepping: Stepping | None, stage: nn.Module, shared: Sequence[str], later: Sequence[str] = ()
) -> None:
    """Step the parameters of one stage; without optimizers (None), do nothing.

    Args:
        shared: the names of parameters that another stage has as well, and that are stepped there.
        later: those of parameters in whose memory another stage has other tensors, which it may
            still read: they are stepped once all stages are done (:meth:`Stepping.finish`).
    """
    if stepping is not None:
        others = {id(stage.get_parameter(name)) for name in (*shared, *later)}
        stepping.part([p for p in stage.parameters() if id(p) not in others])


def weights(
    parts: Sequence[Tensor],
    dim: int | None,
    summed: bool = False,
    total: Callable[[float], float] | None = None,
) -> tuple[float, ...]:
    """The weight of each micro-batch's loss in the loss of the mini-batch.

    A loss is taken as a mean over rows, so its weight is the micro-batch's part of the rows along
    ``dim``, or the same for all without a dimension. If the losses are sums, all weights are 1.

    ``total``: makes of this replica's number of rows that of all replicas, if there are any.

    Raises:
        ValueError: if there are no rows at all.
    """
    if summed:
        return (1.0,) * len(parts)
    rows = [1 if dim is None else part.shape[dim] for part in parts]
    every = sum(rows) if total is None else total(sum(rows))
    if not every:
        raise ValueError(
            "the mini-batch has no rows: its loss is a mean over nothing; leave such a mini-batch "
            "out"
        )
    return tuple(count / every for count in rows)


def average(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the mini-batch: the sum of the micro-batches' losses, each times its weight."""
    if not any(weights):  # this replica has nothing that counts, and others have
        return torch.zeros_like(losses[0])
    total: Tensor = weighted_sum(losses, weights)
    return total


@lean
class _InHalves(torch.autograd.Function):
    """Runs a function as one node of the autograd graph, which keeps the function's inner graph.

    The node's backward computes the gradients of the function's inputs with the inner graph. It
    leaves those of the function's parameters to the second half, and only the inner graph has these
    parameters: the backward of the outer graph cannot compute their gradients any earlier.
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
        # A step that fails leaves tapes whose graphs have not been used up. A graph that kept its
        # tape, which keeps the graph, would never be freed.
        ctx.tape, ctx.parameters, ctx.starts = weakref.ref(tape), parameters, []

        def start(value: Any) -> Any:
            if _is_inner(value):
                value = _cut_off(value)
                ctx.starts.append(value)
            return value

        with torch.enable_grad():
            given = [start(value) for value in args]  # in the order of ``tensors``
            named = {name: start(value) for name, value in kwargs.items()}
            output = function(*given, **named)
        # The backward starts at this edge. To keep the output instead would keep its memory.
        ctx.end = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        end, starts, parameters = ctx.end, ctx.starts, ctx.parameters
        ctx.end = ctx.starts = ctx.parameters = None
        of_inputs: tuple[Tensor | None, ...] = (None,) * max(1, len(starts))
        if grad is not None and starts:
            retain = bool(parameters)
            of_inputs = run_backward(
                (end,), (grad,), tuple(starts), retain_graph=retain, accumulate=False
            )
        if grad is not None and parameters:
            ctx.tape().deferred.append((end, grad, parameters))
        return None, None, None, None, None, *of_inputs


def defer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module so that, in a backward of two halves, the second half computes the gradients of
    its parameters and of parameters among the arguments.

    This is a plain call outside of a step. It also is one if hooks are registered for all modules:
    with a backward in halves, such a hook would be called twice.

    Each such call pays for the Python in here, which is out of the CPU's caches each time, as the
    module's kernels have filled them. So this does only what it must, and does not look for tensors
    in nested arguments.
    """
    tape = recording()
    if tape is None or not torch.is_grad_enabled() or all_are_watched():
        return module(*args, **kwargs)
    values = (*args, *kwargs.values())
    given = [value for value in values if _has_history(value)]
    held = module.parameters() if module._modules else module._parameters.values()
    parameters = [p for p in held if p is not None and p.requires_grad]
    parameters += [value for value in given if isinstance(value, nn.Parameter)]
    if not parameters:
        return module(*args, **kwargs)
    tensors = [value for value in given if not isinstance(value, nn.Parameter)]
    if not tensors:  # autograd records a node only if an input requires a gradient
        tensors = [_ANCHOR]
    return _InHalves.apply(tape, module, parameters, args, kwargs, *tensors)  # type: ignore[no-untyped-call]
