"""What a forward reads of its modules may change between calls: the pipeline does what it does."""

from __future__ import annotations

import array
import copy
import ctypes
import functools
import multiprocessing
import types
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.trace.premises import Premises, attributes_read, unwatched
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


@pytest.mark.covering(1)
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


class Called(nn.Module):
    """Computes by methods, of its own and of a module that fx traces through."""

    factors: ClassVar = {"x": 1.0}

    def __init__(self):
        super().__init__()
        self.mlp, self.inner = MLP(), nn.Sequential(nn.Linear(12, 12), nn.Tanh())

    @staticmethod
    def first(x):
        return 2 * x

    @classmethod
    def second(cls, x):
        return 3 * x

    def third(self, x):
        return self.second(self.first(x)) * self.factors["x"]

    def forward(self, x):
        return self.third(self.inner(self.mlp(x)))


class Negated(Called):
    def third(self, x):
        return -super().third(x)


class Halved(nn.Tanh):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: setattr(model, "forward", lambda x: -model.mlp(x)),
        lambda model, patch: setattr(model.mlp, "forward", lambda x: -x),
        lambda model, patch: setattr(model.inner, "forward", lambda x: -x),
        lambda model, patch: setattr(model.inner[1], "forward", lambda x: -x),
        lambda model, patch: setattr(model, "third", lambda x: -x),
        lambda model, patch: setattr(model, "first", lambda x: -x),
        lambda model, patch: setattr(model, "__class__", Negated),
        lambda model, patch: setattr(model.inner[1], "__class__", Halved),
        lambda model, patch: patch(Called, "forward", lambda self, x: -self.mlp(x)),
        lambda model, patch: patch(Called, "third", lambda self, x: -x),
        lambda model, patch: patch(Called, "second", classmethod(lambda cls, x: -x)),
        lambda model, patch: patch(nn.Tanh, "forward", lambda self, x: -x),
        lambda model, patch: patch(Called, "factors", {"x": 5.0}),
        lambda model, patch: patch(Called, "factors", {"x": 1.0}) or model.factors.update(x=7.0),
    ],
    ids=[
        *("forward", "forward of a part", "of a container", "of a layer"),
        *("method", "static method", "class", "class of a layer"),
        *("forward of the class", "method of the class", "class method", "forward of PyTorch's"),
        *("container of the class", "in a container of the class"),
    ],
)
def test_other_code_is_seen_at_the_next_call(change, tracer, monkeypatch):
    model = Called()
    with compiled(model, tracer=tracer) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        change(model, monkeypatch.setattr)
        torch.testing.assert_close(pipe(X), model(X))
        pipe(X)
        assert len(pipe.compilations) <= 2


def test_methods_are_no_attributes_in_the_words_of_guards():
    model = Called()
    with compiled(model, tracer="symbolic") as pipe:
        pipe(X)
        assert pipe.guards.attributes["factors"] == "{'x': 1.0}"
        assert not {"forward", "third", "inner.forward"} & pipe.guards.attributes.keys()
        model.third = lambda x: -x
        assert pipe.guards.failure(X) == "the method third has been replaced"


