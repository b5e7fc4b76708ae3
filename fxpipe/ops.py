"""The vocabulary: fxpipe's functions that nodes of pipeline graphs and step graphs call.

Each is a plain function. A call with proxies among its arguments becomes a node, so that an emitted
graph can be traced again. Streams are given by name (``"cuda:1/copy"``, see
:mod:`fxpipe.runtime.streams`). The gates (``copy``, ``wait``, ``fork``, ``join``, ``recompute``)
take values nested in tuples, and only values that carry gradient go through their autograd nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, fx, nn

from fxpipe.ir._torch import pytree
from fxpipe.runtime import batch_norm as _batch_norm
from fxpipe.runtime import copy as _copy
from fxpipe.runtime import dependency as _dependency
from fxpipe.runtime import microbatch as _microbatch
from fxpipe.runtime import portal as _portal
from fxpipe.runtime import random as _random
from fxpipe.runtime import shared as _shared
from fxpipe.runtime import step as _step
from fxpipe.runtime.checkpointing import checkpoint as _checkpoint
from fxpipe.runtime.checkpointing.checkpoint import Handle
from fxpipe.runtime.checkpointing.offload import Offload
from fxpipe.runtime.checkpointing.selective import keeping_products
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.portal import Portal
from fxpipe.runtime.ranks.replicas import Gradients
from fxpipe.runtime.ranks.shards import Shards
from fxpipe.runtime.ranks.transport import Arrival, Transport
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
    """Whether one of the values is a proxy, or a container to be searched for proxies."""
    return any(isinstance(value, fx.Proxy | tuple | list | dict) for value in values)


@_op
def scatter(
    tensor: Any, dim: _microbatch.InDim, chunks: int, copied: bool = False
) -> tuple[Any, ...]:
    """Cut a mini-batch into ``chunks`` micro-batches along ``dim``.

    ::

        x ---+--- x_mb0          backward: each micro-batch's gradient into its place
             +--- x_mb1

    The sizes of the parts differ by one row at most, and larger parts come first. The parts are
    views of ``tensor``; if ``copied``, of a copy of it, which the model may write to. Without a
    dimension (None) each micro-batch has the whole tensor. With "list", ``tensor`` is a leaf of a
    list with one element for each row, and has a value for each micro-batch already.
    """
    return _microbatch.scatter(tensor.clone() if copied else tensor, dim, chunks)


@_op
def write_back(
    tensor: Tensor | _microbatch.Parts, dim: int | None, parts: Sequence[Tensor]
) -> None:
    """Write the micro-batches' copies of an input, changed by the model, back to the input.

    ::

        x_mb0 ---+--- x, the caller's
        x_mb1 ---+

    ``parts`` are joined along ``dim``, and have the shape of ``tensor`` together.
    """
    _microbatch.write_back(tensor, dim, parts)


@_op
def seeds(count: int) -> tuple[int, ...]:
    """Draw a seed for each of ``count`` micro-batches from the default generator.

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
    weights: Sequence[float] = (),
    apart: bool = False,
) -> Any:
    """Put the micro-batches' outputs together: joined along ``dims``, averaged where that is None.

    ::

        y_mb0 ---+--- y          backward: each micro-batch gets its part of the gradient
        y_mb1 ---+

    Args:
        values: the output of each micro-batch; all have the same structure.
        dims: the batch dimension of the tensors in an output, one for all or one for each leaf.
            "sum": the outputs are added up. "any": all are the same, and the first one is taken.
            "weighted": they are added up, each times its weight. "list": they are leaves of a list
            with one element for each row, and stay apart.
        parts: the micro-batches' parts of an input, by whose sizes an average weighs the outputs.
        parts_dim: the batch dimension of ``parts``.
        weights: of each micro-batch's loss (see :func:`loss_weights`).
        apart: whether tensors with the batch dimension ``dims`` are left as they are, for the next
            call, which takes them as they are: a state of the stages.

    Raises ValueError if an output that can be neither joined nor averaged (without a batch
    dimension, and not of floating point) differs between micro-batches.
    """
    if apart and len(values) > 1 and isinstance(dims, int):
        return _microbatch.Parts(tuple(values), dims)
    return _microbatch.gather(values, dims, parts, parts_dim, weights)


