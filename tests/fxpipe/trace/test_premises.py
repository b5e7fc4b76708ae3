"""What a forward reads of its modules may change between calls: the pipeline does what it does."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.trace.premises import Premises, attributes_read
from tests.zoo import MLP, outputs_of_loop, same

TWO = ["cpu", "cpu"]
X = torch.randn(4, 12)


class Switched(MLP):
    """What it computes depends on attributes: its class's, its own, those of a configuration."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.names = ["first"]
        self.weights = {"first": 0.5}
        self.config = types.SimpleNamespace(doubled=False, act=F.relu)

    def forward(self, x):
        x = self.config.act(super().forward(x) * self.scale)
        for name in self.names:
            x = x * self.weights[name]
        return x + x if self.config.doubled else x


def compiled(model, **options):
    return fxpipe.compile(model, TWO, chunks=2, **options)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "scale", 3.0),
        lambda model: model.names.append("first"),
        lambda model: model.weights.update(first=0.25),
        lambda model: setattr(model, "weights", {"first": 0.25}),
        lambda model: setattr(model.config, "doubled", True),
        lambda model: setattr(model.config, "act", F.gelu),
    ],
    ids=["inherited", "list", "dict", "another dict", "config", "function"],
)
def test_a_change_is_seen_at_the_next_call_and_step(change, tracer):
    model = Switched()
    with compiled(model, tracer=tracer, loss_fn=F.mse_loss) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        pipe.step(X, target=torch.zeros(4, 12))
        change(model)
        torch.testing.assert_close(pipe(X), model(X))
        torch.testing.assert_close(
            pipe.step(X, target=torch.zeros(4, 12)), F.mse_loss(model(X), torch.zeros(4, 12))
        )
        assert len(pipe.all_guards) == 2


def test_what_has_been_compiled_is_used_again_when_all_is_as_it_was():
    model = Switched()
    with compiled(model) as pipe:
        for doubled in (False, True) * 3:
            model.config.doubled = doubled
            torch.testing.assert_close(pipe(X), model(X))
        model.weights = dict(model.weights)
        torch.testing.assert_close(pipe(X), model(X))
        assert [len(guards.state.premises) for guards in pipe.all_guards] == [1, 1]


def test_what_has_made_no_difference_may_make_one_later():
    class Limited(MLP):
        limit = 1.0

        def forward(self, x):
            x = super().forward(x)
            return x if self.limit > 0 else -x

    model = Limited()
    with compiled(model) as pipe:
        for limit in (1.0, 2.0, -1.0, 3.0, -2.0, 1.0):
            model.limit = limit
            torch.testing.assert_close(pipe(X), model(X))
        assert len(pipe.all_guards) == 2


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(12, 12), nn.Dropout(0.1), nn.Linear(12, 5)

    def forward(self, x):
        return self.b(self.drop(self.a(x)))


def test_modules_that_the_graph_has_may_change_as_they_like():
    model = Dropouts()
    with compiled(model, tracer="symbolic") as pipe:
        for p in (0.1, 0.2, 0.3):
            model.drop.p = p
            pipe(X)
        (guards,) = pipe.all_guards
        model.drop.p = 0.4
        assert guards.hold(), "it is not compiled again for that"
        model.drop.p = 0.0
        torch.testing.assert_close(pipe(X), model(X))
        assert pipe.all_guards == [guards]


def test_parameters_may_be_of_another_shape():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(6, 8), nn.Linear(8, 6)

        def forward(self, ids):
            return self.out(self.table(ids)).view(-1, self.out.weight.shape[0])

    model, ids = Embedded(), torch.randint(0, 6, (4, 3))
    with compiled(model) as pipe:
        pipe(ids)
        model.table.weight.data = torch.randn(9, 8)
        model.out.weight.data, model.out.bias.data = torch.randn(9, 8), torch.randn(9)
        assert pipe(ids).shape == (12, 9)
        assert same(pipe(ids + 3), torch.cat(outputs_of_loop(model, (ids + 3,), 2)))


def test_where_it_is_compiled_again_and_again_that_is_said():
    model = Switched()
    with compiled(model) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for i in range(7):
                model.scale = float(i)
                pipe(X)
        model.scale = 7.0
        with pytest.warns(UserWarning) as told:
            pipe(X)
        assert [str(each.message) for each in told] == [
            "Switched has been compiled 8 times, since scale, an attribute that is no tensor, "
            "differs between the calls (7.0 in this one): make it a buffer, or an argument"
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.scale = 8.0
            torch.testing.assert_close(pipe(X), model(X))
        assert len(pipe.all_guards) == 8, "more are not kept"


def test_what_a_forward_assigns_before_it_reads_it_is_no_premise():
    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.used, self.unused = 0, 1, 2

        def forward(self, x):
            self.rows = x.shape[0]
            return x * self.rows * self.used

    model = Noting()
    with attributes_read(model) as reads:
        model(X)
    assert {name for _, name in reads} == {"rows", "used"}
    model.rows = 0
    premises = Premises(model, reads)
    model.rows, model.unused = 7, 7
    assert premises.hold()
    model.used = 7
    assert not premises.hold() and premises.broken() == [(model, "used")]
    assert premises.without([(model, "used")]).hold()


def test_nothing_is_watched_any_more_afterwards():
    with pytest.raises(ZeroDivisionError), attributes_read(nn.Linear(1, 1)):
        assert "__getattribute__" in vars(nn.Module)
        with attributes_read(nn.Linear(1, 1)):
            pass
        assert "__getattribute__" in vars(nn.Module)
        _ = 1 / 0
    assert "__getattribute__" not in vars(nn.Module)


class Times(nn.Module):
    """Has no parameters by which a pipeline could tell it from another."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_each_of_many_exchanges_of_a_module_without_parameters_is_seen() -> None:
    """A module that is exchanged is freed, and the next one may get its ``id``."""
    model, x = nn.Sequential(nn.Linear(4, 4), Times(0.0), nn.Linear(4, 4)), torch.randn(4, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for factor in range(1, 9):
            model[1] = Times(float(factor))
            torch.testing.assert_close(pipe(x), model(x))
