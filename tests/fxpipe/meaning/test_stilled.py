"""Norms by statistics of the batch, while the check runs a model with fixed ones."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.stilled import Still
from tests.zoo import gradients

aten = torch.ops.aten


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)
        self.norm = norm

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.parametrize(
    "norm",
    [nn.InstanceNorm2d(4), lambda x: F.batch_norm(x, None, None, training=True)],
    ids=["instance norm", "batch norm without statistics"],
)
def test_a_model_with_a_norm_in_train_mode_is_checked_with_its_backward(norm):
    """The check fixed the statistics of the forward only, and the backward's kernel crashed."""
    torch.manual_seed(0)
    model, x = Normed(norm), torch.randn(8, 3, 9, 9)
    for part in x.chunk(4):
        (model(part).square().mean() / 4).backward()
    expected = gradients(model)
    model.zero_grad()
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, loss_fn=lambda y, _: y.square().mean()
    ) as pipe:
        pipe.step(x)
    torch.testing.assert_close(gradients(model), expected)


def by_channels(x):
    """Pictures as one row, whose channels are theirs, and back."""
    return x.transpose(0, 1)[None] if x.ndim == 4 else x[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("norm", "is_of_the_batch"),
    [
        (nn.InstanceNorm2d(4), False),
        (lambda x: F.batch_norm(x, None, None, training=True), True),
        (lambda x: by_channels(F.batch_norm(by_channels(x), None, None, training=True)), True),
    ],
    ids=["instance norm", "batch norm", "batch norm of one row"],
)
def test_the_report_names_statistics_of_the_batch_and_not_those_of_a_row(norm, is_of_the_batch):
    """PyTorch computes an instance norm as a batch norm, whose channels are those of all rows."""
    torch.manual_seed(0)
    with fxpipe.compile(Normed(norm), ["cpu"] * 2, chunks=4) as pipe:
        pipe(torch.randn(8, 3, 9, 9))
        assert ("batch statistics" in pipe.report()) is is_of_the_batch


def test_the_backward_of_a_norm_is_that_with_fixed_statistics():
    x, weight = torch.randn(5, 3, 4, 4, requires_grad=True), torch.randn(3)
    grad = torch.randn(5, 3, 4, 4)
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    y = F.batch_norm(x, mean, var, weight, training=False)
    (expected,) = torch.autograd.grad(y, x, grad)
    none = torch.empty(0)
    with Still():
        native = aten.native_batch_norm_backward.default(
            grad, x, weight, mean, var, none, none, True, 1e-5, [True, True, True]
        )
        cudnn = aten.cudnn_batch_norm_backward.default(
            x, grad, weight, mean, var, none, none, 1e-5, none
        )
        miopen = aten.miopen_batch_norm_backward.default(
            x, grad, weight, mean, var, none, none, 1e-5
        )
    for found in (native, cudnn, miopen):
        torch.testing.assert_close(found[0], expected)


class Reading(nn.Module):
    """Has a norm, and something else that is made of its statistics."""

    def __init__(self, read, functional=False):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.read, self.functional = read, functional

    def forward(self, x):
        x, norm = self.first(x), self.norm
        if self.functional:
            mean, variance = norm.running_mean, norm.running_var
            x = F.batch_norm(x, mean, variance, norm.weight, norm.bias, training=self.training)
        else:
            x = norm(x)
        return self.last(self.read(x, norm))


READS = {
    "value": lambda x, norm: x.tanh() - norm.running_mean,
    "part": lambda x, norm: x * norm.running_var[:1].detach(),
    "no statistics": lambda x, norm: x * norm.weight,
    "nothing": lambda x, norm: x.tanh(),
}


def warnings_of(model, **options):
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=4, **options) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        pipe(torch.randn(8, 4))
    return [str(w.message) for w in caught if issubclass(w.category, fxpipe.BatchWarning)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("read", READS)
def test_running_statistics_that_the_forward_reads_are_warned_of(read, functional):
    told = warnings_of(Reading(READS[read], functional))
    if read in ("value", "part"):
        (warning,) = told
        name = "norm.running_mean" if read == "value" else "norm.running_var"
        assert f"the forward reads {name}, which a batch norm in train mode updates" in warning
    else:
        assert not told
    assert not warnings_of(Reading(READS[read], functional).eval())


def test_statistics_that_only_the_norm_reads_are_none_of_the_forwards():
    for functional in (False, True):
        model = Reading(READS["nothing"], functional)
        with torch.inference_mode():
            assert not warnings_of(model, training=False)
