"""Losses that are means over tokens: each micro-batch counts by how many it has."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe import loss_weight
from fxpipe.schedule import NAMES, Kind, named
from tests.zoo import gradients, same

TWO = ["cpu", "cpu"]
IGNORED = -100


def labelled(rows=8, length=6, classes=11):
    """Of uneven numbers of labels that count; the last two rows have none."""
    ids = torch.randint(0, classes, (rows, length))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % (length + 1)] = IGNORED
    labels[-2:] = IGNORED
    return ids, labels


class Tokens(nn.Module):
    """Predicts labels, and returns the mean over those that count."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.a, self.b = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 11)
        self.reduction = reduction

    def forward(self, ids, labels=None):
        logits = self.d(torch.tanh(self.c(torch.tanh(self.b(self.a(ids))))))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return {"loss": loss, "logits": logits}


def logits_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted(labels):
    return (labels != IGNORED).sum()


def loop(model, parts, loss_of, order):
    """The losses of the micro-batches, weighted by their tokens, and their sum.

    ``order``: in which micro-batches go back.
    """
    weights = [int(counted(labels)) for _, labels in parts]
    share = [weight / sum(weights) for weight in weights]
    losses = [loss_of(model, part) for part in parts]
    for i in order:
        if share[i]:
            losses[i].backward(torch.tensor(share[i]).to(losses[i]))
    terms = [loss.detach() * by for loss, by in zip(losses, share, strict=True) if by]
    return sum(terms[1:], terms[0])


def of_the_model(model, part):
    return model(*part)["loss"]


def of_a_function(model, part):
    return logits_loss(model(part[0]), part[1])


def parts_of(ids, labels, chunks):
    return list(zip(ids.tensor_split(chunks), labels.tensor_split(chunks), strict=True))


@pytest.mark.parametrize("weight", [loss_weight.tokens(), lambda labels, **_: counted(labels)])
def test_a_loss_over_tokens_is_the_models_own(weight):
    model, (ids, labels) = Tokens(), labelled()
    twin = copy.deepcopy(model)
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_weight=weight) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        output, expected = pipe(ids, labels=labels), twin(ids, labels)
        torch.testing.assert_close(output["loss"], expected["loss"])
        output["loss"].backward()
        expected["loss"].backward()
        torch.testing.assert_close(gradients(model), gradients(twin))
        assert torch.equal(output["logits"], twin(ids))
        torch.testing.assert_close(pipe(ids), twin(ids))  # without labels there is no loss


def test_its_bits_are_those_of_the_weighted_loop():
    model, (ids, labels) = Tokens(), labelled()
    twin = copy.deepcopy(model)
    with fxpipe.compile(model, TWO, chunks=4, loss_weight=loss_weight.tokens()) as pipe:
        loss = pipe(ids, labels)["loss"]
        loss.backward()
    expected = loop(twin, parts_of(ids, labels, 4), of_the_model, [3, 2, 1, 0])
    assert same(loss.detach(), expected)
    assert same(gradients(model), gradients(twin))


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("own", [True, False], ids=["own loss", "loss_fn"])
def test_a_step_of_every_schedule_is_the_models_own(schedule, own):
    model, (ids, labels) = Tokens(), labelled(16)
    twin = copy.deepcopy(model)
    weight = loss_weight.tokens() if own else counted
    loss_fn = None if own else logits_loss
    with (
        fxpipe.compile(
            model, TWO, chunks=4, schedule=schedule, loss_fn=loss_fn, loss_weight=weight
        ) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        loss = pipe.step(ids, labels) if own else pipe.step(ids, target=labels)
    expected = logits_loss(twin(ids), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients(model), gradients(twin))


@pytest.mark.parametrize("own", [True, False], ids=["own loss", "loss_fn"])
def test_a_steps_bits_are_those_of_the_weighted_loop(own):
    model, (ids, labels) = Tokens(), labelled()
    twin = copy.deepcopy(model)
    weight = loss_weight.tokens() if own else counted
    loss_fn = None if own else logits_loss
    with fxpipe.compile(model, TWO, chunks=4, loss_fn=loss_fn, loss_weight=weight) as pipe:
        loss = pipe.step(ids, labels) if own else pipe.step(ids, target=labels)
    schedule = named("gpipe", lanes=2, microbatches=4)
    backwards = [a for a in schedule.actions(0) if a.kind is Kind.BACKWARD]
    order = [action.microbatch for action in backwards]
    loss_of = of_the_model if own else of_a_function
    expected = loop(twin, parts_of(ids, labels, 4), loss_of, order)
    assert same(loss, expected)
    assert same(gradients(model), gradients(twin))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_micro_batch_without_labels_adds_nothing(checkpoint):
    """Its loss is no number, and zero times that is none either."""
    model, (ids, labels) = Tokens(), labelled()
    options = {"loss_weight": loss_weight.tokens(), "checkpoint": checkpoint}
    with fxpipe.compile(model, TWO, chunks=4, **options) as pipe:
        assert pipe.step(ids, labels).isfinite()
        assert pipe.losses[-1].isnan() and pipe.losses[0].isfinite()
        assert all(grad.isfinite().all() for grad in gradients(model))
        model.zero_grad()
        pipe(ids, labels)["loss"].backward()
        assert all(grad.isfinite().all() for grad in gradients(model))


def test_a_mini_batch_without_labels_is_refused_ahead_of_its_gradients():
    """What to do instead is a condition in the training loop."""
    model, (ids, labels), weight = Tokens(), labelled(), loss_weight.tokens()
    with fxpipe.compile(model, TWO, chunks=4, loss_weight=weight) as pipe:
        pipe.step(ids, labels)
        before = copy.deepcopy(gradients(model))
        nothing = torch.full_like(labels, IGNORED)
        with pytest.raises(ValueError, match="0 for every micro-batch") as caught:
            pipe.step(ids, nothing)
        assert same(gradients(model), before)
        assert any("if any, have added their gradients" in note for note in caught.value.__notes__)
    assert "if loss_weight(target) > 0" in str(caught.value)
    assert not weight(ids=ids, labels=nothing) > 0 and weight(ids=ids, labels=labels) > 0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "many", torch.ones(2)])
