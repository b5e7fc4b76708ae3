"""A stage, as it is shown to people."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.inspect.draw import NoLayout, draw_model, render_svg
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import CONTAINS
from fxpipe.ir.text import human_bytes, human_time


@dataclass(frozen=True, repr=False)
class Stage:
    """A stage: a part of the model, as a graph module, and the lane and device on which it runs.
    ``contains`` says what is in it, such as "layers.0 to 7"; ``cost`` is an estimate for one
    mini-batch: times in seconds, sizes in bytes."""

    index: int
    module: fx.GraphModule
    device: torch.device
    cost: Cost
    lane: int = 0

    @property
    def contains(self) -> str:
        """What is in the stage, in words: the modules, such as "layers.0 to 7"."""
        return str(self.module.meta.get(CONTAINS, ""))

    def __repr__(self) -> str:
        cost = self.cost
        return (
            f"Stage({self.index} on {self.device}: {len(self.module.graph.nodes)} nodes, "
            f"parameters {human_bytes(cost.param_bytes)}, forward {human_time(cost.forward_s)}, "
            f"backward {human_time(cost.backward_s)}, contains {self.contains})"
        )

    def _repr_svg_(self) -> str | None:
        """A drawing of the nodes of the stage, which notebooks show."""
        try:
            return render_svg(draw_model(self.module))
        except NoLayout:  # no program that lays out drawings is installed
            return None
