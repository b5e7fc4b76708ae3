"""A model that fails on the inputs of the call itself: its own error comes at once, with a note."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.trace.itself import OnTheInputs

TWO = ["cpu", "cpu"]
FEW = 8
"""Calls of a forward: those of the front ends and of one sample, and the call on the inputs as they
are, each with and without gradients. All samples of all candidates would be some hundred calls."""


class Counting(nn.Module):
    """Two layers, and a forward that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls: list[None] = []

    def forward(self, x):
        CALLS.append(None)
        return self.of(x)

    def of(self, x):
        return self.b(self.a(x).relu())


CALLS: list[None] = []


class WrongShape(Counting):
    def of(self, x):
        out = {"seg": super().of(x)}
        return out["seg"] + torch.zeros(3)


class OfADict(Counting):
    def of(self, batch):
        return self.b(self.a(batch["image"]) * batch["mask"])


class UpTo(Counting):
    """Refuses rows that are longer than its table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(6, 8)

    def of(self, ids):
        if ids.shape[1] > 6:
            raise ValueError(f"{ids.shape[1]} words are too many")
        return super().of(self.words(ids) + self.places(torch.arange(ids.shape[1])))


@pytest.fixture(autouse=True)
def _none_yet():
    CALLS.clear()


def failure(pipe: nn.Module, *args: object) -> Exception:
    with pytest.raises(Exception) as caught:
        pipe(*args)
    return caught.value


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("model", "given", "kind", "line"),
    [
        (WrongShape, torch.randn(8, 8), RuntimeError, 'return out["seg"] + torch.zeros(3)'),
        (WrongShape, torch.randn(8, 3, 8), RuntimeError, 'return out["seg"] + torch.zeros(3)'),
        (WrongShape, torch.randn(8, 7), RuntimeError, "return self.b(self.a(x).relu())"),
        (OfADict, {"image": torch.randn(8, 8)}, KeyError, 'batch["image"]) * batch["mask"])'),
        (OfADict, torch.randn(8, 8), IndexError, 'batch["image"]) * batch["mask"])'),
    ],
)
def test_the_error_of_a_forward_comes_at_once_and_with_its_line(
    model, given, kind, line, check, chunks
):
    with fxpipe.compile(model(), TWO, chunks=chunks, check=check) as pipe:
        error = failure(pipe, given)
    assert type(error) is kind and len(CALLS) <= FEW
    (note,) = error.__notes__
    name = model.__name__
    assert note.startswith(f"in fxpipe: {name} itself fails on these inputs, ahead of compiling,")
    assert f'{__file__}"' in note and note.endswith(line)
    assert error.__context__ is None  # nothing that has been tried before it is shown
    assert "".join(traceback.format_exception(error)).count("Traceback") == 1


def test_where_the_schedule_is_open_it_comes_at_once_as_well():
    with fxpipe.compile(WrongShape(), TWO, chunks=4, schedule="auto") as pipe:
        error = failure(pipe, torch.randn(8, 8))
    assert len(CALLS) <= FEW and "WrongShape itself fails" in error.__notes__[0]


def test_a_new_length_that_the_model_refuses_is_said_in_the_same_way():
    with fxpipe.compile(UpTo(), TWO, chunks=2) as pipe:
        pipe(torch.randint(10, (4, 5)))
        CALLS.clear()
        error = failure(pipe, torch.randint(10, (4, 7)))
        assert type(error) is ValueError and len(CALLS) <= FEW
        assert "UpTo itself fails on these inputs" in error.__notes__[0]
        assert pipe(torch.randint(10, (4, 6))).shape == (4, 6, 8)


def test_a_new_length_with_an_index_out_of_range_is_said_in_the_same_way():
    with fxpipe.compile(UpTo(), TWO, chunks=2, dynamic=False, tracer="export") as pipe:
        pipe(torch.randint(10, (4, 5)))
        error = failure(pipe, torch.full((4, 4), 12))
        assert type(error) is IndexError
        assert "UpTo itself fails on these inputs" in error.__notes__[0]


def test_the_error_of_a_step_says_it_too():
    def loss(output, target):
        return (output - target).square().mean()

    with (
        fxpipe.compile(OfADict(), TWO, chunks=4, loss_fn=loss) as pipe,
        pytest.raises(KeyError) as caught,
    ):
        pipe.step({"image": torch.randn(8, 8)}, target=torch.randn(8, 8))
    assert "OfADict itself fails on these inputs" in caught.value.__notes__[0]


class SortedOnly(nn.Module):
    """Passes on rows that are sorted by their first number, and refuses others."""

    def forward(self, x):
        if bool((x[:, 0].diff() < 0).any()):
            raise ValueError("the rows are not sorted")
        return x


class Sorting(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.sorted = SortedOnly()

    def of(self, x):
        return super().of(self.sorted(x))


def test_a_model_that_refuses_samples_only_is_compiled():
    """Rows of the samples are mixed: the inputs as they are tell that it is not the model."""
    x = torch.arange(64.0).reshape(8, 8)
    model = Sorting()
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(4)]))


def test_a_model_that_takes_all_samples_is_not_run_on_the_inputs(monkeypatch):
    monkeypatch.setattr("fxpipe.trace.itself.on_the_example", None)  # it must not be called
    with fxpipe.compile(Counting(), TWO, chunks=4) as pipe:
        pipe(torch.randn(8, 8))


def test_where_hooks_are_needed_to_run_the_note_says_that_they_were_not_called():
    model = WrongShape()
    model.a.register_forward_hook(lambda module, args, output: output[:, :3])
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        error = failure(pipe, torch.randn(8, 8))
    assert "WrongShape, run without its hooks, itself fails" in error.__notes__[0]


class TooLarge(Counting):
    def of(self, x):
        raise torch.OutOfMemoryError("8 rows are too many")


def test_a_lack_of_memory_for_all_rows_at_once_is_no_refusal():
    """Micro-batches need less memory."""
    asked = OnTheInputs(TooLarge(), (torch.randn(8, 8),), {})
    asked.refuse()
    assert CALLS and not asked.are_taken
