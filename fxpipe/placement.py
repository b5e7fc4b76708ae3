"""Where the parameters and buffers of a model live: each on the device of its stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from fxpipe import ops
from fxpipe.graph import FIRST, STAGE, attribute
from fxpipe.mode import bindings, stages_of
from passes.partition import PartitionError


def place(model: nn.Module, stage_graph: fx.GraphModule, devices: Sequence[torch.device]) -> None:
    """Move every stage's parameters and buffers to its device, in place."""
    stages = stages_of(stage_graph)
    homes = homes_of(stages, devices)
    for source in stage_graph.graph.find_nodes(op="get_attr"):
        tensor = attribute(stage_graph, str(source.target))
        for user in source.users:  # what is done once, beside a stage
            if STAGE in user.meta and FIRST not in user.meta:
                homes[id(tensor)] = devices[user.meta[STAGE]]
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in homes:
                device = homes[id(parameter)]
                parameter.data = parameter.data.to(device)
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in homes:
                module._buffers[name] = buffer.to(homes[id(buffer)])
    for stage, device in zip(stages, devices, strict=True):
        for binding in bindings(stage, model):
            binding.refresh()
        for module in stage.modules():  # constants of the trace, which the model has not
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)


def homes_of(
    stages: Sequence[fx.GraphModule], devices: Sequence[torch.device]
) -> dict[int, torch.device]:
    """The device of each parameter and buffer, by its id.

    Raises PartitionError for a buffer that would be on two.
    """
    homes: dict[int, torch.device] = {}
    where: dict[int, int] = {}
    for i, stage in enumerate(stages):  # a shared parameter lives where its value comes from
        for share in stage.graph.find_nodes(op="call_function", target=ops.share):
            if share.args[0].op == "get_attr":
                parameter = attribute(stage, share.args[0].target)
                homes[id(parameter)] = devices[i]
    shared = set(homes)
    for i, stage in enumerate(stages):
        for path, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            home = homes.setdefault(id(tensor), devices[i])
            other = where.setdefault(id(tensor), i)
            if home != devices[i] and id(tensor) not in shared:
                raise PartitionError(
                    f"the buffer {path} is used by stage {other} on {home} and by stage {i} on "
                    f"{devices[i]}: put all its users into one stage, with partition="
                )
    return homes
