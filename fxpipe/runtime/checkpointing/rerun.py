"""A checkpointed stage in a step: the stage is called once, and again ahead of its backward.

::

    forward     arguments ── stage ── results          its autograd graph is freed at once
    replay      arguments ── stage ── (results)        its autograd graph is the backward's

A step has no need for the hooks on saved tensors of :func:`fxpipe.checkpoint`: it says itself when
a stage is run again, and where the backward begins, so that nobody but the step can ask for the
first graph. Each of the two runs costs what a forward without checkpoint does. The first run
records gradients too, since what a model computes may depend on whether it does
(``nn.MultiheadAttention`` has another kernel without), and since a result has to say whether it
requires a gradient. What this graph saves takes no memory that the second run would not take: it is
freed before the stage's results are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from itertools import zip_longest
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.runtime.checkpointing.module_effects import ModuleEffects
from fxpipe.runtime.checkpointing.options import Contexts
from fxpipe.runtime.checkpointing.recomputation import (
    CheckpointError,
    check_version,
    looks_of,
    said,
    version_in,
)
from fxpipe.runtime.penalty import leaves_of

Function = Callable[..., tuple[Any, ...]]
Record = Callable[[Function, tuple[Any, ...]], tuple[tuple[Any, ...], Sequence[Sequence[Any]]]]
"""Calls a function with these arguments. Returns its results, without history, and for each result
the ends of the autograd graph, at which the backward begins: edges of the graph, or tensors."""

_within: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
"""The modules within each stage. They are looked up once, since a stage is called often."""


class Rerun:
    """A call of a stage that is made twice. The second call finds everything as the first did.

    Args:
        stage: the stage; the modules within it never become others.
        function: calls the stage, and returns a tuple of results.
        args: the function's arguments, which are kept until the second call.
        contexts: the contexts of the two calls.

    The settings of the thread, such as autocast, are the same in both calls, since both are made in
    one run of a lane. Random numbers depend on seeds, which are among the arguments.
    """

    def __init__(
        self,
        stage: nn.Module,
        function: Function,
        args: tuple[Any, ...],
        contexts: Contexts | None = None,
    ) -> None:
        within = _within.get(stage)
        if within is None:
            within = _within[stage] = [each for each in stage.modules() if each is not stage]
        self._modules, self._function, self._args = [stage, *within], function, args
        self._given = _versions(_tensors(args))
        self._context = copy_context()
        self._effects = ModuleEffects(self._modules)
        self._contexts = contexts or (nullcontext(), nullcontext())

    def first(self, record: Record) -> tuple[Any, ...]:
        """Make the first call, and return its results."""
        with self._effects.watched(), self._contexts[0]:
            results, ends = record(self._function, self._args)
        self._looks, self._trained = _looks(results), _trained_by(ends)
        return results

    def again(self, record: Record) -> None:
        """Make the second call, with the context variables (``contextvars``) of the first.

        Raises:
            RuntimeError: if an argument, or a tensor of the stage to which the stage itself does
                not write, has been written to since the first call.
            CheckpointError: if the results are not like those of the first call, or are computed
                with other parameters.
        """
        for tensor, version in self._given:
            check_version(tensor, version, "an argument")
        with self._effects.as_before(), self._contexts[1]:
            results, ends = self._context.run(record, self._function, self._args)
        looks = _looks(results)
        if looks != self._looks:
            pairs = zip_longest(map(_said, self._looks), map(_said, looks), fillvalue="nothing")
            first, second = next((one, other) for one, other in pairs if one != other)
            self._differ(f"gave {first}, and its recomputation {second}")
        trained = _trained_by(ends)
        if trained != self._trained:
            runs = "first" if trained < self._trained else "second"
            named = self._modules[0].named_parameters()
            names = [name for name, each in named if each in trained ^ self._trained]
            self._differ(f"used {', '.join(names)} only in the {runs} of its two runs")

    def _differ(self, how: str) -> NoReturn:
        raise CheckpointError(
            f"the forward of {type(self._modules[0]).__name__} {how}: it must do the same both "
            "times, so it may not depend on anything that changes between them"
        )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors in these values. A tensor is taken first, since a pytree takes longer."""
    for value in values:
        if type(value) is Tensor:
            yield value
        elif value is not None:
            yield from (each for each in pytree.tree_leaves(value) if isinstance(each, Tensor))


def _versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(each, version_in(each)) for each in tensors]


def _looks(results: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [(looks_of(tensor), tensor.requires_grad) for tensor in _tensors(results)]


def _said(looks: tuple[Any, bool]) -> str:
    look, requires_grad = looks
    return f"a {said(look)}{' that requires a gradient' * requires_grad}"


def _trained_by(ends: Iterable[Sequence[Any]]) -> set[Tensor]:
    """The parameters that get gradients from a backward that begins at these ends.

    The operators in the graph would tell more, but they may be others where a mode watches the
    first run: ``reshape`` then calls ``view``.
    """
    leaves = leaves_of(end for each in ends for end in each)
    return {leaf for leaf in leaves if isinstance(leaf, nn.Parameter)}
