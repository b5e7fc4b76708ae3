"""What no cut can separate, and what is said where that takes most of a model's time."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.ir.graph import stage_nodes
from passes import PartitionError
from passes.partition.pieces import Piece

TWO = ["cpu"] * 2


class Between(nn.Module):
    """A large part between two small ones."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 16), part, nn.Linear(16, 8)

    def forward(self, x):
        x = self.first(x)
        x = self.part(x)
        return self.last(x)


LINE = inspect.getsourcelines(Between.forward)[1] + 2


class Layers(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 64, 4, batch_first=True, dropout=dropout)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1).expand(-1, 8, -1))[0][:, 0, :16]


class Experts(nn.Module):
    """The sum decides which of the layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(30))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x) + (1 if x.square().mean().item() > i - 100 else 0)
        return x


class Rows(nn.Module):
    """How many rows there are to compute follows from values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))

    def forward(self, x):
        rows = (x.sum(1) > 0).nonzero().squeeze(1)
        return x.index_add(0, rows, self.layers(x[rows]))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x):
        return self.layers(x).float()


class Hooked(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(16, 16) for _ in range(20)))
        self.register_forward_hook(lambda module, args, output: None)


def said(model, devices=TWO, chunks=2):
    """The warnings of one compile, and the report."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with fxpipe.compile(
            model, devices, chunks=chunks, example_inputs=(torch.randn(4, 8),)
        ) as pipe:
            report = pipe.report()
            pipe.eval()(torch.randn(4, 8))  # another mode: it has been said
    found = [str(each.message) for each in told]
    return [text for text in found if "times as fast as one" in text], report


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("part", "name", "reason", "remedy"),
    [
        (Layers, "'part_lstm' (LSTM, ", "LSTM is called as a whole", "several such modules"),
        (partial(Layers, 0.5), "'part_lstm' (LSTM, ", "LSTM is called as a whole", "several such"),
        (Experts, "'part' (Experts, ", "what it does depends on values", "masks and torch.where"),
        (
            Rows,
            "'values_0' (in part, test_pieces.py, ",
            "sizes within it depend on values",
            "masks and",
        ),
        (
            Checkpointed,
            "_checkpoint' (in part.layers, test_pieces.py, ",
            "the model checkpoints it",
            "smaller parts",
        ),
        (
            Mixed,
            "(in part, test_pieces.py, line ",
            "under a torch.autocast of its own",
            "call the pipeline",
        ),
        (Hooked, "'part' (Hooked, ", "a module with hooks is called as", "on its submodules"),
    ],
)
def test_a_pipeline_whose_largest_piece_takes_most_of_the_time_says_so(part, name, reason, remedy):
    (text,), report = said(Between(part()))
    for each in (text, report):
        assert name in each and reason in each and remedy in each
        assert "test_pieces.py, line " in each
    assert text.startswith("2 stages can be at most 1.")


def test_the_line_is_the_models():
    (text,), _ = said(Between(Hooked()))
    assert f"(Hooked, test_pieces.py, line {LINE}) takes 9" in text


def test_nodes_that_write_to_one_memory_stay_together_for_that_reason():
    class Writes(nn.Module):
        def forward(self, x):
            x = x * 1
            first, second = x[:, :8], x[:, 8:]
            for _ in range(10):
                first.add_(second.exp())
                second.add_(first.exp())
            return x

    (text,), _ = said(Between(Writes()))
    assert "more that stay with it take 8" in text
    assert "since they share memory that is written to; write x = x + y where the model " in text


def test_a_block_without_gradients_has_a_name_that_a_user_knows():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))

        def forward(self, x):
            with torch.no_grad():
                y = self.layers(x)
            return x + y

    example = (torch.randn(4, 8),)
    with fxpipe.compile(
        Between(Frozen()), TWO, chunks=2, tracer="export", example_inputs=example
    ) as pipe:
        names = [Piece([node], 1.0).name for node in stage_nodes(pipe.model_graph.graph)]
    assert "a block without gradients (in part)" in names
    assert not any("wrap_with" in name for name in names)


def test_an_even_model_compiles_without_a_word():
    told, report = said(Between(nn.Linear(16, 16)))
    assert not told and "in one piece" not in report


def test_where_there_are_too_few_pieces_the_largest_is_named():
    with pytest.raises(PartitionError) as raised:
        said(Between(Hooked()), ["cpu"] * 4)
    text = str(raised.value)
    assert "can be cut into 3, no more: it has 3 nodes" in text
    assert "'part' (Hooked, test_pieces.py, line " in text
    assert "of the time in one piece (a module with hooks is called as a whole; put the " in text
    assert (
        "give 3 devices, or fewer; a schedule with several stages on each device, such as zbv,"
        in text
    )
    with pytest.raises(PartitionError, match=r"give 1 device; a schedule with several"):
        said(nn.Sequential(nn.Linear(8, 8)), TWO)
