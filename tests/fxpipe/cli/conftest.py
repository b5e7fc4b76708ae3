import sys

import pytest

MODELS = """
import dataclasses

import torch
from torch import nn

TWO = (nn.Linear(2, 2), torch.ones(4, 2))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, scale=1.0):
        return self.third(torch.relu(self.second(torch.relu(self.first(x))))) * scale


def build():
    return Named(), (torch.ones(8, 8),)


def by_name():
    return Named(), {"x": torch.ones(8, 8), "scale": 2.0}


def one_tensor():
    return Named(), torch.ones(8, 8)


def nothing():
    return {}


def fails():
    return 1 / 0


def needs(width):
    return Named()


def words():
    return nn.Embedding(4, 8), torch.zeros(8, 3, dtype=torch.long)


class OfADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch):
        return self.second(self.first(batch["image"]))


def of_a_dict():
    return OfADict(), ({"image": torch.ones(8, 8)},)


class Whole(nn.Module):
    def forward(self, x):
        return x.long() + 1


@dataclasses.dataclass
class Boxes:
    scores: torch.Tensor
    number: int


class Detector(Named):
    def forward(self, x):
        return Boxes(super().forward(x), 3)


def of_a_dataclass():
    return Detector(), torch.ones(8, 8)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        logits = self.second(self.first(x))
        return {"loss": logits.square().mean(), "logits": logits}


def of_a_loss():
    return OwnLoss(), torch.ones(8, 8)


class Steps(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def branches():
    return Steps(), torch.ones(8, 2)


def whole():
    return nn.Sequential(nn.Linear(2, 2), Whole()), torch.ones(4, 2)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with a module ``own_models``, which is where the user is."""
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "own_broken.py").write_text("import own_models\nimport own_missing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in ("own_models", "own_broken"):
        sys.modules.pop(name, None)
