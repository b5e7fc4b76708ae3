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

import inspect
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn

from fxpipe import ops
from fxpipe.ir import augmented
from fxpipe.ir._torch import BatchNorm, InstanceNorm, OpOverload, TorchDispatchMode, schema_of
from fxpipe.ir.graph import ONCE, WHOLE, attribute
from fxpipe.ir.source import model_frame
from fxpipe.ir.tensors import memory_of
from fxpipe.runtime.checkpointing.regions import region_of
from fxpipe.runtime.writes import statistics_written_by
from passes.common.fakes import FakeInterpreter


@dataclass(frozen=True)
class DeferredBatchNorm:
    """Model graph → the same, in which batch norms that keep running statistics are taken apart.

    Only batch norms in training mode are taken apart: modules of ``torch.nn`` (which symbolic
    tracing keeps, and so does an export where they have no momentum), and calls of
    ``F.batch_norm``, ``torch.batch_norm`` and ``aten.batch_norm`` with buffers. ``SyncBatchNorm``
    is one of them in a single process; one that computes its statistics from the batches of several
    processes is refused.

    Whatever else writes to running statistics would do so for each micro-batch. It is looked for in
    a run of the graph on fake tensors, and refused.

    ``inputs``: what the graph is run on, one for each placeholder. Without them only what the nodes
    themselves show is refused.

    Raises ValueError for those, and where another node reads the running statistics.
    """

    name: ClassVar[str] = "batch_norm"
    inputs: tuple[Any, ...] | None = None

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        _take_all_apart(gm)
        _refuse_reads(gm)
        if self.inputs is not None:
            with torch.no_grad():
                _Refusing(gm).run_on(self.inputs)
        return gm


def _take_all_apart(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.find_nodes(op="call_module")):
        path = str(node.target)
        module = gm.get_submodule(path)
        region = region_of(module)
        if region is None and WHOLE in node.meta and "module" in dict(module.named_children()):
            path = f"{path}.module"  # what stands in for one that is kept whole has it as this
            module = gm.get_submodule(path)
        _refuse_synchronised(path, module)
        _refuse_instance_norms(path, module)
        if isinstance(module, BatchNorm) and _is_plain(module):
            _take_apart(node, *_of_module(node, path, module))
        elif region is not None:
            _take_all_apart(region.body)
            _move_updates_out(node, region.body.graph)
            region.body.recompile()
        elif (inner := _updated_within(module, gm.get_submodule(str(node.target)))) is not None:
            raise ValueError(
                f"deferred_batch_norm=True: {'.'.join(filter(None, (path, inner)))} are running "
                f"statistics within {path}, a {type(module).__name__} that is kept whole, so that "
                f"they cannot be updated once for each mini-batch: {_REMEDY}"
            )
    calls: dict[int, list[tuple[fx.Node, dict[str, Any]]]] = {}  # by the buffer of their means
    for node in list(gm.graph.nodes):
        if node.target in _INSTANCE_NORMS:
            given = _arguments(_INSTANCE_NORMS[node.target], node)
            if given["use_input_stats"] is not False and _is_buffer(given["running_mean"]):
                raise ValueError(_said_of_instance_norm(_where(node)))
        if node.target not in _FUNCTIONS:
            continue
        given = _arguments(_FUNCTIONS[node.target], node)
        momentum = given["momentum"]
        running = given["running_mean"], given["running_var"]
        if given["training"] is not True or not all(map(_is_buffer, running)):
            continue  # if it does write to running statistics, the run on fake tensors shows it
        if not isinstance(momentum, float | int):
            raise ValueError(
                f"deferred_batch_norm=True: the batch norm {_where(node)} has a momentum that the "
                "model computes, so that what it is for a mini-batch is not known: give a number, "
                "or let it be a torch.nn batch norm with momentum=None, for the average over all "
                "mini-batches; or leave deferred_batch_norm out"
            )
        mean = attribute(gm, str(running[0].target))
        calls.setdefault(id(mean), []).append((node, given))
    for same in calls.values():
        count = _count_taken_over(gm, same[0][1]["running_mean"], len(same))
        for node, given in same:
            x, weight, bias, mean, variance, _, momentum, eps = map(given.__getitem__, _ARGUMENTS)
            tracked = None
            if count is not None:
                with gm.graph.inserting_before(node):
                    name = count.replace(".", "_")
                    tracked = gm.graph.create_node("get_attr", count, name=name)
            _take_apart(node, x, weight, bias, mean, variance, tracked, momentum, eps)
    gm.recompile()


