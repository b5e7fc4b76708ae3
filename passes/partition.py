"""Partition: give every node of the model graph its stage.

::

    a ─ b ─ c ─ d ─ e ─ f          costs 1 1 2 1 3 1, two stages
    0   0   0   0   1   1          slowest stage 5; also 1 1 2 | 1 3 1: the one that sends less

The automatic cut is contiguous in the graph's order, so no stage can need a later one. It makes the
slowest stage as fast as can be, and then sends as little as can be.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import networkx as nx
from torch import Tensor, fx

from fxpipe.graph import (
    ALIAS,
    COST,
    STAGE,
    VALUE,
    Cost,
    is_work,
    operator_name,
    stage_nodes,
    tensor_bytes,
)

Spec = str | Sequence[str] | Mapping[str, int] | Callable[[fx.GraphModule], Any]
"""How a user says the cut: "auto", names that begin stages, name to stage, or a function of the
model graph that returns one of the latter two."""

SLACK = 0.02  # costs are estimates: within this of the best, the cut that sends less wins


class PartitionError(ValueError):
    """A model cannot be cut as asked."""


@dataclass(frozen=True)
class Partition:
    """Model graph (with costs, if cut automatically) → the same, with ``meta["stage"]``.

    Raises :class:`PartitionError` if there are fewer places to cut than needed, a name is unknown,
    or the asked-for stages need each other in a circle.
    """

    name: ClassVar[str] = "partition"
    stages: int
    spec: Spec = "auto"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        spec = self.spec(gm) if callable(self.spec) else self.spec
        if isinstance(spec, Mapping):
            labels = _labels_of_mapping(gm.graph, spec, self.stages)
        elif isinstance(spec, str):
            if spec != "auto":
                raise PartitionError(
                    f'partition is {spec!r}: give "auto", a list of names that begin stages, '
                    "a dict from names to stages, or a function of the model graph"
                )
            labels = _balanced(gm.graph, self.stages)
        else:
            labels = _labels_of_starts(gm.graph, list(spec), self.stages)
        for node, stage in labels.items():
            node.meta[STAGE] = stage
        return gm


# ------------------------------------------------------------------------------------ automatically


def _balanced(graph: fx.Graph, stages: int) -> dict[fx.Node, int]:
    units = _units(graph)
    if len(units) < stages:
        work = sum(map(len, units))
        raise PartitionError(
            f"{stages} stages asked for, but the model can be cut into {len(units)}, no more: it "
            f"has {work} node{'s' * (work != 1)}, of which those that share written memory, or "
            f"are parts of one result, stay together; give as many devices, or fewer"
        )
    times = [sum(_time(node) for node in unit) for unit in units]
    ends = _cuts(times, _bytes_crossing(units), stages)
    return {
        node: stage
        for stage, (start, end) in enumerate(pairwise([0, *ends]))
        for unit in units[start:end]
        for node in unit
    }


def _time(node: fx.Node) -> float:
    cost: Cost = node.meta[COST]
    return cost.forward_s + cost.backward_s


def _units(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes in order, in runs between which a cut is allowed."""
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    last = list(range(len(work)))  # how far what begins here has to reach
    for group in _together(work):
        where = [position[node] for node in group]
        last[min(where)] = max(last[min(where)], *where)
    units, reach = [], -1
    for i, node in enumerate(work):
        if i > reach:
            units.append([node])
        else:
            units[-1].append(node)
        reach = max(reach, last[i])
    return units


def _together(work: list[fx.Node]) -> Iterable[list[fx.Node]]:
    """Groups of nodes that stay in one stage: alias sets; what takes a result apart, and its maker.

    Stages hand each other tensors: a tuple is taken apart where it is made.
    """
    aliases: dict[int, list[fx.Node]] = {}
    for node in work:
        if ALIAS in node.meta:
            aliases.setdefault(node.meta[ALIAS], []).append(node)
        if operator_name(node) == "getitem":
            maker = node.all_input_nodes[0]
            if is_work(maker) and not isinstance(maker.meta.get(VALUE), Tensor):
                yield [maker, node]
    yield from aliases.values()


def _bytes_crossing(units: list[list[fx.Node]]) -> list[int]:
    """For each place between units (after the i-th), what is made before it and used after it."""
    place = {node: i for i, unit in enumerate(units) for node in unit}
    change = [0] * (len(units) + 1)
    for node, made in place.items():
        used = max((place[user] for user in node.users if user in place), default=made)
        if used > made:
            size = tensor_bytes(node.meta.get(VALUE))
            change[made] += size
            change[used] -= size
    return list(accumulate(change))


