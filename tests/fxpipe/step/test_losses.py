"""Losses and targets: of a function or of the model itself, in any structure."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.zoo import MLP, gradients, mean_loss, same


class OwnLoss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> object:
        out = self.b(torch.tanh(self.a(x)))
        loss = (out[:, 0] - y).square().mean()
        return {"alone": loss, "first": (loss, out), "named": {"logits": out, "loss": loss}}[
            self.kind
        ]


@pytest.mark.parametrize("kind", ["alone", "first", "named"])
def test_a_model_may_return_its_loss(kind):
    model, x, y = OwnLoss(kind), torch.randn(6, 4), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, schedule="1f1b") as pipe:
        loss = pipe.step(x, y)
    wanted = OwnLoss("alone")
    wanted.load_state_dict(reference.state_dict())
    value = wanted(x, y)
    value.backward()
    torch.testing.assert_close(loss, value.detach())
    torch.testing.assert_close(gradients(model), gradients(wanted))


def test_a_model_that_returns_its_loss_may_have_an_argument_called_target():
    class Own(MLP):
        def forward(self, x, target=None):
            return mean_loss(super().forward(x), target)

    model, x, target = Own(), torch.randn(6, 12), torch.randn(6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        loss = pipe.step(x, target=target)
        found = gradients(model)
        model.zero_grad()
        assert same(pipe.step(x, target), loss)
    assert same(gradients(model), found)
    torch.testing.assert_close(loss, model(x, target))


def test_a_target_may_be_nested():
    model, x = MLP(), torch.randn(6, 12)
    target = {"y": torch.randn(6, 12), "scale": 2.0, "more": [torch.tensor(3.0)]}

    def loss_fn(out, t):
        return ((out - t["y"]).square() * t["scale"] * t["more"][0]).mean()

    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        loss = pipe.step(x, target=target)
    torch.testing.assert_close(loss, loss_fn(model(x), target).detach())


@dataclass
class Labels:
    y: Tensor
    more: dict[str, object]


@pytest.mark.parametrize("chunks", [2, 6])
def test_a_target_may_be_an_object_that_nobody_has_registered(chunks):
    """Opened like inputs and outputs: in micro-batches of one row, all rows would fit as well."""
    model, x = MLP(), torch.randn(6, 12)

    def loss_fn(out, t):
        rows = t["labels"].more["rows"]
        return ((out - t["labels"].y) * rows[0] * t["scale"]).square().mean()

    with fxpipe.compile(model, ["cpu"] * 2, chunks=chunks, loss_fn=loss_fn) as pipe:
        for scale in (1.0, 2.0):
            labels = Labels(torch.randn(6, 12), {"rows": [torch.randn(6, 1)], "name": "a"})
            target = {"labels": labels, "scale": scale}
            loss = pipe.step(x, target=target)
            torch.testing.assert_close(loss, loss_fn(model(x), target).detach())
