"""Devices: tensors that a stage makes itself, such as positions and masks, are made on the stage's
device, and not on the device that the model was traced on.

::

    traced on the CPU                       stage 1, on "cuda:1"
    arange(8, device=cpu)                   arange(8, device=cuda:1)

Tracing writes the example's device into the calls that make such tensors. If that is "meta", where
a model is traced as if it were on the CPU, it may write either of the two: the model may have kept
the device of its parameters.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpipe.ir._torch import wrap_with_autocast
from fxpipe.ir.graph import VALUE, attribute
from fxpipe.ir.somewhere import seen_on
from fxpipe.runtime.checkpointing.regions import regions_in, with_body


@dataclass(frozen=True)
class Devices:
    """Stage graph → the same, with each stage's device in place of the one it was traced on."""

    name: ClassVar[str] = "devices"
    traced: torch.device
    devices: tuple[torch.device, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        calls = gm.graph.find_nodes(op="call_module")
        for call, device in zip(calls, self.devices, strict=True):
            self._move(attribute(gm, str(call.target)), device)
        return gm

    @property
    def _written(self) -> set[torch.device]:
        """The devices that tracing writes into calls."""
        return {self.traced, seen_on(self.traced)}

    @property
    def _kinds(self) -> set[str]:
        """The kinds of the devices that tracing writes into calls, by which autocast names them."""
        return {device.type for device in self._written}

    def _move(self, stage: fx.GraphModule, device: torch.device) -> bool:
        """Replace the device in the arguments of a graph's nodes; return whether any named it."""
        moved: list[torch.device] = []

        def own(value: Any) -> Any:
            is_device = isinstance(value, torch.device) and value in self._written
            if isinstance(value, fx.Node):  # a device may also be a value from another stage
                is_device = value.op == "placeholder" and isinstance(
                    value.meta.get(VALUE), torch.device
                )
            if is_device:
                moved.append(device)
            return device if is_device else value

        for node in stage.graph.nodes:
            if node.op not in ("placeholder", "output"):
                args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), own)
                if node.target is wrap_with_autocast and args[0] in self._kinds:
                    moved.append(device)
                    args = (device.type, *args[1:])
                if moved:
                    node.args, node.kwargs = args, kwargs
            if node.op == "get_attr" and self._move_inner(stage, str(node.target), device):
                moved.append(device)
        for path, module, region in list(regions_in(stage)):
            body = fx.GraphModule(region.body, copy.deepcopy(region.body.graph))
            if self._move(body, device):
                moved.append(device)
                stage.add_submodule(path, with_body(module, body))
        if moved:
            stage.recompile()
        return bool(moved)

    def _move_inner(self, stage: fx.GraphModule, path: str, device: torch.device) -> bool:
        """Replace the device in the body of a higher-order operator, such as autocast.

        The body is copied first, since the model graph has the same one and stays as it is. Returns
        whether the body named the device.
        """
        body = attribute(stage, path)
        if not isinstance(body, fx.GraphModule):
            return False
        copied = fx.GraphModule(body, copy.deepcopy(body.graph))
        if not self._move(copied, device):
            return False
        parent, _, name = path.rpartition(".")
        setattr(stage.get_submodule(parent), name, copied)
        return True