def _cuts(times: list[float], crossing: list[int], stages: int) -> list[int]:
    """Where the stages end: the slowest is at most SLACK above the best, then bytes are least."""
    prefix = [0.0, *accumulate(times)]
    count = len(times)
    # best[i]: the slowest stage of the first i units in s stages. The minimum over the last cut is
    # where the growing (the slowest before it) meets the falling (the stage after it).
    best = prefix
    for done in range(1, stages):
        following = [float("inf")] * (count + 1)
        cut = done
        for end in range(done + 1, count + 1):
            while cut + 1 < end and max(best[cut + 1], prefix[end] - prefix[cut + 1]) <= max(
                best[cut], prefix[end] - prefix[cut]
            ):
                cut += 1
            following[end] = max(best[cut], prefix[end] - prefix[cut])
        best = following
    limit = best[count] * (1 + SLACK)

    sent = [0.0 if prefix[end] <= limit else float("inf") for end in range(count + 1)]
    sent[0] = float("inf")
    came_from: list[list[int]] = []
    for _ in range(1, stages):
        following, origin = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            start = end - 1
            while start > 0 and prefix[end] - prefix[start] <= limit:
                bytes_so_far = sent[start] + crossing[start - 1]
                if bytes_so_far < following[end]:
                    following[end], origin[end] = bytes_so_far, start
                start -= 1
        sent = following
        came_from.append(origin)
    ends = [count]
    for origin in reversed(came_from):
        ends.append(origin[ends[-1]])
    return ends[::-1]


# ------------------------------------------------------------------------------------------ by hand


def _labels_of_starts(graph: fx.Graph, starts: list[str], stages: int) -> dict[fx.Node, int]:
    """Each name begins a stage; the first stage begins at the beginning, named or not."""
    work = list(stage_nodes(graph))
    position = {node: i for i, node in enumerate(work)}
    first = {name: min(position[node] for node in _named(work, name)) for name in starts}
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
    _check(work, labels)
    return labels


def _labels_of_mapping(
    graph: fx.Graph, mapping: Mapping[str, int], stages: int
) -> dict[fx.Node, int]:
    """Named nodes go where they are told, the others to the latest stage that they need."""
    work = list(stage_nodes(graph))
    told: dict[fx.Node, tuple[int, str]] = {}
    # The longer path is the more particular one: {"encoder": 0, "encoder.head": 1}.
    for name, stage in sorted(mapping.items(), key=lambda item: len(item[0])):
        if not isinstance(stage, int) or not 0 <= stage < stages:
            raise PartitionError(
                f"partition puts {name!r} into stage {stage!r}: with {stages} devices there are "
                f"stages 0 to {stages - 1}"
            )
        told.update({node: (stage, name) for node in _named(work, name)})
    labels: dict[fx.Node, int] = {}
    for node in work:
        needed = max((labels[n] for n in node.all_input_nodes if n in labels), default=0)
        labels[node] = told[node][0] if node in told else needed
    _check(work, labels)
    missing = set(range(stages)) - set(labels.values())
    if missing:
        raise PartitionError(
            f"partition leaves stage {min(missing)} without a node; with {stages} devices, every "
            f"stage from 0 to {stages - 1} needs one"
        )
    return labels


def _named(work: list[fx.Node], name: str) -> list[fx.Node]:
    """The nodes of that name, or of the module of that path and all within it."""
    found = [node for node in work if node.name == name or _is_within(node, name)]
    if not found:
        known = {node.name for node in work} | {path for node in work for path in _paths(node)}
        close = difflib.get_close_matches(name, sorted(known), n=3)
        if close:
            hint = f"did you mean {' or '.join(map(repr, close))}?"
        else:
            hint = f"it has {', '.join(repr(node.name) for node in work[:3])}, for example"
        raise PartitionError(
            f"partition names {name!r}, but the model graph has no such module or node; {hint}"
        )
    return found


def _paths(node: fx.Node) -> set[str]:
    """The paths of the modules that a node belongs to."""
    paths = {path for path, _ in node.meta.get("nn_module_stack", {}).values() if path}
    if node.op == "call_module":
        paths.add(str(node.target))
    return paths


def _is_within(node: fx.Node, name: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for path in _paths(node))


def _check(work: list[fx.Node], labels: dict[fx.Node, int]) -> None:
    for node in work:
        for source in node.all_input_nodes:
            if source in labels and labels[source] > labels[node]:
                raise PartitionError(_describe_cycle(node, source, labels))
    for group in _together(work):
        stages = {labels[node] for node in group}
        if len(stages) > 1:
            one, other = group[0], next(n for n in group if labels[n] != labels[group[0]])
            raise PartitionError(
                f"{one.name!r} (stage {labels[one]}) and {other.name!r} (stage {labels[other]}) "
                "share memory that is written to (a buffer, say), or are parts of one result: "
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