def test_a_weight_has_to_be_a_number(weight):
    model, (ids, labels) = Tokens(), labelled()
    with (
        fxpipe.compile(model, TWO, chunks=4, loss_weight=lambda **_: weight, check=False) as pipe,
        pytest.raises(ValueError, match="for micro-batch 0: give a number"),
    ):
        pipe(ids, labels)


def test_the_warning_names_what_makes_it_right():
    (ids, labels), says = (
        labelled(),
        r'loss_weight=fxpipe\.loss_weight\.tokens\("labels"\)',
    )
    with fxpipe.compile(Tokens(), TWO, chunks=4) as pipe, pytest.warns(match=says):
        pipe(ids, labels)


def test_the_report_names_it_where_the_example_leaves_out_no_labels():
    """Later batches may: the program is the same."""
    ids, _ = labelled()
    with (
        fxpipe.compile(Tokens(), TWO, chunks=4) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        pipe(ids, ids)
        says = "as long as no labels are -100; for those that are, give loss_weight=fxpipe.loss_"
        assert says + 'weight.tokens("labels")' in pipe.report()
    with fxpipe.compile(Tokens(), TWO, chunks=4, loss_weight=loss_weight.tokens()) as pipe:
        pipe(ids, ids)
        assert "as long as" not in pipe.report()


def test_so_does_that_of_a_loss_function():
    (ids, labels), says = labelled(), r"loss_weight=fxpipe\.loss_weight\.tokens\(\)"
    with (
        fxpipe.compile(Tokens(), TWO, chunks=4, loss_fn=logits_loss) as pipe,
        pytest.warns(match=says),
    ):
        pipe.step(ids, target=labels)


def test_a_mask_may_be_what_counts():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, mask):
            each = self.b(torch.tanh(self.a(x))).square().mean(1)
            return (each * mask).sum() / mask.sum()

    model, x, mask = Masked(), torch.randn(6, 4), torch.tensor([1.0, 0, 0, 1, 1, 1])
    says = r"loss_weight=lambda mask, \*\*_: mask\.sum\(\)"
    with fxpipe.compile(model, TWO, chunks=2) as pipe, pytest.warns(match=says):
        pipe(x, mask)
    with fxpipe.compile(model, TWO, chunks=2, loss_weight=lambda mask, **_: mask.sum()) as pipe:
        torch.testing.assert_close(pipe(x, mask), model(x, mask))


def test_weights_that_are_not_the_models_are_warned_of():
    (ids, labels) = labelled()
    with (
        fxpipe.compile(Tokens(), TWO, chunks=4, loss_weight=lambda **_: 1) as pipe,
        pytest.warns(fxpipe.BatchWarning, match="not the mean that loss_weight says"),
    ):
        pipe(ids, labels)


