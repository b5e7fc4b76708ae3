"""Placement: each parameter and buffer of a model is moved to the device of the stage that uses
it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx, nn

from fxpipe import ops
from fxpipe.compiler.bindings import bindings
from fxpipe.ir.graph import FIRST, STAGE, attribute, stages_of
from fxpipe.ir.tensors import overlapping
from fxpipe.loading.storage import without_values
from passes.partition.partition import PartitionError


def place(
    model: nn.Module, stage_graph: fx.GraphModule, devices: Sequence[torch.device]
) -> dict[str, torch.device | None]:
    """Move the parameters and buffers of every stage to its device, in place.

    Tensors on "meta", which have no values, stay there. Returns the devices that they belong
    to, by their names, with None for what no stage uses.

    Args:
        stage_graph: the model cut into stages, a ``call_module`` for each.
        devices: the device of each stage.

    Raises:
        PartitionError: if a buffer of a module would have to be on two devices.
    """
    stages = stages_of(stage_graph)
    homes = homes_of(stages, devices)
    for source in stage_graph.graph.find_nodes(op="get_attr"):
        tensor = attribute(stage_graph, str(source.target))
        for user in source.users:  # nodes that run once for a mini-batch, outside of the stages
            if STAGE in user.meta and FIRST not in user.meta:
                homes[id(tensor)] = devices[user.meta[STAGE]]
    # A stage may have parameters that are none of the model's own: of a module in a list, say.
    in_stages = (parameter for stage in stages for parameter in stage.parameters())
    for parameter in dict.fromkeys((*model.parameters(), *in_stages)):
        if id(parameter) in homes and not parameter.is_meta:
            device = homes[id(parameter)]
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in homes and not buffer.is_meta:
                module._buffers[name] = buffer.to(homes[id(buffer)])
    for stage, device in zip(stages, devices, strict=True):
        for binding in bindings(stage, model, device):
            binding.refresh()
        for module in stage.modules():  # constants that the trace has made are in the stage only
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
    return {name: homes.get(id(tensor)) for name, tensor in without_values(model).items()}


def refuse_separated(stage_graph: fx.GraphModule, places: Sequence[torch.device | int]) -> None:
    """Raise PartitionError if tensors that share memory, such as two weights that have been tied by
    their data, would be copied to memories of their own: what is trained of one of them would not
    change the other any more, as it does in the model. (Masks that are views of one tensor may be
    copied: nobody writes to them.)

    ``places``: for each stage its device or, where ranks run the stages, its rank.
    """
    met: dict[int, tuple[Tensor, str, list[torch.device | int]]] = {}
    for stage, place in zip(stages_of(stage_graph), places, strict=True):
        for path, tensor in (*stage.named_parameters(), *_buffers(stage)):
            met.setdefault(id(tensor), (tensor, path, []))[2].append(place)
    for pair in overlapping(tensor for tensor, _, _ in met.values()):
        if not any(tensor.requires_grad for tensor in pair):
            continue
        (tensor, path, wanted), (_, other, also) = (met[id(each)] for each in pair)
        found = list(dict.fromkeys([*wanted, *also]))
        here = found[0] if isinstance(found[0], int) or tensor.is_meta else tensor.device
        if found != [here]:
            to = " and ".join(f"rank {p}" if isinstance(p, int) else str(p) for p in found)
            raise PartitionError(
                f"{path} and {other} share one memory, and get memories of their own where they "
                f"are moved to {to}, so that a change of one would not reach the other any more: "
                "let them be one parameter (layer.weight = other.weight), which several stages "
                "may use; or let their stages have the device that they are on, with partition="
            )


def homes_of(
    stages: Sequence[fx.GraphModule], devices: Sequence[torch.device]
) -> dict[int, torch.device]:
    """The device of each parameter and buffer, by the ``id`` of the tensor.

    A buffer that stages on several devices read lives on the device of the first of them, and the
    other stages read replicas. (A buffer that is written to is used in one stage only, see the pass
    "alias".)

    Raises:
        PartitionError: for a buffer that belongs to a module which stages on two devices call: a
            module that is called as a whole cannot be given a replica.
    """
    homes: dict[int, torch.device] = {}
    where: dict[int, int] = {}
    for i, stage in enumerate(stages):  # a shared parameter lives where its value comes from
        for share in stage.graph.find_nodes(op="call_function", target=ops.share):
            if share.args[0].op == "get_attr":
                parameter = attribute(stage, share.args[0].target)
                homes[id(parameter)] = devices[i]
    shared = set(homes)
    read = [_read_by(stage) for stage in stages]
    for i, stage in enumerate(stages):
        for path, tensor in (*stage.named_parameters(), *_buffers(stage)):
            if path in read[i] and id(tensor) not in shared:
                continue
            home = homes.setdefault(id(tensor), devices[i])
            other = where.setdefault(id(tensor), i)
            if home != devices[i] and id(tensor) not in shared:
                raise PartitionError(
                    f"the buffer {path} is of a module that is called by stage {other} on {home} "
                    f"and by stage {i} on {devices[i]}: put the calls into one stage, with "
                    "partition="
                )
    # Tensors that stages read directly, and not by calling a module: stages on other devices read
    # replicas of these.
    for i, stage in enumerate(stages):
        for path in read[i]:
            homes.setdefault(id(attribute(stage, path)), devices[i])
    return homes


def _read_by(stage: fx.GraphModule) -> list[str]:
    """The paths of the tensors that the nodes of a stage read directly, and not by calling the
    module that has them."""
    called = [str(node.target) for node in stage.graph.find_nodes(op="call_module")]
    tensors: list[str] = []
    for node in stage.graph.find_nodes(op="get_attr"):
        is_tensor = isinstance(attribute(stage, str(node.target)), Tensor)
        (tensors if is_tensor else called).append(str(node.target))
    within = tuple(f"{module}." for module in called)
    return [path for path in dict.fromkeys(tensors) if not path.startswith(within)]


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)
