"""A tensor of the target that has no row for each row of the batch, such as a weight for each
class, but as many elements as the batch has rows: it would be cut into micro-batches with the rows,
so that a message names it, whatever ``loss_weight`` says.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import BatchError, BatchWarning

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
TARGET = {"y": (X > 0).float(), "pos_weight": torch.linspace(0.5, 3, 8)}
TWO = ["cpu", "cpu"]


def loss_of(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target["y"], pos_weight=target["pos_weight"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.mark.covering(1)
@pytest.mark.parametrize("weight", [None, "rows", "sum", lambda target: len(target["y"])])
@pytest.mark.parametrize("chunks", [4, 8])
def test_a_weight_for_each_of_as_many_classes_as_there_are_rows_is_refused(weight, chunks):
    with (
        fxpipe.compile(model(), TWO, chunks=chunks, loss_fn=loss_of, loss_weight=weight) as pipe,
        pytest.raises(
            BatchError,
            match=r"target\['pos_weight'\] has 8 elements along the first dimension, as many as "
            r"the batch has rows, so that it is cut.*only if each of them is given all of it",
        ),
    ):
        pipe.step(X, target=TARGET)


@pytest.mark.covering(1)
@pytest.mark.parametrize("weight", [None, "rows", lambda target: target["w"][target["y"]].sum()])
@pytest.mark.parametrize("chunks", [4, 8])
def test_a_weight_for_each_class_that_the_loss_takes_whole_only_is_refused(weight, chunks):
    """It is a mean by these weights, so that no mean over the rows tells."""

    def weighted(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, target["y"], weight=target["w"])

    with (
        fxpipe.compile(model(), TWO, chunks=chunks, loss_fn=weighted, loss_weight=weight) as pipe,
        pytest.raises(
            BatchError,
            match=r"target\['w'\] has 8 elements along the first dimension, as many as the batch "
            r"has rows, so that it is cut.*takes a micro-batch only if it is given all of it",
        ),
    ):
        pipe.step(X, target={"y": X.argmax(1), "w": torch.linspace(0.5, 3, 8)})


def test_a_loss_that_takes_groups_of_rows_is_not_said_to_need_them_whole():
    def of_groups(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (output.view(-1, 4, 8).mean(1).square().mean() - target["r"].view(-1, 4).mean()) ** 2

    target = {"y": X[:, 0].repeat(2), "r": torch.linspace(0.5, 3, 16)}
    with (
        fxpipe.compile(model(), TWO, chunks=4, loss_fn=of_groups, loss_weight="rows") as pipe,
        pytest.warns(BatchWarning, match="is not the mean over the rows"),
    ):
        pipe.step(X.repeat(2, 1), target=target)


def test_what_the_message_advises_works():
    def of_labels(output: Tensor, y: Tensor, pos_weight: Tensor) -> Tensor:
        return loss_of(output, {"y": y, "pos_weight": pos_weight})

    loss_fn = functools.partial(of_labels, pos_weight=TARGET["pos_weight"])
    one = model()
    with fxpipe.compile(one, TWO, chunks=4, loss_fn=loss_fn) as pipe:
        found = pipe.step(X, target=TARGET["y"])
    torch.testing.assert_close(found, loss_of(one(X), TARGET).detach())


def test_two_such_tensors_are_both_named():
    def of_both(output: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        y, pos_weight, scale = target
        return loss_of(output * scale, {"y": y, "pos_weight": pos_weight})

    target = TARGET["y"], TARGET["pos_weight"], torch.linspace(1, 2, 8)
    with (
        fxpipe.compile(model(), TWO, chunks=2, loss_fn=of_both) as pipe,
        pytest.raises(BatchError, match=r"target\[1\] and target\[2\] have 8 elements"),
    ):
        pipe.step(X, target=target)


def test_one_whose_parts_fit_is_warned_of_as_other_losses_are():
    """Its parts give another number. To look for the reason the model would have to run again."""

    def penalised(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, target["y"]) * (1 + target["pos_weight"].max())

    one = model()
    with (
        fxpipe.compile(one, TWO, chunks=2, loss_fn=penalised) as pipe,
        pytest.warns(BatchWarning, match="neither a mean over the rows nor a sum"),
    ):
        pipe.step(X, target=TARGET)


def test_rows_of_a_target_may_have_weights():
    def weighted(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return ((output - target["y"]).square().mean(1) * target["pos_weight"]).mean()

    one = model()
    with fxpipe.compile(one, TWO, chunks=2, loss_fn=weighted) as pipe:
        found = pipe.step(X, target=TARGET)
    torch.testing.assert_close(found, weighted(one(X), TARGET).detach())


def test_where_the_reason_is_not_found_the_message_names_what_was_cut_as_rows():
    def endless(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return loss_of(output, target) / 0

    with (
        fxpipe.compile(model(), TWO, chunks=8, loss_fn=endless) as pipe,
        pytest.raises(
            BatchError,
            match=r"target\['y'\] and target\['pos_weight'\] are cut into micro-batches as rows, "
            "because their first dimensions are as large as the batch",
        ),
    ):
        pipe.step(X, target=TARGET)


def test_a_single_micro_batch_is_given_all_of_it():
    one = model()
    with fxpipe.compile(one, TWO, chunks=1, loss_fn=loss_of) as pipe:
        found = pipe.step(X, target=TARGET)
    torch.testing.assert_close(found, loss_of(one(X), TARGET).detach())
