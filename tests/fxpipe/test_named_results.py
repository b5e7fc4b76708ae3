"""Operators with several results that have names: ``x.max(dim).values``, ``torch.aminmax(x).max``.

The results come as a named tuple of PyTorch's. fx's symbolic tracing keeps it as one value, of
which later nodes take a part by its name.
"""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from tests.zoo import gradients, loop, loss_of, same


def matrices(x):
    """Matrices of three by three that have all they need: an inverse, and eigenvalues apart."""
    m = torch.stack([x[:, :3], x[:, 3:6], x[:, 5:8]], 1)
    return m @ m.transpose(1, 2) + torch.diag(torch.arange(1.0, 4.0))


NAMED = {
    "max": lambda x: x.max(1).values,
    "max by position and name": lambda x: x.max(1)[0] + x.max(dim=1).indices,
    "min": lambda x: torch.min(x, 1).values,
    "topk": lambda x: x.topk(3, 1).values,
    "sort": lambda x: x.sort(1).values,
    "median": lambda x: x.median(1).values,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "mode": lambda x: x.mode(1).values,
    "cummax": lambda x: x.cummax(1).values,
    "cummin": lambda x: x.cummin(1).values,
    "aminmax": lambda x: torch.aminmax(x, dim=1).max,
    "indices": lambda x: x * x.max(1).indices[:, None],
    "svd": lambda x: torch.linalg.svd(matrices(x)).S,
    "eigh": lambda x: torch.linalg.eigh(matrices(x)).eigenvalues,
    "slogdet": lambda x: torch.linalg.slogdet(matrices(x)).logabsdet,
    "qr": lambda x: torch.linalg.qr(matrices(x)).R,
    "inv_ex": lambda x: torch.linalg.inv_ex(matrices(x)).inverse,
    "max_pool": lambda x: F.max_pool1d(x, 2, return_indices=True)[0],
    "both": lambda x: (lambda each: each.values * each.indices)(x.topk(3, 1)),
}
RESULTS = {getattr, operator.getitem}


class Named(nn.Module):
    """A layer before the operator, so that its result has a gradient, and one behind it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 8), nn.Linear(1, 3), function

    def forward(self, x):
        return self.second(self.function(self.first(x))[..., None])


def taken(graph):
    """The first node that takes one of several results, and is used; and the operator's node."""
    pairs = ((node, node.args[0]) for node in graph.nodes if node.target in RESULTS and node.users)
    return next((node, of) for node, of in pairs if not isinstance(of.meta["val"], torch.Tensor))


@pytest.mark.covering(1)
@pytest.mark.one_in(3)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("name", NAMED)
def test_results_are_taken_by_their_names_in_the_stage_that_computes_them(name, tracer):
    model, x = Named(NAMED[name]), torch.randn(7, 4)
    reference = copy.deepcopy(model)
    wanted, _ = loop(reference, (x,), 3)
    with fxpipe.compile(model, ["cpu"], chunks=3, tracer=tracer, example_inputs=(x,)) as whole:
        one, of = taken(whole.model_graph.graph)
    for options in {}, {"partition": [of.name]}, {"partition": {"second": 1}}:
        model.zero_grad()
        with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer, **options) as pipe:
            output = pipe(x)
            loss_of(output).backward()
            assert same(output.detach(), wanted)
            assert same(gradients(model), gradients(reference))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer, partition=[one.name]) as pipe,
        pytest.raises(fxpipe.PartitionError, match="are parts of one result: put them into one"),
    ):
        pipe(x)


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh()).max(1)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_model_may_return_them(tracer):
    model, x = Returned(), torch.randn(6, 4)
    wanted = [torch.cat(each) for each in zip(*map(model, x.chunk(3)), strict=True)]
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer) as pipe:
        output = pipe(x)
    assert torch.equal(output.values, wanted[0]) and torch.equal(output.indices, wanted[1])


class Shape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        shape = h.tanh().shape
        tail = shape[1:]
        return self.second(h.reshape(shape)) / tail.numel()


@pytest.mark.parametrize("start", ["getattr_1", "reshape", "second", "numel", "truediv"])
def test_a_shape_is_of_its_own_type_in_every_stage(start):
    model, x = Shape(), torch.randn(6, 4)
    wanted = loop(model, (x,), 3)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, tracer="symbolic", partition=[start], checkpoint="always"
    ) as pipe:
        model.zero_grad()
        output = pipe(x)
        loss_of(output).backward()
        assert same(output.detach(), wanted[0])
        assert same(gradients(model), wanted[1])
