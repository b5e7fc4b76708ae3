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


@dataclass
class Found:
    y: Tensor
    more: list


class Returning(MLP):
    """Returns its output within other values, in one of several structures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        y = super().forward(x)
        of_all = {
            "dict": {"y": y, "more": [y, {"x": x, "none": []}]},
            "list": [y, {"x": x, "numbers": [1, 2]}],
            "tuple": (y, [x]),
            "dataclass": Found(y, [x, {"x": x}]),
        }
        return of_all[self.kind]


def kinds(value: object) -> object:
    """The types within a value."""
    if isinstance(value, dict):
        return type(value), {key: kinds(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds(each) for each in value]
    return (type(value), kinds(vars(value))) if isinstance(value, Found) else type(value)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("kind", ["dict", "list", "tuple", "dataclass"])
def test_the_loss_gets_the_types_that_the_model_returns(kind, tracer, schedule):
    """Lists and dicts in a graph are of types of ``torch.fx``, which nobody can write to."""
    model, x, target = Returning(kind), torch.randn(6, 12), torch.randn(6, 12)
    seen = []

    def loss(output, target):
        seen.append(kinds(output))
        if isinstance(output, dict):
            output["y"] = output["y"].double().float()
            return (output["y"] - target).square().mean()
        y = output.y if isinstance(output, Found) else output[0]
        if isinstance(output, list):
            output.append(None)
        return (y - target).square().mean()

    options = {"chunks": 3, "loss_fn": loss, "tracer": tracer, "schedule": schedule}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        pipe.step(x, target=target)
        pipe.step(x, target=target)
        assert set(map(str, seen)) == {str(kinds(model(x)))} == {str(kinds(pipe(x)))}


def test_a_loss_that_is_no_scalar_is_named_by_the_type_that_the_model_returns():
    options = {"chunks": 3, "loss_fn": lambda output, target: output}
    with (
        fxpipe.compile(Returning("dict"), ["cpu"] * 2, **options) as pipe,
        pytest.raises(ValueError, match="is a dict: a scalar tensor is needed"),
    ):
        pipe.step(torch.randn(6, 12), target=torch.randn(6))


class Writing(nn.Module):
    """Is kept whole, as its way depends on values; it writes to a dict of its own arguments."""

    def forward(self, given):
        given = dict(given)
        if bool(given["x"].sum() > 1e9):
            raise ValueError("too large")
        SEEN.append(kinds(given))
        return given["x"] + given["more"][0]


SEEN: list[object] = []


@pytest.mark.parametrize("stages", [["second"], ["kept"]])
def test_a_module_that_is_kept_whole_gets_plain_dicts_and_lists(stages):
    class Keeping(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.second = Writing(), nn.Linear(12, 12)

        def forward(self, x):
            return self.second(self.kept({"x": super().forward(x), "more": [x, 1]}))

    model, x = Keeping(), torch.randn(6, 12)
    SEEN.clear()
    model(x)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, partition=stages, loss_fn=mean_loss) as pipe:
        pipe.step(x, target=torch.randn(6))
        assert "kept" in str(pipe.model_graph.graph)
    assert set(map(str, SEEN)) == {str(SEEN[0])}


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


def test_a_target_with_a_list_may_have_fewer_rows_in_a_later_batch():
    """The number of elements of a list is a part of the structure of a target, so that the loss is
    checked again, with rows of the first batch."""

    def loss_fn(output, target):
        x, weights = target
        return sum((w * row.square().mean() for w, row in zip(weights, output - x, strict=True)))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        for rows in (6, 4, 5):
            x, y, weights = (
                torch.randn(rows, 3),
                torch.randn(rows, 3),
                [0.5 + i for i in range(rows)],
            )
            loss = pipe.step(x, target=(y, weights))
            torch.testing.assert_close(loss, loss_fn(model(x), (y, weights)).detach())
