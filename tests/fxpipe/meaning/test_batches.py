"""The first mini-batch may be special: its rows have no padding, and as many boxes each. What a
loss means is checked with later ones, too."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.batches import Batches
from fxpipe.meaning.errors import BatchWarning

TWO = ["cpu"] * 2
IDS, LENGTH, ROWS = 20, 6, 8
FULL = torch.full((ROWS,), LENGTH)
UNEVEN = torch.tensor([6, 1, 2, 3, 6, 5, 1, 1])


def told(pipe: fxpipe.Pipeline, *inputs, **more) -> list[str]:
    """What a step warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BatchWarning)
        pipe.step(*inputs, **more)
    return [str(each.message) for each in caught]


def ids(lengths: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Rows of these lengths, filled up."""
    found = torch.randint(1, IDS, (ROWS, LENGTH))
    found[torch.arange(LENGTH) >= lengths[:, None]] = padding
    return found


# ------------------------------------------------------------------- which mini-batches are checked


@dataclass
class Found:
    is_told: bool = False


def test_the_distances_between_mini_batches_that_are_checked_grow() -> None:
    batches = Batches()
    assert [i for i in range(1, 600) if batches.are_due()] == [2, 8, 32, 128, 512]


def test_after_a_warning_none_is_checked() -> None:
    batches = Batches()
    assert batches.note(Found(is_told=True)).is_told
    assert not any(batches.are_due() for _ in range(40))


# ------------------------------------------------------ losses that later mini-batches tell apart


KEEP = torch.ones(IDS)
KEEP[0] = 0


def by_table(output, target):
    mask = KEEP[target]
    return (F.cross_entropy(output.transpose(1, 2), target, reduction="none") * mask).sum() / (
        mask.sum().clamp(min=1)
    )


def by_sign(output, target):
    mask = target.sign()
    return (F.cross_entropy(output.transpose(1, 2), target, reduction="none") * mask).sum() / (
        mask.sum().clamp(min=1)
    )


@pytest.mark.parametrize("loss_fn", [by_table, by_sign])
def test_a_mask_by_which_a_loss_compares_nothing_is_met_in_a_later_batch(loss_fn) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(IDS, 8), nn.Linear(8, IDS))
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn) as pipe:
        first, later = ids(FULL), ids(UNEVEN)
        assert not told(pipe, first, target=first)
        (said,) = told(pipe, later, target=later)
        assert "the loss is neither a mean over the rows nor a sum" in said
        assert not told(pipe, ids(UNEVEN.flip(0)), target=ids(UNEVEN.flip(0))), "it has been told"


def of_boxes(output, targets):
    count = sum(len(each["boxes"]) for each in targets)
    apart = zip(output, targets, strict=True)
    return sum((o - each["boxes"]).abs().sum() for o, each in apart) / max(count, 1)


def test_lists_of_uneven_lengths_are_met_in_a_later_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=of_boxes) as pipe:
        said = [
            told(pipe, torch.randn(ROWS, 6), target=[{"boxes": torch.randn(n, 4)} for n in counts])
            for counts in ([2] * ROWS, [2, 1, 3, 6, 0, 1, 1, 4])
        ]
        assert not said[0] and len(said[1]) == 1


class Reader(nn.Module):
    """Returns its loss; no name of an input says that it has labels."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.embed, self.head, self.ignored = nn.Embedding(IDS, 8), nn.Linear(8, IDS), ignored

    def forward(self, text, then):
        output = self.head(self.embed(text)).transpose(1, 2)
        return F.cross_entropy(output, then, ignore_index=self.ignored)


@pytest.mark.parametrize("ignored", [0, -100])
def test_a_model_that_returns_its_loss_is_checked_with_later_batches_too(ignored: int) -> None:
    torch.manual_seed(0)
    with fxpipe.compile(Reader(ignored), TWO, chunks=4) as pipe:
        assert not told(pipe, ids(FULL), ids(FULL))
        found = [each for _ in range(8) for each in told(pipe, ids(FULL), ids(UNEVEN, ignored))]
        assert len(found) == 1 and "output is neither a mean over the rows nor a sum" in found[0]


class Labelled(Reader):
    def forward(self, text, labels):
        return super().forward(text, labels)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(5))
def test_a_later_batch_is_checked_cut_as_the_model_has_been_compiled(seed: int) -> None:
    """The tokens are independent of each other, so that such a batch could be cut along its tokens:
    then all micro-batches have the same share of labels, and nothing would be told."""
    torch.manual_seed(seed)
    with fxpipe.compile(Labelled(-100), TWO, chunks=4) as pipe:
        text = ids(FULL)
        assert not told(pipe, text, text)
        labels = text.clone()
        labels[7] = -100
        (said,) = told(pipe, text, labels)
        assert 'loss_weight=fxpipe.loss_weight.tokens("labels")' in said


def test_nothing_is_told_of_a_loss_that_stays_a_mean_over_the_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=F.cross_entropy) as pipe:
        for _ in range(10):
            assert not told(pipe, torch.randn(ROWS, 6), target=torch.randint(5, (ROWS,)))


