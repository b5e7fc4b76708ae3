"""The vocabulary: what the nodes of a pipeline graph call, and nothing else.

Each is a plain function. Called on proxies it becomes a node, so that an emitted graph can be
traced again. Streams are named (``"cuda:1/copy"``, see :mod:`fxpipe.runtime.streams`). All but
``scatter`` and ``gather`` take and give values nested in tuples, and leave alone what carries no
gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, fx, nn

from fxpipe.ir._torch import pytree
from fxpipe.runtime import batch_norm as _batch_norm
from fxpipe.runtime import checkpoint as _checkpoint
from fxpipe.runtime import copy as _copy
from fxpipe.runtime import dependency as _dependency
from fxpipe.runtime import microbatch as _microbatch
from fxpipe.runtime import portal as _portal
from fxpipe.runtime import random as _random
from fxpipe.runtime import shared as _shared
from fxpipe.runtime import step as _step
from fxpipe.runtime.checkpoint import Handle
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.portal import Portal
from fxpipe.runtime.step import Tape
from fxpipe.runtime.streams import CALLER

P = ParamSpec("P")
R = TypeVar("R")


def _op(function: Callable[P, R]) -> Callable[P, R]:
    """Let a call with a proxy anywhere among its arguments become a node of the proxy's graph."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _may_hold_proxies(args) or (kwargs and _may_hold_proxies(kwargs.values())):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, fx.Proxy):
                    proxy: Any = leaf.tracer.create_proxy("call_function", call, args, kwargs)
                    return proxy  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


def _may_hold_proxies(values: Iterable[Any]) -> bool:
    """Whether it is worth the time to look for proxies within the values."""
    return any(isinstance(value, fx.Proxy | tuple | list | dict) for value in values)


@_op
def scatter(
    tensor: Tensor, dim: int | None, chunks: int, copied: bool = False
) -> tuple[Tensor, ...]:
    """A mini-batch in ``chunks`` micro-batches along ``dim``.

    ::

        x ---+--- x_mb0          backward: each micro-batch's gradient into its place
             +--- x_mb1

    The parts are views; ``copied``: of a copy, where x will be written to.
    """
    return _microbatch.scatter(tensor.clone() if copied else tensor, dim, chunks)


@_op
def write_back(tensor: Tensor, dim: int | None, parts: Sequence[Tensor]) -> None:
    """What the micro-batches have made of their copies of an input becomes the input's value.

    ::

        x_mb0 ---+--- x, the caller's
        x_mb1 ---+
    """
    tensor.copy_(_microbatch.gather(parts, dim))


@_op
def seeds(count: int) -> tuple[int, ...]:
    """A seed for every micro-batch, drawn from the default generator.

    ::

        seeds ---+--- seed_mb0 --- (all that draws random numbers for micro-batch 0)
                 +--- seed_mb1
    """
    return _random.seeds(count)


@_op
def gather(
    values: Sequence[Any],
    dims: _microbatch.Dims,
    parts: Sequence[Tensor] = (),
    parts_dim: int = 0,
) -> Any:
    """The micro-batches' outputs as one: joined along ``dims``, or averaged where that is None.

    ::

        y_mb0 ---+--- y          backward: each micro-batch gets its part of the gradient
        y_mb1 ---+

    An average weighs each micro-batch by the size of its part of the input (``parts``). What all
    have alike ("any") is given as the first has it.
    """
    return _microbatch.gather(values, dims, parts, parts_dim)


@_op
def copy(values: Any, source: str, target: str) -> Any:
    """Move values to the device of the target stream.

    ::

        source ---[source stream]--- copy ---[target stream]--- target

    The backward moves the gradients back. On one device the result shares memory with the source;
    a stage that writes to what it receives clones it first (pass ``alias``).
    """
    return _copy.copy(values, source, target)


@_op
def wait(values: Any, source: str, target: str) -> Any:
    """The target stream waits until the source stream has made the values.

    ::

        values (source stream) --- wait --- values (target stream)

    It does not wait for what the source stream is given besides. In the backward the source stream
    waits until the target stream has made the gradients.
    """
    return _copy.wait(values, source, target)


@_op
def fork(values: Any) -> tuple[Any, Tensor]:
    """Branch a phony off a lane; the values' backward waits for the phony's.

    ::

        values --- fork --- values
                     `----- phony --- (to a join)
    """
    return _dependency.fork(values)


