"""A model that does not take one row is given larger micro-batches, and fewer of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.schedule import named
from tests.zoo import gradients, loop, mean_loss, same, step_of_loop


class Normed(nn.Module):
    """Batch norm of vectors: in train mode PyTorch refuses a batch of one row."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x))))


class InGroups(nn.Module):
    """Takes as many rows as there are in a group, or a multiple."""

    def __init__(self, size):
        super().__init__()
        self.size, self.a, self.b = size, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        grouped = torch.tanh(self.a(x)).view(-1, self.size, 4)
        return self.b(grouped).view(-1, 4)


def calls_as_the_loop(pipe, model, x, chunks):
    """A call, with its backward, gives what a loop over so many micro-batches gives."""
    reference = copy.deepcopy(model)
    output = pipe(x)
    torch.sin(output).sum().backward()
    assert pipe.chunks == chunks
    expected = loop(reference, (x,), chunks)
    assert same([output.detach(), gradients(model)], list(expected))
    assert same(list(model.buffers()), list(reference.buffers()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", [16, 9, 3, 2])
@pytest.mark.parametrize("batch, chunks", [(16, 8), (9, 4), (5, 2), (3, 1), (2, 1)])
def test_no_micro_batch_is_smaller_than_the_model_takes(batch, chunks, first):
    model, x = Normed(), torch.randn(batch, 4)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=8, example_inputs=(torch.randn(first, 4),)
    ) as pipe:
        calls_as_the_loop(pipe, model, x, chunks)


class Listing(Normed):
    """Goes through the rows by a loop, so that it is compiled for batches of one size."""

    def forward(self, x):
        return torch.stack([row / (1 + i) for i, row in enumerate(super().forward(x))])


class Siamese(Normed):
    """Has the number of rows as a constant."""

    def forward(self, x):
        scores = super().forward(x) @ x.T
        return nn.functional.cross_entropy(scores, torch.tensor([*range(len(x))]), reduction="none")


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("batch, chunks", [(3, 1), (2, 1), (6, 3), (9, 3), (5, 1)])
@pytest.mark.parametrize("kind", [Listing, Siamese])
@pytest.mark.filterwarnings("ignore::fxpipe.BatchWarning")
def test_micro_batches_of_one_size_are_no_smaller_either(kind, batch, chunks):
    model, x = kind(), torch.randn(batch, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=8, check="warn") as pipe:
        calls_as_the_loop(pipe, model, x, chunks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_has_as_many_micro_batches_as_a_call(schedule):
    model, x, target = Normed(), torch.randn(9, 4), torch.randn(9)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=8, schedule=schedule, loss_fn=mean_loss) as pipe:
        reference = copy.deepcopy(model)
        loss = pipe.step(x, target=target)
        assert len(pipe.losses) == pipe.chunks == 4
        order = named(schedule, lanes=2, microbatches=4)
        wanted = step_of_loop(reference, (x,), target, pipe, order, 4, mean_loss)
    assert same([loss, gradients(model)], list(wanted))


def test_in_evaluation_mode_it_takes_one_row():
    with fxpipe.compile(Normed(), ["cpu"] * 2, chunks=8) as pipe:
        pipe(torch.randn(9, 4))
        assert pipe.chunks == 4
        pipe.eval()
        pipe(torch.randn(9, 4))
        assert pipe.chunks == 8
        pipe.train()
        pipe(torch.randn(9, 4))
        assert pipe.chunks == 4


def test_a_batch_that_the_model_itself_refuses_fails_as_with_the_model():
    with fxpipe.compile(Normed(), ["cpu"] * 2, chunks=8, in_dims=0) as pipe:
        pipe(torch.randn(9, 4))
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            pipe(torch.randn(1, 4))


@pytest.mark.parametrize("size, chunks", [(2, 6), (3, 4), (4, 3), (6, 2)])
def test_rows_in_groups_are_cut_between_groups(size, chunks):
    model, x = InGroups(size), torch.randn(12, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=chunks) as pipe:
        output = pipe(x)
        assert pipe.chunks == chunks
        assert same(output.detach(), torch.cat([model(part) for part in x.chunk(chunks)]).detach())


def test_the_report_says_why_there_are_fewer_micro_batches():
    with fxpipe.compile(Normed(), ["cpu"] * 2, chunks=8) as pipe:
        pipe(torch.randn(9, 4))
        lines = pipe.report().splitlines()
        said = "the model takes no micro-batch of 1 row: "
        assert "4 micro-batches" in pipe.report() and any(line.startswith(said) for line in lines)
        pipe.eval()
        pipe(torch.randn(9, 4))
        assert "8 micro-batches" in pipe.report() and said not in pipe.report()
