"""Small models for tests, and the plain loop over micro-batches that pipelines are measured by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import passes
from fxpipe import Pipeline
from fxpipe.runtime.compiled.stage import CompiledStages
from fxpipe.schedule import Kind, Schedule
from passes import Alias, Partition, default_chain
from passes.chain import ToPipeline, ToStages
from passes.common.segments import Segments


class MLP(nn.Module):
    def __init__(self, width: int = 12, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Block(nn.Module):
    """A residual block; its ReLUs write in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """``width=64, blocks=(2, 2, 2, 2)`` is ResNet-18 (its stem for small images)."""

    def __init__(self, width: int = 4, blocks: tuple[int, ...] = (1, 1, 1), classes: int = 5):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        inner, layers = width, []
        for level, count in enumerate(blocks):
            for i in range(count):
                outer = width * 2**level
                layers.append(Block(inner, outer, stride=2 if level and not i else 1))
                inner = outer
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class UNet(nn.Module):
    """Every level of the way down is concatenated to the same level of the way up."""

    def __init__(self, channels: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(depth)]
        self.inp = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths)
        )
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in pairwise(widths))
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inp(x))
        skips = []
        for conv in self.down:
            skips.append(x)
            x = F.relu(conv(x))
        for conv in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(conv(torch.cat([x, skips.pop()], 1)))
        return self.out(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.size()
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in; the causal mask is a buffer that every layer uses."""

    def __init__(self, vocabulary: int = 11, width: int = 8, depth: int = 3, length: int = 6):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))
        self.blocks = nn.ModuleList(Layer(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class Tied(nn.Module):
    """A weight that two modules share, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens))
        return self.head(self.mix(torch.tanh(self.other(torch.tanh(x)))))


class Chain(nn.Module):
    """Linears a, b, c, ... in a row; ``skips``: after which others the output of one is added."""

    def __init__(self, depth: int, skips: dict[int, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        for i in range(depth):
            self.add_module("abcdefgh"[i], nn.Linear(3, 3))
        self.depth, self.skips = depth, skips or {}

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for i in range(self.depth):
            x = getattr(self, "abcdefgh"[i])(x)
            for source, targets in self.skips.items():
                if i in targets:
                    x = x + made[source]
            made.append(x)
        return x


def images(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 8, 8),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "mlp": (MLP, lambda batch: (torch.randn(batch, 12),)),
    "resnet": (ResNet, images),
    "unet": (UNet, images),
    "transformer": (Transformer, lambda batch: (torch.randint(11, (batch, 6)),)),
}


def loss_of(output: Any) -> Tensor:
    """A scalar of any output, with a gradient for each of its tensors."""
    return torch.sin(output).sum()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is a mean over the rows, each of which has its own target."""
    return (torch.sin(output).flatten(1).sum(1) * target).mean()


def parts(tensor: Tensor, chunks: int) -> list[Tensor]:
    """The micro-batches that a pipeline cuts a mini-batch into."""
    return list(torch.tensor_split(tensor, min(chunks, tensor.shape[0])))


def outputs_of_loop(model: nn.Module, inputs: tuple[Tensor, ...], chunks: int) -> list[Any]:
    """The model's output for each micro-batch.

    Their concatenation is what a pipeline's output equals bit for bit. The model's output for the
    whole mini-batch has other last bits on CPUs whose matrix kernels depend on the shape.
    """
    return [model(*part) for part in zip(*(parts(t, chunks) for t in inputs), strict=True)]


def loop(model: nn.Module, inputs: tuple[Tensor, ...], chunks: int) -> tuple[Tensor, list[Any]]:
    """The loop that a pipeline has to equal: all forwards, then the backwards, the last micro-batch
    first."""
    model.zero_grad()
    outputs = outputs_of_loop(model, inputs, chunks)
    for output in reversed(outputs):
        loss_of(output).backward()
    return torch.cat(outputs).detach(), gradients(model)


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same structure and the same bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and same([*a.values()], [*b.values()])
    return bool(a == b)


def labelled(model: nn.Module, inputs: tuple[Tensor, ...], starts: list[str]) -> fx.GraphModule:
    """The model graph with stages, a new one of which begins at each of the names."""
    gm = Alias(inputs)(fx.symbolic_trace(model))
    return Partition(len(starts) + 1, starts)(gm)


def steps(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    starts: list[str],
    *,
    chunks: int,
    checkpoint: str = "never",
    checkpoint_segments: Segments = 1,
    deferred_batch_norm: bool = False,
    compiled: CompiledStages | None = None,
    chain: passes.Chain | None = None,
) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graph after every pass of the chain that leads to the pipeline graph, with the pass's
    name, from the traced model on."""
    chain, devices = chain or default_chain(), ("cpu",) * (len(starts) + 1)
    in_dims = (0,) * len(inputs)
    gm: fx.GraphModule = fx.symbolic_trace(model)
    to_stages = ToStages(
        inputs,
        in_dims,
        devices,
        Partition(len(devices), starts),
        chunks=chunks,
        deferred_batch_norm=deferred_batch_norm,
    )
    for rewrite in chain.passes(to_stages):
        gm = rewrite(gm)
        yield rewrite.name, gm
    out_dims = (0,) * len(gm.graph.output_node().all_input_nodes)
    to_pipeline = ToPipeline(
        devices, chunks, in_dims, out_dims, checkpoint, checkpoint_segments, compiled=compiled
    )
    for rewrite in chain.passes(to_pipeline):
        gm = rewrite(gm)
        yield rewrite.name, gm


def after(name: str, *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The graph after the pass of that name; arguments are those of :func:`steps`."""
    return next(gm for step, gm in steps(*args, **kwargs) if step == name)


def step_of_loop(
    model: nn.Module,
    x: tuple[Tensor, ...],
    target: Tensor,
    pipe: Pipeline,
    schedule: Schedule,
    chunks: int,
    loss_fn: Callable[[Any, Tensor], Tensor],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients of a step: those of each micro-batch by itself, summed in the
    order of each stage's backwards."""
    chunks = min(chunks, len(target))
    trained = [p for p in model.parameters() if p.requires_grad]
    losses, grads = [], []
    rows = zip(*(parts(t, chunks) for t in (*x, target)), strict=True)
    for *inputs, y in rows:
        loss = loss_fn(model(*inputs), y)
        weight = torch.tensor(len(y) / len(target)).to(loss)
        losses.append(loss.detach() * weight)
        grads.append(torch.autograd.grad(loss, trained, weight, allow_unused=True))
    order = {stage: [] for stage in range(schedule.stages)}
    for lane in range(len(schedule.lanes)):
        for action in schedule.actions(lane):
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                order[action.stage].append(action.microbatch)
    homes = {}
    for stage in reversed(pipe.stages):
        homes |= dict.fromkeys(map(id, stage.module.parameters()), stage.index)
    sums: list[Tensor | None] = []
    numbers = {id(parameter): i for i, parameter in enumerate(trained)}
    for own, parameter in zip(pipe.module.parameters(), model.parameters(), strict=True):
        found = [
            grads[j][numbers[id(parameter)]]
            for j in order[homes.get(id(own), 0)]
            if id(parameter) in numbers
        ]
        is_used = found and found[0] is not None
        sums.append(sum(found[1:], found[0].clone()) if is_used else None)
    return sum(losses), sums
