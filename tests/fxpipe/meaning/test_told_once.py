"""A loss that compares rows with each other is told of once, whatever the sizes of batches, and for
its own reason."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning

TWO = ["cpu"] * 2


class Siamese(nn.Module):
    """Its loss tells each row's partner from those of all other rows. The number of rows is a
    constant of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, other = (F.normalize(self.layers(x), dim=1) for x in (a, b))
        return F.cross_entropy(10 * one @ other.T, torch.tensor([*range(len(a))]))


class Towers(Siamese):
    """The same, with a loss that is computed outside of it."""

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"a": self.layers(a), "b": self.layers(b)}


def contrastive(output: dict[str, Tensor], target: None) -> Tensor:
    one, other = (F.normalize(output[key], dim=1) for key in "ab")
    return F.cross_entropy(10 * one @ other.T, torch.arange(len(one)))


class Branching(nn.Module):
    """A branch of it does depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.layers(a + b)
        return h.square().mean() if len(h) < 8 else h.square().mean() + h.mean(0).square().sum()


@contextmanager
def told() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if issubclass(each.category, BatchWarning)]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 12), torch.randn(rows, 12)


def test_a_contrastive_loss_is_told_of_once_and_not_for_a_branch_that_is_not_there():
    torch.manual_seed(0)
    with fxpipe.compile(Siamese(), TWO, chunks=4) as pipe, told() as said:
        for rows in (16, 12, 9):
            pipe.step(*batch(rows))
    (text,) = said
    assert "neither a mean over the rows nor a sum" in text
    assert "branch" not in text


def test_so_is_that_of_a_loss_function():
    torch.manual_seed(0)
    with (
        fxpipe.compile(Towers(), TWO, chunks=4, loss_fn=contrastive) as pipe,
        told() as said,
    ):
        for rows in (16, 3, 2, 10, 12):
            pipe.step(*batch(rows))
    (text,) = said
    assert "neither a mean over the rows nor a sum" in text


def test_a_mini_batch_that_is_not_cut_is_told_of_once():
    torch.manual_seed(0)
    with fxpipe.compile(Siamese(), TWO, chunks=4) as pipe, told() as said:
        for rows in (16, 13, 11):
            pipe.step(*batch(rows))
    assert len(said) == 2
    assert said[1].startswith("a mini-batch of 13 rows is one micro-batch")


def test_a_branch_is_told_of_with_the_micro_batches_that_run():
    torch.manual_seed(0)
    with fxpipe.compile(Branching(), TWO, chunks=4) as pipe, told() as said:
        pipe.step(*batch(10))
    (text,) = said
    assert "for 10 rows" in text and "of 5 and 5 of them" in text
    assert "a branch of it depends on the batch size" in text


def test_explain_says_that_the_check_has_compared_such_a_loss():
    torch.manual_seed(0)
    with fxpipe.compile(Siamese(), TWO, chunks=4) as pipe, told():
        pipe.step(*batch(16))
        found = " ".join(str(pipe.explain()).split())
    assert "has not been checked" not in found and "found it out" not in found
    assert (
        "That is the likeliest reading of the shapes: the model was run on a few rows at once and "
        "in parts, and what the parts give is not the whole's output, as said below." in found
    )
    assert "Output is neither a mean over the rows nor a sum" in found


class Queue(nn.Module):
    """Compares rows with those of earlier calls, and with an average of its own layer: another
    state decides in each kind of call."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.averaged = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.averaged(x) if self.training else self.layer(x).detach()
        similar: Tensor = self.layer(x) @ self.queue.clone().T
        with torch.no_grad():
            if self.training:
                self.averaged.weight.mul_(0.9).add_(self.layer.weight, alpha=0.1)
            self.queue.copy_(torch.cat([keys, self.queue])[:4])
        return similar


def test_an_output_that_depends_on_state_is_told_of_once_whatever_that_is() -> None:
    torch.manual_seed(0)
    model = Queue()
    with fxpipe.compile(model, TWO, chunks=2) as pipe, told() as said:
        pipe(torch.randn(8, 6))
        model.eval()
        pipe(torch.randn(8, 6))
        pipe(torch.randn(6, 6))
    (text,) = said
    assert "output depends on the state that an earlier call leaves in" in text
    assert len(pipe.compilations) > 1
