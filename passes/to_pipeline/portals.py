"""Portals: a skip is sent straight from the stage that makes it to the one that uses it, past the
stages between.

::

    before     cell (i, 0) ── a ──────────────────────────────────────────── cell (i, 3)

    after      cell (i, 0) ── a ── portal_blue ── portal_copy ── portal_orange ── cell (i, 3)

Each hop that passes over stages gets three such nodes for each micro-batch. Hops to the next stage,
and inputs of the model, are left to pass "copies". The route of a value with several users is in
:mod:`passes.common.skips`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, ORIGIN, STAGE, VALUE
from fxpipe.runtime.streams import COPY, stream_name
from passes.common.skips import routes
from passes.to_pipeline.cells import Cell, Writer, cells


@dataclass(frozen=True)
class Portals:
    """Pipeline graph → the same, with skips through portals. ``devices``: one for each stage."""

    name: ClassVar[str] = "portals"
    devices: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = cells(gm.graph)
        first = {cell: nodes[0] for cell, nodes in found.items()}
        left = {cell: nodes[-1] for cell, nodes in found.items()}  # the last portal_blue
        arrived: dict[Cell, fx.Node] = {}  # the last portal_copy
        for value, stages in list(routes(gm.graph)):
            for source, target in pairwise(stages):
                assert target is not None
                if source is None or target == source + 1:
                    continue  # pass "copies" brings it
                microbatch = value.meta[MICROBATCH]
                here, there = (microbatch, source), (microbatch, target)
                streams = (stream_name(self.devices[s], COPY) for s in (source, target))
                blue = Writer(here, after=left[here]).call(ops.portal_blue, (value,), "portal_blue")
                left[here] = blue
                # All portals of a cell arrive before the first is opened: they wait together.
                writer = Writer(there, after=arrived.get(there, first[there].prev))
                moved = writer.call(ops.portal_copy, (blue, *streams), "portal_copy")
                arrived[there] = moved
                writer = Writer(there, after=first[there].prev)
                orange = writer.call(ops.portal_orange, (moved,), "portal_orange")
                for node in (blue, moved, orange):
                    node.meta |= {k: value.meta[k] for k in (ORIGIN, VALUE) if k in value.meta}
                _take_from(target, value, orange)
                value = orange  # the next hop begins here
        gm.recompile()
        return gm


def _take_from(stage: int, value: fx.Node, orange: fx.Node) -> None:
    """Let users in this stage and later ones take the value from the portal's ``orange`` node."""
    for user in list(value.users):
        if user is not orange and user.meta.get(STAGE, -1) >= stage:
            user.replace_input_with(value, orange)
