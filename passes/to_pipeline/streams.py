"""Streams: the pass says on which stream each node runs, and makes streams wait for each other
where values go from one to another.

::

    before     stage 0 ──┬── b ──────┬──────────── copy ──┬────────────── stage 1
                         └── portal ─┘             portal copy

    after      stage 0 ──┬── b ──────┬── wait ──── copy ──┬──── wait ──── stage 1
                         └── portal ─┘             portal copy
               compute ──────────────────│  copy streams       │───────── compute

All values that leave a cell pass one wait, which records an event on the compute stream: the copies
of the values wait for it, on the streams of the links (:mod:`fxpipe.runtime.streams`). All values
that arrive in a cell pass another wait, in which the compute stream waits for their copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import DEVICE, STAGE, STREAM
from fxpipe.runtime.streams import COMPUTE, COPY, stream_name
from passes.to_pipeline.cells import CARRIERS, Cell, Writer, cell_of, cells, items, outgoing, sweep


@dataclass(frozen=True)
class Streams:
    """Pipeline graph with copies → the same with waits, ``meta["device"]`` and ``meta["stream"]``.

    ``devices``: one for each stage.
    """

    name: ClassVar[str] = "streams"
    devices: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for cell, nodes in cells(gm.graph).items():
            self._leave(cell, self._enter(cell, nodes) + nodes)
        for node in gm.graph.nodes:
            if STAGE in node.meta:
                device = self.devices[node.meta[STAGE]]
                role = COPY if node.target in CARRIERS else COMPUTE
                node.meta[DEVICE] = torch.device(device)
                node.meta[STREAM] = stream_name(device, role)
        return sweep(gm)

    def _streams(self, cell: Cell) -> tuple[str, str]:
        device = self.devices[cell[1]]
        return stream_name(device, COMPUTE), stream_name(device, COPY)

    def _enter(self, cell: Cell, nodes: list[fx.Node]) -> list[fx.Node]:
        """Let the compute stream wait for the values that arrive. Returns the nodes added."""
        compute, copy = self._streams(cell)
        copied = [item for node in nodes if node.target is ops.copy for item in items(node)]
        arriving = copied + [node for node in nodes if node.target is ops.portal_copy]
        if not arriving:
            return []
        writer = Writer(cell, after=max(arriving))
        writer.gate(ops.wait, arriving, copy, compute, uses=lambda user: True)
        return writer.added

    def _leave(self, cell: Cell, nodes: list[fx.Node]) -> None:
        """Let the copy stream wait for the values that leave, if any is copied."""
        compute, copy = self._streams(cell)
        leaving = outgoing(nodes)
        if any(user.target in CARRIERS for node in leaving for user in node.users):
            writer = Writer(cell, after=nodes[-1])
            writer.gate(ops.wait, leaving, compute, copy, uses=lambda user: cell_of(user) != cell)
