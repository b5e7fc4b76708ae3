"""Metadata, and the text form, of the graphs of every level.

A node says where it belongs in ``node.meta``, under the keys below, beside fx's own (``val``,
``stack_trace``, ``nn_module_stack``).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

STAGE = "stage"  #: int
MICROBATCH = "microbatch"  #: int
DEVICE = "device"  #: torch.device
STREAM = "stream"  #: str such as ``"cuda:1/copy"``
GAP = "gap"  #: of a graph module: by what part its slowest stage is slower than possible, at most
COST = "cost"  #: Cost
SAVED = "saved"  #: tuple[tuple[int, int], ...]: the memories kept for its backward: number, bytes
ORIGIN = "origin"  #: str: the value of the stage graph that a node of the pipeline graph stands for
ACTION = "action"  #: fxpipe.schedule.Action: the one that a node of the step graph is
VALUE = "val"  #: fx's key: the fake (or example) value of a node
COPIES = "copies"  #: tuple[int, ...]: how many of each tensor of the value a mini-batch has
LARGER = "larger"  #: the fake value for a larger batch, as long as it is looked at
HOME = "home"  #: int: the stage in which a parameter lives, at what brings it to another
ALIAS = "alias"  #: int: nodes with the same number have to stay in one stage
WRITES = "writes"  #: tuple[str, ...]: the nodes whose memory this one writes to
SAME_AS = "same_as"  #: tuple[str, ...]: the nodes of whose tensors this one gives some as they came
NO_BACKWARD = "no_backward"  #: True where it has a gradient that no output leads back to
WRITTEN = "written"  #: True at the placeholder of an input that is written to
SEED = "seed"  #: True at the placeholder of the seed
RANDOM = "random"  #: True where random numbers are drawn
ONCE = "once"  #: True at what is done once for a mini-batch, after its micro-batches
FIRST = "first"  #: True at what is done once for a mini-batch, ahead of its micro-batches


class OuterModule(fx.GraphModule):
    """A graph module around others: when its own graph has changed, theirs have not."""

    def _recompile_submodules(self) -> list[Any]:  # fx would compile all of them again
        return []


FIXED = "param_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes"
"""The parts of a cost that do not depend on the batch."""


@dataclass(frozen=True)
class Cost:
    """What a node, or a stage, costs for one mini-batch. Times in seconds, sizes in bytes."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    param_bytes: int = 0
    activation_bytes: int = 0
    output_bytes: int = 0
    flops: int = 0
    backward_flops: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on the batch: parameters and all that is kept for them."""
        return sum(getattr(self, name) for name in FIXED)

    def times(self, count: int) -> Cost:
        """That of ``count`` micro-batches, if this is that of one. What is fixed counts once."""
        names = {f.name for f in fields(self)}.difference(FIXED)
        return replace(self, **{name: getattr(self, name) * count for name in names})

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def cost_of(nodes: Iterable[fx.Node]) -> Cost:
    """What the nodes of one stage cost together: memory that several of them keep counts once."""
    total, kept, sizes = Cost(), 0, dict[int, int]()
    for node in nodes:
        cost = node.meta.get(COST, Cost())
        total += cost
        kept += 0 if SAVED in node.meta else cost.activation_bytes
        sizes.update(node.meta.get(SAVED, ()))
    return replace(total, activation_bytes=kept + sum(sizes.values()))


_WITHOUT_TENSORS = {type(None), bool, int, float, str, slice, torch.dtype, torch.device}


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a value (any pytree), in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    kind = type(value)  # what is usual first: every pass asks this of every node
    if kind in _WITHOUT_TENSORS:
        return []
    if kind in (tuple, list, dict):
        parts = value.values() if kind is dict else value
        return [tensor for part in parts for tensor in tensors_of(part)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value (any pytree; fake tensors count as real ones)."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def copies_of(node: fx.Node) -> tuple[int, ...]:
    """Of each tensor of a node's value, how many of that size there are in a mini-batch.

    One, which is divided among the micro-batches; or one for each micro-batch, if all have it in
    full (pass "rows").
    """
    found: tuple[int, ...] = node.meta.get(COPIES, ())
    return found or (1,) * len(tensors_of(node.meta.get(VALUE)))


def times_done(node: fx.Node) -> int:
    """How many times in a mini-batch a node does all that it does: once for each micro-batch, if
    neither what it is given nor what it gives is divided among them."""
    sources = (source for source in node.all_input_nodes if source.op != "get_attr")
    return min((n for one in (node, *sources) for n in copies_of(one)), default=1)


def batch_bytes(node: fx.Node, trained: bool = False) -> int:
    """Bytes of all tensors in a node's value, in a whole mini-batch; with ``trained`` of those that
    get a gradient only."""
    return sum(
        count * tensor_bytes(tensor)
        for count, tensor in zip(copies_of(node), tensors_of(node.meta.get(VALUE)), strict=True)
        if tensor.requires_grad or not trained
    )


def memory_of(tensor: torch.Tensor) -> int:
    """A number that stands for the tensor's memory, the same for all its views."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def attribute(gm: fx.GraphModule, target: str) -> Any:
    """What a ``get_attr`` or ``call_module`` node of that target stands for."""
    return operator.attrgetter(target)(gm)