@_op
def loss_weights(
    function: nn.Module, parts: Sequence[Sequence[Any]], gradients: Gradients | None = None
) -> tuple[float, ...]:
    """The weight of each micro-batch's loss: what ``function`` gives, over the sum for all of them.

    ::

        x_mb0, labels_mb0 --- function ---+--- shares: the weight of each over the sum of all
        x_mb1, labels_mb1 --- function ---+

    Args:
        function: a module that gives the weight of a micro-batch, a number, from its parts.
        parts: for each tensor that the weights are computed from, the parts of all micro-batches.
        gradients: those of the step, if there are replicas: the sum is that of all replicas then.

    Raises ValueError for a weight that is negative or no number, and if all of them are zero.
    """
    total = None if gradients is None else gradients.replicas.total
    return _microbatch.shares([function(*own) for own in zip(*parts, strict=True)], total)


@_op
def copy(values: Any, source: str, target: str) -> Any:
    """Move values to the device of the target stream.

    ::

        source ---[source stream]--- copy ---[target stream]--- target

    The backward moves the gradients back. On one device the result shares memory with the source,
    so a stage that writes to a value that it receives clones it first (pass ``split``).
    """
    return _copy.copy(values, source, target)


@_op
def wait(values: Any, source: str, target: str) -> Any:
    """Let the target stream wait until the source stream has made the values.

    ::

        values (source stream) --- wait --- values (target stream)

    It waits for these values only, and not for later work of the source stream. In the backward the
    source stream waits until the target stream has made the gradients.
    """
    return _copy.wait(values, source, target)


@_op
def fork(values: Any) -> tuple[Any, Tensor]:
    """Branch a phony (a tensor without elements) off values, whose backward waits for the phony's.

    ::

        values --- fork --- values
                     `----- phony --- (to a join)
    """
    return _dependency.fork(values)


@_op
def join(values: Any, phony: Tensor) -> Any:
    """Merge a phony (see :func:`fork`) into values; the phony's backward comes after the values'.

    ::

                values --- join --- values
        (from a fork) phony --'
    """
    return _dependency.join(values, phony)


@_op
def portal_blue(tensor: Any) -> Portal:
    """Take a skip tensor out of autograd's graph at its source; a phony stands in for it there.

    ::

        t --- blue --- phony          backward: t gets the gradient that came through the portal
                :
                t, hidden
    """
    return _portal.portal_blue(tensor)


@_op
def portal_copy(portal: Portal, source: str, target: str) -> Portal:
    """Move the tensor that a portal hides from autograd to the device of the target stream.

    ::

        phony ------------ copy ------------ phony
        t, hidden ..[source to target].. t, hidden

    The backward moves the hidden gradient the other way.
    """
    return _portal.portal_copy(portal, source, target)


@_op
def portal_orange(portal: Portal) -> Any:
    """Bring a skip tensor back into autograd's graph, at its consumer.

    ::

        phony ------ orange --- t          backward: the gradient of t goes into the portal
        t, hidden ......:
    """
    return _portal.portal_orange(portal)


@_op
def checkpoint(stage: nn.Module, *args: Any) -> tuple[Any, Handle | None]:
    """Run a stage without keeping its activations.

    Returns the stage's output, and a handle by which :func:`recompute` runs the stage again.

    ::

        args --- stage --- output          saved tensors: none, until recompute or their first use
    """
    # Its forward is called, and not the module: fx prints errors in a call of a module to stderr.
    # Nodes that draw random numbers are given a seed (pass "random"), the same in both runs.
    options = _checkpoint.CheckpointOptions(preserve_rng_state=False)
    return _checkpoint.checkpointed(stage.forward, *args, options=options)


@_op
def selective(stage: nn.Module, *args: Any) -> tuple[Any, Handle | None]:
    """Run a stage without keeping its activations, but for the results of products.

    Returns the stage's output, and a handle by which :func:`recompute` runs the stage again with
    these results.

    ::

        args --- stage --- output          kept: the results of products of matrices, convolutions
                                           and attention
    """
    options = _checkpoint.CheckpointOptions(
        preserve_rng_state=False, context_fn=functools.partial(keeping_products, once=False)
    )
    return _checkpoint.checkpointed(stage.forward, *args, options=options)


@_op
def offloaded(
    stage: nn.Module, source: str, share: float, *args: Any
) -> tuple[Any, Offload | None]:
    """Run a stage, and move its activations, or a share of their bytes, from the source stream's
    device to the host's memory.

    Returns the stage's output, and a handle by which :func:`recompute` begins to bring them back.

    ::

        args --- stage --- output
                   :
        saved tensors ..[link]. host ..[link]. saved tensors, for the backward
    """
    return _checkpoint.offloaded(stage, source, share, *args)


