"""Norms by statistics of the batch, while the check runs a model with fixed ones."""

from __future__ import annotations

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
