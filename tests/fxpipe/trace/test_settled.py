"""Attributes that the first call of a model sets, and that later calls find set."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import TraceError
from tests.zoo import same

TWO = ["cpu", "cpu"]


class Window(nn.Module):
    """Takes a smaller window for ever once an input has been shorter than it, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.window = nn.Linear(4, 4), nn.Linear(4, 4), 6

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] <= self.window:
            self.window = x.shape[1]
        return self.b(self.a(x)) * self.window


class Normed(Window):
    """The same with a batch norm, which writes to its buffers in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), nn.BatchNorm1d(4))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Window, Normed])
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_calls_of_other_sizes_find_them_as_in_the_model(
    kind: type[Window], dynamic: bool | None
) -> None:
    torch.manual_seed(0)
    model = kind()
    loop = copy.deepcopy(model)
    with fxpipe.compile(model, TWO, chunks=2, dynamic=dynamic) as pipe:
        for length in 8, 5, 8, 5, 3, 9, 8:
            x = torch.randn(4, length, 4)
            assert same(pipe(x), torch.cat([loop(part) for part in x.chunk(2)])), length
            assert model.window == loop.window


def test_once_they_are_set_they_ask_for_no_more_compilations() -> None:
    model = Window()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        for _ in range(5):
            pipe(torch.randn(4, 5, 4))
        assert len(pipe.compilations) <= 2, "one for the window ahead of the call, one for later"
        assert len(pipe.all_guards) == 1


class Tabled(nn.Module):
    """Makes a table for the shortest input, and notes in a number how long that is."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.b, self.length, self.where = nn.Linear(4, 4), nn.Linear(4, 4), 8, where
        self.register_buffer("buffer", torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < self.length:
            table = torch.arange(9.0)
            if self.where == "attribute":
                self.table = table
            else:
                self.buffer.copy_(table)
            self.length = x.shape[1]
        kept = self.table if self.where == "attribute" else self.buffer
        return self.b(self.a(x)) * kept[self.length]


def test_a_number_is_not_set_without_the_table_that_it_is_about() -> None:
    torch.manual_seed(0)
    model = Tabled("attribute").eval()
    loop = copy.deepcopy(model)
    with fxpipe.compile(model, TWO, chunks=2) as pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            x = torch.randn(4, 5, 4)
            assert same(pipe(x), torch.cat([loop(part) for part in x.chunk(2)]))
        assert model.length == 8
        assert same(model(x), loop(x)), "the model itself still makes its table"


def test_a_model_that_fills_a_buffer_by_a_number_is_refused() -> None:
    pipe = fxpipe.compile(Tabled("buffer").eval(), TWO, chunks=2)
    with pytest.raises(TraceError, match="changes length in its forward"):
        pipe(torch.randn(4, 5, 4))


def test_the_number_of_rows_is_not_set_since_micro_batches_have_others() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.rows = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows = x.shape[0]
            return self.b(self.a(x))

    model = Counted()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(torch.randn(8, 4))
        assert model.rows == 0
