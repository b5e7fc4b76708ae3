"""Portals: skips leave the autograd lane where they are made, and come back where they are used.

::

    before     cell (i, 0) ── a ──────────────────────────────────────────── cell (i, 3)

    after      cell (i, 0) ── a ── portal_blue ── portal_copy ── portal_orange ── cell (i, 3)

One triple for each hop that passes over stages, and micro-batch; nothing in the stages between. A
hop to the next stage, and an input of the model, is left to pass "copies". See :mod:`passes.skips`
for the way that a value with several users takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.graph import MICROBATCH, ORIGIN, STAGE, VALUE
from fxpipe.runtime.streams import COPY, stream_name
from passes.cells import Cell, Writer, cells
from passes.skips import routes


@dataclass(frozen=True)
class Portals:
    """Pipeline graph → the same, long skips through portals. ``devices``: one for each stage."""

    name: ClassVar[str] = "portals"
    devices: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        first = {cell: nodes[0] for cell, nodes in cells(gm.graph).items()}
        last = {cell: nodes[-1] for cell, nodes in cells(gm.graph).items()}
        arrived: dict[Cell, fx.Node] = {}
        for value, stages in list(routes(gm.graph)):
            microbatch = value.meta[MICROBATCH]
            for source, target in pairwise(stages):
                assert target is not None
                if source is None or target == source + 1:
                    continue  # ``value`` itself is what the target has: pass "copies" brings it
                exit_, entry = (microbatch, source), (microbatch, target)
                writer = Writer(exit_, after=last[exit_])
                blue = writer.call(ops.portal_blue, (value,), "portal_blue")
                last[exit_] = blue
                streams = (stream_name(self.devices[s], COPY) for s in (source, target))
                # All portals of a cell arrive before the first is opened: they wait together.
                writer = Writer(entry, after=arrived.get(entry, first[entry].prev))
                moved = writer.call(ops.portal_copy, (blue, *streams), "portal_copy")
                arrived[entry] = moved
                writer = Writer(entry, after=first[entry].prev)
                orange = writer.call(ops.portal_orange, (moved,), "portal_orange")
                for node in (blue, moved, orange):
                    node.meta |= {k: value.meta[k] for k in (ORIGIN, VALUE) if k in value.meta}
                self._replace(value, orange, target)
                value = orange
        gm.recompile()
        return gm

    @staticmethod
    def _replace(value: fx.Node, orange: fx.Node, stage: int) -> None:
        """From this stage on, the value is what came out of the portal."""
        for user in list(value.users):
            if user is not orange and user.meta.get(STAGE, -1) >= stage:
                user.replace_input_with(value, orange)
