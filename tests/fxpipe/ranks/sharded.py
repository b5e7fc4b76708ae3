"""What ranks do in tests of replicas whose parameters are in shards (``fully_shard``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.fxpipe.ranks.checkpoints import FLAT
from tests.fxpipe.ranks.jobs import Call, Trained, made
from tests.fxpipe.ranks.replicated import compiled_of, mesh_of, stepped
from tests.zoo import mean_loss

WIDTH = 5  # which two replicas cannot share out evenly


class Block(nn.Module):
    """Parameters of called modules, one that the forward reads itself, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.gain + torch.tanh(self.linear(x)) * self.frozen


class Blocks(nn.Module):
    """Blocks between layers that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


CUT = {"partition": ["blocks.2.norm"]}


def sharded(make: Callable[[], nn.Module], mesh: Any, **how: Any) -> nn.Module:
    """The model, whose blocks are in shards."""
    model = made(make)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **how)
    return model


def train(
    group: dist.ProcessGroup,
    batches: Sequence[tuple[Call, Call]],
    how: dict[str, Any] | None,
    sharding: dict[str, Any] | None = None,
    written: str | None = None,
    is_accumulated: bool = False,
    **options: Any,
) -> tuple[int, Trained, list[str]]:
    """Make a step of each batch, and a call in eval mode for the last. Returns the replica, too,
    and the names of the parameters that are in shards.

    ``how``: arguments of the step beside the optimizer; without any there is no optimizer.
    ``sharding``: arguments of ``fully_shard``.
    ``written``: the folder for a checkpoint of the model and the optimizer.
    """
    mesh = mesh_of(("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    model = sharded(Blocks, mesh, **(sharding or {}))
    first = batches[0][replica]
    with compiled_of(model, mesh, mean_loss, first, **{**CUT, **options}) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        calls = [parts[replica] for parts in batches]
        trained = stepped(pipe, optimizer, calls, how, is_accumulated)
        pipe.eval()
        with torch.no_grad():
            trained.output = pipe(*calls[-1].args, broadcast=True)
        names = [n for n, p in pipe.named_parameters() if isinstance(p, DTensor)]
        if written is not None:
            state, moments = get_state_dict(pipe, optimizer, options=FLAT)
            dcp.save({"model": state, "optimizer": moments}, checkpoint_id=written)
    return replica, trained, names


class Sharing(Blocks):
    """A parameter of the first block is one of the last layer, too, which is in another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.blocks[0].linear.weight


def refusals(group: dist.ProcessGroup, call: Call) -> list[str]:
    """What a rank says to shards that a pipeline does not take."""
    mesh = mesh_of(("dp", "pp"))

    def on_the_whole_model() -> nn.Module:
        return fully_shard(made(Blocks), mesh=mesh["dp"])

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return sharded(Blocks, mesh)

    def with_a_shared_weight() -> nn.Module:
        model = made(Sharing)
        for modules in ([model.blocks[0].linear, model.last], model.first, *model.blocks, model):
            fully_shard(modules, mesh=mesh["dp"])
        return model

    said = []
    for make, where in (
        (lambda: sharded(Blocks, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16)), mesh),
        (lambda: sharded(Blocks, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)), mesh),
        (lambda: sharded(Blocks, {"dp": mesh["pp"]}), mesh),
        (lambda: sharded(Blocks, mesh), mesh["pp"]),
        (on_meta, mesh),
        (on_the_whole_model, mesh),
        (with_a_shared_weight, mesh),
        (lambda: sharded(Blocks, mesh), ["cpu", "cpu"]),
    ):
        try:
            compiled_of(make(), where, mean_loss, call, **CUT)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
