"""A model is compiled anew when a variable around it changes that its forward computes with."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from tests.zoo import outputs_of_loop

X = torch.ones(4, 3)
CHUNKS = 2

SCALE = 2.0
SETTINGS = {"shift": [1.0, 2.0], "name": "first"}
CALLS = 0
TABLE = torch.full((3,), 2.0)

ARGS = SimpleNamespace(factor=2.0, step=0, log=print)


class Config:
    power = 1

    def __init__(self) -> None:
        self.bias, self.scale = 0.5, 2.0


CONFIG = Config()


def helped(x: Tensor) -> Tensor:
    return x + SETTINGS["shift"][1]


@pytest.fixture(autouse=True)
def as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what tests assign."""
    for name in "SCALE", "CALLS", "helped":
        monkeypatch.setitem(globals(), name, globals()[name])
    monkeypatch.setitem(globals(), "TABLE", torch.full((3,), 2.0))
    monkeypatch.setitem(globals(), "SETTINGS", {"shift": [1.0, 2.0], "name": "first"})
    monkeypatch.setitem(globals(), "ARGS", SimpleNamespace(factor=2.0, step=0, log=print))
    monkeypatch.setitem(globals(), "CONFIG", Config())
    monkeypatch.setattr(Config, "power", 1)
    monkeypatch.setattr(Settings, "scale", 2.0)
    monkeypatch.setitem(globals(), "OF_A_CLASS", Derived())
    monkeypatch.setitem(globals(), "STATISTICS", torch.tensor([2.0, 1.0]))
    monkeypatch.setitem(globals(), "FACTORS", np.array([2.0, 1.0], np.float32))
    monkeypatch.setitem(globals(), "OBJECTS", [Config()])
    monkeypatch.setitem(globals(), "REFERENCE", weakref.ref(OBJECTS[0]))
    monkeypatch.setitem(globals(), "SHARED", multiprocessing.Value("d", 2.0))
    monkeypatch.setitem(globals(), "OF_A_THREAD", threading.local())
    OF_A_THREAD.scale = 2.0
    monkeypatch.setenv("OF_THIS_TEST", "")  # so that it is put back
    monkeypatch.delenv("OF_THIS_TEST")


def of_the_loop(model: nn.Module) -> Tensor:
    return torch.cat(outputs_of_loop(model, (X,), CHUNKS))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)


class Reads(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.second(helped(self.first(x) * SCALE)) * ARGS.factor + TABLE
        return (y + CONFIG.bias) ** Config.power


class Counts(Two):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return self.second(self.first(x))


def scaled() -> None:
    global SCALE
    SCALE = 3.0


def shifted() -> None:
    SETTINGS["shift"][1] = 5.0  # type: ignore[index]


def settled_anew() -> None:
    global SETTINGS
    SETTINGS = {"shift": [0.0, -1.0], "name": "first"}


def put_another_table() -> None:
    global TABLE
    TABLE = torch.full((3,), 3.0)


def helped_otherwise() -> None:
    globals()["helped"] = lambda x: x - 1


def factored() -> None:
    ARGS.factor = 7.0


def biased() -> None:
    CONFIG.bias = 0.25


def squared() -> None:
    Config.power = 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled, "SCALE of .*: 2.0 → 3.0"),
        (shifted, r"SETTINGS of .*\['shift'\]\[1\]: 2.0 → 5.0"),
        (settled_anew, r"SETTINGS of .*\['shift'\]\[0\]: 1.0 → 0.0"),
        (put_another_table, "TABLE of .* is another tensor"),
        (helped_otherwise, "helped of .* is another function, <lambda>"),
        (factored, "ARGS of .*, 'factor': 2.0 → 7.0"),
        (biased, "CONFIG of .*, 'bias': 0.5 → 0.25"),
        (squared, "(CONFIG|Config) of .*, 'power': 1 → 2"),
    ],
)
def test_a_change_is_seen_at_the_next_call(
    change: Callable[[], None], said: str, tracer: str
) -> None:
    model = Reads()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS, tracer=tracer) as pipe:
        assert torch.equal(pipe(X), of_the_loop(model))
        change()
        assert torch.equal(pipe(X), of_the_loop(model))
        (_, again) = pipe.compilations
        assert any(re.search(f"the global variable {said}", why) for why in again.why)