@_op
def recompute(values: Any, handle: Handle | Offload | None) -> Any:
    """Pass values on, and in the backward run the checkpointed stage of the handle again; or begin
    to bring back the activations of a stage that are on the host (:func:`offloaded`).

    The stage's own backward comes after that, so that the gradient is copied meanwhile.

    ::

        stage --- values --- wait --- recompute --- (copy)
        backward:  stage <-- wait <-- recompute <-- (copy of the gradient, still on its way)
    """
    return _checkpoint.recompute(values, handle)


@_op
def share(parameter: Tensor) -> Tensor:
    """A view of a parameter for one micro-batch, at which the gradients of its uses are summed.

    ::

        parameter --- share ---+--- one use        backward: the parameter gets the sum
                               +--- another
    """
    return _shared.share(parameter)


@_op
def lend(parameter: Tensor, count: int) -> tuple[Tensor, ...]:
    """Views of a parameter, one for each stage that uses it on a device of its own.

    ::

        parameter --- lend ---+--- [0] --- bring        backward: the parameter gets the sum, in
                              +--- [1] --- bring        the order of the views
    """
    return _shared.lend(parameter, count)


@_op
def bring(parameter: Tensor, target: str, user: str) -> Tensor:
    """Copy a parameter to a stage on another device, once for all its micro-batches.

    ::

        parameter ---[target stream]--- bring ---[user stream]--- (share, in each micro-batch)

    The backward brings back the sum of the micro-batches' gradients.
    """
    # ``share`` makes an autograd node on the parameter's own device and stream, where the gradient
    # is then added to the parameter's.
    value = _shared.share(parameter)
    (value,) = _copy.wait(_copy.copy((value,), CALLER, target), target, user)
    return value  # type: ignore[no-any-return]


