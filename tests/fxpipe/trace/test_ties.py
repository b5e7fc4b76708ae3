"""A pipeline sees which names of the model's tensors are names of one tensor, at each call."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.trace.ties import Ties

X, Y = torch.randn(8, 6), torch.randn(8, 6)
TRACERS = pytest.mark.parametrize("tracer", ["symbolic", "export"])


class Tied(nn.Module):
    """Two layers have one weight, a third one has another; two names have one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("shift", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh() * self.scale).tanh() + self.shift)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 6))


def assigned(model: nn.Module) -> None:
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES = {
    "untied": lambda model: setattr(model.second, "weight", weight()),
    "untied at the first name": lambda model: setattr(model.first, "weight", weight()),
    "untied by a state dict": assigned,
    "tied to another": lambda model: setattr(model.second, "weight", model.third.weight),
    "tied three ways": lambda model: setattr(model.third, "weight", model.first.weight),
    "a buffer untied": lambda model: setattr(model, "shift", torch.randn(6)),
    "a buffer untied at the first name": lambda model: setattr(model, "scale", torch.randn(6)),
    "a buffer that is a parameter": lambda model: model._buffers.update(shift=model.third.bias),
}


def same_as_the_loop(pipe: fxpipe.Pipeline, model: nn.Module) -> None:
    like = copy.deepcopy(model)
    like.zero_grad()
    model.zero_grad()
    loss = pipe.step(X, target=Y)
    losses = [F.mse_loss(like(x), y) / 4 for x, y in zip(X.chunk(4), Y.chunk(4), strict=True)]
    sum(losses).backward()
    torch.testing.assert_close(loss, sum(losses).detach())
    torch.testing.assert_close(pipe(X), like(X))
    pairs = zip(model.named_parameters(), like.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.covering(1)
@TRACERS
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tie_that_is_made_or_undone_is_seen(change, tracer):
    """Had it been overlooked, the graph would go on with one tensor under both names."""
    model = Tied()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=F.mse_loss, tracer=tracer) as pipe:
        same_as_the_loop(pipe, model)
        change(model)
        same_as_the_loop(pipe, model)
        assert len(pipe.compilations) == 2


def test_other_tensors_with_the_same_ties_need_no_compilation():
    model = Tied()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=F.mse_loss) as pipe:
        same_as_the_loop(pipe, model)
        model.first.weight = model.second.weight = weight()
        model.scale = model.shift = torch.randn(6)
        model.third.weight = weight()
        same_as_the_loop(pipe, model)
        assert len(pipe.compilations) == 1


def test_a_graph_is_used_again_when_the_ties_are_as_they_were():
    model = Tied()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=F.mse_loss) as pipe:
        pipe(X)
        model.second.weight = weight()
        pipe(X)
        model.second.weight = model.first.weight
        same_as_the_loop(pipe, model)
        assert len(pipe.compilations) == 2


def test_the_guards_name_the_tie_that_has_changed():
    model = Tied()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, training=False) as pipe:
        pipe(X)
        former, model.second.weight = model.second.weight, weight()
        said = pipe.guards.failure(X)
        assert said == "first.weight and second.weight: one tensor → two"
        model.second.weight = former
        assert pipe.guards.failure(X) == ""
        model.third.weight = former
        said = pipe.guards.failure(X)
        assert said == "second.weight and third.weight: two tensors → one"


class Holding(nn.Module):
    """Uses a parameter, and a buffer, by attributes that hold them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.randn(6))
        vars(self)["weight"], self.scales = self.first.weight, [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.second(self.first(x).tanh()), self.weight) * self.scales[0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: setattr(model.first, "weight", weight()), "first.weight"),
        (lambda model: setattr(model, "scale", torch.randn(6)), "scale"),
    ],
    ids=["parameter", "buffer"],
)
def test_a_tensor_that_an_attribute_holds_too_is_tied_to_the_attribute(change, name):
    model = Holding()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        change(model)
        said = f"{name} is another tensor than the one with which the graph was made"
        assert pipe.guards.failure(X) == said
        torch.testing.assert_close(pipe(X), model(X))


def test_nothing_has_changed_ahead_of_a_change():
    ties = Ties(Tied())
    assert ties.hold() and ties.changed() is None
