"""Shift: nodes leave a stage for another one, along all stages between them.

::

    stages   0  0  0  0 │ 1  1 │ 2  2  2        from stage 0 to stage 2 go two bytes,
             0  0 │ 1  1 │ 2  2  2  2  2        if each node takes one

The search for a cut looks at all cuts, but knows only in part what their stages need. Where a cut
is known to be short of a few bytes on one device, a shift takes as many from there to where there
is room, and leaves the rest of the cut as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.partition.cut.dag import Machine
from passes.partition.cut.solve import needed_at_least
from passes.partition.problem import CutProblem


@dataclass(frozen=True)
class Shift:
    """A cut, and what is to leave one of its stages.

    Attributes:
        before: the stage of each node of the graph, by its name.
        source, target: the stage that nodes leave, and the one that gets as many.
        size: the bytes that these nodes take at least.
    """

    before: Mapping[str, int]
    source: int
    target: int
    size: float

    def apply(
        self, found: CutProblem, machine: Machine, pins: Mapping[int, int]
    ) -> tuple[int, ...]:
        """The stage of each node of the DAG after the shift. From each stage on the way those nodes
        go that are nearest to the next one, but for pinned nodes and what lies behind them, and
        for the last node of a stage."""
        stage = [0] * found.dag.size
        for each, home in zip(found.work, found.home, strict=True):
            stage[home] = self.before[each.name]
        step = 1 if self.source < self.target else -1
        for here in range(self.source, self.target, step):
            own = [node for node, at in enumerate(stage) if at == here][::-step]
            sizes, left = needed_at_least(found.dag, machine)[here], self.size
            for node in own[:-1]:
                if left <= 0 or node in pins:
                    break
                stage[node] = here + step
                left -= float(sizes[node])
        return tuple(stage)