def add_input(graph: fx.Graph, name: str, *default: Any) -> fx.Node:
    """A further input, renamed if the model has one of that name."""
    node = graph.create_node("placeholder", name, default, name=name)
    node.target = node.name  # which fx has made unique
    return node


def rename_in_meta(graph: fx.Graph, names: dict[str, str]) -> None:
    """Let the metadata of nodes name those that have replaced others."""
    for node in graph.nodes if names else ():
        for key in (WRITES, SAME_AS):
            if key in node.meta:
                node.meta[key] = tuple(names.get(name, name) for name in node.meta[key])


def stage_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that are work: what stages are made of."""
    return filter(is_work, graph.nodes)


def is_work(node: fx.Node) -> bool:
    """Whether a node is part of a stage: no placeholder, ``get_attr``, or output."""
    is_once = ONCE in node.meta or FIRST in node.meta
    return node.op not in ("placeholder", "get_attr", "output") and not is_once


def operator_name(node: fx.Node) -> str:
    """What a node calls: a function's name, ``.method`` or the path of a module."""
    if node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            return str(target)
        return getattr(target, "__name__", str(target))
    if node.op == "call_method":
        return f".{node.target}"
    return str(node.target)


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        inner = ", ".join(map(_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        parts = ("" if p is None else _text(p) for p in (value.start, value.stop))
        step = "" if value.step is None else f":{_text(value.step)}"
        return ":".join(parts) + step
    return repr(value)


def format_node(node: fx.Node) -> str:
    """One line: what the node computes, then where it belongs (``# stage 0, mb 1, cpu:0``)."""
    if node.op == "output":
        line = f"return {_text(node.args[0])}"
    elif node.op == "placeholder":
        default = f" = {node.args[0]!r}" if node.args else ""
        line = f"{node.name}: input{default}"
    elif node.op == "get_attr":
        line = f"{node.name} = self.{node.target}"
    elif node.op == "call_function" and operator_name(node) == "getitem":
        line = f"{node.name} = {_text(node.args[0])}[{_text(node.args[1])}]"
    else:
        words = [_text(a) for a in node.args]
        words += [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
        line = f"{node.name} = {operator_name(node)}({', '.join(words)})"
    return f"{line}{_where(node)}"


def _where(node: fx.Node) -> str:
    where = []
    if STAGE in node.meta:
        where.append(f"stage {node.meta[STAGE]}")
    if MICROBATCH in node.meta:
        where.append(f"mb {node.meta[MICROBATCH]}")
    if STREAM in node.meta:
        where.append(node.meta[STREAM])
    return f"  # {', '.join(where)}" if where else ""


def format_graph(graph: fx.GraphModule | fx.Graph) -> str:
    """The graph as text, a node a line, the same for the same graph on every run."""
    if isinstance(graph, fx.GraphModule):
        graph = graph.graph
    return "\n".join(map(format_node, graph.nodes)) + "\n"


def format_code(gm: fx.GraphModule) -> str:
    """The generated Python of a graph module, each line saying where its node belongs."""
    nodes = {node.name: node for node in gm.graph.nodes}
    lines = []
    for line in gm.code.strip().splitlines():
        assigned = re.match(r"\s+(\w+)(?: : [^=]+)? = (.*?)(;  .*)?$", line)
        if assigned and assigned[1] in nodes:  # without fx's "x = None", which only frees memory
            line = f"    {assigned[1]} = {assigned[2]}{_where(nodes[assigned[1]])}"
        lines.append(line)
    return "\n".join(lines) + "\n"
