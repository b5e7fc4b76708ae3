"""One program serves calls with inputs of any length, height and width that it is right for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import BatchError, BatchWarning
from tests.zoo import gradients, same

TWO = ["cpu", "cpu"]


def compiled(model, **options):
    """A pipeline whose first program is already one for any sizes."""
    return fxpipe.compile(model, TWO, chunks=2, dynamic=True, **options)


class Attends(nn.Module):
    """A small language model, with a limit to the length of its sequences."""

    def __init__(self, longest=32):
        super().__init__()
        self.longest = longest
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(longest, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids):
        b, t = ids.size()
        assert t <= self.longest, "too long"
        x = self.tokens(ids) + self.places(torch.arange(t, device=ids.device))
        q, k, v = (p.view(b, t, 2, 4).transpose(1, 2) for p in self.qkv(x).split(8, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + y.transpose(1, 2).reshape(b, t, 8))


def of_length(length, rows=4):
    return torch.randint(20, (rows, length))


@pytest.mark.parametrize(
    ("dynamic", "programs"), [(None, 2), (True, 1), pytest.param(False, 7, marks=pytest.mark.long)]
)
def test_sequences_of_any_length_share_programs_whose_bits_are_those_of_the_loop(dynamic, programs):
    torch.manual_seed(0)
    model = Attends()
    reference = Attends()
    reference.load_state_dict(model.state_dict())
    with fxpipe.compile(model, TWO, chunks=2, dynamic=dynamic) as pipe:
        for length in 6, 7, 4, 2, 32, 3, 13:  # 4 is the number of rows, 2 that of a micro-batch
            ids = of_length(length)
            output = pipe(ids)
            parts = [reference(part) for part in ids.chunk(2)]
            assert same(output, torch.cat(parts)), length
            output.sum().backward()
            for part in reversed(parts):
                part.sum().backward()
            for ours, theirs in zip(gradients(model), gradients(reference), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            model.zero_grad()
            reference.zero_grad()
        assert len(pipe.all_guards) == programs
        assert pipe.front_end == "export"


def test_sizes_are_constants_until_another_shape_has_come_in_whatever_mode():
    model = Attends()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(of_length(6))
        assert "ids: int64 [*, 6]" in str(pipe.guards)
        model.eval()
        pipe(of_length(6, rows=8))
        assert "ids: int64 [*, 6]" in str(pipe.guards), "another mode and batch are no other size"
        pipe(of_length(7))
        assert "ids: int64 [*, *], ids.size(1) <= 32" in str(pipe.guards)
        model.train()
        pipe(of_length(9))
        assert "ids: int64 [*, *], ids.size(1) <= 32" in str(pipe.guards)
        for length in 6, 7, 20:
            for mode in True, False:
                pipe.train(mode)
                pipe(of_length(length))
        assert len(pipe.compilations) == 4
        assert pipe.compilations[2].why[0] == "shape of ids: (8, 6) → (4, 7)"


def test_other_sizes_are_remembered_when_programs_are_dropped():
    with fxpipe.compile(Attends(), TWO, chunks=2) as pipe:
        pipe(of_length(6))
        pipe(of_length(7))
        pipe.recompile()
        pipe(of_length(8))
        pipe(of_length(9))
        assert len(pipe.compilations) == 3


def test_anything_but_true_false_and_none_is_refused():
    with pytest.raises(ValueError, match="dynamic is 'yes': give True"):
        fxpipe.compile(Attends(), TWO, dynamic="yes")


def test_a_limit_of_the_model_is_a_guard_and_beyond_it_the_model_raises_its_own_error():
    with compiled(Attends(), example_inputs=(of_length(5),)) as pipe:
        assert "compiled for ids: int64 [*, *], ids.size(1) <= 32" in str(pipe.guards)
        said = pipe.guards.failure(of_length(33))
        assert said.startswith("sizes: ids.size(1) <= 32 does not hold for ids (4, 33) (needed by ")
        assert said.endswith('assert t <= self.longest, "too long")')
        with pytest.raises(AssertionError, match="too long"):
            pipe(of_length(33))


def test_a_step_of_another_length_takes_the_same_program():
    model = Attends()
    loss = nn.CrossEntropyLoss()
    with compiled(
        model, loss_fn=lambda output, ids: loss(output.flatten(0, 1), ids.flatten())
    ) as pipe:
        for length in 5, 9, 3:
            ids = of_length(length)
            model.zero_grad()
            pipe.step(ids, target=ids)
            ours = gradients(model)
            model.zero_grad()
            for part in reversed(ids.chunk(2)):
                (loss(model(part).flatten(0, 1), part.flatten()) / 2).backward()
            for one, other in zip(ours, gradients(model), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert len(pipe.all_guards) == 1


class Branches(nn.Module):
    """Python code that branches by a length: not for symbolic tracing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.b(self.a(x))
        return y * 2 if x.shape[1] > 8 else y