@pytest.mark.parametrize(
    ("reduction", "weight", "says"),
    [
        ("sum", loss_weight.tokens(), "is a sum over the rows, and loss_weight weighs means"),
        (
            "sum",
            "rows",
            "is a sum over the rows, and loss_weight='rows' says that it is a mean: give "
            "loss_weight='sum', or let the loss be a mean",
        ),
        (
            "mean",
            "sum",
            "is a mean over the rows, and loss_weight='sum' says that it is a sum: give "
            "loss_weight='rows', or let the loss be a sum",
        ),
    ],
)
def test_a_contradiction_is_refused(reduction, weight, says):
    ids, labels = labelled()
    labels = labels if reduction == "sum" else ids  # where all count, it is a mean over the rows
    with (
        fxpipe.compile(Tokens(reduction), TWO, chunks=4, loss_weight=weight) as pipe,
        pytest.raises(fxpipe.BatchError, match=says),
    ):
        pipe(ids, labels)
    summed = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction=reduction)  # noqa: E731
    with (
        fxpipe.compile(Tokens(), TWO, chunks=4, loss_fn=summed, loss_weight=weight) as pipe,
        pytest.raises(fxpipe.BatchError, match=f"loss_fn {says}"),
    ):
        pipe.step(ids, target=labels)


def test_a_mean_over_labels_that_is_said_to_be_a_sum_is_told_what_it_is():
    ids, labels = labelled()
    means = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    with (
        fxpipe.compile(Tokens(), TWO, chunks=4, loss_fn=means, loss_weight="sum") as pipe,
        pytest.warns(fxpipe.BatchWarning, match=r"not the sum.*loss_weight.tokens\(\)"),
    ):
        pipe.step(ids, target=labels)


@pytest.mark.parametrize("weight", ["mean", 3, [1, 2]])
def test_a_loss_weight_is_a_function_or_a_word(weight):
    with pytest.raises(TypeError, match=r"loss_weight is .*: give a function of the target"):
        fxpipe.compile(Tokens(), TWO, loss_weight=weight)


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (
            loss_weight.tokens,
            r"call it, as in loss_weight=fxpipe\.loss_weight\.tokens\(ignore_index=-100",
        ),
        (loss_weight.observed, r"call it, as in loss_weight=fxpipe\.loss_weight\.observed\(\)"),
    ],
)
@pytest.mark.parametrize("loss_fn", [None, F.cross_entropy])
def test_what_makes_a_function_that_counts_is_to_be_called(weight, says, loss_fn):
    with pytest.raises(TypeError, match=says):
        fxpipe.compile(Tokens(), TWO, loss_weight=weight, loss_fn=loss_fn)


def test_an_error_of_a_loss_weight_says_in_words_what_was_computed():
    ids, labels = labelled()
    with (
        fxpipe.compile(Tokens(), TWO, chunks=4, loss_weight=loss_weight.tokens()) as pipe,
        pytest.raises(ValueError, match="loss_weight gives 0 for every micro-batch") as raised,
    ):
        pipe.step(ids, torch.full_like(labels, IGNORED))
    assert raised.value.__notes__ == [
        "in fxpipe: while loss_weight was asked by how much the loss of each micro-batch counts "
        "(node 'weights')"
    ]


def test_explain_says_of_a_last_batch_of_one_row_what_it_says_of_others():
    ids, labels = labelled()
    loss_fn = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    options = {"loss_fn": loss_fn, "loss_weight": loss_weight.tokens()}
    with fxpipe.compile(Tokens(), TWO, chunks=4, **options) as pipe:
        for rows in (len(ids), 1):
            pipe.step(ids[:rows], target=labels[:rows])
            found = " ".join(str(pipe.explain()).split())
            assert "averaged with the weights that loss_weight gives" in found
            assert "taken for a mean" not in found


def of_four_rows(output, target):
    if len(output) != 4:
        raise ValueError("four rows, please")
    return (output - target).square().sum()


def test_a_loss_that_cannot_be_asked_is_refused_with_what_settles_it():
    model, x, y = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        torch.randn(8, 4),
        torch.randn(8, 4),
    )
    with (
        fxpipe.compile(model, TWO, chunks=2, loss_fn=of_four_rows) as pipe,
        pytest.raises(fxpipe.BatchError, match=r'rows, please\. Give loss_weight="rows"'),
    ):
        pipe.step(x, target=y)
    for check in ("warn", False):
        with (
            fxpipe.compile(model, TWO, chunks=2, loss_fn=of_four_rows, check=check) as pipe,
            pytest.warns(fxpipe.BatchWarning, match="four rows, please"),
        ):
            pipe.step(x, target=y)
    whole = (model(x) - y).square().sum().detach()
    for weight, part in (("sum", 1.0), ("rows", 0.5)):
        with fxpipe.compile(model, TWO, chunks=2, loss_fn=of_four_rows, loss_weight=weight) as pipe:
            torch.testing.assert_close(pipe.step(x, target=y), whole * part)


