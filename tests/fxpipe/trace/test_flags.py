"""Where a forward asks which tensors require gradients, a pipeline does what the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.errors import Unsupported
from fxpipe.trace.flags import OF_INPUTS
from fxpipe.trace.premises import attributes_read
from tests.zoo import MLP, same

TWO = ["cpu", "cpu"]
X = torch.randn(4, 12)


class DoublesWhatIsTrained(MLP):
    """A front end cannot look at the answer of a tensor that it has recorded, but at that of a
    parameter: export is asked, or symbolic tracing where parameters are real ones."""

    def is_frozen(self):
        return not any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, x):
        x = super().forward(x)
        return x if self.is_frozen() else x + x


class DoublesForGradients(MLP):
    def forward(self, x):
        return super().forward(x) * (2 if x.requires_grad else 1)


class Layers(nn.Sequential):
    """Two layers that are alike, so that export traces the first, and copies it."""

    def __init__(self):
        super().__init__(DoublesWhatIsTrained(), DoublesWhatIsTrained())


def compiled(model, tracer="auto"):
    return fxpipe.compile(model, TWO, chunks=2, tracer=tracer)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_model_that_branches_by_it_may_be_frozen_and_thawed(tracer):
    model = DoublesWhatIsTrained()
    with compiled(model, tracer) as pipe:
        for trains in True, False, True:
            model.requires_grad_(trains)
            torch.testing.assert_close(pipe(X), model(X))
        assert len(pipe.compilations) == 2
        name = next(name for name, _ in model.named_parameters())
        assert pipe.compilations[1].why == (f"{name}.requires_grad: True → False",)


def test_a_model_that_does_not_ask_is_not_compiled_again():
    model = MLP()
    with compiled(model) as pipe:
        pipe(X)
        model.requires_grad_(False)
        torch.testing.assert_close(pipe(X), model(X))
        assert len(pipe.compilations) == 1


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_of_layers_that_are_alike_any_may_be_frozen(tracer):
    model = Layers()
    with compiled(model, tracer) as pipe:
        pipe(X)
        model[1].requires_grad_(False)
        torch.testing.assert_close(pipe(X), model(X))
        model[0].requires_grad_(False)
        torch.testing.assert_close(pipe(X), model(X))
        assert len(pipe.compilations) == 3


def test_an_input_that_requires_a_gradient_is_refused_where_a_forward_asks_for_that():
    model = DoublesForGradients()
    with compiled(model) as pipe:
        assert same(pipe(X), torch.cat([model(x) for x in X.split(2)]))
        with pytest.raises(Unsupported, match=r"the input x does.*x\.detach\(\)"):
            pipe(X.clone().requires_grad_())
        assert pipe.guards.failure(X.clone().requires_grad_()) == "x.requires_grad: False → True"


class AlsoForLargeBatches(DoublesForGradients):
    """Makes its batch size a constant as well, of which a trace for any size would be refused."""

    def forward(self, x):
        return super().forward(x) * (3 if float(len(x)) > 100 else 1)


def test_so_it_is_said_of_a_model_that_is_compiled_for_one_batch_size():
    with (
        compiled(AlsoForLargeBatches()) as pipe,
        pytest.raises(Unsupported, match=r"the input x does.*x\.detach\(\)"),
    ):
        pipe(X.clone().requires_grad_())


def test_only_what_code_of_the_model_asks_is_noted():
    model = MLP()
    own = next(model.parameters())
    with attributes_read(model) as reads:
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()(torch.zeros(1, 2, 4))
    assert reads == {}
    with attributes_read(model) as reads:
        own.requires_grad  # noqa: B018
    ((module, name),) = reads
    assert module is not model
    assert name == "weight.requires_grad"
    with attributes_read(model) as reads:
        X.requires_grad  # noqa: B018
    assert (model, OF_INPUTS) in reads
    assert len(reads) == 1 + len(list(model.parameters()))


class DoublesWhileTraining(nn.Module):
    """Doubles a hidden value where a backward may follow, by what is asked."""

    def __init__(self, ask):
        super().__init__()
        self.a, self.b, self.ask = nn.Linear(12, 12), nn.Linear(12, 12), ask

    def forward(self, x):
        h = self.a(x)
        return self.b(2 * h if self.ask(h) else h)


ASKED = {
    "requires_grad": lambda h: h.requires_grad,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", ASKED)
def test_a_call_without_gradients_is_refused_where_the_forward_asks_for_them(way, first):
    model = DoublesWhileTraining(ASKED[way])
    with compiled(model, "export") as pipe:
        for records in (True, False) if first else (False, True):
            with torch.set_grad_enabled(records):
                if records:
                    torch.testing.assert_close(pipe(X), model(X))
                else:
                    with pytest.raises(Unsupported, match="and this call records none"):
                        pipe(X)


def test_a_call_without_gradients_of_a_frozen_model_has_nothing_to_ask_for():
    model = DoublesWhileTraining(ASKED["requires_grad"]).requires_grad_(False)
    with compiled(model) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(X), model(X))
