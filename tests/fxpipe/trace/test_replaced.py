"""What a forward does to its tensors themselves, and not to their values, is in no graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import TraceError
from fxpipe.trace.isolation import untouched

X = torch.randn(8, 4)


class Changing(nn.Module):
    """Does something to one of its tensors in each forward."""

    def __init__(self, change):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.scale, self.change = torch.ones(4), change

    def forward(self, x):
        self.change(self)
        return self.head(self.body(x) * self.scale + self.mean)


def renorm(net):
    net.head.weight.data = torch.renorm(net.head.weight.data, 2, 0, 0.1)


def move_on(net):
    net.mean.data = net.mean.data * 0.9


def move_a_tensor_on(net):
    net.scale.data = net.scale.data * 0.9


def replace(net):
    net.head.weight = nn.Parameter(net.head.weight.detach() * 0.9)


def freeze(net):
    net.body.requires_grad_(False)


def freeze_each(net):
    for parameter in net.body.parameters():
        parameter.requires_grad = False


DONE = {
    renorm: "assigns to the data of head.weight",
    move_on: "assigns to the data of mean",
    move_a_tensor_on: "assigns to the data of scale",
    replace: "puts another parameter in place of head.weight",
    freeze: "sets requires_grad of body.0.weight",
    freeze_each: "sets requires_grad of body.0.weight",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["auto", "symbolic", "export"])
@pytest.mark.parametrize("change", DONE)
def test_it_is_refused_and_the_model_is_left_as_it_was(change, tracer):
    model = Changing(change)
    before = copy.deepcopy(model.state_dict())
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=f"Changing {DONE[change]} in its forward"):
        pipe(X)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model.scale, torch.ones(4))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("change", [freeze, freeze_each])
def test_a_flag_that_is_set_already_is_no_change(change):
    model = Changing(change)
    change(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        pipe(X).sum().backward()
    assert model.head.weight.grad is not None and model.body[0].weight.grad is None


def test_what_only_the_first_call_does_is_done_by_a_call_ahead():
    def once(net):
        if not getattr(net, "is_set", False):
            renorm(net)
            net.is_set = True

    model = Changing(once)
    with pytest.raises(TraceError, match="call the model once ahead of"):
        fxpipe.compile(model, ["cpu"] * 2, chunks=2)(X)
    model(X)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        assert torch.equal(pipe(X), torch.cat([model(part) for part in X.chunk(2)]))


def test_tensors_have_their_memory_again_after_a_run():
    model = Changing(renorm)
    memory = model.head.weight.data_ptr()
    with untouched(model) as since:
        model(X)
        assert since.replaced() == [(model.head, "weight", "assigns to the data of")]
    assert model.head.weight.data_ptr() == memory
