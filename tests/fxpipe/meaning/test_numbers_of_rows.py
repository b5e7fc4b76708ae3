"""Models in which rows have a whole number each (a class, a step of a diffusion, a group, a flag),
and what the model does with one row depends on the numbers of others: those of the first row, the
sum, the median. Whole numbers are often equal by chance, also those of two parts of a sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.sample import LEVELS, MIXED, OF_LABELS, OF_TWINS, sampled
from fxpipe.meaning.trial import TRIALS

ROWS, CLASSES = 16, 50


class Model(nn.Module):
    """Values of rows, and what ``of_numbers`` makes of them with the numbers ``g`` of all rows."""

    def __init__(self, of_numbers):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), nn.Embedding(CLASSES, 4)
        self.of_numbers = of_numbers

    def forward(self, x, g):
        return self.of_numbers(self.layer(x), g, lambda index: self.table(index.long()))


FIRST_ROW = {
    "g[0]": lambda h, g, table: h * (1 + g[0]),
    "table(g[0])": lambda h, g, table: h + table(g[0]),
    "table(g[:1])": lambda h, g, table: h + table(g[:1]),
    "g == g[0]": lambda h, g, table: h * (g == g[0])[:, None],
    "g <= g[0]": lambda h, g, table: h * (g <= g[0])[:, None],
    "g > g[0]": lambda h, g, table: h * (g > g[0])[:, None],
    "changes so far": lambda h, g, table: h + table((g != g[0]).cumsum(0)),
    "the row before": lambda h, g, table: h + table(torch.cat([g[:1], g[:-1]])),
    "the first one of its kind": lambda h, g, table: (
        h * torch.cat([g[:1] == g[:1], g[1:] != g[:-1]])[:, None]
    ),
    "a new largest": lambda h, g, table: h * (g == g.cummax(0).values)[:, None],
}
ALL_ROWS = {
    "median": lambda h, g, table: h * (g == g.median())[:, None],
    "sum": lambda h, g, table: h * (g / g.sum().clamp(min=1))[:, None],
    "largest": lambda h, g, table: h * (g == g.max())[:, None],
    "any zero": lambda h, g, table: torch.where((g == 0).any(), h, -h),
    "the other end": lambda h, g, table: h + table(g.flip(0)),
    "the row before, in a circle": lambda h, g, table: h + table(g.roll(1)),
    "the second row": lambda h, g, table: h + table(g[1] if len(g) > 1 else g[0]),
    "how many are equal": lambda h, g, table: h * (g[:, None] == g).sum(1, keepdim=True),
}
NUMBERS = {
    "classes": torch.tensor([2, 0, 2, 0, 1, 0, 1, 1, 1, 0, 2, 2, 0, 0, 1, 2]),
    "all different": torch.arange(ROWS),
    "flags": torch.arange(ROWS) % 3 % 2,
    "mostly ones": (torch.arange(ROWS) != 5).long(),
    "flags as real numbers": (torch.arange(ROWS) % 3 > 0).float(),
    "all 0": torch.zeros(ROWS, dtype=torch.long),
    "all 1": torch.ones(ROWS, dtype=torch.long),
    "all 7": torch.full((ROWS,), 7),
}


def is_refused(model: nn.Module, *inputs) -> bool:
    """Whether a pipeline refuses a call. If not, it has to give what the model gives."""
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe:
        try:
            found = pipe(*inputs)
        except fxpipe.BatchError:
            return True
        torch.testing.assert_close(found, model(*inputs))
        if len(inputs) > 1:  # other numbers than those of the example
            others = inputs[0], NUMBERS["classes"].to(inputs[1].dtype)
            torch.testing.assert_close(pipe(*others), model(*others))
    return False


@pytest.mark.covering(1)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("name", [*FIRST_ROW, *ALL_ROWS])
def test_a_model_that_looks_at_numbers_of_other_rows_is_right_or_refused(name: str, numbers):
    torch.manual_seed(0)
    is_refused(Model((FIRST_ROW | ALL_ROWS)[name]), torch.randn(ROWS, 4), numbers)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in FIRST_ROW if name != "table(g[0])"])
def test_so_is_one_that_looks_at_the_flag_of_the_first_row(name: str):
    flags = torch.arange(ROWS) % 3 > 0
    looks = {"g[0]": lambda h, g, table: h * g[0]}.get(name, FIRST_ROW[name])
    torch.manual_seed(0)
    is_refused(Model(looks), torch.randn(ROWS, 4), flags)


def weighed(h, w, table):
    """A mean with weights, of which each row has its share."""
    return h * (w / w.sum().clamp(min=1))[:, None]


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_a_mask_that_is_divided_by_its_sum_is_refused(dtype, is_scaled: bool):
    scaled = (lambda h, w, table: weighed(h, w, table) * len(w)) if is_scaled else weighed
    mask = (torch.arange(ROWS) % 3 > 0).to(dtype)
    for tracer in ("auto", "export"):
        torch.manual_seed(0)
        with (
            fxpipe.compile(Model(scaled), ["cpu"] * 2, chunks=4, tracer=tracer) as pipe,
            pytest.raises(fxpipe.BatchError),
        ):
            pipe(torch.randn(ROWS, 4), mask)


class Prompted(nn.Module):
    """Takes the first token of the first row for a task that all rows have."""

    def __init__(self, task):
        super().__init__()
        self.table, self.task = nn.Embedding(CLASSES, 4), task

    def forward(self, ids):
        return self.table(ids).tanh().mean(1) + self.table(self.task(ids))


@pytest.mark.covering(1)
@pytest.mark.parametrize("most", [2, 3, CLASSES])
@pytest.mark.parametrize(
    "task", [lambda ids: ids[0, 0], lambda ids: ids[:1, 0], lambda ids: ids.flatten()[0]]
)
def test_so_is_one_that_takes_a_token_of_the_first_row_for_all(task, most: int):
    for seed in range(4):
        torch.manual_seed(seed)
        is_refused(Prompted(task), torch.randint(most, (ROWS, 3)))


OWN = {
    "class": lambda h, g, table: h + table(g),
    "weight": lambda h, g, table: h * g[:, None],
    "flag": lambda h, g, table: torch.where(g[:, None] > 0, h, -h),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("of_its_own", OWN.values(), ids=OWN)
def test_a_model_that_looks_at_each_rows_own_number_is_taken(of_its_own, numbers):
    torch.manual_seed(0)
    assert not is_refused(Model(of_its_own), torch.randn(ROWS, 4), numbers)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("length", [1, 2, 7])
def test_sequences_that_are_all_full_are_packed(length: int):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 4, batch_first=True)

        def forward(self, x, lengths):
            options = {"batch_first": True, "enforce_sorted": False}
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, **options)
            return self.rnn(packed)[1][0]

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.packed, self.head = Packed(), nn.Linear(4, 2)

        def forward(self, x, lengths):
            return self.head(self.packed(x, lengths))

    model, x, lengths = Classifier(), torch.randn(ROWS, length, 4), torch.full((ROWS,), length)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe:
        torch.testing.assert_close(pipe(x, lengths), model(x, lengths))


SIZES = [(1, 3), (3, 4), (2, 4), (4, 4, 4, 4)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_samples_tell_the_numbers_of_their_parts_apart(numbers, sizes):
    first = sizes[0]
    for seed in set(range(TRIALS)) - {OF_LABELS}:
        found = sampled([numbers], [0], sizes, MIXED, seed)[0].tolist()
        most, last, start, rest = max(found), found[first - 1], found[first], found[first:]
        if seed in OF_TWINS:
            assert set(found[:first]) == {most} and most in rest, "both parts have the largest"
            assert start == min(found) < most, "one of the parts lacks the smallest"
            assert found[-1] < most
        else:
            assert found.count(most) == 1, "one of the parts lacks the largest"
            assert start == last, "the second part begins as the first one ends"


@pytest.mark.parametrize("level", LEVELS[:-1])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
@pytest.mark.parametrize("sizes", SIZES)
def test_samples_of_whole_rows_tell_their_parts_apart(sizes, shape, level: str):
    """Also where most of the example's rows have the largest number."""
    lengths = torch.full((ROWS,), 5)
    lengths[[3, 9]] = torch.tensor([2, 3])
    for seed in set(range(TRIALS)) - {OF_LABELS}:
        (found,) = sampled([lengths.reshape(shape)], [0], sizes, level, seed)
        assert found.shape == (sum(sizes), *shape[1:])
        if seed in OF_TWINS:
            assert found[0] == 5 and found[sizes[0]] < 5
        else:
            assert (found == 5).sum() == 1


