"""Devices: a tensor that a stage makes is made on the stage's device.

::

    traced on the CPU                       stage 1, on "cuda:1"
    arange(8, device=cpu)                   arange(8, device=cuda:1)

A trace fixes the device of what the model makes itself (positions, masks) to that of the example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.graph import VALUE, attribute


@dataclass(frozen=True)
class Devices:
    """Stage graph → the same, with the stages' devices in place of the one it was traced on."""

    name: ClassVar[str] = "devices"
    traced: torch.device
    devices: tuple[torch.device, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        calls = gm.graph.find_nodes(op="call_module")
        for call, device in zip(calls, self.devices, strict=True):
            self._move(attribute(gm, str(call.target)), device)
        return gm

    def _move(self, stage: fx.GraphModule, device: torch.device) -> None:
        moved: list[torch.device] = []

        def own(value: Any) -> Any:
            is_device = isinstance(value, torch.device) and value == self.traced
            if isinstance(value, fx.Node):  # another stage's
                is_device = value.op == "placeholder" and isinstance(
                    value.meta.get(VALUE), torch.device
                )
            if is_device:
                moved.append(device)
            return device if is_device else value

        for node in stage.graph.nodes:
            if node.op not in ("placeholder", "output"):
                args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), own)
                if moved:
                    node.args, node.kwargs = args, kwargs
        if moved:
            stage.recompile()