def test_a_loss_of_which_all_values_are_zero_says_nothing():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    with (
        fxpipe.compile(
            model, TWO, chunks=2, loss_fn=lambda out, _: F.relu(out.square() - 1e6).sum()
        ) as pipe,
        pytest.raises(fxpipe.BatchError, match="the same either way"),
    ):
        pipe.step(x)


def test_the_ready_made_functions():
    labels = torch.tensor([[1, IGNORED, 2], [IGNORED, 3, 4]])
    assert loss_weight.tokens()(labels) == 4
    assert loss_weight.tokens(shifted=True)(labels) == 3
    assert loss_weight.tokens("y", ignore_index=1)({"y": labels}) == 5
    assert loss_weight.tokens("y")(x=None, y=labels) == 4
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    assert loss_weight.observed()(values) == 3
    assert loss_weight.observed("y")({"y": values}) == 3
    assert loss_weight.observed()(x=None, target=values) == 3
    for each in loss_weight.tokens("y"), loss_weight.observed("y"):
        assert pickle.loads(pickle.dumps(each)) == each


def test_values_cannot_be_counted_where_it_is_not_said_which():
    values = torch.zeros(2)
    with pytest.raises(ValueError, match=r"a tuple of 2: .*lambda target: \(~target\[0\].isnan"):
        loss_weight.observed()((values, values))
    with pytest.raises(
        ValueError, match=r"the values in 'target', and there are 'y': .*observed\("
    ):
        loss_weight.observed()({"y": values})


def test_a_language_model_of_transformers():
    """Its labels are shifted; the unpipelined loss is the mean over all that are not masked."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    twin = copy.deepcopy(model)
    ids, labels = labelled(8, 10, 31)
    says = r'loss_weight=fxpipe\.loss_weight\.tokens\("labels", shifted=True\)'
    with fxpipe.compile(model, TWO, chunks=4) as pipe, pytest.warns(match=says):
        pipe(ids, labels=labels)
    weight = loss_weight.tokens("labels", shifted=True)
    with (
        fxpipe.compile(model, TWO, chunks=4, schedule="1f1b", loss_weight=weight) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", fxpipe.BatchWarning)
        loss = pipe(input_ids=ids, labels=labels).loss
        expected = twin(input_ids=ids, labels=labels).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(gradients(model), gradients(twin))
        model.zero_grad()
        torch.testing.assert_close(pipe.step(input_ids=ids, labels=labels), expected.detach())
        torch.testing.assert_close(gradients(model), gradients(twin))


def of_groups(reduction):
    """The loss of answers in groups of four, of which each is compared with its group: a mean over
    the tokens of a mask, over the rows, or a sum."""

    def loss(output, target):
        rewards = target["rewards"].view(-1, 4)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
        each = -(output.log_softmax(1) * advantages * target["mask"])
        of_all = {"mask": target["mask"].sum(), "rows": len(each), "sum": 1}
        return each.sum() / of_all[reduction]

    return loss


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("reduction", "weight", "says"),
    [
        ("mask", "rows", "not the mean over the rows that loss_weight='rows' says"),
        ("mask", "sum", "not the sum over the rows that loss_weight='sum' says"),
        ("mask", lambda target: target["rewards"].square().sum(), "not the mean that loss_weight"),
        ("mask", lambda target: target["mask"].sum(), ""),
        ("rows", "rows", ""),
        ("sum", "sum", ""),
    ],
)
@pytest.mark.parametrize("chunks", [2, 8])
def test_what_is_said_of_a_loss_of_groups_is_checked_with_sizes_that_it_takes(
    reduction, weight, says, chunks
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    target = {"rewards": torch.randn(32), "mask": (torch.rand(32, 5) > torch.rand(32, 1)).float()}
    pipe = fxpipe.compile(
        model, TWO, chunks=chunks, loss_fn=of_groups(reduction), loss_weight=weight
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(torch.randn(32, 6), target=target)
    assert len(caught) == bool(says)
    assert says in "".join(str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("reduction", "weight", "says"), [("sum", "rows", "is a sum"), ("rows", "sum", "is a mean")]
)
def test_a_wrong_word_for_a_loss_of_groups_is_refused(reduction, weight, says):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    target = {"rewards": torch.randn(16), "mask": torch.ones(16, 5)}
    pipe = fxpipe.compile(model, TWO, chunks=4, loss_fn=of_groups(reduction), loss_weight=weight)
    with pytest.raises(fxpipe.BatchError, match=says):
        pipe.step(torch.randn(16, 6), target=target)