_REMEDY = (
    "call a batch norm of torch.nn or F.batch_norm, with the model's own buffers, where the model "
    "is traced; or leave deferred_batch_norm out, and have the running statistics of micro-batches"
)
_ARGUMENTS = (
    *("input", "weight", "bias", "running_mean", "running_var"),
    *("training", "momentum", "eps"),
)


_FUNCTIONS: dict[Any, Any] = {
    F.batch_norm: F.batch_norm,
    torch.batch_norm: torch.ops.aten.batch_norm.default,
    torch.ops.aten.batch_norm.default: torch.ops.aten.batch_norm.default,
}
"""The functions that normalise by a batch, each with one that says how it is called."""
_INSTANCE_NORMS: dict[Any, Any] = {
    F.instance_norm: F.instance_norm,
    torch.instance_norm: torch.ops.aten.instance_norm.default,
    torch.ops.aten.instance_norm.default: torch.ops.aten.instance_norm.default,
}
"""The functions that normalise each row by itself, as well."""


def _arguments(function: Any, node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by their names, as this function, or operator, gets them."""
    if isinstance(function, OpOverload):
        names = [argument.name for argument in schema_of(function).arguments]
        return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_buffer(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _where(node: fx.Node) -> str:
    """Where a node is in the model, for people."""
    frame = model_frame(node.meta.get("stack_trace"))
    at = "" if frame is None else f" (at {frame['file']}:{frame['number']})"
    return f"{node.name!r}{at}"


def _updated_within(module: nn.Module, node: nn.Module) -> str | None:
    """The path of running statistics within a module that is one node, which a call updates; None
    if there are none.

    Args:
        node: the module that the node calls. What stands in for a module that is kept whole knows
            of its ``statistics``.
    """
    norms = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) and part.training and part.running_mean is not None
    }
    seen = getattr(node, "statistics", ())
    return next(iter((*(f"{name}.running_mean".lstrip(".") for name in norms), *seen)), None)


def _refuse_synchronised(path: str, module: nn.Module) -> None:
    """Raise ValueError if a module has batch norms whose statistics are those of several processes.

    They are computed in the forward, by an operator that updates the running statistics, too.
    """
    for name, part in module.named_modules():
        is_one = isinstance(part, nn.SyncBatchNorm) and part.training
        if is_one and dist.is_initialized() and dist.get_world_size(part.process_group) > 1:
            raise ValueError(
                f"deferred_batch_norm=True: {'.'.join(filter(None, (path, name)))} is a "
                "SyncBatchNorm, which updates its running statistics from the micro-batches of "
                "several processes in each call: leave deferred_batch_norm out, or use a batch "
                "norm of one process"
            )


def _refuse_instance_norms(path: str, module: nn.Module) -> None:
    """Raise ValueError if a module has instance norms with running statistics, which are no
    statistics of a batch: each row adds to them."""
    for name, part in module.named_modules():
        is_one = isinstance(part, InstanceNorm) and part.training
        if is_one and part.running_mean is not None:
            raise ValueError(_said_of_instance_norm(".".join(filter(None, (path, name)))))


def _said_of_instance_norm(where: str) -> str:
    return (
        f"deferred_batch_norm=True: {where} is an instance norm with running statistics, which "
        "would be updated for each micro-batch: leave deferred_batch_norm out, and have the "
        "running statistics of micro-batches, or give the instance norm none"
    )


class _Refusing(FakeInterpreter):
    """Runs a graph, and raises an error at a node that writes running statistics to a buffer."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.gm, self.writes = gm, _Statistics()

    def run_on(self, inputs: tuple[Any, ...]) -> None:
        fakes = self.fake(inputs)
        # They are kept as long as the run takes, else other tensors could get their memory.
        own = [(name, self.fake(buffer)) for name, buffer in self.gm.named_buffers()]
        self.buffers = {memory_of(buffer): name for name, buffer in own}
        with self.mode, self.writes:
            self.run(*fakes)

    def run_node(self, n: fx.Node) -> Any:
        self.writes.memories.clear()
        value = super().run_node(n)
        for memory in self.writes.memories:
            if memory in self.buffers:
                raise ValueError(
                    f"deferred_batch_norm=True: {_where(n)} updates running statistics in "
                    f"{self.buffers[memory]}, and would do so for each micro-batch: {_REMEDY}"
                )
        return value


class _Statistics(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memories of the running statistics that batch norms write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memories: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.memories.update(map(memory_of, statistics_written_by(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _is_plain(module: BatchNorm) -> bool:
    """Whether a module has a forward of PyTorch's batch norms, and updates running statistics."""
    is_torchs = type(module).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)
    return is_torchs and module.training and module.running_mean is not None


def _of_module(node: fx.Node, path: str, module: nn.Module) -> tuple[Any, ...]:
    (x,) = (*node.args, *node.kwargs.values())
    tensors: list[fx.Node | None] = []
    with node.graph.inserting_before(node):
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if getattr(module, name) is None:
                tensors.append(None)
                continue
            flat = f"{node.target}.{name}".replace(".", "_")
            tensors.append(node.graph.create_node("get_attr", f"{path}.{name}", name=flat))
    return x, *tensors, module.momentum, module.eps


def _count_taken_over(gm: fx.GraphModule, mean: fx.Node, calls: int) -> str | None:
    """The path of ``num_batches_tracked`` beside the running mean of batch norms, if the graph adds
    one to it for each of their ``calls``. None if the graph does not count batches.

    The nodes that count are erased, since ``update_statistics`` counts mini-batches. Raises
    ValueError if the number is used, or counts something else.
    """
    path = ".".join([*str(mean.target).split(".")[:-1], "num_batches_tracked"])
    try:
        buffer = attribute(gm, path)
    except AttributeError:
        return None
    values: list[fx.Node] = []  # the buffer, and what has been counted up from it
    added = 0
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            if attribute(gm, str(node.target)) is buffer:
                values.append(node)
        elif node.args and node.args[0] in values:
            adds = node.target in _ADDS and node.args[1:] == (1,) and not node.kwargs
            sets = node.target in _SETS and node.args[1] in values
            if adds or sets or node.target in _DETACHES:
                values.append(node)
                added += adds
    if not added:
        return None
    users = (user for value in values for user in value.users if user not in values)
    if (user := next(users, None)) is not None:
        raise ValueError(
            f"deferred_batch_norm=True: the model computes with {path}, the number of batches, "
            f"{_where(user)}, which is that of mini-batches once it is deferred, but is read for "
            "each micro-batch: do not read it, or leave deferred_batch_norm out"
        )
    if added != calls:
        raise ValueError(
            f"deferred_batch_norm=True: the model adds {added} to {path}, the number of batches, "
            f"for {calls} calls of the batch norm: add one for each call, or leave "
            "deferred_batch_norm out"
        )
    for node in reversed(values):
        if node.op != "get_attr":
            gm.graph.erase_node(node)
    return path


_ADDS = {
    *("add", "add_", operator.add, operator.iadd, augmented.iadd, torch.add),
    *(torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor),
}
_SETS = {"copy_", torch.ops.aten.copy_.default}
_DETACHES = {"detach", torch.ops.aten.detach.default}


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
        made.meta = {key: value for key, value in node.meta.items() if key != WHOLE}
        return made

    with graph.inserting_before(node):
        norm = add(ops.batch_norm, (x, weight, bias, eps), "norm")
        y, *statistics = (
            add(operator.getitem, (norm, i), part)
            for i, part in enumerate(("out", "mean", "var", "count"))
        )
        update = (mean, variance, tracked, momentum, (tuple(statistics),))
        add(ops.update_statistics, update, "update").meta[ONCE] = True
    if WHOLE in node.meta:  # a module that is kept whole gives a list
        for user in list(node.users):
            assert user.target is operator.getitem and user.args[1] == 0
            user.replace_all_uses_with(y)
            graph.erase_node(user)
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
