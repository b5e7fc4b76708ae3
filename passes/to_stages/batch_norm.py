"""Deferred batch norm: batch norms update their running statistics once for each mini-batch, as
they do without a pipeline.

::

    before     x ─ bn ─ y

    after      x ─ batch_norm ─┬─ y
                               └─ mean, variance, count ─ update_statistics

The node ``update_statistics`` is in no stage's module, so that it runs once (pass "split"). Pass
"microbatch" gives it the statistics of all micro-batches. A batch norm in a checkpoint that the
model itself has is taken apart in the body of the checkpoint. The checkpoint then returns the
statistics, too, and the update comes after it, so that no recomputation repeats the update.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from fxpipe import ops
from fxpipe.ir._torch import BatchNorm
from fxpipe.ir.graph import ONCE, attribute
from fxpipe.runtime.checkpointing.regions import region_of


@dataclass(frozen=True)
class DeferredBatchNorm:
    """Model graph → the same, in which batch norms that keep running statistics are taken apart.

    Only batch norms in training mode are taken apart, be they modules of ``torch.nn`` (symbolic
    tracing) or calls of ``aten.batch_norm`` (export). ``SyncBatchNorm`` stays as it is, since it
    computes its statistics from the batches of several processes.

    Raises ValueError where another node reads the running statistics.
    """

    name: ClassVar[str] = "batch_norm"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in list(gm.graph.find_nodes(op="call_module")):
            module = gm.get_submodule(str(node.target))
            if isinstance(module, BatchNorm) and _is_plain(module):
                _take_apart(node, *_of_module(node, module))
            elif (region := region_of(module)) is not None:
                self(region.body)
                _move_updates_out(node, region.body.graph)
                region.body.recompile()
        counters = _counters(gm)
        target = torch.ops.aten.batch_norm.default
        for node in list(gm.graph.find_nodes(op="call_function", target=target)):
            x, weight, bias, mean, variance, training, momentum, eps, _ = node.args
            if training and mean is not None:
                tracked = _taken_over(gm, counters, mean)
                _take_apart(node, x, weight, bias, mean, variance, tracked, momentum, eps)
        _refuse_reads(gm)
        gm.recompile()
        return gm


def _is_plain(module: BatchNorm) -> bool:
    """Whether a module has the forward of PyTorch's batch norms, and updates running statistics."""
    is_torchs = type(module).forward is BatchNorm.forward
    return is_torchs and module.training and module.running_mean is not None


def _of_module(node: fx.Node, module: nn.Module) -> tuple[Any, ...]:
    (x,) = (*node.args, *node.kwargs.values())
    tensors: list[fx.Node | None] = []
    with node.graph.inserting_before(node):
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if getattr(module, name) is None:
                tensors.append(None)
                continue
            path = f"{node.target}.{name}"
            flat = path.replace(".", "_")
            tensors.append(node.graph.create_node("get_attr", path, name=flat))
    return x, *tensors, module.momentum, module.eps