class Scale:
    """An object that is called like a function."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    @property
    def half(self):
        return self.factor / 2


class Third(Scale):
    @property
    def half(self):
        return self.factor / 3


class Calling(MLP):
    """Computes by objects that hold numbers: one is called, one is in a closure, and so on."""

    def __init__(self):
        super().__init__()
        factors = [2.0]
        self.called, self.of_method, self.asked = Scale(2.0), Scale(2.0), Scale(2.0)
        self.method = self.of_method.__call__
        self.factors, self.closed = factors, lambda x: x * factors[0]
        self.bound, self.queue = functools.partial(Scale(2.0)), deque([2.0, 3.0])

    @property
    def first(self):
        return self.queue[0]

    def forward(self, x):
        x = self.method(self.called(super().forward(x)))
        return self.bound(self.closed(x)) * self.first + self.asked.half


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model, patch: setattr(model.called, "factor", 5.0),
        lambda model, patch: setattr(model.of_method, "factor", 5.0),
        lambda model, patch: setattr(model.asked, "__class__", Third),
        lambda model, patch: model.factors.__setitem__(0, 5.0),
        lambda model, patch: setattr(model.bound.func, "factor", 5.0),
        lambda model, patch: model.queue.rotate(1),
        lambda model, patch: patch(Calling, "first", property(lambda self: 5.0)),
    ],
    ids=["called", "of a method", "class", "closure", "partial", "queue", "property"],
)
def test_what_an_object_computes_with_is_compared_also_if_it_is_called(change, tracer, monkeypatch):
    model = Calling()
    with compiled(model, tracer=tracer) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        pipe(X)
        assert len(pipe.compilations) == 1
        change(model, monkeypatch.setattr)
        torch.testing.assert_close(pipe(X), model(X))
        assert len(pipe.compilations) == 2


class InSlots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclass(slots=True)
class Settings:
    scale: float = 1.0


def deep() -> types.SimpleNamespace:
    of_schedule = types.SimpleNamespace(scale=1.0)
    return types.SimpleNamespace(train={"schedules": [of_schedule]})


@pytest.mark.parametrize(
    "make, owner",
    [
        (deep, lambda config: config.train["schedules"][0]),
        (InSlots, lambda config: config),
        (Settings, lambda config: config),
    ],
)
def test_a_change_deep_in_a_configuration_is_seen(make, owner):
    class Net(MLP):
        def __init__(self):
            super().__init__()
            self.config = make()

        def forward(self, x):
            return super().forward(x) * owner(self.config).scale

    model = Net()
    with compiled(model) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        owner(model.config).scale = 3.0
        assert pipe.guards.failure(X).endswith("scale: 1.0 → 3.0")
        torch.testing.assert_close(pipe(X), model(X))


class Trainer:
    scale = 1.0


TRAINER = Trainer()


@pytest.mark.parametrize(
    ("kept", "read", "change"),
    [
        (weakref.ref(TRAINER), lambda kept: kept().scale, lambda: setattr(TRAINER, "scale", 3.0)),
        *(
            (each, lambda kept: kept.value, functools.partial(setattr, each, "value", 3.0))
            for each in (ctypes.c_double(1.0), multiprocessing.Value("d", 1.0))
        ),
    ],
    ids=["a weak reference", "of ctypes", "shared among processes"],
)
def test_what_is_read_through_an_object_of_pythons_library_is_seen_to_change(kept, read, change):
    class Net(MLP):
        def __init__(self):
            super().__init__()
            self.kept = kept

        def forward(self, x):
            return super().forward(x) * read(self.kept)

    model = Net()
    with compiled(model) as pipe:
        assert same(pipe(X), torch.cat(outputs_of_loop(model, (X,), 2)))
        change()
        assert same(pipe(X), torch.cat(outputs_of_loop(model, (X,), 2)))
        assert len(pipe.compilations) == 2


class ByAnArray(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.read, self.layer = read, nn.Linear(4, 3)
        self.weights = np.array([1.0, 2.0, 3.0], np.float32)
        self.kept = {"weights": self.weights}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: float(model.weights[0]),
        lambda model: model.weights.mean().item(),
        lambda model: torch.from_numpy(model.weights),
        lambda model: torch.tensor(model.weights),
        lambda model: float(model.kept["weights"][0]),
    ],
    ids=["a number", "a mean", "its memory", "a copy", "in a dict"],
)
def test_an_array_of_numpy_that_is_written_to_is_seen(read):
    model, x = ByAnArray(read), torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for value in 1.0, 7.0, 7.0, float("nan"), 2.0:
            model.weights[0] = value
            expected = torch.cat(outputs_of_loop(model, (x,), 2))
            torch.testing.assert_close(pipe(x), expected, rtol=0, atol=0, equal_nan=True)
        said = str(pipe.compilations[1])
    assert len(pipe.compilations) == 4, "once for each value"
    assert "weights" in said and "[1. 2. 3.] → [7. 2. 3.]" in said


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    "read",
    [lambda net: net.__dict__["scale"], lambda net: vars(net)["scale"], lambda net: net.all()],
    ids=["__dict__", "vars", "a loop"],
)
def test_what_is_read_of_the_dictionary_of_a_module_is_seen_to_change(read, is_part):
    class OfItsDict(MLP):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def all(self):
            return sum(value for name, value in self.__dict__.items() if name == "scale")

        def forward(self, x):
            return super().forward(x) * read(self)

    own = OfItsDict()
    model = nn.Sequential(nn.Identity(), own) if is_part else own
    with compiled(model) as pipe:
        for value in 1.0, 3.0, 3.0:
            own.scale = value
            assert torch.equal(pipe(X), torch.cat(outputs_of_loop(model, (X,), 2)))
        assert len(pipe.compilations) == 2
        assert pipe.compilations[1].why == (f"{'1.' * is_part}scale: 1.0 → 3.0",)


@pytest.mark.parametrize(
    "kept",
    [
        [1.0] * 5000,
        dict.fromkeys(range(5000), 1.0),
        deque([1.0] * 5000),
        array.array("f", [1.0] * 5000),
        bytearray([1] * 5000),
    ],
    ids=lambda kept: type(kept).__name__,
)
def test_a_value_among_thousands_is_seen_to_change(kept):
    class OneOfMany(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.layer = copy.copy(kept), nn.Linear(12, 5)

        def forward(self, x):
            return self.layer(x) * self.kept[4999]

    model = OneOfMany()
    with compiled(model) as pipe:
        for value in 1, 3, 3:
            model.kept[4999] = value
            assert torch.equal(pipe(X), torch.cat(outputs_of_loop(model, (X,), 2)))
        said = pipe.compilations[-1].why[0]
    assert 2 <= len(pipe.compilations) <= 3
    assert "kept" in said and (not isinstance(kept, list) or said == "kept[4999]: 1 → 3")


def test_an_array_with_a_nan_is_equal_to_itself():
    class KeepsAnArray(MLP):
        def __init__(self):
            super().__init__()
            self.kept = array.array("f", [2.0, float("nan")])

        def forward(self, x):
            return super().forward(x) * self.kept[0]

    with compiled(KeepsAnArray()) as pipe:
        for _ in range(3):
            pipe(X)
        assert len(pipe.compilations) == 1


def test_of_many_values_deep_in_a_configuration_none_is_compared():
    """They are data: a forward does not branch by them, and comparing them takes time in a call."""
    model = Switched()
    model.config.rest = {"of": {"data": list(range(33))}, "few": {"data": list(range(32))}}
    with compiled(model) as pipe:
        pipe(X)
        model.config.rest["of"]["data"][0] = 1
        assert pipe.guards.failure(X) == ""
        model.config.rest["few"]["data"][0] = 1
        assert pipe.guards.failure(X).endswith("['few']['data'][0]: 0 → 1")


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
            "Switched has been compiled 8 times, since scale, an attribute that is neither a "
            "parameter nor a buffer, differs between the calls (7.0 in this one): make it a "
            "tensor, as a buffer or an argument"
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


class Scaled(nn.Module):
    """It multiplies by a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.k = torch.full((12,), 2.0)

    def forward(self, x):
        return self.a(x) * self.k