def test_each_branch_by_a_length_is_a_program_of_its_own():
    model = Branches()
    with compiled(model) as pipe:
        for length in 5, 12, 6, 30, 8, 9:
            x = torch.randn(4, length, 3)
            torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.all_guards) == 2
        short, long = map(str, pipe.all_guards)
        assert "x.size(1) <= 8" in short and "x.size(1) > 8" in long


class Masked(nn.Module):
    """A mask between positions, which all rows share."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, mask):
        assert mask.shape[0] == x.shape[1]
        y = self.a(x)
        weights = (y @ y.transpose(1, 2)).masked_fill(mask, -9.0).softmax(dim=-1)
        return self.b(weights @ y)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lengths", [(4, 7, 2, 5, 3), (7, 4, 3, 2, 5), (2, 6, 4)])
def test_a_length_may_be_the_number_of_rows_of_the_batch_or_of_a_micro_batch(lengths):
    torch.manual_seed(0)
    model = Masked()
    with compiled(model) as pipe:
        for length in lengths:
            x, mask = torch.randn(4, length, 6), torch.ones(length, length).triu(1) > 0
            parts = [model(part, mask) for part in x.chunk(2)]
            assert same(pipe(x, mask), torch.cat(parts)), length
        assert len(pipe.all_guards) == 1


class Coincides(nn.Module):
    """A model that takes another way where the length is the number of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.b(self.a(x))
        return y * 2 if x.shape[0] == x.shape[1] else y


@pytest.mark.parametrize("length", [6, 12])
def test_a_way_that_only_a_micro_batch_takes_or_only_the_mini_batch_is_refused(length):
    model = Coincides()
    with compiled(model) as pipe:
        x = torch.randn(12, 9, 6)
        torch.testing.assert_close(pipe(x), model(x))
        with pytest.raises(BatchError):
            pipe(torch.randn(12, length, 6))
        x = torch.randn(12, 8, 6)
        torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.all_guards) == 1


class Sevens(nn.Module):
    """A model that takes another way for seven rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.b(self.a(x))
        return y * 2 if x.shape[0] == 7 else y


def test_a_branch_that_only_micro_batches_take_is_refused():
    model = Sevens()
    with compiled(model) as pipe:
        x = torch.randn(8, 6)
        torch.testing.assert_close(pipe(x), model(x))
        with pytest.raises(BatchError):
            pipe(torch.randn(14, 6))


def test_a_mini_batch_that_alone_takes_a_branch_is_one_micro_batch_where_it_is_not_cut_evenly():
    model = Sevens()
    with compiled(model) as pipe:
        x = torch.randn(8, 6)
        torch.testing.assert_close(pipe(x), model(x))
        x = torch.randn(7, 6)
        with pytest.warns(BatchWarning, match="a mini-batch of 7 rows is one micro-batch"):
            torch.testing.assert_close(pipe(x), model(x))


def test_a_size_that_the_model_fixes_is_compiled_for_each_value_and_the_line_is_named():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, other):
            wide = other.shape[1] + len([None] * x.shape[1])  # a list is of a number of elements
            return self.b(self.a(x)) * wide, other * 2

    model = Table()
    with compiled(model) as pipe:
        for length, width in (3, 5), (3, 9), (4, 5), (4, 9), (3, 7):
            x, other = torch.randn(4, length, 4), torch.randn(4, width)
            for ours, theirs in zip(pipe(x, other), model(x, other), strict=True):
                torch.testing.assert_close(ours, theirs)
        assert len(pipe.all_guards) == 2, "one for each length, whatever the width"
        said = pipe.all_guards[0].failure(torch.randn(4, 6, 4), torch.randn(4, 5))
        assert said.startswith("shape of x: (4, 3, 4) → (4, 6, 4) (dimension 1 has to be 3: ")
        assert "[None] * x.shape[1]" in said


def test_a_size_of_one_is_a_constant():
    model = Attends()
    with compiled(model) as pipe:
        for length in 5, 1, 6, 1:
            ids = of_length(length)
            torch.testing.assert_close(pipe(ids), model(ids))
        assert len(pipe.all_guards) == 2
