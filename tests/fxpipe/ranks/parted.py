"""What ranks do in tests of tensor-parallel stages: several ranks have parts of one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxpipe
from tests.fxpipe.ranks.jobs import Call, made
from tests.zoo import mean_loss, same

WIDTH, HEADS, WORDS, CHUNKS = 8, 4, 11, 3


class Decoder(nn.Module):
    """A block as Llama has it: attention, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.gate = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        seen = self.norm(x)
        heads = (
            project(seen).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        seen = self.other_norm(x)
        return x + self.down(F.silu(self.gate(seen)) * self.up(seen))


class Decoders(nn.Module):
    """Decoder blocks, with dropout between them if asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Decoder() for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


class Dropping(Decoders):
    """The blocks with dropout."""

    def __init__(self) -> None:
        super().__init__(0.5)


PLAN = {
    **dict.fromkeys(["q", "k", "v", "up", "gate"], ColwiseParallel()),
    **dict.fromkeys(["o", "down"], RowwiseParallel()),
}
CUT = {"partition": ["blocks.1.norm"], "chunks": CHUNKS, "schedule": "1f1b"}


def mesh_of() -> Any:
    """Two stages, each of two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def parted(make: Any, mesh: Any) -> nn.Module:
    """The model, whose blocks are in parts on the ranks of a mesh."""
    model = made(make)
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    return model


def looped(model: nn.Module, call: Call, weight: float = 1 / CHUNKS) -> Tensor:
    """The loss of a loop over the micro-batches, whose gradients are accumulated in their order."""
    total = torch.zeros(())
    for part, y in zip(call.args[0].chunk(CHUNKS), call.target.chunk(CHUNKS), strict=True):
        loss = mean_loss(model(part), y)
        loss.backward(torch.full_like(loss, weight))
        total = total + loss.detach() * weight
    return total


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    group: dist.ProcessGroup, calls: Sequence[Call], how: dict[str, Any]
) -> tuple[dict[str, list[str]], dict[str, Tensor], list[Tensor]]:
    """Train a pipeline and, by a loop over micro-batches, the same model with the same parts of
    parameters on the same ranks. Returns what differs in any bit, the gradients of the last step,
    and the losses.

    ``how``: arguments of the step beside the optimizer and the scaler.
    """
    mesh = mesh_of()
    model, reference = parted(Decoders, mesh["tp"]), parted(Decoders, mesh["tp"])
    losses, expected = [], []
    with fxpipe.compile(
        model, mesh, loss_fn=mean_loss, example_inputs=calls[0].args, **CUT
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        other = torch.optim.AdamW(reference.parameters(), lr=0.05)
        for call in calls:
            optimizer.zero_grad()
            other.zero_grad()
            losses.append(
                pipe.step(*call.args, target=call.target, optimizer=optimizer, scaler=scaler, **how)
            )
            expected.append(looped(reference, call))
            other.step()
        pipe.eval()
        with torch.no_grad():
            output = pipe(*calls[-1].args, broadcast=True)
            outputs = torch.cat([reference(part) for part in calls[-1].args[0].chunk(CHUNKS)])
        theirs = dict(reference.named_parameters())
        named = dict(pipe.named_parameters())
        differ = {
            "losses": [] if same(losses, expected) else ["losses"],
            "output": [] if same(output, outputs) else ["output"],
            "grads": [n for n, p in named.items() if not same(own(p.grad), own(theirs[n].grad))],
            "values": [n for n, p in named.items() if not same(own(p), own(theirs[n]))],
        }
        grads = {name: whole(p.grad) for name, p in named.items()}
    return differ, grads, losses


def dropping(group: dist.ProcessGroup, call: Call, where: str) -> list[Any]:
    """Losses of a model with dropout: on ranks with parts of parameters ("parts"), on such ranks
    with other seeds ("seeds"), or on two ranks with whole parameters."""
    if where == "whole":
        model, mesh = made(Dropping), group
    else:
        mesh = mesh_of()
        model = parted(Dropping, mesh["tp"])
    found: list[Any] = []
    with fxpipe.compile(model, mesh, loss_fn=mean_loss, example_inputs=call.args, **CUT) as pipe:
        torch.manual_seed(7 + dist.get_rank() * (where == "seeds"))
        try:
            found += [pipe.step(*call.args, target=call.target) for _ in range(2)]
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def refusals(group: dist.ProcessGroup, call: Call) -> list[str]:
    """What a rank says to parts that a pipeline does not take."""
    mesh = mesh_of()
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    said = []
    for where, options in (
        (mesh["pp"], {}),
        (other, {}),
        (["cpu", "cpu"], {}),
        (mesh, {"costs": "measured"}),
    ):
        try:
            model = parted(Decoders, mesh["tp"])
            fxpipe.compile(model, where, example_inputs=call.args, **CUT, **options)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
