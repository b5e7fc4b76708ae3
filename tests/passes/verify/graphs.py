"""Graphs for the tests of the verifier, made by the passes alone: their devices need not exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.schedule import named
from passes import Partition, Project, default_chain
from passes.chain import ToPipeline, ToStages, ToStep
from tests.zoo import Tied, Transformer, UNet, images

DEVICES = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


class Mean(nn.Module):
    """The loss of the step graphs."""

    def forward(self, output: Tensor, target: Any) -> Tensor:
        return output.float().mean()


class Normed(nn.Module):
    """A residual net with a batch norm, whose statistics are updated once for a mini-batch, and a
    skip over two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(self.c(self.bn(self.b(h)))) + h


class Writing(nn.Module):
    """A model that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.d(self.c(self.b(self.a(x))))


class Several(nn.Module):
    """A model that has two of all that the others have one of in a stage: batch norms, inputs that
    are written to, weights of another stage, skips and results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.bn1, self.bn2 = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        y.add_(1)
        h, k = self.a(x), self.b(y)
        h, k = self.bn1(h), self.bn2(k)
        z = self.c(h + k)
        p, q = nn.functional.linear(z, self.a.weight), nn.functional.linear(z, self.b.weight)
        z = self.d(p * q)
        return z + h, z - k


def two_of_rows(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 4), torch.randn(batch, 4)


def tokens(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(11, (batch, 6)),)


def rows(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 4),)


MODELS: dict[str, tuple[Any, Any, list[str]]] = {
    "U-Net": (UNet, images, ["down_0", "down_1", "cat_1"]),
    "tied": (Tied, tokens, ["other", "tanh_1", "head"]),
    "transformer": (Transformer, tokens, ["blocks_1_norm1", "blocks_2_norm1", "norm"]),
    "batch norm": (Normed, rows, ["b", "c", "d"]),
    "writing": (Writing, rows, ["b", "c", "d"]),
    "several": (Several, two_of_rows, ["bn1", "c", "d"]),
}
"""By name: the model, what gives its inputs for a batch size, and where stages begin."""


def stage_graph(name: str, devices: tuple[str, ...] = DEVICES, chunks: int = 3) -> fx.GraphModule:
    """The stage graph of a model, with a stage for each device."""
    make, inputs_of, starts = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make(), inputs_of(2 * chunks)
    context = ToStages(
        inputs,
        (0,) * len(inputs),
        devices,
        Partition(len(devices), starts[: len(devices) - 1]),
        chunks=chunks,
        deferred_batch_norm=True,
    )
    gm: fx.GraphModule = fx.symbolic_trace(model)
    for rewrite in default_chain().passes(context):
        if rewrite.name != "devices":  # which moves the tensors there
            gm = rewrite(gm)
    return gm


def pipeline_graph(
    name: str, checkpoint: str = "never", segments: int = 1, chunks: int = 3
) -> fx.GraphModule:
    """The pipeline graph of a model on four devices."""
    gm = stage_graph(name)
    outputs = (0,) * len(gm.graph.output_node().all_input_nodes)
    inputs = (0,) * len(gm.graph.find_nodes(op="placeholder"))
    context = ToPipeline(DEVICES, chunks, inputs, outputs, checkpoint, segments)
    for rewrite in default_chain().passes(context):
        gm = rewrite(gm)
    return gm


def step_graph(
    name: str,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    segments: int = 1,
    chunks: int = 3,
    lanes: int = 4,
) -> fx.GraphModule:
    """The step graph of a model in four stages, with a device for each lane."""
    order = named(schedule, lanes=lanes, microbatches=chunks, stages=4)
    devices = tuple(DEVICES[lane] for lane in order.placement)
    gm = stage_graph(name, devices)
    inputs = (0,) * len(gm.graph.find_nodes(op="placeholder"))
    context = ToStep(Mean(), order, devices, inputs, (), checkpoint, segments)
    for rewrite in default_chain().passes(context):
        gm = rewrite(gm)
    return gm


def rank_graphs(
    name: str, schedule: str = "1f1b", checkpoint: str = "never", chunks: int = 3, ranks: int = 4
) -> list[fx.GraphModule]:
    """The graphs of all ranks of a model in four stages."""
    order = named(schedule, lanes=ranks, microbatches=chunks, stages=4)
    gm = step_graph(name, schedule, checkpoint, 1, chunks, ranks)
    return [Project(order.placement, rank)(gm) for rank in range(ranks)]
