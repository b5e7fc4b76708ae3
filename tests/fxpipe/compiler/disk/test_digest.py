"""Digests of values and of code: equal in every process for what is equal, and for nothing else."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fxpipe.compiler.disk import digest as digest_module
from fxpipe.compiler.disk.digest import Digest
from fxpipe.compiler.disk.errors import NotKept


def digest(value):
    found = Digest(nn.Linear(1, 1))
    found.add("value", value)
    return found.hex()


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: int
    y: int


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class Named(dict):
    def __init__(self, name):
        super().__init__(a=1)
        self.name = name


class Silent(float):
    def __repr__(self):
        return "a number"


def closed(number):
    return lambda x: x + number


HELPED = 1


def helper(x):
    return x * HELPED


def of_globals(x):
    return helper(x)


def made(source, **scope):
    """The function ``f`` that a source defines, with these globals."""
    scope.setdefault("__name__", "__main__")
    exec(source, scope)
    return scope["f"]


VALUES = [
    *(None, True, 1, 1.0, -0.0, 0.0, 1j, "1", b"1", ..., slice(1), range(1), Color.RED, Color.BLUE),
    *([], (), {}, set(), frozenset(), [1], (1,), {1}, {"a": 1}, {"a": 2}, {"b": 1}, [[1]], [1, 2]),
    *(
        torch.float32,
        torch.device("cpu"),
        torch.strided,
        torch.Size([1]),
        np.float32(1),
        np.int8(1),
    ),
    *(np.zeros(2), np.ones(2), np.zeros(3), torch.zeros(2), torch.ones(2), torch.zeros(2, 1)),
    *(torch.zeros(2).double(), torch.zeros(2, requires_grad=True), nn.Parameter(torch.zeros(2))),
    *(Point(1, 2), Point(2, 1), Slotted(1), Slotted(2), int, float, Point, Color, torch, np),
    *(Named("a"), Named("b"), Silent(1), Silent(2)),
    *(closed(1), closed(2), functools.partial(helper, 1), functools.partial(helper, 2), len, max),
    *(Point(1, 2).__eq__, nn.Linear(1, 1), nn.Linear(1, 2), nn.Linear(1, 1).eval(), torch.relu),
    *(made("def f(x): return x"), made("def f(x): return -x"), made("def f(x, y=1): return x")),
    *(made("def f(x, *, y=1): return x"), made("def f(x, *, y=2): return x")),
    *(made("def f(x): return g(x)", g=closed(1)), made("def f(x): return g(x)", g=closed(2))),
    *(made("def f(x): return n", n=1), made("def f(x): return n", n=2)),
    *(made("def f(x): return [1 for _ in x]"), made("def f(x): return [2 for _ in x]")),
    *(made("def f(x): return m.g(x)", m=types.SimpleNamespace(g=1)),),
    *(made("class f:\n  a = 1"), made("class f:\n  a = 2")),
    *(made("class f:\n  __module__ = 'torch.nn'\n  a = 1"),),
    *(made("class f:\n  __module__ = 'torch.nn'\n  a = 2"),),
    *(made("class f:\n  def __add__(self, x): return 1"),),
    *(made("class f:\n  def __add__(self, x): return 2"),),
    *(made("class f:\n  @property\n  def a(self): return 1"),),
    *(made("class f:\n  @property\n  def a(self): return 2"),),
    *(made("class f:\n  @staticmethod\n  def a(): return 1"),),
    *(made("class f:\n  @staticmethod\n  def a(): return 2"),),
]


def test_values_that_differ_have_different_digests():
    found = [digest(value) for value in VALUES]
    same = [
        (VALUES[i], VALUES[j]) for i in range(len(found)) for j in range(i) if found[i] == found[j]
    ]
    assert same == []


def test_a_global_that_a_called_function_reads_counts(monkeypatch):
    before = digest(of_globals)
    monkeypatch.setitem(globals(), "HELPED", 2)
    assert digest(of_globals) != before
    monkeypatch.setitem(globals(), "HELPED", 1)
    assert digest(of_globals) == before


def test_code_below_a_decorator_of_pytorch_counts():
    one, other = made("def f(x): return x"), made("def f(x): return -x")
    assert digest(torch.no_grad()(one)) != digest(torch.no_grad()(other))


def test_which_parts_are_one_object_counts():
    one, other = [1], [1]
    assert digest([one, one]) != digest([one, other])
    tensor = torch.zeros(4)
    assert digest([tensor[:2], tensor[:2]]) != digest([tensor[:2], torch.zeros(2)])


def test_what_refers_to_itself_has_a_digest():
    one, other = Point(1, 2), Point(1, 2)
    one.x, other.x = one, other
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    "value, said",
    [
        (torch.Generator(), "value is a torch._C.Generator"),
        ({"a": [open(os.devnull)]}, r"value.a\[0\] is a _io.TextIOWrapper"),  # noqa: SIM115
        (Point(iter([1]), 2), "value.x is a builtins.list_iterator"),
        (threading.local(), "value is a _thread._local"),
        ({object()}, "value is a set that has a builtins.object"),
        (torch.jit.script(nn.Linear(1, 1)), "compiled to TorchScript"),
    ],
    ids=["generator", "file", "iterator", "thread", "set", "TorchScript"],
)
def test_what_cannot_be_compared_is_refused_with_the_path_to_it(value, said):
    with pytest.raises(NotKept, match=said):
        digest(value)


def test_the_fields_of_a_named_tuple_count():
    pairs = [NamedTuple("Pair", [(name, int) for name in names]) for names in ("ab", "ba", "ab")]
    one, other, same = ([pair, pair(1, 2)] for pair in pairs)
    assert digest(one) == digest(same) != digest(other)


def test_locks_and_loggers_say_nothing_of_what_is_computed():
    import logging

    assert digest([threading.Lock()]) == digest([threading.Lock()])
    assert digest([logging.getLogger("a")]) == digest([logging.getLogger("a")])


def test_a_module_that_a_function_would_import_has_to_be_known():
    source = "def f(x):\n  from not_imported_yet import g\n  return g(x)"
    with pytest.raises(NotKept, match="imports not_imported_yet, which has not been imported"):
        digest(made(source, __name__="__main__"))
    known = sys.modules["not_imported_yet"] = types.ModuleType("not_imported_yet")
    try:
        known.g = closed(1)
        before = digest(made(source, __name__="__main__"))
        known.g = closed(2)
        assert digest(made(source, __name__="__main__")) != before
    finally:
        del sys.modules["not_imported_yet"]


def test_a_model_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(digest_module, "_MOST", 1000)
    with pytest.raises(NotKept, match="more than 1,000 parts"):
        digest(list(range(2000)))
    nested = []
    for _ in range(10_000):
        nested = [nested]
    monkeypatch.setattr(digest_module, "_MOST", 100_000)
    with pytest.raises(NotKept, match="nested too deeply"):
        digest(nested)


PROCESS = """
import torch
from torch import nn
from fxpipe.compiler.disk.digest import Digest

class Net(nn.Module):
    kinds = {"a", "b", "c", "d"}
    def forward(self, x):
        return x if x.dtype in {torch.float32, torch.float64} or "a" in {"a", "b", "c"} else -x

model = Net()
model.names = {"one", "two", "three", "four"}
found = Digest(model)
found.add_model(model)
found.add("names", (model.names, model.kinds, {torch.float16, torch.float32}))
print(found.hex())
"""


def test_digests_are_the_same_in_all_processes():
    found = []
    for seed in "1", "2":
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", PROCESS]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout)
    assert found[0] == found[1]
