"""A model whose batch is along the second dimension, as that of ``nn.LSTM`` is: a target is cut
along its first dimension all the same, and messages say so where the batch is along its second one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import BatchError

TWO = ["cpu", "cpu"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.r, self.b = nn.Linear(4, 8), nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.r(self.a(x))[0])


def of_times(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.permute(1, 2, 0), target.permute(1, 0))


def of_rows(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.permute(1, 2, 0), target)


def batch(times: int) -> tuple[Tensor, Tensor]:
    return torch.randn(times, 8, 4), torch.randint(3, (times, 8))


def test_a_target_of_which_another_dimension_is_as_large_as_the_batch_is_to_be_transposed() -> None:
    x, y = batch(6)
    with (
        fxpipe.compile(Recurrent(), TWO, chunks=4, loss_fn=of_times) as pipe,
        pytest.raises(
            ValueError,
            match=r"of shape \(6, 8\), and the batch has 8 rows: its first dimension must be as "
            r"large. Its dimension 1 is: if the batch is along that one, give it transposed, by "
            r"target.transpose\(0, 1\), and let loss_fn take it so",
        ),
    ):
        pipe.step(x, target=y)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weight", [None, "rows"])
@pytest.mark.parametrize("chunks", [4, 8])
def test_it_is_noticed_where_there_are_as_many_times_as_rows(chunks: int, weight: Any) -> None:
    x, y = batch(8)
    with (
        fxpipe.compile(
            Recurrent(), TWO, chunks=chunks, loss_fn=of_times, loss_weight=weight
        ) as pipe,
        pytest.raises(
            BatchError,
            match=r"the target is cut into micro-batches along its first dimension, as all targets "
            r"are, and the inputs along dimension 1; .* only if both are cut along dimension 1: "
            r"give it transposed, by target.transpose\(0, 1\)",
        ),
    ):
        pipe.step(x, target=y)


def of_all_times(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Turned(Recurrent):
    """Is given rows first, and gives times first."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.transpose(0, 1))


@pytest.mark.parametrize("model, what", [(Recurrent(), "the inputs"), (Turned(), "the output")])
def test_it_is_noticed_where_a_loss_takes_parts_of_other_rows(model: Any, what: str) -> None:
    """The parts of the output and of the target have as many elements when they are flattened."""
    x, y = batch(8)
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_fn=of_all_times) as pipe,
        pytest.raises(BatchError, match=rf"and {what} along dimension 1; .* give it transposed"),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize("times", [6, 8])
def test_what_the_messages_advise_works(times: int) -> None:
    model, (x, y) = Recurrent(), batch(times)
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=of_rows) as pipe:
        found = pipe.step(x, target=y.transpose(0, 1))
    torch.testing.assert_close(found, of_times(model(x), y).detach())


def test_it_is_named_by_its_key() -> None:
    def of_both(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        weighed = of_times(output * target["w"][:, None], target["y"])
        return weighed

    x, y = batch(8)
    with (
        fxpipe.compile(Recurrent(), TWO, chunks=4, loss_fn=of_both) as pipe,
        pytest.raises(
            BatchError, match=r"target\['y'\] is cut .* by target\['y'\].transpose\(0, 1"
        ),
    ):
        pipe.step(x, target={"y": y, "w": torch.rand(8)})
