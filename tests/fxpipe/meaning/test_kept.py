"""To find out what a loss means, the model runs once for each sample, however often the loss is
computed of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.compiler.later_checks import LaterChecks
from fxpipe.meaning.kept import KeptOutputs

ROWS = {".a": 0, ".b": 1}


class Towers(nn.Module):
    """Two towers; notes its runs."""

    def __init__(self, has_scale: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(())) if has_scale else None
        self.runs: list[int] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.runs.append(len(x))
        found = {"a": self.a(x), "b": self.b(x).T}
        return found if self.scale is None else {**found, "scale": self.scale * 2}


def two_means(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(output["b"].T, target["y"], reduction="none")
    some = (losses * target["mask"]).sum() / target["mask"].sum()
    return F.cross_entropy(output["a"], target["y"]) + some


def test_a_loss_of_two_means_is_checked_in_few_runs_of_the_model(monkeypatch):
    calls: list[int] = []
    forward = Towers.forward
    plain = LaterChecks._loss_dim

    def counted(self, *given):
        monkeypatch.setattr(Towers, "forward", lambda own, x: (calls.append(1), forward(own, x))[1])
        found = plain(self, *given)
        monkeypatch.setattr(Towers, "forward", forward)
        return found

    monkeypatch.setattr(LaterChecks, "_loss_dim", counted)
    torch.manual_seed(0)
    target = {"y": torch.arange(16) % 5, "mask": (torch.rand(16) > 0.4).float()}
    with (
        fxpipe.compile(Towers(), ["cpu"], chunks=4, loss_fn=two_means) as pipe,
        pytest.warns(fxpipe.BatchWarning, match="neither a mean"),
    ):
        pipe.step(torch.randn(16, 6), target=target)
    assert len(calls) <= 12, "ten samples, of two sizes, and one of the mini-batch's own rows"


def kept(model: nn.Module) -> KeptOutputs:
    return KeptOutputs(lambda tensors: model(*tensors), [0], ROWS)


def test_rows_that_have_been_there_are_not_computed_again():
    model, x = Towers(), torch.randn(5, 6)
    x[2, 3] = torch.nan
    of, whole = kept(model), model(x)
    model.runs.clear()
    for rows in ([0, 1, 2, 3, 4], [3], [4, 2], [1, 1, 0]):
        found = of([x[rows]])
        torch.testing.assert_close(found["a"], whole["a"][rows], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found["b"], whole["b"][:, rows], rtol=0, atol=0, equal_nan=True)
        found["a"].zero_()  # as a loss may do
    assert model.runs == [5]
    of([x + 1])
    of([x[:2]])
    assert model.runs == [5, 5]


def test_a_model_with_an_output_that_has_no_rows_runs_each_time():
    model, x = Towers(has_scale=True), torch.randn(4, 6)
    of = kept(model)
    of([x])
    of([x[:1]])
    assert model.runs == [4, 1]


def test_a_row_of_inputs_may_be_several_rows_of_an_output():
    x = torch.randn(3, 2, 4)
    of = KeptOutputs(lambda tensors: {"a": tensors[0].flatten(0, 1)}, [0], ROWS)
    of([x])
    assert torch.equal(of([x[[2, 0]]])["a"], x[[2, 0]].flatten(0, 1))
