"""Copies: values that a stage receives are copied to its device, all values from one stage by one
node.

::

    before     cell (i, 0) ──┬── b ──┬── cell (i, 1)
                             └── c ──┘
    after      cell (i, 0) ──┬── b ──┬── copy ──┬── cell (i, 1)
                             └── c ──┘          └──

An input of the model is copied straight from the caller to the first stage that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from fxpipe.runtime.streams import CALLER, COPY, stream_name
from passes.to_pipeline.cells import Cell, Writer, cell_of, cells, sweep


@dataclass(frozen=True)
class Copies:
    """Pipeline graph with portals → the same with copies. ``devices``: one for each stage."""

    name: ClassVar[str] = "copies"
    devices: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        found = cells(gm.graph)
        # Cells in the order of stages: a value that is copied to one stage may be copied on from
        # there to the next.
        for cell in sorted(found, key=lambda cell: (cell[1], cell[0])):
            arriving = _arriving(found[cell], cell)
            for source in sorted({s for s in arriving.values() if s is not None}):
                values = [value for value, s in arriving.items() if s == source]
                self._copy(cell, found[cell][0], source, values)
            values = [value for value, source in arriving.items() if source is None]
            if values:
                self._copy(cell, found[cell][0], None, values)
        return sweep(gm)

    def _copy(self, cell: Cell, first: fx.Node, source: int | None, values: list[fx.Node]) -> None:
        start = CALLER if source is None else stream_name(self.devices[source], COPY)
        writer = Writer(cell, after=first.prev)
        writer.gate(
            ops.copy,
            values,
            start,
            stream_name(self.devices[cell[1]], COPY),
            uses=lambda user: user.meta.get(STAGE, -1) >= cell[1],
        )


def _arriving(nodes: list[fx.Node], cell: Cell) -> dict[fx.Node, int | None]:
    """The values that a cell uses and has not made, each with the stage that it comes from.

    The stage is None for the caller. Values of portals are left out: pass "portals" moves them.
    """
    return {
        value: value.meta.get(STAGE)
        for node in nodes
        if node.target is not ops.portal_copy
        for value in node.all_input_nodes
        if cell_of(value) != cell and MICROBATCH in value.meta
    }
