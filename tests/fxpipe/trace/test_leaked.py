"""No parameter loses a gradient since an object that cannot be copied holds it, too."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

X = torch.randn(8, 6)


class Closed:
    """An object of a class that says itself how it ends, and so is not copied."""

    def __init__(self, weight):
        self.weight = weight

    def __del__(self):
        pass


class Made:
    """An object of a class that says itself how it is made."""

    def __new__(cls, weight):
        return object.__new__(cls)

    def __init__(self, weight):
        self.weight = weight


class Holding(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.extra = kind(self.first.weight)

    def forward(self, x):
        return F.linear(self.second(self.first(x)), self.extra.weight)


class Asking(Holding):
    """Reads the object, and not the parameter that it has."""

    def forward(self, x):
        return self.second(self.first(x)) if self.extra is not None else x


@pytest.mark.parametrize("kind", [Closed, Made])
def test_a_parameter_of_an_object_that_is_not_copied_is_refused(kind):
    """It had no gradient by its use there, and no run of the twin told."""
    said = r"the forward of Holding uses the parameter first\.weight by its attribute extra, an"
    with (
        pytest.raises(fxpipe.TraceError, match=said),
        fxpipe.compile(Holding(kind), ["cpu", "cpu"], chunks=4) as pipe,
    ):
        pipe(X)


@pytest.mark.parametrize("kind", [Closed, Made])
def test_what_the_object_has_does_not_matter_where_the_forward_does_not_use_it(kind):
    model = Asking(kind)
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, tracer="export") as pipe:
        torch.testing.assert_close(pipe(X), model(X))


def test_a_namespace_is_copied():
    model = Holding(lambda weight: types.SimpleNamespace(weight=weight))
    like = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4) as pipe:
        pipe(X).sum().backward()
        like(X).sum().backward()
    for ours, theirs in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
