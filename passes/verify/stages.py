"""What the verifier knows of a stage's module: the names of what it takes and gives, and the
parameters that it uses.

::

    stage_1:   a ── linear ── relu ── r          takes ("a",), gives ("r",), uses linear.weight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxpipe.ir.graph import BROUGHT, ORIGIN, WRITES, attribute
from fxpipe.runtime.compiled.stage import as_it_is
from passes.common.values_given import given_values


@dataclass(frozen=True)
class StageSummary:
    """What is known of a module that runs as a stage.

    Args:
        takes: for each argument the name of the model's value that it has to be and, if it is a
            parameter that is brought from another stage, the parameter's path; empty where that is
            unknown.
        gives: the name of the model's value that each result is; empty where that is unknown.
        parameters: those that it uses itself, by their ids. A parameter that comes as an argument
            (pass "shared") is none of them.
    """

    takes: tuple[tuple[str, str], ...]
    gives: tuple[str, ...]
    parameters: dict[int, str]


def stage_of(module: Any, path: str) -> StageSummary:
    """What is known of the stage that a graph has at a path."""
    if isinstance(module, fx.GraphModule):
        module = as_it_is(module)
    else:
        named = module.named_parameters() if isinstance(module, nn.Module) else ()
        return StageSummary((), (), {id(p): f"{path}.{name}" for name, p in named})
    takes = tuple(
        (str(node.meta.get(ORIGIN, node.name)), str(node.meta.get(BROUGHT, "")))
        for node in module.graph.find_nodes(op="placeholder")
    )
    gives = module.graph.output_node().meta.get(ORIGIN, ())
    return StageSummary(takes, gives, dict(_parameters(module)))


def _parameters(gm: fx.GraphModule) -> Iterator[tuple[int, str]]:
    """The ids and names of the parameters that the nodes of a graph use."""
    for node in gm.graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        path = str(node.target)
        value = attribute(gm, path)
        if isinstance(value, nn.Parameter):
            yield id(value), path
        elif isinstance(value, fx.GraphModule):
            yield from _parameters(value)
        elif isinstance(value, nn.Module):
            given = _given(node)
            for name, parameter in value.named_parameters():
                if name not in given:
                    yield id(parameter), f"{path}.{name}"


def _given(module: fx.Node) -> set[str]:
    """The names of a module's parameters for which each call of it is given other values."""
    calls = [found for user in module.users if (found := given_values(user)) is not None]
    if module.op != "get_attr" or len(calls) != len(module.users) or not calls:
        return set()
    return set.intersection(*(set(values) for _, values in calls))


def writes_to_what_it_is_given(module: Any) -> tuple[fx.Node, str] | None:
    """A node of a stage that writes to the memory of one of the stage's arguments, and the
    argument's name; None if there is no such node.

    On one device, what a stage is given shares memory with what another stage has kept.
    """
    if not isinstance(module, fx.GraphModule):
        return None
    given = {node.name for node in module.graph.find_nodes(op="placeholder")}
    for node in module.graph.nodes:
        for name in node.meta.get(WRITES, ()):
            if name in given:
                return node, name
    return None