def by_a_variable_of_a_function() -> tuple[nn.Module, Callable[[], None]]:
    scale = 2.0

    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * scale)

    def change() -> None:
        nonlocal scale
        scale = 5.0

    return Net(), change


def by_the_class() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * type(self).scale)

    return Net(), lambda: setattr(Net, "scale", 5.0)


def by_a_default() -> tuple[nn.Module, Callable[[], None]]:
    def scaled_by(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(scaled_by(self.first(x)))

    return Net(), lambda: setattr(scaled_by, "__defaults__", (5.0,))


def by_an_attribute_of_a_function() -> tuple[nn.Module, Callable[[], None]]:
    def scaled_by(x: Tensor) -> Tensor:
        return x * scaled_by.scale  # type: ignore[attr-defined]

    scaled_by.scale = 2.0  # type: ignore[attr-defined]

    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(scaled_by(self.first(x)))

    return Net(), lambda: setattr(scaled_by, "scale", 5.0)


class Settings:
    scale = 2.0


STATISTICS = torch.tensor([2.0, 1.0])
FACTORS = np.array([2.0, 1.0], np.float32)
OBJECTS = [Config()]
REFERENCE = weakref.ref(OBJECTS[0])
SHARED = multiprocessing.Value("d", 2.0)
OF_A_THREAD = threading.local()


def by_settings_in_a_class_without_methods() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * Settings.scale)

    return Net(), lambda: setattr(Settings, "scale", 5.0)


class Derived(Settings):
    pass


OF_A_CLASS = Derived()


def by_what_an_object_has_of_its_class() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * OF_A_CLASS.scale)

    return Net(), lambda: setattr(Settings, "scale", 5.0)


def by_what_an_object_had_of_its_class() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * OF_A_CLASS.scale)

    return Net(), lambda: setattr(OF_A_CLASS, "scale", 5.0)


def by_an_attribute_of_a_class_of_settings() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Derived()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * self.settings.scale)

    return Net(), lambda: setattr(Settings, "scale", 5.0)


def by_settings_in_a_class_that_is_an_attribute() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        settings = Settings

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * self.settings.scale)

    return Net(), lambda: setattr(Settings, "scale", 5.0)


def by_an_object_in_a_list() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * OBJECTS[0].scale)

    return Net(), lambda: setattr(OBJECTS[0], "scale", 5.0)


def added_to() -> None:
    STATISTICS.add_(1)


def by_what_is_computed_from_a_tensor() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second((self.first(x) - STATISTICS[0]) / (STATISTICS[1] + 1))

    return Net(), added_to


def by_a_number_from_a_tensor() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * STATISTICS.mean().item())

    return Net(), added_to


def by_a_number_from_an_array() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * float(FACTORS[0]))

    return Net(), lambda: FACTORS.__setitem__(0, FACTORS[0] + 1)


def by_an_environment_variable() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * float(os.environ.get("OF_THIS_TEST", "2.0")))

    def change() -> None:
        os.environ["OF_THIS_TEST"] = "5.0"

    return Net(), change


def by_a_weak_reference() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * REFERENCE().scale)

    return Net(), lambda: setattr(OBJECTS[0], "scale", 5.0)


def by_what_is_shared_among_processes() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * SHARED.value)

    return Net(), lambda: setattr(SHARED, "value", 5.0)