@pytest.mark.parametrize("most", [2, 50])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_several_numbers_begin_with_others(sizes, dtype, most: int):
    """The second part has none of the first row's numbers in its own first and last row."""
    for seed in range(TRIALS):
        numbers = torch.randint(most, (ROWS, 3))
        numbers[0, :2] = torch.tensor([0, 1])  # so that they are not all equal as flags
        (found,) = sampled([numbers.to(dtype)], [0], sizes, MIXED, seed)
        assert (found[0] != found[sizes[0]]).all() and (found[0] != found[-1]).all()


class Masked(nn.Module):
    """Scales a layer by what a mask has in all rows."""

    def __init__(self, of_mask):
        super().__init__()
        self.layer, self.of_mask = nn.Linear(4, 4), of_mask

    def forward(self, x, mask):
        return self.layer(x) * self.of_mask(mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.bool])
@pytest.mark.parametrize("columns", [4, 40])
@pytest.mark.parametrize(
    "of_mask",
    [lambda mask: mask.float().amax(0)[:4], lambda mask: 1 + mask.bool().all(0)[:4].float()],
    ids=["any", "all"],
)
def test_a_mask_of_ones_of_which_all_rows_take_what_any_or_all_have_is_not_cut(
    of_mask, columns, dtype
):
    """In parts of several rows of a mask that is drawn at random each column has a one."""
    model = Masked(of_mask)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe:
        pipe(torch.randn(8, 4), torch.ones(8, columns, dtype=dtype))
        x, mask = torch.randn(8, 4), (torch.arange(8 * columns) % 3 == 0).reshape(8, -1).to(dtype)
        assert torch.equal(pipe(x, mask), torch.cat([model(part, mask) for part in x.chunk(4)]))