def agree_on_outputs_and_gradients(pipe, model):
    model.zero_grad()
    result = pipe(X)
    result.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    expected = torch.cat(outputs_of_loop(model, (X,), 2))
    expected.sum().backward()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_tensor_that_is_no_buffer_may_be_replaced_and_written_to(tracer):
    part = Scaled()
    model = nn.Sequential(part, nn.Linear(12, 5))
    with compiled(model, tracer=tracer) as pipe:
        agree_on_outputs_and_gradients(pipe, model)
        part.k.fill_(3.0)
        agree_on_outputs_and_gradients(pipe, model)
        assert len(pipe.all_guards) == 1, "a write in place is no reason to compile again"
        first, part.k = part.k, torch.full((12,), 5.0)
        assert pipe.guards.failure(X).startswith("0.k: tensor([3.")
        agree_on_outputs_and_gradients(pipe, model)
        part.k.fill_(4.0)
        agree_on_outputs_and_gradients(pipe, model)
        part.k = first
        agree_on_outputs_and_gradients(pipe, model)
        part.k = torch.full((1,), 5.0)
        agree_on_outputs_and_gradients(pipe, model)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_the_weight_of_a_layer_may_be_a_tensor_that_is_no_parameter(tracer):
    layer = nn.Linear(12, 12)
    weight = layer.weight.detach().clone()
    del layer.weight
    layer.weight = weight
    model = nn.Sequential(nn.Linear(12, 12), layer, nn.Linear(12, 5))
    with compiled(model, tracer=tracer) as pipe:
        agree_on_outputs_and_gradients(pipe, model)
        weight.mul_(2)
        agree_on_outputs_and_gradients(pipe, model)
        layer.weight = torch.ones(12, 12)
        agree_on_outputs_and_gradients(pipe, model)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_graph_that_serves_for_an_equal_tensor_reads_the_one_that_the_model_has(tracer):
    part = Scaled()
    model = nn.Sequential(part, nn.Linear(12, 5))
    with compiled(model, tracer=tracer) as pipe:
        pipe(X)
        first, part.k = part.k, part.k.clone()
        agree_on_outputs_and_gradients(pipe, model)
        assert len(pipe.all_guards) == 1, "the values are equal, and so are the graphs"
        part.k.fill_(4.0)
        agree_on_outputs_and_gradients(pipe, model)
        part.k = first
        agree_on_outputs_and_gradients(pipe, model)


