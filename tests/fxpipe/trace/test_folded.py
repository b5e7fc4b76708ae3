"""Tensors of a model from which a symbolic trace has computed constants: the graph is right until
they are written to."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.trace.folded import computed_with

X = torch.randn(8, 4)


class Scaled(nn.Module):
    """Scales by a tensor that is no buffer, in the way that is given."""

    def __init__(self, scale):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tau = torch.tensor([1.5, 0.5])
        self.taus = {"first": [self.tau]}
        self.scale = scale

    def forward(self, x):
        return self.b(self.scale(self, self.a(x)))


FOLDED = {
    "an operator": lambda net, h: h / net.tau.exp().sum(),
    "a number": lambda net, h: h * float(net.tau[0]),
    "a branch": lambda net, h: h * 2 if net.tau[0] > 1 else h * 3,
    "a list of numbers": lambda net, h: h * net.tau.tolist()[0],
    "NumPy": lambda net, h: h * float(net.tau.numpy()[0]),
    "NumPy's function": lambda net, h: h * float(np.asarray(net.tau)[0]),
    "a tensor in containers": lambda net, h: h * float(net.taus["first"][0][1]),
    "a buffer's own memory": lambda net, h: h * float(net.b._parameters["weight"].detach()[0, 0]),
}


def loop(model, x):
    return torch.cat([model(part) for part in x.chunk(2)])


@pytest.mark.parametrize("way", FOLDED)
def test_a_write_to_a_tensor_of_which_a_graph_has_a_constant_is_seen(way):
    model = Scaled(FOLDED[way])
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="symbolic") as pipe:
        assert torch.equal(pipe(X), loop(model, X))
        assert torch.equal(pipe(X), loop(model, X))
        assert len(pipe.compilations) == 1
        with torch.no_grad():
            model.tau.mul_(-2)
            model.b.weight.mul_(-2)
        assert torch.equal(pipe(X), loop(model, X))
        assert any("has been written to" in why for why in pipe.compilations[-1].why)


def test_a_tensor_that_the_graph_reads_may_be_written_to():
    model = Scaled(lambda net, h: h * len(net.tau) * net.tau.size(0))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="symbolic") as pipe:
        pipe(X)
        model.tau.mul_(-2)
        assert torch.equal(pipe(X), loop(model, X))
        assert len(pipe.compilations) == 1


def test_parameters_and_buffers_that_nodes_read_are_not_computed_with():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="symbolic") as pipe:
        for _ in range(3):
            pipe(X).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
        assert len(pipe.compilations) == 1


def test_many_writes_are_warned_of():
    model = Scaled(FOLDED["a number"])
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="symbolic") as pipe,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(9):
            assert torch.equal(pipe(X), loop(model, X))
            model.tau.mul_(0.9)
    (text,) = [str(each.message) for each in said if "compiled 8 times" in str(each.message)]
    assert "since tau, a tensor from which its forward computes" in text
    assert "make it a buffer" in text


def test_only_tensors_of_the_model_are_noticed():
    model = Scaled(FOLDED["an operator"])
    with computed_with(model) as found:
        torch.ones(3).exp()
        model.tau.shape, model.tau.dtype, model.tau.size(0)
        assert not found.tensors
        model.tau[1:].exp()
    assert [tensor is model.tau for tensor in found.tensors] == [
        True,
        True,
    ]  # it is held in two places
    assert not found.trained


class Penalised(nn.Module):
    """What it computes of parameters that it gets from ``parameters()`` has a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        squares = [p.square().sum() for p in self.first.parameters()]
        return self.second(self.first(x)), sum(squares)


class Averaged(Penalised):
    def forward(self, x):
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        return F.linear(x, torch.stack(weights).mean(0)), x.sum(1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Penalised, Averaged])
@pytest.mark.parametrize("at_first", ["trained", "without gradients", "frozen"])
def test_what_is_computed_with_parameters_alone_has_its_gradient(kind, at_first):
    model = kind()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        if at_first == "frozen":
            model.first.requires_grad_(False)
        with torch.set_grad_enabled(at_first != "without gradients"):
            pipe(X)
        model.requires_grad_(True)
        for _ in range(2):
            grads = []
            for call in pipe, model:
                model.zero_grad()
                output, penalty = call(X)
                (output.square().mean() + penalty.mean()).backward()
                grads.append([None if p.grad is None else p.grad for p in model.parameters()])
            torch.testing.assert_close(*grads)


def test_symbolic_tracing_says_so():
    with (
        fxpipe.compile(Penalised(), ["cpu"] * 2, chunks=2, tracer="symbolic") as pipe,
        pytest.raises(fxpipe.TraceError, match="it does not get by their names"),
    ):
        pipe(X)


class Written(nn.Module):
    """Writes to a tensor that is no buffer, in the way that is given, and reads it."""

    def __init__(self, write):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mean, self.write = torch.zeros(4), write

    def forward(self, x):
        h = self.a(x)
        y = self.b(h - self.mean.exp())
        self.write(self, h.detach().mean(0))
        return y


def add(net, new):
    net.mean += 1


def set_item(net, new):
    net.mean[...] = 0.5 * net.mean + 0.5 * new


def into(net, new):
    torch.add(net.mean * 0.5, new, out=net.mean)


WRITES = {
    "+=": add,
    "copy_": lambda net, new: net.mean.copy_(0.5 * net.mean + 0.5 * new),
    "lerp_": lambda net, new: net.mean.lerp_(new, 0.5),
    "two writes": lambda net, new: net.mean.mul_(0.5).add_(new, alpha=0.5),
    "[...] =": set_item,
    "out=": into,
}


@pytest.mark.parametrize("way", WRITES)
def test_a_model_that_writes_to_a_tensor_that_is_no_buffer_is_exported(way):
    model = Written(WRITES[way])
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for _ in range(3):
            assert torch.allclose(pipe(X), loop(alone, X), atol=1e-6)
            assert torch.allclose(model.mean, alone.mean, atol=1e-6)
    with pytest.raises(fxpipe.TraceError, match="it writes in place to a tensor that is none of"):
        fxpipe.compile(Written(WRITES[way]), ["cpu"] * 2, chunks=2, tracer="symbolic")(X)