def by_a_variable_of_each_thread() -> tuple[nn.Module, Callable[[], None]]:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * OF_A_THREAD.scale)

    return Net(), lambda: setattr(OF_A_THREAD, "scale", 5.0)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (by_a_weak_reference, r"REFERENCE of .*, \(\), 'scale': 2.0 → 5.0"),
        (by_what_is_shared_among_processes, "SHARED of .*"),
        (by_a_variable_of_each_thread, "OF_A_THREAD of .*, 'scale': 2.0 → 5.0"),
        (by_settings_in_a_class_without_methods, "Settings of .*, 'scale': 2.0 → 5.0"),
        (by_what_an_object_has_of_its_class, "OF_A_CLASS of .*, 'scale': 2.0 → 5.0"),
        (by_what_an_object_had_of_its_class, "OF_A_CLASS of .*, 'scale': 2.0 → 5.0"),
        (by_an_attribute_of_a_class_of_settings, "settings.__class__.scale: 2.0 → 5.0"),
        (by_settings_in_a_class_that_is_an_attribute, r"settings.scale: 2.0 → 5.0"),
        (by_an_object_in_a_list, "OBJECTS of .*, 0, 'scale': 2.0 → 5.0"),
        (by_what_is_computed_from_a_tensor, "STATISTICS of .* has been written to"),
        (by_a_number_from_a_tensor, "STATISTICS of .* has been written to"),
        (by_a_number_from_an_array, "FACTORS of .* is another array"),
        (by_an_environment_variable, "the environment variable OF_THIS_TEST: missing → '5.0'"),
        (by_a_variable_of_a_function, r"the variable scale of .*Net.forward: 2.0 → 5.0"),
        (by_the_class, r"the class attribute .*Net.scale: 2.0 → 5.0"),
        (by_a_default, r"a default of .*scaled_by\[0\]: 2.0 → 5.0"),
        (by_an_attribute_of_a_function, r"scaled_by of .*, 'scale': 2.0 → 5.0"),
    ],
)
def test_a_change_of_another_kind_of_variable_is_seen_at_the_next_call(
    what: Callable[[], tuple[nn.Module, Callable[[], None]]], said: str
) -> None:
    model, change = what()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        assert torch.equal(pipe(X), of_the_loop(model))
        change()
        assert torch.equal(pipe(X), of_the_loop(model))
        (_, again) = pipe.compilations
        assert any(re.search(said, why) for why in again.why)


class Helper:
    """Reads a global variable in each of its methods."""

    def by_its_name(self) -> float:
        return SCALE

    @staticmethod
    def by_a_static_method() -> float:
        return SCALE

    @classmethod
    def by_a_class_method(cls) -> float:
        return SCALE

    @property
    def by_a_property(self) -> float:
        return SCALE


class HelperOfOperators:
    def __getitem__(self, place: int) -> float:
        return SCALE * place

    def __float__(self) -> float:
        return SCALE

    def __mul__(self, other: Tensor) -> Tensor:
        return other * SCALE


class HelperInADict(dict[str, float]):
    def by_its_name(self) -> float:
        return SCALE


HELPED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a method": (Helper, lambda held: held.by_its_name()),
    "a static method": (Helper, lambda held: held.by_a_static_method()),
    "a class method": (Helper, lambda held: held.by_a_class_method()),
    "a method, named ahead": (Helper, lambda held: (each := held.by_its_name, each())[1]),
    "a method of the class": (Helper, lambda held: type(held).by_a_class_method()),
    "a property": (Helper, lambda held: held.by_a_property),
    "an index": (HelperOfOperators, lambda held: held[1]),
    "a conversion": (HelperOfOperators, float),
    "a product": (HelperOfOperators, lambda held: (held * torch.ones(3)).sum() / 3),
    "a list": (lambda: [Helper()], lambda held: held[0].by_its_name()),
    "a kind of dict": (HelperInADict, lambda held: held.by_its_name()),
    "an object": (lambda: SimpleNamespace(has=Helper()), lambda held: held.has.by_its_name()),
    "a table of functions": (lambda: TABLE_OF_FUNCTIONS["of all"], lambda held: held()),
    "a global table": (lambda: "of all", lambda held: TABLE_OF_FUNCTIONS[held]()),
    "a table that it has": (lambda: [*TABLE_OF_FUNCTIONS.values()], lambda held: held[0]()),
}
TABLE_OF_FUNCTIONS = {"of all": lambda: SCALE}


class Holds(Two):
    def __init__(self, way: str) -> None:
        super().__init__()
        made, self.way = HELPED[way]
        self.held = made()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.way(self.held))


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("way", HELPED)
def test_what_an_object_reads_that_a_module_holds_is_watched(way: str, is_inside: bool) -> None:
    model = nn.Sequential(Holds(way), nn.Linear(3, 3)) if is_inside else Holds(way)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        assert torch.equal(pipe(X), of_the_loop(model))
        scaled()
        assert torch.equal(pipe(X), of_the_loop(model))
        (_, again) = pipe.compilations
        assert any(re.search("SCALE of .*: 2.0 → 3.0", why) for why in again.why)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.relu, torch.tanh, "function, tanh"),
        (nn.LayerNorm(3), nn.LayerNorm(3, eps=0.5), "module"),
        (partial(F.leaky_relu, negative_slope=0.1), partial(F.elu, alpha=0.5), "function"),
        (np.ones(3, np.float32), np.zeros(3, np.float32), "array"),
        (slice(0, 2), slice(1, 3), "slice"),
        ({"of": torch.relu}, {"of": torch.tanh}, "['of']: "),
    ],
)
def test_another_object_is_seen_at_the_next_call(one: Any, other: Any, said: str) -> None:
    used = one

    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if isinstance(used, np.ndarray):
                return self.second(y * torch.from_numpy(used))
            if isinstance(used, slice):
                return self.second(y)[:, used]
            return self.second(used["of"](y) if isinstance(used, dict) else used(y))

    model = Net()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        assert torch.equal(pipe(X), of_the_loop(model))
        used = other
        assert torch.equal(pipe(X), of_the_loop(model))
        (_, again) = pipe.compilations
        assert any(said in why for why in again.why)