def test_a_tensor_that_needs_a_gradient_gets_its_own():
    model = nn.Sequential(Scaled(), nn.Linear(12, 5))
    with compiled(model) as pipe:
        for _ in range(3):
            k = model[0].k = torch.ones(12, requires_grad=True)
            pipe(X).sum().backward()
            (gradient,) = torch.autograd.grad(model(X).sum(), [k])
            torch.testing.assert_close(k.grad, gradient)


class Merging(nn.Module):
    """What it computes depends on attributes that it need not have."""

    def __init__(self, look_up):
        super().__init__()
        self.a, self.look_up = nn.Linear(12, 12), look_up

    def forward(self, x):
        return x if self.look_up(self) else self.a(x)


def by_getattr(module):
    return getattr(module, "merged", False)


def by_hasattr(module):
    return hasattr(module, "merged")


def of_a_part(module):
    return getattr(module.a, "merged", False)


def by_try(module):
    try:
        return module.merged
    except AttributeError:
        return False


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("look_up", [by_getattr, by_hasattr, of_a_part, by_try])
@pytest.mark.parametrize("is_part", [False, True], ids=["model", "part"])
def test_an_attribute_that_the_model_did_not_have_may_be_added(look_up, tracer, is_part):
    class Model(Merging):
        def __init__(self):
            super().__init__(look_up)
            self.b = nn.Linear(12, 5)

        def forward(self, x):
            return self.b(super().forward(torch.tanh(x)))

    model = nn.Sequential(Merging(look_up), nn.Tanh(), nn.Linear(12, 5)) if is_part else Model()
    part = model[0] if is_part else model
    owner = part.a if look_up is of_a_part else part
    with compiled(model, tracer=tracer) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        owner.merged = True
        path = ("0." if is_part else "") + ("a." if look_up is of_a_part else "")
        assert pipe.guards.failure(X) == f"{path}merged: missing → True"
        torch.testing.assert_close(pipe(X), model(X))
        owner.merged = False
        torch.testing.assert_close(pipe(X), model(X))
        del owner.merged
        torch.testing.assert_close(pipe(X), model(X))


