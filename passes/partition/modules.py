"""The modules of a model graph as parts of the problem of cutting it: cuts between modules are
easier to read than cuts through them, and most of them send less.

::

    depth 1   embed │ layers.0 │ layers.1 │ head       a cut at a depth is at one of these bars:
    depth 2   embed │ norm │ attn │ + │ mlp │ + │ ...  it divides nothing at this depth

Each call of a module is a module of its own here, if a model calls one several times.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from passes.common.names import calls_of
from passes.partition.cut.contract import contracted, grouped
from passes.partition.cut.dag import Dag, Unit, Value
from passes.partition.problem import CutProblem, PartitionError


def between_modules(problem: CutProblem) -> Iterator[tuple[Dag, list[int]]]:
    """The DAG of a problem for cuts between modules of a depth, from the outermost modules to the
    innermost: each with the node of that DAG for every node of ``problem.dag``.

    In each of these DAGs the modules of that depth are single nodes, and those further out are
    units, each of which outweighs all bytes that can be sent.
    """
    stacks = [tuple(key for key, _ in calls_of(node)) for node in problem.work]
    most = outweighing(problem.dag.values)
    last = 0
    for depth in range(1, 1 + max(map(len, stacks), default=0)):
        small, home = contracted(
            problem.dag, grouped(problem.dag.size, _members(problem, stacks, depth).values())
        )
        if last < small.size < problem.dag.size:
            yield _with_units(small, problem, stacks, depth, home, most), home
        last = small.size


def outweighing(values: Iterable[Value]) -> float:
    """A number of bytes that is more than all that any cut sends of these values."""
    return 1.0 + 2 * sum(value.size * len(value.users) for value in values)


def _members(
    problem: CutProblem, stacks: Sequence[tuple[str, ...]], depth: int
) -> dict[tuple[str, ...], list[int]]:
    """The nodes of the problem's DAG that are in each module of a depth."""
    found: dict[tuple[str, ...], list[int]] = {}
    for stack, node in zip(stacks, problem.home, strict=True):
        if len(stack) >= depth:
            found.setdefault(stack[:depth], []).append(node)
    return found


def _with_units(
    small: Dag,
    problem: CutProblem,
    stacks: Sequence[tuple[str, ...]],
    depth: int,
    home: Sequence[int],
    penalty: float,
) -> Dag:
    units = []
    for outer in range(1, depth):
        for nodes in _members(problem, stacks, outer).values():
            inside = tuple(sorted({home[node] for node in nodes}))
            if len(inside) > 1:
                units.append(Unit(inside, penalty))
    return replace(small, units=tuple(units))


def at_boundaries(work: Sequence[fx.Node], patterns: Sequence[str]) -> list[list[fx.Node]]:
    """Groups of nodes that no cut may divide, where stages may begin and end only where modules do
    that a pattern matches.

    ``patterns``: paths of modules, or their ends, in which each ``*`` stands for one name.

    Raises PartitionError for a pattern that no module matches.
    """
    inside: dict[str, list[int]] = {}
    unused = dict.fromkeys(patterns)
    for i, node in enumerate(work):
        for key, path in calls_of(node):
            for pattern in patterns:
                if _matches(path, pattern):
                    inside.setdefault(key, []).append(i)
                    unused.pop(pattern, None)
    if unused:
        pattern = next(iter(unused))
        paths = sorted({path for node in work for _, path in calls_of(node)})
        raise PartitionError(
            f"boundaries has {pattern!r}, which is the path of no module of the graph: give paths "
            f"in which each * stands for one name, such as {paths[len(paths) // 2]!r}"
            if paths
            else f"boundaries has {pattern!r}, but the graph has no modules"
        )
    cuts = {
        0,
        len(work),
        *(min(p) for p in inside.values()),
        *(max(p) + 1 for p in inside.values()),
    }
    return [list(work[a:b]) for a, b in pairwise(sorted(cuts))]


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return len(names) >= len(wanted) and all(
        fnmatch.fnmatchcase(*pair) for pair in zip(names[-len(wanted) :], wanted, strict=True)
    )