@_op
def join(values: Any, phony: Tensor) -> Any:
    """Merge a phony into a lane; the phony's backward comes after the values'.

    ::

                values --- join --- values
        (from a fork) phony --'
    """
    return _dependency.join(values, phony)


@_op
def portal_blue(tensor: Any) -> Portal:
    """A skip tensor leaves the autograd lane at its source; a phony stays for it.

    ::

        t --- blue --- phony          backward: t gets the gradient that came through the portal
                :
                t, hidden
    """
    return _portal.portal_blue(tensor)


@_op
def portal_copy(portal: Portal, source: str, target: str) -> Portal:
    """Move the hidden tensor to the device of the target stream.

    ::

        phony ------------ copy ------------ phony
        t, hidden ..[source to target].. t, hidden

    The backward moves the hidden gradient the other way.
    """
    return _portal.portal_copy(portal, source, target)


@_op
def portal_orange(portal: Portal) -> Any:
    """The skip tensor comes back into the autograd lane, at its consumer.

    ::

        phony ------ orange --- t          backward: the gradient of t goes into the portal
        t, hidden ......:
    """
    return _portal.portal_orange(portal)


@_op
def checkpoint(stage: nn.Module, *args: Any) -> tuple[Any, Handle | None]:
    """Run a stage without keeping its activations. Gives its output, and a handle to run it again.

    ::

        args --- stage --- output          saved tensors: none, until recompute or their first use
    """
    # Its forward, not the module: fx would print to stderr what goes wrong in it.
    # What draws random numbers is given a seed (pass "random"), the same both times.
    options = _checkpoint.CheckpointOptions(preserve_rng_state=False)
    return _checkpoint.checkpointed(stage.forward, *args, options=options)


@_op
def recompute(values: Any, handle: Handle | None) -> Any:
    """Run the checkpointed stage again when the backward comes by, ahead of its own.

    ::

        stage --- values --- wait --- recompute --- (copy)
        backward:  stage <-- wait <-- recompute <-- (copy of the gradient, still on its way)
    """
    return _checkpoint.recompute(values, handle)


@_op
def share(parameter: Tensor) -> Tensor:
    """A parameter as a value, for all its uses in one micro-batch.

    ::

        parameter --- share ---+--- one use        backward: the parameter gets the sum
                               +--- another
    """
    return _shared.share(parameter)


@_op
def bring(parameter: Tensor, target: str, user: str) -> Tensor:
    """A parameter for a stage on another device, once for all its micro-batches.

    ::

        parameter ---[target stream]--- bring ---[user stream]--- (share, in each micro-batch)

    The backward brings back the sum of the micro-batches' gradients.
    """
    # Its gradient is added up on the parameter's own device and stream, by a node of its own.
    value = _shared.share(parameter)
    (value,) = _copy.wait(_copy.copy((value,), CALLER, target), target, user)
    return value  # type: ignore[no-any-return]


