"""Which rank has which of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from fxpipe import ops
from fxpipe.ir._torch import sharded_modules
from fxpipe.ir.graph import STAGE, attribute, stages_of
from fxpipe.ir.tensors import is_in_parts
from fxpipe.loading.storage import tensors_of


def owners(
    model: nn.Module, stage_graph: fx.GraphModule, ranks: tuple[int, ...]
) -> dict[str, list[int]]:
    """The ranks that have each tensor of a model that a stage graph uses, by all its names.

    The first rank is the one that keeps the tensor up to date. A parameter has only this one, which
    is the one that sends its value to the others if several stages share it. Any other tensor is
    had by each rank that reads it, and the first of them is the first in the list: tensors that are
    written to are used in one stage only (pass "alias").
    """
    homes: dict[int, list[int]] = {}
    stages = stages_of(stage_graph)
    for rank, stage in zip(ranks, stages, strict=True):
        for share in stage.graph.find_nodes(op="call_function", target=ops.share):
            if share.args[0].op == "get_attr":
                homes.setdefault(id(attribute(stage, str(share.args[0].target))), [rank])

    def used(tensor: Any, rank: int) -> None:
        known = homes.setdefault(id(tensor), [rank])
        if rank not in known and not isinstance(tensor, nn.Parameter):
            known.append(rank)

    for rank, stage in zip(ranks, stages, strict=True):
        for _, tensor in tensors_of_module(stage):
            used(tensor, rank)
    for node in stage_graph.graph.find_nodes(op="get_attr"):
        for user in node.users:
            if STAGE in user.meta:
                used(attribute(stage_graph, str(node.target)), ranks[user.meta[STAGE]])
    return {
        name: homes[id(tensor)] for name, tensor in tensors_of_module(model) if id(tensor) in homes
    }


def tensors_of_module(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, buffers, and tensors that are plain attributes, of a module and the modules
    in it, under all their names."""
    for path, each in module.named_modules(remove_duplicate=False):
        for name, tensor in tensors_of(each):
            yield f"{path}.{name}".removeprefix("."), tensor


def parameters_in_parts(model: nn.Module) -> dict[str, Any]:
    """The parameters of which each of several ranks has a part, as ``parallelize_module`` leaves
    them: ``DTensor``s that the forward itself computes with. What ``fully_shard`` has cut is whole
    while the forward runs, and is not among them."""
    sharded = {id(p) for module in sharded_modules(model) for p in module.parameters()}
    named = model.named_parameters()
    return {name: p for name, p in named if is_in_parts(p) and id(p) not in sharded}
