"""A model's own checkpoint writes to running statistics in the forward, and again in the backward,
as in PyTorch. Where a step runs these in another order than a loop over the micro-batches, so that
the statistics differ from the loop's, a warning names them, and says what helps; and that helps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe import BatchWarning
from tests.fxpipe.trace.small import BOTH
from tests.zoo import same

TOLD = r"writes to a\.1\.\w+, a\.1\.\w+, a\.1\.\w+ in its forward, and once more in the backward"


def as_torch(function: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def without(function: Callable[..., Any], x: Tensor) -> Any:
    return function(x)


class Normed(nn.Module):
    def __init__(self, call: Callable[..., Any] = as_torch) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.b = nn.Linear(8, 8)
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.b(self.call(self.a, x))


class Counted(nn.Module):
    """A functional batch norm, whose statistics no counter of batches stands beside."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True)


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.sigmoid(x)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)


def looped(model: nn.Module) -> list[Tensor]:
    """The buffers after a loop over four micro-batches, a forward and a backward of each."""
    model = copy.deepcopy(model)
    for x, y in zip(*(each.chunk(4) for each in batch()), strict=True):
        (F.mse_loss(model(x), y) / 4).backward()
    return list(model.buffers())


def stepped(model: nn.Module, count: int = 2, **options: Any) -> tuple[list[Tensor], list[str]]:
    """The buffers after a step, and the warnings that it has given."""
    model, (x, y) = copy.deepcopy(model), batch()
    cut = {"partition": ["b"]} if count == 2 else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BatchWarning)
        with fxpipe.compile(
            model, ["cpu"] * count, chunks=4, loss_fn=F.mse_loss, **cut, **options
        ) as pipe:
            pipe.step(x, target=y)
            pipe.step(x, target=y)
    told = [
        str(each.message) for each in caught if "once more in the backward" in str(each.message)
    ]
    return list(model.buffers()), told


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_what_is_written_in_another_order_than_in_a_loop_is_told_of_once(
    tracer: str, schedule: str
) -> None:
    _, told = stepped(Normed(), schedule=schedule, tracer=tracer)
    assert len(told) == 1
    assert all(f"a.1.{name}" in told[0] for name in ("running_mean", "running_var"))
    assert "stage 0 may begin" in told[0]


def test_nothing_is_told_where_the_order_is_that_of_the_loop() -> None:
    model, (x, y) = Normed(), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", BatchWarning)
        with fxpipe.compile(model, ["cpu"], chunks=4, schedule="1f1b", loss_fn=F.mse_loss) as pipe:
            expected = looped(model)
            pipe.step(x, target=y)
    assert same(list(model.buffers()), expected)


def test_nothing_is_told_where_nothing_is_written_in_the_backward() -> None:
    assert not stepped(Normed().eval())[1]
    assert not stepped(Normed(without))[1]


@pytest.mark.parametrize(
    ("part", "name"), [(Counted(), "a.1.mean, a.1.var"), (Average(), "a.1.average")]
)
def test_any_buffer_is_noticed(part: nn.Module, name: str) -> None:
    model = Normed()
    model.a[1] = part
    _, (told,) = stepped(model)
    assert f"writes to {name} in its forward" in told


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    ("call", "options"), [(fxpipe.checkpoint, {}), (without, {"checkpoint": "always"})]
)
def test_what_the_message_advises_counts_each_micro_batch_once_in_every_schedule(
    call: Callable[..., Any], options: dict[str, Any], schedule: str
) -> None:
    model = Normed(call)
    expected = Normed(without)
    expected.load_state_dict(model.state_dict())
    x, y = batch()
    with (
        fxpipe.compile(
            model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=F.mse_loss, **options
        ) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", BatchWarning)
        pipe.step(x, target=y)
    assert same(list(model.buffers()), looped(expected))


def test_deferred_batch_norms_are_not_told_of() -> None:
    assert not stepped(Normed(), deferred_batch_norm=True)[1]
