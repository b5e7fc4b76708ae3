"""A forward prints neither for the samples of a check, nor in a pipeline, which computes what was
traced: a warning names the line."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir import log


class Talks(nn.Module):
    """Prints the sum of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        print("hidden", hidden)
        return self.second(hidden)


class Whole(nn.Module):
    """Its way depends on values, so that it is kept whole: it prints in each micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 0).any()):
            x = x.clamp(min=0)
        print("seen", tuple(x.shape))
        return x


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_warning_names_the_line_that_prints(tracer: str, capsys) -> None:
    said = r"Talks prints within its forward \(at .*test_prints.py:\d+: print\(\"hidden\", hidden\)"
    with fxpipe.compile(Talks(), ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        with pytest.warns(UserWarning, match=said):
            pipe(torch.randn(4, 4))
        pipe(torch.randn(4, 4))
        pipe.eval()
        pipe(torch.randn(4, 4))
    assert not capsys.readouterr().out


def test_a_module_that_is_kept_whole_prints_and_is_not_warned_of(capsys) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Whole(), nn.Linear(4, 2))
    with warnings.catch_warnings(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        warnings.simplefilter("error")
        pipe(torch.randn(4, 4))
        pipe(torch.randn(4, 4))
    assert capsys.readouterr().out.splitlines() == ["seen (2, 4)"] * 4


def test_nothing_is_printed_where_settings_are_chosen(capsys) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        print("output", output)
        return (output - target).square().mean()

    x, y = torch.randn(4, 4), torch.randn(4, 2)
    given = {"example_inputs": (x,), "example_target": y, "loss_fn": loss_fn, "costs": "measured"}
    with pytest.warns(UserWarning, match="Talks prints within its forward"):
        fxpipe.plan(Talks(), ["cpu"] * 2, chunks=2, memory="1GiB", **given)
        fxpipe.compile(Talks(), ["cpu"] * 2, schedule="auto", memory="1GiB", **given).prepare(x)
    assert not capsys.readouterr().out


@dataclass(frozen=True)
class Counted:
    """A pass that prints how many nodes there are."""

    name: str = "counted"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        print("nodes", len(gm.graph.nodes))
        return gm


def test_a_pass_of_the_users_prints(capsys) -> None:
    def traced(model: nn.Module, args: Any, kwargs: Any) -> fx.GraphModule:
        print("traced")
        return fx.symbolic_trace(model)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    chain = fxpipe.default_chain().before("split", Counted())
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, passes=chain, tracer=traced) as pipe:
        pipe(torch.randn(4, 4))
    assert set(capsys.readouterr().out.splitlines()) == {"traced", "nodes 4"}


def test_a_loss_prints_once_for_each_micro_batch(capsys) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        print("rows", len(output))
        return (output - target).square().mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
    assert capsys.readouterr().out.splitlines() == ["rows 2"] * 4


def mean_of_all(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).mean() ** 2).sqrt()


def test_a_handler_of_warnings_that_prints_is_no_model(monkeypatch, capsys) -> None:
    def show(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        print("told of:", category.__name__)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=mean_of_all) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
    assert "told of: BatchWarning" in capsys.readouterr().out.splitlines()


class Printing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print("logged by:", record.name)


def test_a_handler_of_logs_that_prints_is_no_model(monkeypatch, capsys) -> None:
    monkeypatch.setattr(logging.getLogger("fxpipe.warnings"), "handlers", [Printing()])
    log._log.cache_clear()  # a warning is logged once in a process
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=mean_of_all) as pipe,
        pytest.warns(fxpipe.BatchWarning),
    ):
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
    assert "logged by: fxpipe.warnings" in capsys.readouterr().out.splitlines()
