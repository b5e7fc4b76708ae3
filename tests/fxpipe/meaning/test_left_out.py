"""Labels that a loss leaves out are noticed when they come, also long after its check."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning
from fxpipe.meaning.left_out import LabelsLeftOut, LabelWatch

CLASSES, LENGTH = 5, 3


def loss_of_tokens(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def loss_with_padding(output, target):
    return F.cross_entropy(output.flatten(0, 1), target["labels"].flatten(), ignore_index=0)


def pipeline(loss_fn, **options):
    return fxpipe.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES)),
        ["cpu"] * 2,
        chunks=2,
        schedule="1f1b",
        loss_fn=loss_fn,
        **options,
    )


def batch(left_out=None, where=()):
    """Inputs of four rows, and their labels, of which those at some places are left out."""
    torch.manual_seed(0)
    labels = torch.randint(1, CLASSES, (4, LENGTH))
    for place in where:
        labels[place] = left_out
    return torch.randn(4, LENGTH, 4), labels


def told(call):
    """The warnings of a call about what micro-batches mean."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, BatchWarning)]


def test_the_first_mini_batch_with_uneven_labels_left_out_is_told_of_and_no_other():
    with pipeline(loss_of_tokens) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, target=y)) == []
        x, y = batch(-100, [(3, 1), (3, 2)])
        (text,) = told(lambda: pipe.step(x, target=y))
        assert "loss_weight=fxpipe.loss_weight.tokens()" in text
        assert told(lambda: pipe.step(x, target=y)) == []


def test_labels_left_out_evenly_are_not_told_of():
    with pipeline(loss_of_tokens) as pipe:
        for where in ([], [(0, 1), (2, 1)], [(1, 0), (3, 2)]):
            x, y = batch(-100, where)
            assert told(lambda x=x, y=y: pipe.step(x, target=y)) == []


def test_the_label_is_the_one_that_the_loss_function_leaves_out():
    with pipeline(loss_with_padding) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, target={"labels": y})) == []
        x, y = batch(0, [(3, 1), (3, 2)])
        (text,) = told(lambda: pipe.step(x, target={"labels": y}))
        assert 'loss_weight=fxpipe.loss_weight.tokens("labels", ignore_index=0)' in text


@pytest.mark.parametrize("said", [{"loss_weight": "rows"}, {"check": False}])
def test_who_has_said_what_the_loss_means_is_not_told(said):
    with pipeline(loss_of_tokens, **said) as pipe:
        for where in ([], [(3, 1)]):
            x, y = batch(-100, where)
            assert told(lambda x=x, y=y: pipe.step(x, target=y)) == []


class Tagger(nn.Module):
    """A model that computes its loss itself, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))

    def forward(self, x, labels):
        return loss_of_tokens(self.layers(x), labels)


@pytest.mark.parametrize("is_step", [True, False])
def test_a_model_that_computes_its_loss_is_told_of_such_labels_too(is_step):
    with fxpipe.compile(Tagger(), ["cpu"] * 2, chunks=2) as pipe:
        call = pipe.step if is_step else pipe
        x, y = batch()
        assert told(lambda: call(x, labels=y)) == []
        x, y = batch(-100, [(3, 1), (3, 2)])
        (text,) = told(lambda: call(x, labels=y))
        assert re.search(r"loss_weight=fxpipe\.loss_weight\.tokens\(", text)
        assert told(lambda: call(x, labels=y)) == []


def test_losses_that_are_sums_leave_nothing_out_of_a_mean():
    output, labels = torch.randn(4, CLASSES), torch.tensor([1, 2, 3, 4])
    with LabelsLeftOut() as found:
        F.cross_entropy(output, labels, reduction="sum", ignore_index=7)
        F.mse_loss(output, output)
        assert found.labels == set()
        F.nll_loss(output, labels, ignore_index=255)
        assert found.labels == {255}


def test_labels_may_have_their_rows_in_any_dimension():
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, 3, -1]])
    assert LabelWatch([-1]).meets([(labels, 1)], (2, 2))
    assert not LabelWatch([-1]).meets([(labels[:, 3:], 1)], (1,))


def test_values_that_cannot_be_labels_are_passed_over():
    values = [torch.tensor([-1.0, 1.0]), torch.tensor([-1, 1], device="meta"), None]
    assert not LabelWatch([-1]).meets([(value, 0) for value in values], (1, 1))
