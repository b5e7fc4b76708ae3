"""What a forward asks about the layout of a tensor must not decide what it computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.errors import TraceError

TWO = ["cpu", "cpu"]
X = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))
LAYOUTS = [X, X.transpose(0, 2).contiguous().transpose(0, 2), X[:, :1].expand(8, 3, 4)]

QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "contiguous": lambda x: x.is_contiguous(),  # asks
    "a hidden value": lambda x: x.transpose(1, 2).is_contiguous(),  # asks
    "strides": lambda x: x.stride() == (12, 4, 1),  # asks
    "a stride": lambda x: x.stride(1) == 4,  # asks
    "a hidden stride": lambda x: x.transpose(1, 2).stride(-1) == 1,  # asks
    "expanded": lambda x: 0 in x.stride(),  # asks
    "offset": lambda x: x.storage_offset() == 0,  # asks
    "view": lambda x: x._is_view(),  # asks
    "base": lambda x: x._base is None,  # asks
    "shared": lambda x: x.is_shared(),  # asks
    "version": lambda x: x._version == 0,  # asks
    "negated": lambda x: x.is_neg(),  # asks
    "negated, by a function": lambda x: torch.is_neg(x),  # asks
    "conjugated": lambda x: torch.is_conj(x),  # asks
    "pinned": lambda x: x.is_pinned(),  # asks
    "order": lambda x: x.dim_order() == (0, 1, 2),  # asks
    "bytes in memory": lambda x: x.untyped_storage().nbytes() == x.nbytes,  # asks
    "elements in memory": lambda x: len(x.storage()) == x.numel(),  # asks
    "number of an output": lambda x: x.output_nr == 0,  # asks
    "keeps its gradient": lambda x: x.retains_grad,  # asks
}


class Asks(nn.Module):
    """Does something else by an answer, or asks to no effect."""

    def __init__(self, asks: Callable[[Tensor], bool], factor: float = 2.0) -> None:
        super().__init__()
        self.asks, self.factor = asks, factor
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x * self.factor if self.asks(x) else x)
        y: Tensor = self.second(h.relu())
        return y


class Masks(nn.Module):
    """Masks what is contiguous only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x * mask if x.is_contiguous() else x)  # asks
        y: Tensor = self.second(h.relu())
        return y


class LooksUp(nn.Module):
    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.asks = asks
        self.first, self.second = nn.Embedding(4, 4, padding_idx=0), nn.Linear(4, 4, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.second(self.first(ids))
        return h * 2 if self.asks(ids) else h


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.second(self.first(x))
        is_last = x.is_contiguous(memory_format=torch.channels_last)  # asks
        return h * 2 if is_last else h


class Careful(nn.Module):
    """Asks as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        while not x.is_contiguous():
            x = x.contiguous()
        h = self.first(x).transpose(1, 2)
        h = h.reshape(-1, 3) if not h.is_contiguous() else h.view(-1, 3)
        y: Tensor = self.second(h.view(x.shape[0], 4, 3).transpose(1, 2))
        return y


class Frames(nn.Module):
    """Overlapping frames of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        count, (rows, step) = (x.shape[1] - 4) // 2 + 1, x.stride()  # asks
        frames = x.as_strided((x.shape[0], count, 4), (rows, 2 * step, step))
        y: Tensor = self.second(self.first(frames).relu())
        return y


BOTH = pytest.mark.parametrize("tracer", ["auto", "export"])


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("way", QUESTIONS)
def test_a_model_whose_output_depends_on_it_is_refused(way: str, tracer: str) -> None:
    """A trace is answered as for a fresh, contiguous tensor."""
    for x in LAYOUTS[:2]:
        pipe = fxpipe.compile(Asks(QUESTIONS[way]), TWO, chunks=2, tracer=tracer)
        with pytest.raises(TraceError, match=r"layout or the history .*\(at .*# asks\)"):
            pipe(x)


@BOTH
def test_so_is_one_that_asks_for_the_order_of_channels(tracer: str) -> None:
    pipe = fxpipe.compile(Channels(), TWO, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=r"layout or the history .*\(at .*# asks\)"):
        pipe(torch.randn(4, 3, 5, 5))


@BOTH
def test_so_is_one_that_asks_whether_two_tensors_have_the_same_memory(tracer: str) -> None:
    asks = Asks(lambda x: x.is_set_to(x.detach()))  # asks
    pipe = fxpipe.compile(asks, TWO, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=r"layout or the history .*\(at .*# asks\)"):
        pipe(X)


@BOTH
def test_an_example_that_hides_the_difference_does_not_help(tracer: str) -> None:
    pipe = fxpipe.compile(Masks(), TWO, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=r"layout or the history .*\(at .*# asks\)"):
        pipe(X, torch.ones(8, 3, 4))


@BOTH
@pytest.mark.parametrize(
    "asks",
    [
        lambda ids: ids.stride(0) == 0,  # asks
        lambda ids: set(ids.stride()) == {0},  # asks
    ],
)
def test_repeated_rows_are_several_of_which_one_may_be_without_effect(
    asks: Callable[[Tensor], bool], tracer: str
) -> None:
    """The first element is padding, and all that is computed from it is zero."""
    pipe = fxpipe.compile(LooksUp(asks), TWO, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=r"layout or the history .*\(at .*# asks\)"):
        pipe(torch.tensor([[0, 1, 2]] * 8))


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("way", QUESTIONS)
def test_a_model_may_ask_to_no_effect(way: str, tracer: str) -> None:
    model = Asks(QUESTIONS[way], factor=1.0)
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        for x in LAYOUTS:
            torch.testing.assert_close(pipe(x), model(x))


@BOTH
def test_a_model_may_ask_for_what_it_makes_contiguous(tracer: str) -> None:
    model = Careful()
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        for x in LAYOUTS:
            torch.testing.assert_close(pipe(x), model(x))


def test_strides_may_be_handed_on() -> None:
    model = Frames()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        for x in torch.randn(8, 12), torch.randn(12, 8).t(), torch.randn(8, 24)[:, ::2]:
            torch.testing.assert_close(pipe(x), model(x))


def test_strides_that_are_constants_of_a_graph_are_refused() -> None:
    pipe = fxpipe.compile(Frames(), TWO, chunks=2, tracer="export")
    with pytest.raises(TraceError, match=r"has the layout of its inputs as a constant .*# asks\)"):
        pipe(torch.randn(8, 12))


@pytest.mark.parametrize("asks", [lambda x: x.grad_fn is None, lambda x: x.is_leaf])
def test_the_history_of_an_input_must_not_decide_either(asks: Callable[[Tensor], bool]) -> None:
    pipe = fxpipe.compile(Asks(asks), TWO, chunks=2)
    with pytest.raises(TraceError, match="depends on whether gradients are recorded"):
        pipe(X)