@pytest.mark.parametrize(
    ("add", "kind"),
    [
        (lambda part: part.register_buffer("shift", torch.ones(12)), "buffer"),
        (lambda part: part.register_parameter("shift", nn.Parameter(torch.ones(12))), "parameter"),
        (lambda part: setattr(part, "shift", torch.ones(12)), "tensor"),
        (lambda part: setattr(type(part), "shift", 1.0), "of the class"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_is_added_may_be_a_tensor_or_be_of_the_class(add, kind):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(12, 12)

        def forward(self, x):
            return self.a(x) + (self.shift if hasattr(self, "shift") else 0.0)

    model = nn.Sequential(Shifted(), nn.Linear(12, 5))
    with compiled(model) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        add(model[0])
        torch.testing.assert_close(pipe(X), model(X))


def test_a_module_of_torchscript_has_no_tables_of_its_own():
    part = torch.jit.trace(nn.Linear(12, 12), torch.zeros(2, 12))
    model = nn.Sequential(nn.Linear(12, 12), part, nn.Linear(12, 5))
    with compiled(model) as pipe:
        torch.testing.assert_close(pipe(X), model(X))


def test_look_ups_of_pytorch_that_fail_are_no_premises():
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.BatchNorm1d(3), nn.LSTM(8, 8)
    )
    with attributes_read(model) as reads:
        model(torch.randn(2, 3, 8))
        hasattr(model[0], "asked_by_the_model")
    missing = [name for module, name in reads if not hasattr(module, name)]
    assert missing == ["asked_by_the_model"]


def test_what_others_read_while_a_model_is_exported_is_not_noted():
    model = Switched()
    with attributes_read(model) as outer, attributes_read(model) as inner:
        with unwatched() as watched:
            _ = model.names, getattr(model, "asked_in_vain", None)
            with watched():
                _ = model.scale
            _ = model.config
        _ = model.weights
    assert {name for _, name in outer} == {name for _, name in inner} == {"scale", "weights"}


def test_where_nothing_is_watched_there_is_nothing_to_switch_off():
    with unwatched() as watched, watched():
        assert "__getattribute__" not in vars(nn.Module)


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


class Remembers(nn.Module):
    """Goes by a buffer: whether there is one, how many values it has, and of which type."""

    def __init__(self, goes_by):
        super().__init__()
        self.mlp, self.goes_by = MLP(), goes_by
        self.register_buffer("memory", torch.ones(12))
        self.register_buffer("later", None)

    def forward(self, x):
        return self.goes_by(self, self.mlp(x))


GOES_BY = {
    "none": lambda m, x: x if m.later is None else x + m.later,
    "in vain": lambda m, x: x if getattr(m, "later", None) is None else x + m.later,
    "size": lambda m, x: x + m.memory.sum() if m.memory.numel() > 12 else x,
    "length": lambda m, x: x * len(m.memory),
    "type": lambda m, x: x + m.memory.sum() if m.memory.is_floating_point() else x,
    "loop": lambda m, x: x + sum(value * 2 for value in m.memory),
    "all": lambda m, x: x + sum(buffer.sum() for buffer in m.buffers()),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("goes_by", GOES_BY)
def test_a_buffer_may_come_and_go_and_be_of_another_size_or_type(goes_by):
    model = Remembers(GOES_BY[goes_by])
    with compiled(model) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        for name, value in [
            ("later", torch.ones(12)),
            ("memory", torch.ones(24)),
            ("memory", torch.ones(24).long()),
            ("later", None),
        ]:
            setattr(model, name, value)
            torch.testing.assert_close(pipe(X), model(X))


def test_tensors_of_modules_that_had_none_are_seen():
    class Adds(MLP):
        def forward(self, x):
            more = [t.sum() for t in (*self.parameters(False), *self.buffers(False))]
            return super().forward(x) + sum(more)

    model = Adds()
    with compiled(model) as pipe:
        torch.testing.assert_close(pipe(X), model(X))
        model.register_buffer("own", torch.ones(3))
        torch.testing.assert_close(pipe(X), model(X))
        model.register_parameter("bias", nn.Parameter(torch.ones(3)))
        torch.testing.assert_close(pipe(X), model(X))
        assert [each.why for each in pipe.compilations[1:]] == [
            ("buffers have been added",),
            ("shapes of parameters have changed",),
        ]


def test_it_is_said_which_buffer_has_changed():
    model = Remembers(GOES_BY["loop"])
    with compiled(model) as pipe:
        pipe(X)
        model.memory = torch.ones(24)
        pipe(X)
        assert pipe.compilations[1].why == ("the buffer memory: float32 [12] → float32 [24]",)
