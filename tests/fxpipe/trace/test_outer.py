"""A trace leaves nothing in the caches and global variables that the code of a model reads."""

from __future__ import annotations

import functools
import logging
import runpy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.trace.isolation import untouched
from fxpipe.trace.outer import globals_read
from tests.fxpipe.trace import small

CALLS, LAST, HANDLER = 0, None, None
TABLES: dict[int, Tensor] = {}
LOSSES: list[Tensor] = []
LENGTHS: list[int] = []


@functools.cache
def cached(length: int) -> Tensor:
    return torch.arange(length).float() / length


def by_hand(length: int) -> Tensor:
    if length not in TABLES:
        TABLES[length] = torch.arange(length).float() / length
    return TABLES[length]


def in_a_default(length: int, tables: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    if length not in tables:
        tables[length] = torch.arange(length).float() / length
    return tables[length]


def in_a_default_by_name(length: int, *, tables: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006
    return in_a_default(length, tables)


class OfAClass:
    """Keeps tables in its class, which all objects share."""

    tables: dict[int, Tensor] = {}  # noqa: RUF012

    @functools.lru_cache(2)  # noqa: B019
    def cached(self, length: int) -> Tensor:
        return torch.arange(length).float() / length

    def by_hand(self, length: int) -> Tensor:
        if length not in self.tables:
            self.tables[length] = torch.arange(length).float() / length
        return self.tables[length]


def remembered():
    """A function with a table of its own, as a decorator would make it."""
    tables: dict[int, Tensor] = {}

    def table(length: int) -> Tensor:
        if length not in tables:
            tables[length] = torch.arange(length).float() / length
        return tables[length]

    return table


of_a_closure, of_a_class = remembered(), OfAClass()


class Holder:
    """Has no table of its own, and is no module."""

    def by_hand(self, length: int) -> Tensor:
        if length not in TABLES:
            TABLES[length] = torch.arange(length).float() / length
        return TABLES[length]


class Positions(nn.Module):
    """Adds a table, by one of these functions. Its way depends on sizes, if ``branches``."""

    def __init__(self, kind: str, branches: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kind, self.branches = kind, branches
        self.holder = Holder()

    def table(self, length: int) -> Tensor:
        if self.kind == "cached":
            return cached(length)
        if self.kind == "by hand":
            return by_hand(length)
        if self.kind == "cached by a class":
            return of_a_class.cached(length)
        if self.kind == "by hand in a class":
            return of_a_class.by_hand(length)
        if self.kind == "by an object of the model":
            return self.holder.by_hand(length)
        if self.kind == "in a default":
            return in_a_default(length)
        if self.kind == "in a default by name":
            return in_a_default_by_name(length)
        return of_a_closure(length)

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.shape[1] > 2:  # a trace with symbols cannot go on
            x = x * 2
        return self.second(self.first(x) + self.table(x.shape[1])[:, None])


KINDS = (
    *("cached", "by hand", "cached by a class", "by hand in a class", "in a closure"),
    *("by an object of the model", "in a default", "in a default by name"),
)


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in any table, list or variable."""
    cached.cache_clear()
    OfAClass.cached.cache_clear()
    defaults = *in_a_default.__defaults__, *in_a_default_by_name.__kwdefaults__.values()
    for each in TABLES, OfAClass.tables, LOSSES, LENGTHS, *defaults:
        each.clear()
    monkeypatch.setitem(globals(), "CALLS", 0)
    for name in "LAST", "HANDLER":
        monkeypatch.setitem(globals(), name, None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_computes_tensors_after_it_has_been_compiled(kind: str, branches: bool) -> None:
    model = Positions(kind, branches)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for length in 5, 3:
            x = torch.randn(4, length, 4)
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
            assert type(model(x)) is Tensor


class LoadsWhatItHas(OrderedDict[str, Tensor]):
    """A table that runs code as somebody looks at all that it has."""

    def values(self):
        raise ValueError("not to be loaded")


LOADS = LoadsWhatItHas(weight=torch.ones(4))


def test_code_of_a_kind_of_dict_does_not_run_as_it_is_looked_into() -> None:
    class ReadsATable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * LOADS["weight"]

    model, x = ReadsATable(), torch.randn(4, 4)
    with fxpipe.compile(model, ["cpu"], chunks=2) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))


SCRIPT = """
import functools, fxpipe, torch
from torch import nn

TABLES = {}

@functools.cache
def cached(length):
    return torch.arange(length).float()

def by_hand(length):
    if length not in TABLES:
        TABLES[length] = torch.arange(length).float()
    return TABLES[length]

class AddsATable(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), table

    def forward(self, x):
        return self.layer(x) + self.table(x.shape[1])

for table in cached, by_hand:
    model, x = AddsATable(table), torch.randn(4, 4)
    with fxpipe.compile(model, ["cpu"], chunks=2) as pipe:
        output = pipe(x)
    assert torch.equal(output, torch.cat([model(part) for part in x.chunk(2)]))
    assert type(table(4)) is torch.Tensor
"""


def test_tables_of_a_script_are_kept_as_they_were(tmp_path: Path) -> None:
    """A script's module is ``__main__``, whose name looks like one that Python has for itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("tracer", ["auto", "export"])  # a look-up by a size is no symbol
def test_what_was_in_a_table_stays_there(tracer: str) -> None:
    table = by_hand(5)
    model = Positions("by hand", False)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        pipe(torch.randn(4, 5, 4))
        pipe(torch.randn(4, 3, 4))
    assert list(TABLES) == [5] and TABLES[5] is table


class Notes(nn.Module):
    """Notes the length of each call, and a loss, in global lists."""

    def forward(self, x: Tensor) -> Tensor:
        note(x)
        return x


class NotesAndBranches(Notes):
    """Cannot be traced by symbols, and serves all sizes."""

    def forward(self, x: Tensor) -> Tensor:
        LOSSES.append(x.mean())
        return x * 2 if x.shape[1] > 9 else x


def note(x: Tensor) -> None:
    LENGTHS.append(len(x))
    LOSSES.append(x.mean())


def test_a_cache_that_has_been_given_nothing_keeps_what_it_has() -> None:
    model = Positions("cached", False)
    model(torch.ones(1, 5, 4))
    with untouched(model):
        model(torch.ones(1, 5, 4))
    assert cached.cache_info().currsize == 1
    with untouched(model):
        model(torch.ones(1, 3, 4))
    assert cached.cache_info().currsize == 0


def test_a_global_list_has_no_tensors_of_the_runs_of_a_check() -> None:
    model = Notes()
    model(torch.ones(1))
    with untouched(model):
        model(torch.ones(3))
        assert len(LOSSES) == 2
    assert len(LOSSES) == 1 and LENGTHS == [1, 3]


@pytest.mark.parametrize("kind", [Notes, NotesAndBranches])
@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_a_warning_says_that_a_pipeline_puts_no_tensors_in_global_variables(
    tracer: str, kind: type[nn.Module]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 2))
    said = "puts tensors into the global variable LOSSES of .*test_outer in its forward"
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe,
        pytest.warns(UserWarning, match=said),
    ):
        pipe(torch.randn(4, 4))


def test_a_table_that_is_made_once_is_not_warned_of() -> None:
    model = Positions("by hand", False)
    with warnings.catch_warnings(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        warnings.simplefilter("error")
        pipe(torch.randn(4, 5, 4))


class Assigns(nn.Module):
    """Assigns to a variable of this kind in each call, and gives what its layer gives."""

    calls = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        global CALLS, LAST
        y = self.layer(x)
        if self.kind == "a number":
            CALLS += 1
        elif self.kind == "a tensor":
            LAST = y.mean()
        elif self.kind == "in another file":
            small.LAST = y.mean()
        elif self.kind == "in a class":
            type(self).calls += 1
        else:
            remember(y)
        return y


def remembering() -> tuple[Callable[[Tensor], None], Callable[[], Tensor | None]]:
    last = None

    def remember(y: Tensor) -> None:
        nonlocal last
        last = y.mean()

    return remember, lambda: last


remember, remembered_last = remembering()
ASSIGNED = {
    "a number": (lambda: CALLS, "the global variable CALLS of .*test_outer"),
    "a tensor": (lambda: LAST, "the global variable LAST of .*test_outer"),
    "in another file": (lambda: vars(small).get("LAST"), "the global variable LAST of small"),
    "in a class": (lambda: Assigns.calls, "the class attribute Assigns.calls"),
    "in a closure": (remembered_last, "the variable last around remembering"),
}


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("kind", ASSIGNED)
def test_a_variable_to_which_the_forward_assigns_has_what_it_had(kind: str, tracer: str) -> None:
    get, said = ASSIGNED[kind]
    model, x, before = Assigns(kind), torch.randn(4, 4), get()
    expected = f"Assigns assigns to {said}.* in its forward; a pipeline does not"
    with (
        fxpipe.compile(model, ["cpu"], chunks=2, tracer=tracer) as pipe,
        pytest.warns(UserWarning, match=expected),
    ):
        output = pipe(x)
    assert get() is before
    assert torch.equal(output, torch.cat([model.layer(part) for part in x.chunk(2)]))


class Derived(Assigns):
    """Has the number of its calls apart from that of the class from which it has inherited it."""


def test_an_attribute_that_a_class_has_inherited_is_inherited_again() -> None:
    with untouched(model := Derived("in a class")):
        model(torch.ones(1, 4))
        assert Derived.calls == 1
    assert "calls" not in vars(Derived)


class Depends(nn.Module):
    """Computes with a variable to which each call assigns; one such variable counts calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        global CALLS, LAST
        y = self.layer(x)
        if self.kind == "a number":
            CALLS += 1
            return y * CALLS
        if self.kind == "a number later":
            CALLS += 1
            return y * 2 if CALLS > 500 else y
        last, LAST = LAST, y.detach().mean()
        return y if last is None else y - last


@pytest.mark.parametrize("kind", ["a number", "a number later", "a tensor"])
def test_a_model_that_depends_on_what_an_earlier_call_has_assigned_is_refused(kind: str) -> None:
    with (
        fxpipe.compile(Depends(kind), ["cpu"], chunks=2) as pipe,
        pytest.raises(fxpipe.TraceError, match=r"assigns to .*, and what it gives depends"),
    ):
        pipe(torch.randn(4, 4))
    assert CALLS == 0 and LAST is None


class MakesOnce(nn.Module):
    """Makes a tensor in its first call, and adds a handler to a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        global LAST, HANDLER
        if HANDLER is None:
            HANDLER = logging.NullHandler()
            logging.getLogger(__name__).addHandler(HANDLER)
        if LAST is None:
            LAST = torch.arange(4.0)
        return self.layer(x) + LAST


def test_what_the_first_call_makes_is_not_told_and_what_it_makes_known_elsewhere_stays() -> None:
    model, x = MakesOnce(), torch.randn(4, 4)
    with warnings.catch_warnings(), fxpipe.compile(model, ["cpu"], chunks=2) as pipe:
        warnings.simplefilter("error")
        output = pipe(x)
        assert LAST is None and logging.getLogger(__name__).handlers == [HANDLER]
        assert torch.equal(output, torch.cat([model(part) for part in x.chunk(2)]))
        assert torch.equal(pipe(x), output)


head = nn.LazyBatchNorm1d()


class NamedAlike(nn.Module):
    """Has an attribute with the name of a global variable, which its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_a_global_variable_with_the_name_of_an_attribute_is_not_read() -> None:
    assert globals_read(NamedAlike.forward.__code__) == frozenset()
    with fxpipe.compile(NamedAlike(), ["cpu"], chunks=2) as pipe:
        assert pipe(small.x()).shape == (4, 8)
