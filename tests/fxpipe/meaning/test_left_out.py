"""Labels that a loss leaves out are noticed when they come, also long after its check."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning
from fxpipe.meaning.left_out import (
    MOST,
    LabelCondition,
    LabelsLeftOut,
    LabelWatch,
    conditions_in,
    whatever_it_does,
)

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
    """Unless it is in a mini-batch that is checked in any case, as the second one is."""
    with pipeline(loss_of_tokens) as pipe:
        for where in ([], [], [(0, 1), (2, 1)], [(1, 0), (3, 2)]):
            x, y = batch(-100, where)
            assert told(lambda x=x, y=y: pipe.step(x, target=y)) == []


def test_the_label_is_the_one_that_the_loss_function_leaves_out():
    with pipeline(loss_with_padding) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, target={"labels": y})) == []
        x, y = batch(0, [(3, 1), (3, 2)])
        (text,) = told(lambda: pipe.step(x, target={"labels": y}))
        assert 'loss_weight=fxpipe.loss_weight.tokens("labels", ignore_index=0)' in text


def nll(output, labels):
    """The loss of each label."""
    found = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    return found.unflatten(0, labels.shape)


def mean_of_words(output, target):
    is_word = target != 0
    return (nll(output, target) * is_word).sum() / is_word.sum()


def mean_of_chosen(output, target):
    return nll(output, target.clamp(min=0))[target >= 0].mean()


def mean_of_nonzero(output, target):
    return nll(output, target)[target.bool()].mean()


def mean_of_compared_with_a_tensor(output, target):
    return nll(output, target)[target != torch.tensor(0)].mean()


@pytest.mark.parametrize(
    ("loss_fn", "label"),
    [
        (mean_of_words, 0),
        (mean_of_chosen, -1),
        (mean_of_nonzero, 0),
        (mean_of_compared_with_a_tensor, 0),
    ],
)
def test_a_mask_that_a_loss_makes_of_its_labels_is_noticed_when_it_first_masks_some(loss_fn, label):
    with pipeline(loss_fn) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, target=y)) == []
        x, y = batch(label, [(3, 1), (3, 2)])
        (text,) = told(lambda: pipe.step(x, target=y))
        assert "neither a mean over the rows" in text
        assert "loss_weight=" in text
        assert told(lambda: pipe.step(x, target=y)) == []


def mean_within_lengths(output, target):
    labels, lengths = target
    is_within = torch.arange(LENGTH) < lengths[:, None]
    return (nll(output, labels) * is_within).sum() / is_within.sum()


def test_lengths_that_are_all_equal_may_be_shorter_in_a_later_batch():
    with pipeline(mean_within_lengths) as pipe:
        x, y = batch()
        full, uneven = torch.tensor([3, 3, 3, 3]), torch.tensor([3, 3, 1, 2])
        (text,) = told(lambda: pipe.step(x, target=(y, full)))
        assert "loss_weight=lambda target: target[1].sum()" in text
        assert told(lambda: pipe.step(x, target=(y, uneven))) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [torch.ones(4, 3), torch.ones(4, 3, dtype=torch.long)])
@pytest.mark.parametrize("is_met", [lambda m: m == 1, lambda m: m > 0.5, lambda m: m.bool()])
def test_a_mask_in_which_all_count_has_others_in_which_some_do_not(mask, is_met):
    """And no values beside 0 and 1, by which a right ``loss_weight`` would be wrong."""

    def loss_fn(output, target):
        labels, mask = target
        counts = is_met(mask)
        return (nll(output, labels) * counts).sum() / counts.sum()

    x, y = batch()
    with pipeline(loss_fn, loss_weight=lambda target: target[1].sum()) as pipe:
        assert told(lambda: pipe.step(x, target=(y, mask))) == []


def test_full_lengths_do_not_make_a_right_weight_wrong():
    with pipeline(mean_within_lengths, loss_weight=lambda target: target[1].sum()) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, target=(y, torch.tensor([3, 3, 3, 3])))) == []


def apart(output, target):
    return (output.sum(-1) - target).abs()


def with_isnan(output, target):
    return apart(output, target)[~target.isnan()].mean()


def with_isfinite(output, target):
    return apart(output, target)[target.isfinite()].mean()


def with_itself(output, target):
    return apart(output, target).masked_select(target == target).mean()


def with_nanmean(output, target):
    return apart(output, target).nanmean()


def with_nansum(output, target):
    return apart(output, target).nansum() / (~target.isnan()).sum()


def with_great_ones(output, target):
    is_known = target.abs() < 100
    return torch.where(is_known, apart(output, target), 0.0).sum() / is_known.sum()


def told_of_later(pipe, rows, missing=torch.nan):
    """What is said of a batch of which some rows have few values, after one that has all."""
    torch.manual_seed(0)
    x, target = torch.randn(32, LENGTH, 4), torch.randn(32, LENGTH)
    assert told(lambda: pipe.step(x, target=target)) == []
    target[rows, 1:] = missing
    found = told(lambda: pipe.step(x, target=target))
    assert told(lambda: pipe.step(x, target=target)) == []
    return found


@pytest.mark.parametrize(
    "loss_fn", [with_isnan, with_isfinite, with_itself, with_nanmean, with_nansum]
)
def test_values_that_are_missing_are_noticed_whatever_tells_them(loss_fn):
    with pipeline(loss_fn) as pipe:
        assert len(told_of_later(pipe, slice(12, 32))) == 1


def test_values_far_from_all_others_are_noticed():
    with pipeline(with_great_ones) as pipe:
        assert len(told_of_later(pipe, slice(12, 32), -999.0)) == 1


@pytest.mark.parametrize("rows", [slice(0, 6), slice(26, 32), slice(9, 10), slice(1, 32)])
def test_a_few_rows_that_differ_from_all_others_are_in_the_sample(rows):
    with pipeline(with_isnan) as pipe:
        assert len(told_of_later(pipe, rows)) == 1


def test_a_few_rows_that_differ_are_in_the_sample_of_the_first_batch_too():
    x, target = torch.randn(64, LENGTH, 4), torch.randn(64, LENGTH)
    target[9, 1:] = torch.nan
    with pipeline(with_isnan) as pipe:
        assert len(told(lambda: pipe.step(x, target=target))) == 1


def test_a_label_of_which_there_are_few_is_noticed_in_the_first_batch():
    """In a sample whose labels are drawn from all of them there is none."""

    def mean_but_for_two(output, target):
        is_word = target != 2
        return (nll(output, target) * is_word).sum() / is_word.sum()

    x, labels = (
        torch.randn(64, LENGTH, 4),
        torch.arange(64 * LENGTH).reshape(64, LENGTH) % 2 * 3 + 1,
    )
    labels[50, 1] = 2
    with pipeline(mean_but_for_two) as pipe:
        assert len(told(lambda: pipe.step(x, target=labels))) == 1
        assert told(lambda: pipe.step(x, target=labels)) == []


def test_a_mask_of_ones_is_noticed_in_the_first_batch():
    class Masked(Reader):
        def forward(self, x, y, counted):
            return (nll(self.layers(x), y) * counted).sum() / counted.sum()

    with fxpipe.compile(Masked(None), ["cpu"] * 2, chunks=2) as pipe:
        x, y = batch()
        (text,) = told(lambda: pipe.step(x, y, torch.ones(4, LENGTH)))
        assert "loss_weight=lambda counted, **_: counted.sum()" in text


def test_a_weight_that_was_right_for_the_first_batch_is_told_of_once_it_is_not():
    def mean_of_known(output, target):
        return nll(output, target.clamp(min=0))[target >= 0].mean()

    weight = fxpipe.loss_weight.tokens(ignore_index=-2)
    with pipeline(mean_of_known, loss_weight=weight) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, target=y)) == []
        x, y = batch(-1, [(3, 1), (3, 2)])
        (text,) = told(lambda: pipe.step(x, target=y))
        assert "not the mean that loss_weight says" in text
        assert told(lambda: pipe.step(x, target=y)) == []


def test_what_a_loss_compares_for_another_reason_is_no_cause_for_a_warning():
    """The loss of each row is another function of labels above two, and the mean is one over the
    rows all the same."""

    def weighted(output, target):
        return torch.where(target > 2, 2 * nll(output, target), nll(output, target)).mean()

    with pipeline(weighted) as pipe:
        for where in ([], [(3, 1)], [(0, 0), (0, 1)]):
            x, y = batch(3, where)
            assert told(lambda x=x, y=y: pipe.step(x, target=y)) == []


def test_a_loss_that_has_been_told_of_is_not_told_of_again():
    def over_all(output, target):
        is_word = target != 0
        return (nll(output, target) * is_word).sum() / is_word.sum().square()

    with pipeline(over_all) as pipe:
        x, y = batch()
        assert len(told(lambda: pipe.step(x, target=y))) == 1
        x, y = batch(0, [(3, 1), (3, 2)])
        assert told(lambda: pipe.step(x, target=y)) == []


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


def ignoring_zero(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=0)


class Reader(nn.Module):
    """A model that leaves labels out of its loss, as its ``loss_fn`` says."""

    def __init__(self, loss_fn):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, CLASSES))
        self.loss_fn = loss_fn

    def forward(self, x, labels):
        return self.loss_fn(self.layers(x), labels)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("loss_fn", [mean_of_words, ignoring_zero])
def test_a_model_whose_own_loss_makes_the_mask_is_told_of_too(loss_fn, tracer):
    with fxpipe.compile(Reader(loss_fn), ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        x, y = batch()
        assert told(lambda: pipe.step(x, labels=y)) == []
        x, y = batch(0, [(3, 1), (3, 2)])
        assert len(told(lambda: pipe.step(x, labels=y))) == 1


class OfKnown(nn.Module):
    """A model whose loss is a mean over the values that are not missing."""

    def __init__(self, is_multiplied):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, LENGTH))
        self.is_multiplied = is_multiplied

    def forward(self, x, y):
        is_known = ~y.isnan()
        if not self.is_multiplied:
            return (self.layers(x) - y)[is_known].abs().mean()
        y = torch.where(is_known, y, 0.0)
        return ((self.layers(x) - y).abs() * is_known).sum() / is_known.sum()


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_step", [True, False])
@pytest.mark.parametrize("is_multiplied", [True, False])
def test_values_missing_in_any_input_of_a_model_that_returns_its_loss_are_noticed(
    is_multiplied, is_step
):
    torch.manual_seed(0)
    x, y = torch.randn(32, 4), torch.randn(32, LENGTH)
    with fxpipe.compile(OfKnown(is_multiplied), ["cpu"] * 2, chunks=4) as pipe:
        call = pipe.step if is_step else pipe
        assert told(lambda: call(x, y)) == []
        y[:6, 1:] = torch.nan
        assert len(told(lambda: call(x, y))) == 1
        assert told(lambda: call(x, y)) == []


def test_missing_values_that_change_nothing_are_no_cause_for_a_warning():
    class Filled(OfKnown):
        def forward(self, x, y):
            return (self.layers(x.nan_to_num()) - y).abs().mean()

    x, y = torch.randn(32, 4), torch.randn(32, LENGTH)
    with fxpipe.compile(Filled(False), ["cpu"] * 2, chunks=4) as pipe:
        assert told(lambda: pipe.step(x, y)) == []
        x[:6, 1:] = torch.nan
        assert told(lambda: pipe.step(x, y)) == []


def test_conditions_are_read_from_a_graph():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(ignore_index=7)

        def forward(self, y, labels):
            known = F.cross_entropy(y, labels, ignore_index=255) + F.nll_loss(y, labels)
            is_word = (labels != 0) & (labels.lt(3)) & torch.ge(labels, 1)
            return self.criterion(y, labels) + known + (y[:, 0] * is_word).mean()

    found = list(conditions_in(fx.symbolic_trace(Model())))
    assert found == [
        LabelCondition("eq", 255, is_sure=True),
        LabelCondition("eq", -100, is_sure=True),
        LabelCondition("eq", 0),
        LabelCondition("lt", 3),
        LabelCondition("lt", 1),
        LabelCondition("eq", 7, is_sure=True),
    ]


def test_labels_that_are_all_equal_are_a_condition_and_what_is_far_from_others_is():
    def conditions(*values):
        return list(whatever_it_does(enumerate(values)))

    assert conditions(torch.tensor([3, 3]), None) == [LabelCondition("eq", 3, place=0)]
    assert conditions(torch.tensor([True, True])) == [LabelCondition("eq", 1, place=0)]
    assert conditions(None, torch.tensor([1.0, 1.0])) == [
        LabelCondition("endless", place=1),
        LabelCondition("eq", 1, place=1),
    ]
    assert conditions(torch.tensor([2, 5])) == [
        LabelCondition("lt", -1, place=0),
        LabelCondition("le", 8, place=0),
    ]
    assert conditions(torch.tensor([2.0, torch.nan])) == [LabelCondition("endless", place=0)]
    assert conditions(torch.tensor([True, False]), torch.tensor([4])) == []


def test_a_comparison_and_its_opposite_are_one_condition():
    labels = torch.tensor([1, 2, 3])
    with LabelsLeftOut() as found:
        for number in 2, 2.0:
            _ = (labels == number, labels != number, labels < number, labels >= number)
            _ = (labels <= number, labels > number, labels > labels)
        _ = (torch.tensor([3]) > labels, torch.tensor(3) >= labels, torch.tensor(3) == labels)
    assert list(found.conditions) == [
        LabelCondition("eq", 2),
        LabelCondition("lt", 2),
        LabelCondition("le", 2),
        LabelCondition("lt", 3),
        LabelCondition("le", 3),
        LabelCondition("eq", 3),
    ]


@pytest.mark.parametrize(
    "call, conditions",
    [
        (lambda y: y.clamp(0, 1), [LabelCondition("le", 0), LabelCondition("lt", 1)]),
        (lambda y: y.clamp(max=1), [LabelCondition("lt", 1)]),
        (lambda y: y.clamp_min(0), [LabelCondition("le", 0)]),
        (lambda y: y.logical_not(), [LabelCondition("eq", 0)]),
        (lambda y: y.count_nonzero(), [LabelCondition("eq", 0)]),
        (lambda y: torch.isin(y, torch.tensor([7, 9])), [LabelCondition("eq", i) for i in (7, 9)]),
        (lambda y: y.isnan(), [LabelCondition("isnan")]),
        (lambda y: y * 2, []),
    ],
)
def test_what_makes_a_mask_of_labels_is_a_condition(call, conditions):
    with LabelsLeftOut() as found:
        call(torch.tensor([1.0, 2.0]))
    assert list(found.conditions) == conditions


def test_of_many_conditions_the_first_are_looked_at_and_those_that_are_sure():
    conditions = [LabelCondition("eq", number) for number in range(100)]
    conditions.append(LabelCondition("eq", -100, is_sure=True))
    for label, is_met in (0, True), (MOST - 1, True), (MOST, False), (-100, True):
        assert LabelWatch(conditions).meets([(torch.tensor([label, 500]), 0)], (1, 1)) is is_met


def test_losses_that_are_sums_leave_nothing_out_of_a_mean():
    output, labels = torch.randn(4, CLASSES), torch.tensor([1, 2, 3, 4])
    with LabelsLeftOut() as found:
        F.cross_entropy(output, labels, reduction="sum", ignore_index=7)
        F.mse_loss(output, output)
        assert not found.conditions
        F.nll_loss(output, labels, ignore_index=255)
    assert list(found.conditions) == [LabelCondition("eq", 255, is_sure=True)]


def test_labels_may_have_their_rows_in_any_dimension():
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, 3, -1]])
    assert LabelWatch([LabelCondition("eq", -1)]).meets([(labels, 1)], (2, 2))
    assert not LabelWatch([LabelCondition("eq", -1)]).meets([(labels[:, 3:], 1)], (1,))


def test_values_that_cannot_be_labels_are_passed_over():
    values = [torch.tensor([-1 + 0j, 1]), torch.tensor([-1, 1], device="meta"), None]
    assert not LabelWatch([LabelCondition("eq", -1)]).meets(
        [(value, 0) for value in values], (1, 1)
    )
