"""The models that parts run, small and large."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.benchmarks.nets import UNet as LargeUNet
from tests.benchmarks.nets import resnet
from tests.gpu.machine import Machine
from tests.zoo import MLP, Transformer, UNet


class Block(nn.Module):
    """Convolutions, and what is between them in most nets. ``dropout``: with some of that, too."""

    def __init__(self, channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.conv2(F.relu(self.norm(self.conv1(x)))))


class Placed(nn.Sequential):
    """A chain whose parts are on devices of their own: what a pipeline is compared with."""

    def forward(self, x: Any) -> Any:
        for part in self:
            x = part(x.to(next(part.parameters()).device))
        return x


def placed(model: nn.Sequential, devices: list[str]) -> Placed:
    """The same modules, each moved to its device."""
    return Placed(*(part.to(device) for part, device in zip(model, devices, strict=True)))


def blocks(stages: int, channels: int = 8, dropout: float = 0.0) -> nn.Sequential:
    """A chain of equal blocks, one for each stage."""
    return nn.Sequential(*(Block(channels, dropout) for _ in range(stages)))


def cut(model: nn.Sequential) -> list[str]:
    """The partition with one stage for each module of a chain."""
    return [str(index) for index in range(1, len(model))]


@contextmanager
def pipeline(model: nn.Module, devices: list[str], **options: Any) -> Iterator[fxpipe.Pipeline]:
    """A pipeline of a model, which is on the first device before and afterwards, without
    gradients."""
    model.to(devices[0])
    model.zero_grad()
    try:
        with fxpipe.compile(model, devices, **options) as pipe:
            yield pipe
    finally:
        model.to(devices[0])
        model.zero_grad()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean over rows, each of which has its own target."""
    return (torch.sin(output).flatten(1).sum(1) * target).mean()


Inputs = Callable[[int], tuple[Tensor, ...]]


def usual(machine: Machine) -> dict[str, tuple[Callable[[], nn.Module], Inputs]]:
    """Small models of the usual kinds, wide enough for the kernels that large ones get."""
    width, channels, size = machine.pick((512, 32, 32), (12, 4, 8))
    models: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
        "mlp": (lambda: MLP(width), lambda batch: (torch.randn(batch, width),)),
        "unet": (lambda: UNet(channels), lambda batch: (torch.randn(batch, 3, size, size),)),
        "transformer": (
            lambda: Transformer(width=machine.pick(128, 8)),
            lambda batch: (torch.randint(11, (batch, 6)),),
        ),
    }
    return models if machine.is_real else {"unet": models["unet"]}


def dense(stages: int, width: int, layers: int) -> nn.Sequential:
    """Stages of equal work, which is all matrix products."""
    return nn.Sequential(
        *(
            nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())))
            for _ in range(stages)
        )
    )


# ------------------------------------------------------------------------------------ as published


@dataclass(frozen=True)
class Large:
    """A model in its published size, with what a training step of it takes.

    ``unit`` is what is counted, of which a batch has ``count``.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    loss_fn: Callable[[Any, Tensor], Tensor]
    unit: str
    count: int


def large(machine: Machine, chunks: int, times: int = 1) -> list[Callable[[], Large]]:
    """GPT-2 with 124 M parameters, the U-Net (5, 64), and ResNet-101; made when called for. A
    micro-batch has two rows, of ResNet-101 eight, or so many ``times`` as many."""
    parts = chunks * times
    return [
        lambda: _gpt2(machine, parts),
        lambda: _unet(machine, parts),
        lambda: _resnet(machine, parts),
    ]


def _gpt2(machine: Machine, parts: int) -> Large:
    rows, tokens = parts * machine.pick(2, 1), machine.pick(512, 8)
    vocabulary, width, heads, depth = machine.pick((50257, 768, 12, 12), (50, 16, 2, 2))
    ids = torch.randint(vocabulary, (rows, tokens))
    model: nn.Module
    if importlib.util.find_spec("transformers"):
        from transformers import GPT2Config, GPT2LMHeadModel

        name = "GPT-2 of transformers"
        config = GPT2Config(
            vocab_size=vocabulary,
            n_embd=width,
            n_head=heads,
            n_layer=depth,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPT2LMHeadModel(config)
    else:
        name, model = "GPT-2 of the kit", GPT2(vocabulary, width, heads, depth)

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        logits = getattr(output, "logits", output)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return Large(name, model, (ids,), ids, loss_fn, "tokens", ids.numel())


class GPT2(nn.Module):
    """Radford et al. 2019, with tied embeddings, for a machine without transformers."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int = 1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.places(places))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def _unet(machine: Machine, parts: int) -> Large:
    rows, size = parts * machine.pick(2, 1), machine.pick(192, 16)
    convs, channels, depth = machine.pick((5, 64, 5), (1, 2, 2))
    x = torch.randn(rows, 3, size, size)
    target = torch.randn(rows, 1, size, size)
    model = LargeUNet(convs, channels, depth)
    return Large(f"U-Net ({convs}, {channels})", model, (x,), target, F.mse_loss, "samples", rows)


def _resnet(machine: Machine, parts: int) -> Large:
    rows, size = parts * machine.pick(8, 2), machine.pick(224, 32)
    depths = machine.pick((3, 4, 23, 3), (1, 1, 1, 1))
    name = machine.pick("ResNet-101", "ResNet-14")
    target = torch.randint(1000, (rows,))
    x = torch.randn(rows, 3, size, size)
    return Large(name, resnet(depths), (x,), target, F.cross_entropy, "samples", rows)
