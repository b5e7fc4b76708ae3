"""What stands in the place of random numbers of Python and NumPy while a model is checked.

The functions of the modules ``random`` and ``numpy.random`` are replaced for the thread that
checks. Each draw is the first one of a generator of its own, so that the same call always gives the
same, however many draws there have been before it (one for each row, say). All numbers of an array
are the same, and so are those of all rows. Orders are the reverse ones, in which rows that change
places show.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from fxpipe.trace.patches import patched

SEED = 2148
"""The seed of the generators that draw in the place of others. The first integer that is drawn from
it is rarely 0, which would hide what is multiplied by it, and the first weight of a mixture is
neither near 0 nor near 1."""


@dataclass
class Met:
    """What has been replaced in a run of a model."""

    any: bool = False
    """Whether random numbers have been drawn."""
    uniform: bool = False
    """Whether these may be compared with a rate."""

    def take(self, any: bool, uniform: bool) -> None:
        """Note that this has been met as well."""
        self.any |= any
        self.uniform |= uniform


@contextmanager
def stilled_host(uniform: float) -> Iterator[Met]:
    """Inside the ``with`` block, Python's and NumPy's functions that draw random numbers give the
    same at every call, and for every row. ``uniform`` is what stands for numbers from 0 to 1.

    Yields an object that tells what has been drawn.
    """
    met = Met()
    with ExitStack() as stack:
        for module, name, draw in _functions():
            own = partial(_noted, met, name in _UNIFORM, draw, uniform)
            stack.enter_context(patched(module, name, partial(_always, own)))
        yield met


def _always(replacement: Any, original: Any) -> Any:
    return replacement


def _noted(
    met: Met, is_uniform: bool, draw: Draw, uniform: float, *args: Any, **kwargs: Any
) -> Any:
    met.take(True, is_uniform)
    return draw(uniform, *args, **kwargs)


Draw = Callable[..., Any]
"""``draw(uniform, *args, **kwargs)``: what stands for the result of a call."""

_STATES = {"seed", "getstate", "setstate", "get_state", "set_state"}
_UNIFORM = {"random", "uniform", "rand", "random_sample", "ranf", "sample"}


def _functions() -> Iterator[tuple[ModuleType, str, Draw]]:
    """The functions that draw from the generators of the process: those of Python, and those of
    NumPy if it has been imported."""
    for name in _drawing(random, random.Random):
        yield random, name, _PYTHON.get(name) or partial(_first_of_python, name)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        for name in (*_drawing(numpy, numpy.RandomState), "ranf", "sample"):
            yield numpy, name, _NUMPY.get(name) or partial(_first_of_numpy, name)


def _drawing(module: ModuleType, kind: type) -> list[str]:
    """The functions of a module that are methods of one generator."""
    owners = {name: getattr(each, "__self__", None) for name, each in vars(module).items()}
    return [n for n, owner in owners.items() if isinstance(owner, kind) and n not in _STATES]


# ---------------------------------------------------------------------------------- Python's


def _first_of_python(name: str, _: float, *args: Any, **kwargs: Any) -> Any:
    return getattr(random.Random(SEED), name)(*args, **kwargs)


def _between(uniform: float, low: float, high: float) -> float:
    return low + uniform * (high - low)


def _one_of_choices(_: float, *args: Any, k: int = 1, **kwargs: Any) -> list[Any]:
    return random.Random(SEED).choices(*args, k=1, **kwargs) * k


def _reverse(_: float, x: Any) -> None:
    x[:] = x[::-1].copy()


_PYTHON: dict[str, Draw] = {
    "random": lambda uniform: uniform,
    "uniform": _between,
    "choices": _one_of_choices,
    "shuffle": _reverse,
}


# ----------------------------------------------------------------------------------- NumPy's


def _first_of_numpy(name: str, _: float, *args: Any, **kwargs: Any) -> Any:
    """The first number that a generator draws, in the place of all; where parameters are arrays,
    the first number for each of them."""
    numpy = sys.modules["numpy"]

    def draw(*each: Any, **named: Any) -> Any:
        return getattr(numpy.random.RandomState(SEED), name)(*each, **named)

    made = draw(*args, **kwargs)
    if not numpy.ndim(made):
        return made
    given = (*args, *kwargs.values())
    if not any(isinstance(each, numpy.ndarray) and each.ndim for each in given):
        return _all_as(made, made.flat[0])
    # What is no array may be a size, which the array of parameters says already.
    own = [each for each in args if not isinstance(each, tuple)]
    named = {key: each for key, each in kwargs.items() if key != "size"}
    first = numpy.vectorize(lambda *each, **named: numpy.ravel(draw(*each, **named))[0])
    return _all_as(made, first(*own, **named))


def _all_as(made: Any, value: Any) -> Any:
    """Numbers as they have been drawn, an array or one number: with these values in their place."""
    if not hasattr(made, "shape"):
        return type(made)(value)
    made[...] = value
    return made


def _uniform(uniform: float, *shape: Any, **kwargs: Any) -> Any:
    numpy = sys.modules["numpy"].random.RandomState(SEED)
    return _all_as(numpy.random_sample(*shape, **kwargs), uniform)


def _uniform_of_shape(uniform: float, *shape: int) -> Any:
    return _all_as(sys.modules["numpy"].random.RandomState(SEED).rand(*shape), uniform)


def _uniform_between(uniform: float, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
    made = sys.modules["numpy"].random.RandomState(SEED).uniform(low, high, size)
    return _all_as(made, low + uniform * (high - low))


def _vectors(name: str, _: float, *args: Any, **kwargs: Any) -> Any:
    """The first vector that a generator draws, in the place of all."""
    made = getattr(sys.modules["numpy"].random.RandomState(SEED), name)(*args, **kwargs)
    return _all_as(made, made.reshape(-1, made.shape[-1])[0].copy())


def _chosen(_: float, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
    made = sys.modules["numpy"].random.RandomState(SEED).choice(a, size, replace, p)
    return _all_as(made, made.flat[0]) if size is not None and replace and made.size else made


def _turned(_: float, x: Any) -> Any:
    numpy = sys.modules["numpy"]
    return (numpy.arange(x) if numpy.ndim(x) == 0 else numpy.array(x))[::-1].copy()


_NUMPY: dict[str, Draw] = {
    "rand": _uniform_of_shape,
    **dict.fromkeys(("random", "random_sample", "ranf", "sample"), _uniform),
    "uniform": _uniform_between,
    "randn": lambda _, *shape: _first_of_numpy("standard_normal", _, size=shape or None),
    **{n: partial(_vectors, n) for n in ("dirichlet", "multinomial", "multivariate_normal")},
    "choice": _chosen,
    "permutation": _turned,
    "shuffle": _reverse,
    "bytes": lambda _, length: sys.modules["numpy"].random.RandomState(SEED).bytes(length),
}