@_op
def call(module: nn.Module, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Run a module with values in place of parameters; ``values`` has them by parameter names.

    ::

        share ---+
        args  ---+--- module ---
    """
    return _shared.call(module, values, *args, **kwargs)


@_op
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Normalise a micro-batch, of shape (rows, channels, ...), by its own statistics.

    Returns the normalised tensor, mean and unbiased variance of each channel, and the number of
    elements that a channel has.

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

    Args:
        running_mean, running_var: buffers of shape (channels,), which are written to.
        tracked: the number of mini-batches so far, which is counted up; None to count none.
        momentum: the weight of the new statistics; None for an average over all mini-batches.
        parts: mean, variance and count of each micro-batch, as :func:`batch_norm` gives them.
    """
    _batch_norm.update_statistics(running_mean, running_var, tracked, momentum, parts)


@_op
def forward(
    stage: nn.Module,
    args: tuple[Any, ...],
    passed: Sequence[int],
    single: bool,
    checkpoint: bool | str,
) -> tuple[tuple[Any, ...], Tape]:
    """Run the forward of a stage for a micro-batch, in a training step.

    ::

        args --- stage ---+--- results
          `---------------+--- arguments that are passed on
                          `... tape: what its backward needs

    Args:
        passed: the indices of those arguments that are passed on to later stages.
        single: whether the stage returns one result, and not a tuple of results.
        checkpoint: whether no activations are kept, so that the backward runs the stage again;
            "selective": the results of products are kept for that; or "offload": all activations
            are kept until :func:`offload` moves them to the host.

    Returns the results followed by the arguments that are passed on, and the tape, which is the
    recorded autograd graph.
    """
    return _step.forward(stage, args, passed, single, checkpoint)


@_op
def loss(
    function: nn.Module, output: Any, target: Any, number: int, stages: Sequence[Tape]
) -> tuple[Tensor, Tape]:
    """Compute the loss of micro-batch ``number``: ``function(output, target)``, a scalar.

    ::

        output ---+--- loss ---+--- value
        target ---+            `... tape

    ``stages``: the tapes of all stages for this micro-batch. If a parameter is in the loss itself
    (a penalty on weights), the tape of its stage is given the gradient in the backward.

    Raises ValueError if the loss is no real scalar tensor, or requires no gradient.
    """
    return _step.loss(function, output, target, number, stages)


@_op
def loss_backward(tape: Tape, weight: float, scale: Tensor | None) -> Any:
    """Begin the backward of a micro-batch: compute the gradient of the model's output.

    ::

        gradient of the output --- loss --- weight (times scale)

    ``weight``: the factor by which this micro-batch's loss counts in the mini-batch's. ``scale``:
    the factor of a gradient scaler, or None.
    """
    return _step.loss_backward(tape, weight, scale)


@_op
def backward(tape: Tape, grads: Sequence[Any], after: Any = None) -> Any:
    """Run the backward of a stage for a micro-batch, from the gradients of the tape's results.

    ::

        gradients of the arguments --- stage --- gradients of the results
                                         `--- parameters

    Returns the gradients of the stage's arguments; those of its parameters are accumulated in
    ``.grad``. ``after`` has no effect here: it is an edge of the graph that makes this call come
    after another one where no gradient does.
    """
    return _step.backward(tape, grads)


@_op
def backward_input(tape: Tape, grads: Sequence[Any], after: Any = None) -> Any:
    """Run the first half of a backward: the gradients of the arguments, for which other stages
    wait. ``after`` is that of :func:`backward`.

    ::

        gradients of the arguments --- stage --- gradients of the results
    """
    return _step.backward_input(tape, grads)


@_op
def weight_grad(tape: Tape) -> None:
    """Run the second half of a backward: deferred gradients of parameters, for which no stage
    waits.

    ::

        tape --- parameters
    """
    _step.weight_grad(tape)


@_op
def added(first: Any, second: Any) -> Any:
    """Add two gradients of one value, which is among the outputs twice.

    Either may be None, if there is no such gradient; the result is None if both are.
    """
    return _step.added(first, second)


@_op
def replay(tape: Tape) -> None:
    """Run a checkpointed stage again, while the gradients of its results are still being sent.

    ::

        arguments --- stage --- tape
    """
    _step.replay(tape)


@_op
def offload(tape: Tape, source: str, share: float) -> None:
    """Begin to move the activations of a tape, or a share of their bytes, from the source stream's
    device to the host's memory, without waiting.

    ::

        forward --- tape ..[source stream's link]. host
    """
    _step.offload(tape, source, share)


@_op
def reload(tape: Tape) -> None:
    """Begin to bring the activations of a tape back from the host's memory, without waiting. The
    backward waits for them.

    ::

        host ..[link]. tape --- backward
    """
    _step.reload(tape)


@_op
def send(values: Sequence[Any], source: str, target: str) -> tuple[Any, ...]:
    """Send values, detached from their autograd history, to the device of the target stream.

    ::

        source ---[source stream]--- send ---[target stream]--- target
    """
    return _step.send(values, source, target)


@_op
def replicate(parameter: Tensor, target: str, user: str) -> Tensor:
    """Make a replica of a parameter for a stage on another device, once for a training step.

    ::

        parameter ---[target stream]--- replica

    The replica is a leaf of autograd's graph: the gradients of the stage's micro-batches are
    accumulated in its ``.grad``.
    """
    return _step.replicate(parameter, target, user)


@_op
def gathered(replica: Tensor) -> Tensor | None:
    """The sum of the micro-batches' gradients in a replica; None if it got no gradient.

    It is complete once all backwards of the stage are done.
    """
    return _step.gathered(replica)


@_op
def accumulate(parameter: Tensor, grad: Tensor | None) -> None:
    """Add a gradient to a parameter's ``.grad``; if it is None, do nothing.

    ::

        gathered ---[send]--- parameter
    """
    _step.accumulate(parameter, grad)


@_op
def optimize(
    optimizer: Stepping | None, stage: nn.Module, shared: Sequence[str], later: Sequence[str] = ()
) -> None:
    """Step the parameters of a stage whose gradients are done, if there is an optimizer.

    ::

        gradients --- optimizer --- parameters

    Args:
        shared: the names of those parameters that live in another stage, and are stepped there.
        later: the names of those in whose memory another stage has another tensor, which it may
            still read: they are stepped once all stages are done.
    """
    _step.optimize(optimizer, stage, shared, later)


@_op
def weights(
    parts: Sequence[Tensor],
    dim: int | None,
    summed: bool = False,
    gradients: Gradients | None = None,
) -> tuple[float, ...]:
    """The factor by which the loss of each micro-batch counts in the loss of the mini-batch.

    It is the micro-batch's share of the rows (of ``parts`` along ``dim``; all shares are equal if
    that is None), or 1 if the loss is ``summed`` over the rows. If there are replicas,
    ``gradients`` are those of the step, and it is the share of the rows of all replicas.
    """
    total = None if gradients is None else gradients.replicas.total
    return _step.weights(parts, dim, summed, total)


@_op
def total(gradients: Gradients | None, loss: Tensor) -> Tensor:
    """The sum of a loss over all replicas; None in place of ``gradients`` stands for one replica.

    ::

        replica 0 --- average ---+--- total
        replica 1 --- average ---+--- total
    """
    return loss if gradients is None else gradients.replicas.sum(loss)


@_op
def reduce(gradients: Gradients | None, stage: nn.Module, shared: Sequence[str]) -> None:
    """Begin to sum the gradients of a stage's parameters over all replicas, without waiting.

    ::

        replica 0, stage 0 --- gradients ---+--- reduce
        replica 1, stage 0 --- gradients ---+--- reduce

    ``shared``: as for :func:`optimize`.
    """
    if gradients is not None:
        others = {id(stage.get_parameter(name)) for name in shared}
        gradients.begin(p for p in stage.parameters() if id(p) not in others)


@_op
def reduced(gradients: Gradients | None) -> None:
    """Wait until all sums that :func:`reduce` has begun are there.

    ::

        reduce (stage 0), reduce (stage 2) --- reduced --- optimize
    """
    if gradients is not None:
        gradients.finish()


@_op
def unshard(shards: Shards | None, stage: int) -> None:
    """Begin to gather those parameters of a stage of which each replica has a shard, without
    waiting.

    ::

        shards of replica 0 ---+--- unshard --- unsharded --- forward
        shards of replica 1 ---'
    """
    if shards is not None:
        shards.unshard(stage)


@_op
def unsharded(shards: Shards | None, stage: int) -> None:
    """Wait until the parameters of a stage are there, which :func:`unshard` has begun to gather."""
    if shards is not None:
        shards.wait(stage)


@_op
def reduce_scatter(shards: Shards | None, stage: int) -> None:
    """Begin to sum the gradients of a stage's gathered parameters over all replicas, without
    waiting. Each replica gets the sums for its own shards.

    ::

        replica 0, stage 0 --- gradients ---+--- reduce_scatter --- gradients of its shards
        replica 1, stage 0 --- gradients ---+--- reduce_scatter --- gradients of its shards
    """
    if shards is not None:
        shards.reduce(stage)


@_op
def reshard(shards: Shards | None, stage: int) -> None:
    """Free a stage's gathered parameters, and keep the shards, without waiting. This is done once
    all that has begun for the stage is done."""
    if shards is not None:
        shards.reshard(stage)


@_op
def resharded(shards: Shards | None, stage: int) -> None:
    """Wait until a stage has shards only, which have their gradients.

    ::

        reduce_scatter (stage 0) --- reshard (stage 0) --- resharded (stage 0) --- optimize
    """
    if shards is not None:
        shards.wait(stage)


@_op
def average(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the mini-batch: the sum of its micro-batches' losses, each times its weight."""
    return _step.average(losses, weights)


@_op
def defer(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module so that the gradients of its parameters can be computed later, by
    :func:`weight_grad`."""
    return _step.defer(module, *args, **kwargs)


@_op
def transmit(transport: Transport, values: Any, edge: tuple[int, int], number: int) -> None:
    """Send values to another rank, without waiting for it.

    ::

        values --- transmit ---[edge]--- receive --- (arrived)

    Args:
        values: tensors, numbers and what else can be pickled, in any nesting.
        edge: the rank that transmits and the one that receives.
        number: how many transfers of this edge come before this one in a run of the graph.
    """
    transport.transmit(values, edge, number)


@_op
def receive(transport: Transport, edge: tuple[int, int], number: int) -> Arrival:
    """Begin to receive what another rank transmits, without waiting for it.

    ::

        (transmit) ---[edge]--- receive --- arrived --- values

    ``edge`` and ``number`` are those of the :func:`transmit` on the other rank.
    """
    return transport.receive(edge, number)


@_op
def arrived(arrival: Arrival) -> Any:
    """The values that another rank has transmitted. Waits until they are here.

    ::

        receive --- arrived --- values
    """
    return arrival.wait()


@_op
def elsewhere(stage: nn.Module) -> Tape:
    """An empty tape for a stage that another rank runs, among the tapes that :func:`loss` takes.

    ::

        tape of stage 0, on another rank ..... elsewhere ---+--- loss
        tape of stage 1, here --------------------------------'
    """
    return _step.elsewhere(stage)


VOCABULARY: tuple[Callable[..., Any], ...] = (
    scatter,
    write_back,
    seeds,
    gather,
    loss_weights,
    copy,
    wait,
    fork,
    join,
    portal_blue,
    portal_copy,
    portal_orange,
    checkpoint,
    offloaded,
    selective,
    recompute,
    share,
    lend,
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
    offload,
    reload,
    send,
    replicate,
    gathered,
    accumulate,
    optimize,
    weights,
    total,
    reduce,
    reduced,
    unshard,
    unsharded,
    reduce_scatter,
    reshard,
    resharded,
    average,
    defer,
    transmit,
    receive,
    arrived,
    elsewhere,
)
