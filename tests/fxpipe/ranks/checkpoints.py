"""What ranks do in tests of models on "meta" and of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import fxpipe
from tests.fxpipe.ranks.jobs import Call, Where, compiled
from tests.zoo import mean_loss

WIDTH = 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""The optimizer's state by the names of parameters, which no two ranks share."""


class Scales(nn.Module):
    """A buffer that is saved and one that is not, which stages of several ranks read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("saved", torch.ones(WIDTH))
        self.register_buffer("made", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.made.copy_(torch.arange(WIDTH))
        self.saved.fill_(0.5)


class Net(nn.Module):
    """A tied weight, running statistics, shared buffers, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = Scales()
        self.embed = nn.Embedding(9, WIDTH)
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4), nn.Linear(5, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.a(self.embed(tokens))) * self.scales.made
        x = torch.tanh(self.b(x)) + self.scales.saved
        x = torch.tanh(self.c(x)) * self.scales.made
        return self.head(torch.tanh(self.d(x)) * self.scales.saved)


def on_meta() -> Net:
    """The model without values."""
    with torch.device("meta"):
        return Net()


CUTS = {4: ["b", "c", "d"], 2: ["c"]}
COMMON = {"chunks": 4, "loss_weight": "rows", "check": False}


def pipeline(where: Where, make: Callable[[], nn.Module], call: Call, schedule: str) -> Any:
    """The model on four or two ranks, or lanes."""
    size = where if isinstance(where, int) else dist.get_world_size(where)
    cut = {"partition": CUTS[size], "schedule": schedule, "example_inputs": call.args}
    return compiled(where, make, mean_loss, **cut, **COMMON)


@dataclass
class Part:
    """What a rank, or a process with lanes, has after training."""

    losses: list[Tensor]
    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    optimizer: dict[str, Any]
    left: list[str]
    """The names of tensors that have no values."""


def trained(
    where: Where,
    make: Callable[[], nn.Module],
    calls: list[Call],
    schedule: str,
    weights: str | None = None,
    read: str | None = None,
    written: str | None = None,
) -> Part:
    """Load weights from a file, or all from a distributed checkpoint; train; save all to such a
    checkpoint."""
    with pipeline(where, make, calls[0], schedule) as pipe:
        if weights is not None:
            pipe.load(weights)
        elif not isinstance(where, int):
            pipe.materialize()
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        group = {"no_dist": True} if isinstance(where, int) else {"process_group": where}
        if read is not None:
            resume(pipe, optimizer, read, **group)
        losses = []
        for call in calls:
            optimizer.zero_grad()
            losses.append(pipe.step(*call.args, target=call.target))
            optimizer.step()
        model, flat = get_state_dict(pipe, optimizer, options=FLAT)
        if written is not None:
            dcp.save({"model": model, "optimizer": flat}, checkpoint_id=written, **group)
        grads = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        tensors = (*pipe.module.named_parameters(), *pipe.module.named_buffers())
        left = [name for name, tensor in tensors if tensor.is_meta]
    return Part(losses, grads, dict(model), dict(flat), left)


def resume(model: nn.Module, optimizer: Any, checkpoint: str, **group: Any) -> None:
    """Load a distributed checkpoint into a pipeline or a plain model, and into its optimizer."""
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights}, checkpoint_id=checkpoint, **group)
    # AdamW has no state for a parameter that has never got a gradient.
    partly = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optimizer": state}, checkpoint_id=checkpoint, planner=partly, **group)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=state,
        options=FLAT,
    )


def initialised(where: Where, call: Call) -> dict[str, Tensor]:
    """The values that materialize() gives to a rank's part of the model."""
    torch.manual_seed(5)
    with pipeline(where, on_meta, call, "1f1b") as pipe:
        pipe.materialize()
        return {name: value.clone() for name, value in pipe.state_dict().items()}


def refusals(where: Where, call: Call) -> list[str]:
    """What a rank says to a model on "meta" where nothing settles what micro-batches mean, and to
    calls before there are values."""
    said = []
    for options in ({}, {"check": False}, {"check": False, "loss_weight": "rows"}):
        try:
            with fxpipe.compile(on_meta(), where, chunks=4, loss_fn=mean_loss, **options) as pipe:
                pipe.step(*call.args, target=call.target)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