@_op
def call(module: nn.Module, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a module with these values in place of the parameters of those names.

    ::

        share ---+
        args  ---+--- module ---
    """
    return _shared.call(module, values, *args, **kwargs)


@_op
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Normalise a micro-batch by its own statistics, and give these.

    ::

        x --- batch_norm ---+--- y
                            +--- mean, variance, count --- (update_statistics; no gradient)
    """
    return _batch_norm.batch_norm(x, weight, bias, eps)


@_op
def update_statistics(
    running_mean: Tensor,
    running_var: Tensor,
    tracked: Tensor | None,
    momentum: float | None,
    parts: Sequence[tuple[Tensor, Tensor, int]],
) -> None:
    """Update a batch norm's running statistics, once for all micro-batches.

    ::

        mean, variance, count (mb0) ---+--- running mean, running variance, number of mini-batches
        mean, variance, count (mb1) ---+
    """
    _batch_norm.update_statistics(running_mean, running_var, tracked, momentum, parts)


@_op
def forward(
    stage: nn.Module, args: tuple[Any, ...], passed: Sequence[int], single: bool, checkpoint: bool
) -> tuple[tuple[Any, ...], Tape]:
    """The forward of a stage for a micro-batch, in a training step.

    ::

        args --- stage ---+--- results
          `---------------+--- arguments that are passed on
                          `... tape: what its backward needs

    ``single``: the stage gives one result, not a tuple. ``checkpoint``: no activations are kept.
    """
    return _step.forward(stage, args, passed, single, checkpoint)


@_op
def loss(
    function: nn.Module, output: Any, target: Any, number: int, stages: Sequence[Tape]
) -> tuple[Tensor, Tape]:
    """The loss of micro-batch ``number``.

    ::

        output ---+--- loss ---+--- value
        target ---+            `... tape

    ``stages``: their tapes. Where a parameter is in the loss, its stage is given the gradient.
    """
    return _step.loss(function, output, target, number, stages)


@_op
def loss_backward(tape: Tape, weight: float, scale: Tensor | None) -> Any:
    """Where the backward of a micro-batch begins: the gradient of the model's output.

    ::

        gradient of the output --- loss --- weight (times scale)
    """
    return _step.loss_backward(tape, weight, scale)


@_op
def backward(tape: Tape, grads: Sequence[Any], after: Any = None) -> Any:
    """The backward of a stage for a micro-batch. Parameters get their gradients on the way.

    ::

        gradients of the arguments --- stage --- gradients of the results
                                         `--- parameters

    ``after``: what comes before it, where no gradient does that would say so.
    """
    return _step.backward(tape, grads)


@_op
def backward_input(tape: Tape, grads: Sequence[Any], after: Any = None) -> Any:
    """The first half of a backward: what the stage before waits for. ``after``: as there.

    ::

        gradients of the arguments --- stage --- gradients of the results
    """
    return _step.backward_input(tape, grads)


@_op
def weight_grad(tape: Tape) -> None:
    """The second half of a backward: what nobody waits for.

    ::

        tape --- parameters
    """
    _step.weight_grad(tape)


@_op
def added(first: Any, second: Any) -> Any:
    """The gradients of a value that is twice among the outputs; None where there is none."""
    return _step.added(first, second)


@_op
def replay(tape: Tape, halved: bool = False) -> None:
    """Run a checkpointed stage again, while the gradients of its results are still on their way.

    ``halved``: its backward comes in two halves.
    """
    _step.replay(tape, halved)


@_op
def send(values: Sequence[Any], source: str, target: str) -> tuple[Any, ...]:
    """Values without history, on the device of the target stream.

    ::

        source ---[source stream]--- send ---[target stream]--- target
    """
    return _step.send(values, source, target)


@_op
def replicate(parameter: Tensor, target: str, user: str) -> Tensor:
    """A parameter for a stage on another device, once for a training step.

    ::

        parameter ---[target stream]--- replica

    It is a leaf, which gathers the gradients of the stage's micro-batches by itself.
    """
    return _step.replicate(parameter, target, user)


@_op
def gathered(replica: Tensor) -> Tensor | None:
    """The gradients that a replica has gathered, once the stage's backwards are done."""
    return _step.gathered(replica)


@_op
def accumulate(parameter: Tensor, grad: Tensor | None) -> None:
    """Add a gradient to a parameter's.

    ::

        gathered ---[send]--- parameter
    """
    _step.accumulate(parameter, grad)


@_op
def optimize(optimizer: Stepping | None, stage: nn.Module, shared: Sequence[str]) -> None:
    """Step the parameters of a stage whose gradients are done, if there is an optimizer.

    ::

        gradients --- optimizer --- parameters

    All but those of the names in ``shared``, which are another stage's.
    """
    _step.optimize(optimizer, stage, shared)


@_op
def weights(parts: Sequence[Tensor], dim: int | None, summed: bool = False) -> tuple[float, ...]:
    """Each micro-batch's part of the mini-batch, by which its loss counts; one where it is
    ``summed`` over the rows."""
    return _step.weights(parts, dim, summed)


@_op
def average(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the mini-batch, from those of its micro-batches."""
    return _step.average(losses, weights)


@_op
def defer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module whose parameters' gradients may be computed later (``weight_grad``)."""
    return _step.defer(module, *args, **kwargs)


VOCABULARY: tuple[Callable[..., Any], ...] = (
    scatter,
    write_back,
    seeds,
    gather,
    copy,
    wait,
    fork,
    join,
    portal_blue,
    portal_copy,
    portal_orange,
    checkpoint,
    recompute,
    share,
    bring,
    call,
    batch_norm,
    update_statistics,
    forward,
    loss,
    loss_backward,
    backward,
    backward_input,
    weight_grad,
    added,
    replay,
    send,
    replicate,
    gathered,
    accumulate,
    optimize,
    weights,
    average,
    defer,
)