def test_a_call_without_a_change_is_no_compilation() -> None:
    with fxpipe.compile(Reads(), ["cpu"] * 2, chunks=CHUNKS) as pipe:
        pipe(X)
        SETTINGS["shift"] = [1.0, 2.0]  # another list, of equal numbers
        ARGS.step += 1  # which the forward does not read
        pipe(X)
        assert len(pipe.compilations) == 1
        assert pipe.guards.attributes["the global variable SCALE of " + __name__] == "2.0"


def test_values_of_a_tensor_are_read_in_each_call() -> None:
    model = Reads()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        pipe(X)
        TABLE.mul_(3)
        assert torch.equal(pipe(X), of_the_loop(model))
        assert len(pipe.compilations) == 1


def test_what_the_forward_itself_changes_is_not_watched() -> None:
    global CALLS
    with fxpipe.compile(Counts(), ["cpu"] * 2, chunks=CHUNKS) as pipe:
        pipe(X)
        CALLS += 100
        pipe(X)
        assert len(pipe.compilations) == 1


class CountsInTheBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        CountsInTheBackward.calls += 1
        return gradient


def test_what_the_backward_changes_is_not_watched_either() -> None:
    class Counted(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(CountsInTheBackward.apply(self.first(x)))

    with fxpipe.compile(Counted(), ["cpu"] * 2, chunks=CHUNKS) as pipe:
        for _ in range(2):
            pipe(X).sum().backward()
        assert len(pipe.compilations) == 1
    assert CountsInTheBackward.calls == 2 * CHUNKS, "once for each micro-batch, and for no check"


@torch.fx.wrap
def offset(x: Tensor) -> Tensor:
    return x + SETTINGS["shift"][0]


class Wrapped(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(offset(self.first(x)))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * SCALE

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * SCALE


class OwnFunction(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubles.apply(self.first(x)))


@pytest.mark.parametrize(("kind", "change"), [(Wrapped, shifted), (OwnFunction, scaled)])
def test_what_runs_in_every_call_reads_them_itself(
    kind: type[nn.Module], change: Callable[[], None]
) -> None:
    model = kind()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS, tracer="symbolic") as pipe:
        assert torch.equal(pipe(X), of_the_loop(model))
        SETTINGS["shift"][0] = 4.0  # type: ignore[index]
        change()
        assert torch.equal(pipe(X), of_the_loop(model))
        assert len(pipe.compilations) == 1


class ByThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * getattr(OF_A_THREAD, "scale", 1.0)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class KeptWhole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return x * getattr(OF_A_THREAD, "scale", 1.0)


@pytest.mark.parametrize(
    ("scaled", "tracer"), [(ByThread.apply, "symbolic"), (KeptWhole(), "export")]
)
def test_what_runs_in_threads_of_stages_has_no_variables_of_the_callers_thread(
    scaled: Any, tracer: str
) -> None:
    class Net(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = scaled

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.scaled(self.first(x)))

    words = "reads the global variable OF_A_THREAD of .*, a threading.local, and stages run in"
    with pytest.raises(fxpipe.TraceError, match=words):
        fxpipe.compile(Net(), ["cpu"] * 2, chunks=CHUNKS, tracer=tracer)(X)


def test_a_loss_has_no_variables_of_the_callers_thread() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * getattr(OF_A_THREAD, "scale", 1.0)

    with pytest.raises(ValueError, match="loss_fn reads the global variable OF_A_THREAD of "):
        fxpipe.compile(Two(), ["cpu"] * 2, chunks=CHUNKS, loss_fn=loss)