def _counters(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """The nodes that count batches in an exported graph, in order, by the buffer that they add to.
    A buffer whose number something else reads is left out."""
    counted: dict[fx.Node, int] = {}
    found: dict[int, list[fx.Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor):
        source = node.args[0]
        if source in counted:  # a second call of the same batch norm adds to what the first gives
            counted[node] = counted[source]
        elif isinstance(source, fx.Node) and source.op == "get_attr":
            counted[node] = id(attribute(gm, str(source.target)))
        else:
            continue
        found.setdefault(counted[node], []).append(node)
    return {
        buffer: nodes
        for buffer, nodes in found.items()
        if all(user in counted for node in nodes for user in node.users)
    }


def _taken_over(gm: fx.GraphModule, counters: dict[int, list[fx.Node]], mean: Any) -> Any:
    """The node of ``num_batches_tracked`` beside the running mean of a batch norm.

    The next node that adds one to it is erased, since ``update_statistics`` counts mini-batches.
    None if the graph does not count batches, or uses their number.
    """
    path = f"{mean.target.rpartition('.')[0]}.num_batches_tracked"
    try:
        counting = counters.get(id(attribute(gm, path)))
    except AttributeError:
        return None
    if not counting:
        return None
    counter = counting.pop(0)
    (tracked, _) = counter.args
    counter.replace_all_uses_with(tracked)  # type: ignore[arg-type]
    gm.graph.erase_node(counter)
    return tracked


def _refuse_reads(gm: fx.GraphModule) -> None:
    """Raise ValueError if a node reads running statistics whose update is deferred: in the model it
    may read them after the update, which comes behind all micro-batches now."""
    updates = gm.graph.find_nodes(op="call_function", target=ops.update_statistics)
    deferred = {id(attribute(gm, str(node.target))) for u in updates for node in u.args[:2]}
    for node in gm.graph.find_nodes(op="get_attr") if updates else ():
        readers = (user for user in node.users if user.target is not ops.update_statistics)
        reader = next(readers, None)
        if reader is not None and id(attribute(gm, str(node.target))) in deferred:
            raise ValueError(
                f"{reader.name!r} reads {node.target}, which deferred_batch_norm=True updates only "
                "behind all micro-batches: it would read what an earlier mini-batch has left; "
                "leave deferred_batch_norm out, or read the statistics outside of the forward"
            )


def _take_apart(
    node: fx.Node,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    tracked: Any,
    momentum: Any,
    eps: Any,
) -> None:
    graph, name = node.graph, node.name

    def add(function: Any, args: Iterable[Any], suffix: str) -> fx.Node:
        made = graph.create_node("call_function", function, tuple(args), name=f"{name}_{suffix}")
        made.meta = dict(node.meta)
        return made

    with graph.inserting_before(node):
        norm = add(ops.batch_norm, (x, weight, bias, eps), "norm")
        y, *statistics = (
            add(operator.getitem, (norm, i), part)
            for i, part in enumerate(("out", "mean", "var", "count"))
        )
        update = (mean, variance, tracked, momentum, (tuple(statistics),))
        add(ops.update_statistics, update, "update").meta[ONCE] = True
    node.replace_all_uses_with(y)
    graph.erase_node(node)


_VALUES = "val", "tensor_meta"


def _move_updates_out(node: fx.Node, body: fx.Graph) -> None:
    """Let the body of a checkpoint, which ``node`` calls, give the statistics of its batch norms,
    and update the running ones behind the node."""
    updates = body.find_nodes(op="call_function", target=ops.update_statistics)
    if not updates:
        return
    output, graph = body.output_node(), node.graph
    (values,) = output.args
    results = list(values) if isinstance(values, tuple) else [values]
    statistics = [part for update in updates for part in update.args[-1][0]]
    output.args = ((*results, *statistics),)
    at = node

    def result(index: int, name: str, meta: dict[str, Any]) -> fx.Node:
        nonlocal at
        with graph.inserting_after(at):
            at = graph.create_node("call_function", operator.getitem, (node, index), name=name)
        at.meta = meta
        return at

    described = {key: value for key, value in node.meta.items() if key not in _VALUES}
    if not isinstance(values, tuple):
        only = result(0, f"{node.name}_out", dict(node.meta))
        node.replace_all_uses_with(only, delete_user_cb=lambda user: user is not only)
        node.meta = dict(described)
    index = len(results)
    for update in updates:
        *buffers, momentum, (parts,) = update.args
        own = []
        for part in parts:
            own.append(result(index, part.name, dict(described)))
            index += 1
        with graph.inserting_after(at):
            at = graph.create_node("call_function", ops.update_statistics, name=update.name)
        with graph.inserting_before(at):
            copies = [buffer and graph.node_copy(buffer) for buffer in buffers]
        at.args = (*copies, momentum, (tuple(own),))
        at.meta = {**described, ONCE: True}
        body.erase_node(update)
        for buffer in filter(None, buffers):
            if not buffer.users:
                body.erase_node(buffer)
