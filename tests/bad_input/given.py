"""What the wrong calls of ``messages.txt`` are made with: models, inputs, pipelines, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
import passes  # noqa: F401 (the calls of the table use what is imported here)
from fxpipe import compile, ops, plan, schedule, simulate, skip  # noqa: F401
from fxpipe.schedule import Schedule, StageCost  # noqa: F401

CPUS = ["cpu", "cpu"]
x = torch.ones(4, 3)
y = torch.zeros(4, 3)


class Net(nn.Module):
    """Three layers, for three stages at most."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class WithLoss(Net):
    """Returns its loss."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        y = super().forward(x)
        return y if target is None else (F.mse_loss(y, target), y)


class Languages(nn.Module):
    """A model whose layers are numbered, as those of language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 3)
        self.h = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        y = self.wte(ids) + torch.arange(ids.shape[1])[:, None]
        for layer in self.h:
            y = layer(y)
        return y


class Bags(nn.Module):
    """Means of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(7, 3), nn.Linear(3, 3)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.layer(self.table(ids, offsets))


class Packed(Languages):
    """Reads rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.GRU(3, 3, batch_first=True)

    def forward(self, ids: Tensor, lengths: Any) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.wte(ids), lengths, True, False)
        return self.reader(packed)[1][0]


class Longest(Languages):
    """Cuts a batch to its longest row, and sets to zero what is behind the end of each row."""

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        y = self.h[1](self.h[0](self.wte(ids)))[:, : lengths.max()]
        return y * (torch.arange(y.shape[1]) < lengths[:, None])[..., None]


class Stashes(nn.Module):
    """Stashes a value under a name, and pops one under another name."""

    def __init__(self, stashed: list[str], popped: list[str]) -> None:
        super().__init__()
        self.layer, self.stashed, self.popped = nn.Linear(3, 3), stashed, popped

    def forward(self, x: Tensor) -> Tensor:
        for name in self.stashed:
            skip.stash(name, x)
        y = self.layer(x)
        for name in self.popped:
            y = y + skip.pop(name)
        return y


def pipe(**options: Any) -> fxpipe.Pipeline:
    """A pipeline of two stages that has not been called."""
    return compile(Net(), CPUS, **{"chunks": 2, "loss_fn": F.mse_loss, **options})


def called(**options: Any) -> fxpipe.Pipeline:
    """A pipeline of two stages that has been called."""
    made = pipe(**options)
    made.prepare(x)
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all parameters of a model."""
    return torch.optim.SGD(model.parameters(), 0.1)


def file(content: str | bytes, name: str = "given") -> str:
    """The path of a file with this content, in the current folder."""
    Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    return name


def profile(**changes: Any) -> str:
    """The path of a profile in which some entries have other values; None leaves one out."""
    data = {"format": 1, "device": "cpu", "torch": "2", "costs": {"first": {"forward_s": 1.0}}}
    kept = {key: value for key, value in (data | changes).items() if value is not None}
    return file(json.dumps(kept), "given.json")


def saved(**changes: Tensor) -> str:
    """The path of a checkpoint in which some tensors are others."""
    torch.save(Net().state_dict() | changes, "given.pt")
    return "given.pt"
