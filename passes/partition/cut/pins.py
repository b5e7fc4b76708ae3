"""Pins: a cut in which some nodes have given stages, found without a search.

::

    pins       a0 ── a ── a ── a2          earliest   0  0  0  2     a stage comes after those of
               b ─── b1 ─ b ── b           latest     0  2  2  2     all nodes ahead, and before
                                                                     those of all nodes behind

    earliest   b:   0  1  1  1             latest     b:  1  1  2  2

Every node may go to any stage from its earliest to its latest one; where that is none, no cut keeps
the pins. The search for a cut looks at beginnings of a few orders of all nodes, of which none may
keep many pins: then it begins at the cut that is found here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from passes.partition.cut.dag import Dag


def stages_allowed(
    dag: Dag, pins: Mapping[int, int], stages: int
) -> tuple[list[int], list[int]] | None:
    """The earliest and the latest stage of each node, with these pins; None if no cut keeps
    them."""
    earliest, latest = [0] * dag.size, [stages - 1] * dag.size
    for node in range(dag.size):
        before = (earliest[u] for u in dag.before[node])
        earliest[node] = max(pins.get(node, 0), *before, 0)
    for node in reversed(range(dag.size)):
        after = (latest[v] for v in dag.after[node])
        latest[node] = min(pins.get(node, stages - 1), *after, stages - 1)
    if any(first > last for first, last in zip(earliest, latest, strict=True)):
        return None
    return earliest, latest


def cut_by_pins(dag: Dag, pins: Mapping[int, int], stages: int) -> tuple[int, ...] | None:
    """A cut that keeps the pins, and is about even where they leave a choice. None if there is
    none, or if a stage would be empty."""
    allowed = stages_allowed(dag, pins, stages)
    if allowed is None:
        return None
    earliest, latest = allowed
    ahead = np.cumsum(dag.weight) - dag.weight
    share = max(float(dag.weight.sum()) / stages, np.finfo(float).tiny)
    even = list[int]()
    for node in range(dag.size):
        least = max((even[u] for u in dag.before[node]), default=0)
        wanted = max(earliest[node], least, int(ahead[node] / share))
        even.append(min(latest[node], wanted))
    cuts = (tuple(each) for each in (even, earliest, latest))
    return next((cut for cut in cuts if len(set(cut)) == stages), None)
