"""Stages by the names of modules and nodes, for a cut that the user gives to pass "partition".

::

    ["layer3", "head"]             each name begins a stage
    {"encoder": 0, "decoder": 1}   each name goes to its stage; every other node goes to the latest
                                   stage that it takes a value from
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import networkx as nx
from torch import fx

from fxpipe import ops
from fxpipe.ir.counts import integer
from fxpipe.ir.graph import stage_nodes
from passes.common.names import named_nodes, nothing_named
from passes.partition.problem import PartitionError, reads_before_writes, together


def labels_of_starts(graph: fx.Graph, starts: list[str], stages: int) -> dict[fx.Node, int]:
    """The stages of nodes, where each name in ``starts`` begins a stage.

    The first stage begins at the first node, whether or not that is named.

    Raises PartitionError if the names do not make ``stages`` stages in the model's order.
    """
    check_names(starts)
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    first = {name: min(position[node] for node in named(work, name)) for name in starts}
    starts = [name for name in starts if first[name] > 0]
    cuts = [first[name] for name in starts]
    if len(cuts) != stages - 1:
        raise PartitionError(
            f"partition names {len(cuts)} places to cut, which makes {len(cuts) + 1} stages, but "
            f"there are {stages} devices: give one name for each stage but the first"
        )
    for (a, b), (i, j) in zip(pairwise(starts), pairwise(cuts), strict=True):
        if i >= j:
            raise PartitionError(
                f"{b!r} begins a stage after {a!r}, but in the model it comes no later: stages "
                "would need each other in a circle; give the names in the model's order"
            )
    labels = {node: sum(position[node] >= cut for cut in cuts) for node in work}
    _bring_home(labels, [node for node in work if node.name not in first])
    _check(work, labels)
    return labels


def labels_of_mapping(
    graph: fx.Graph, mapping: Mapping[str, int], stages: int
) -> dict[fx.Node, int]:
    """The stages of nodes, where ``mapping`` has the stages of modules and nodes by name. Every
    other node goes to the latest stage that it takes a value from.

    Raises PartitionError if a stage stays empty, or stages would need each other in a circle.
    """
    check_names(mapping)
    work = list(stage_nodes(graph))
    told: dict[fx.Node, int] = {}
    # A longer path overrides a shorter one that contains it: {"encoder": 0, "encoder.head": 1}.
    for name, stage in sorted(mapping.items(), key=lambda item: len(item[0])):
        told.update(dict.fromkeys(named(work, name), check_stage("partition", name, stage, stages)))
    labels: dict[fx.Node, int] = {}
    for node in work:
        needed = max((labels[n] for n in node.all_input_nodes if n in labels), default=0)
        labels[node] = told.get(node, needed)
    _bring_home(labels, [node for node in work if node not in told])
    _check(work, labels)
    missing = set(range(stages)) - set(labels.values())
    if missing:
        raise PartitionError(
            f"partition leaves stage {min(missing)} without a node; with {stages} devices, every "
            f"stage from 0 to {stages - 1} needs one"
        )
    return labels


def shortest_mapping(graph: fx.Graph, stages: Mapping[str, int], count: int) -> dict[str, int]:
    """A mapping by which :func:`labels_of_mapping` cuts a graph into ``count`` stages as
    ``stages``, with the stage of each node, does: it names those nodes only that would go to
    another stage by what they take values from."""
    work, told = list(stage_nodes(graph)), dict[str, int]()
    for node in work:
        sources = (stages[source.name] for source in node.all_input_nodes if source.name in stages)
        if max(sources, default=0) != stages[node.name]:
            told[node.name] = stages[node.name]
    try:
        found = labels_of_mapping(graph, told, count)
    except PartitionError:  # a node may have the name of a module, say
        return dict(stages)
    is_same = all(found[node] == stages[node.name] for node in work)
    return told if is_same else dict(stages)


def check_names(names: Iterable[object]) -> None:
    """Raise :class:`PartitionError` for a name that is not a string."""
    for name in names:
        if not isinstance(name, str):
            raise PartitionError(
                f"partition has {name!r}, a {type(name).__name__}, for a name: give the names of "
                "modules or nodes, as str"
            )


def check_stage(what: str, name: str, stage: object, stages: int) -> int:
    """The stage into which the user puts a name, as an ``int``; NumPy integers are taken as well.

    Raises :class:`PartitionError` if there is no such stage.
    """
    number = integer(stage)
    if number is None or not 0 <= number < stages:
        raise PartitionError(
            f"{what} puts {name!r} into stage {stage!r}: with {stages} devices there are stages 0 "
            f"to {stages - 1}"
        )
    return number


def _bring_home(labels: dict[fx.Node, int], nodes: list[fx.Node]) -> None:
    """Move the shared parameters among ``nodes`` to the first stage that uses them."""
    for node in nodes:
        if node.target is ops.share:
            users = [labels[user] for user in node.users if user in labels]
            labels[node] = min(users, default=labels[node])


def named(work: Sequence[fx.Node], name: str) -> list[fx.Node]:
    """The nodes that a name stands for: the node of that name, or all nodes of the module of that
    path and of its submodules, or of the only module whose path ends so.

    Raises PartitionError if there are none.
    """
    found = named_nodes(work, name)
    if not found:
        raise PartitionError(f"partition names {name!r}, but {nothing_named(work, name)}")
    return found


def _check(work: list[fx.Node], labels: dict[fx.Node, int]) -> None:
    for node in work:
        for source in node.all_input_nodes:
            if source in labels and labels[source] > labels[node]:
                raise PartitionError(_describe_cycle(node, source, labels))
    for reader, writer in reads_before_writes(work):
        if labels[reader] > labels[writer]:
            raise PartitionError(
                f"{reader.name!r} in stage {labels[reader]} reads memory that {writer.name!r} in "
                f"the earlier stage {labels[writer]} writes to after it: put {writer.name!r} into "
                f"stage {labels[reader]} or later, or {reader.name!r} earlier"
            )
    for group in together(work):
        stages = {labels[node] for node in group}
        if len(stages) > 1:
            one, other = group[0], next(n for n in group if labels[n] != labels[group[0]])
            raise PartitionError(
                f"{one.name!r} (stage {labels[one]}) and {other.name!r} (stage {labels[other]}) "
                "share memory that is written to (a buffer, say), hand something to each other "
                "through a Python object, or are parts of one result: "
                "put them into one stage"
            )


def _describe_cycle(node: fx.Node, source: fx.Node, labels: dict[fx.Node, int]) -> str:
    early, late = labels[node], labels[source]
    stages: nx.DiGraph[int] = nx.DiGraph(
        (labels[a], labels[b]) for b in labels for a in b.all_input_nodes if a in labels
    )
    text = f"{node.name!r} in stage {early} needs {source.name!r} from the later stage {late}"
    if nx.has_path(stages, early, late):
        text += f", and stage {late} needs stage {early}: the stages would wait in a circle"
    return text + f"; put {node.name!r} into stage {late} or later, or {source.name!r} earlier"
