"""Graphs of every level as text: a node a line, or as the Python code that fx generates."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from fxpipe.ir._torch import OpOverload
from fxpipe.ir.graph import MICROBATCH, STAGE, STREAM


def operator_name(node: fx.Node) -> str:
    """What a node calls: a function's name, ``.method`` or the path of a module."""
    if node.op == "call_function":
        target = node.target
        if isinstance(target, OpOverload):
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