# ------------------------------------------------------------------------------------ a CTC loss


def ctc(output, target):
    """It compares its losses with infinity, which no label is."""
    logs = F.log_softmax(output, -1).transpose(0, 1)
    given = target["labels"], target["frames"], target["length"]
    loss = F.ctc_loss(logs, *given, reduction="sum", zero_infinity=True)
    return loss / target["length"].sum()


def test_a_loss_that_compares_with_infinity_is_told_of_with_what_makes_it_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))

    def batch(lengths):
        labels = torch.randint(1, 12, (ROWS, LENGTH))
        target = {"labels": labels, "frames": torch.full((ROWS,), 20), "length": lengths}
        return torch.randn(ROWS, 20, 8), target

    with fxpipe.compile(model, TWO, chunks=4, loss_fn=ctc) as pipe:
        x, target = batch(FULL)  # of which some may be shorter in a later batch
        (said,) = told(pipe, x, target=target)
        assert "inf" not in said
    weight = 'lambda target: target["length"].sum()'
    assert f"loss_weight={weight}" in said
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=ctc, loss_weight=eval(weight)) as pipe:
        assert math.isclose(pipe.step(x, target=target), ctc(model(x), target), rel_tol=1e-5)


def test_where_a_later_check_fails_the_next_step_checks_again(monkeypatch) -> None:
    from fxpipe.compiler import later_checks

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(IDS, 8), nn.Linear(8, IDS))

    def loss_fn(output, target):
        return F.cross_entropy(output.transpose(1, 2), target, ignore_index=0)

    def fails(*args):
        raise OverflowError("as in a bug of the check")

    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn) as pipe:
        first, later = ids(FULL), ids(UNEVEN)
        assert not told(pipe, first, target=first)
        with monkeypatch.context() as patch:
            patch.setattr(later_checks, "loss_dim", fails)
            with pytest.raises(OverflowError) as raised:
                pipe.step(later, target=later)
        assert "while it was checked once more" in raised.value.__notes__[0]
        assert len(told(pipe, later, target=later)) == 1


# ---------------------------------------------------------------- what a loss reads, and its target


class Counted(nn.Module):
    """The buffer is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, output, target):
        return F.cross_entropy(output, target) + 0.3 * self.steps * output.square().sum()


def test_a_buffer_of_a_loss_that_is_an_integer_is_noticed() -> None:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)), Counted()
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss) as pipe:
        for _ in range(3):  # the third one is not due
            assert not told(pipe, torch.randn(ROWS, 6), target=torch.randint(5, (ROWS,)))
        loss.steps += 1
        assert told(pipe, torch.randn(ROWS, 6), target=torch.randint(5, (ROWS,)))


def test_weights_of_classes_that_a_loss_had_not_are_noticed() -> None:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)), nn.NLLLoss()

    def loss_fn(output, target):
        return loss(output.log_softmax(-1), target)

    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn) as pipe:
        x, y = torch.randn(ROWS, 6), torch.tensor([0, 1, 2, 3, 4, 3, 4, 0])
        for _ in range(3):
            assert not told(pipe, x, target=y)
        loss.weight = torch.tensor([1.0, 1.0, 1.0, 5.0, 9.0])
        assert told(pipe, x, target=y)


def test_one_micro_batch_takes_a_target_of_any_shape() -> None:
    """The rows of a batch of graphs are its nodes, and there is a label for each graph."""

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, nodes, graph):
            found = torch.zeros(4, 8).index_add(0, graph, self.nodes(nodes).relu())
            return self.head(found)

    torch.manual_seed(0)
    model, nodes, graph = Graphs(), torch.randn(11, 6), torch.arange(11) % 4
    labels = torch.tensor([0, 1, 2, 1])
    with fxpipe.compile(model, TWO, chunks=1, loss_fn=F.cross_entropy) as pipe:
        loss = pipe.step(nodes, graph, target=labels)
        assert loss == F.cross_entropy(model(nodes, graph), labels)


def _masked(output, target):
    mask = (torch.arange(3)[None] < target["n"][:, None]).float()
    return ((output - target["y"]).square() * mask).sum() / mask.sum()


def _lengths(target):
    return target["n"].sum()


@pytest.mark.covering(1)
@pytest.mark.parametrize("loss_weight", [None, _lengths])
@pytest.mark.parametrize("sizes", [(16, 10), (16, 3), (3, 16), (16, 1, 20, 2)])
def test_a_later_mini_batch_may_have_fewer_rows_than_the_one_compiled_for(sizes, loss_weight):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    options = {"loss_fn": _masked, "loss_weight": loss_weight}
    with fxpipe.compile(model, TWO, chunks=4, **options) as pipe:
        for rows in sizes:
            x, y, n = torch.randn(rows, 6), torch.randn(rows, 3), torch.randint(1, 4, (rows,))
            loss = pipe.step(x, target={"y": y, "n": n})
            whole = _masked(model(x), {"y": y, "n": n})
            assert loss_weight is None or torch.allclose(loss, whole, rtol=1e-5)
