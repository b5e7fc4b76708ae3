"""The record of compilations: when a model was compiled, why, for what, and how long it took."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import overload

from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.guards.program import Guards
from fxpipe.ir.text import human_time

WIDTH = 100  # of a record that is printed
SHOWN = 3  # the most programs of which a printed record says why they did not serve the call

FIRST = "the first call"
FORGOTTEN = "all programs had been dropped (recompile(), values loaded, parameters moved)"


@dataclass(frozen=True)
class Compilation:
    """One compilation of a model for a kind of call.

    Attributes:
        number: the how-manieth compilation of the pipeline it is, from 1 on.
        at: when it began.
        seconds: how long it took, without what lowers a pipeline or step graph to programs.
        why: what made it necessary: for each program that there was, the latest first, the guard
            that the call has failed, such as ``shape of x: (8, 4) → (8, 6)``.
        guards: for which calls the program that came of it is right.
        front_end: what traced the model: "symbolic", "export" or "custom".
        cache: "" without a cache on disk, else "from the cache", "kept in the cache", or why the
            compilation is not kept.
    """

    number: int
    at: datetime
    seconds: float
    why: tuple[str, ...]
    guards: Guards
    front_end: str
    cache: str = ""

    def __str__(self) -> str:
        how = ", ".join(filter(None, (self.front_end, self.cache)))
        head = f"{self.number}. {self.at:%H:%M:%S}, {human_time(self.seconds)}, {how}: "
        more = len(self.why) - SHOWN
        reasons = [*self.why[:SHOWN], *([f"and {more} programs more"] if more > 0 else [])]
        lines = textwrap.wrap(head + reasons[0], WIDTH, subsequent_indent="   ")
        for reason in reasons[1:]:
            lines += textwrap.wrap(reason, WIDTH, initial_indent="   ", subsequent_indent="   ")
        said = textwrap.wrap(self.guards.brief, WIDTH - 3)
        return "\n".join([*lines, *textwrap.indent("\n".join(said), "   ").splitlines()])


@contextmanager
def timed_into(seconds: list[float]) -> Iterator[None]:
    """Inside the ``with`` block time is taken, and added to a list at its end, however it ends."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds.append(time.perf_counter() - begin)


class Compilations(Sequence[Compilation]):
    """The compilations of a pipeline, the oldest first. ``print`` shows each in a few lines.

    ::

        2 compilations of GPT
        1. 10:46:11, 2.31 s, export: the first call
           compiled for ids: int64 [*, *], ids.size(1) <= 64, train, no autocast, 9 attributes of
           the model
        2. 10:46:15, 1.95 s, export: mode of the model: train → eval
           compiled for ids: int64 [*, *], ids.size(1) <= 64, eval, no autocast, 9 attributes of
           the model

    ``pipe.compilations[0].guards.attributes`` has the attributes of the model.

    Attributes:
        lowered: how many seconds each graph of a call or of a step has taken, which is for one
            number of micro-batches; with the first of a step it is checked what the loss means.
        checks: how many seconds each check of a later mini-batch has taken: labels or numbers had
            come in it by which micro-batches might mean something else.
        refused: the error that the latest attempt to compile has ended with, as one line; "" if it
            has succeeded, or there was none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._all: list[Compilation] = []
        self.lowered: list[float] = []
        self.checks: list[float] = []
        self.refused = ""

    @contextmanager
    def refusals_noted(self) -> Iterator[None]:
        """A context for one compilation: an error that ends it is noted as ``refused``. What comes
        after the first compilation of a call, as the check of a loss does, is one, too."""
        try:
            yield
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            self.refused = f"{type(error).__name__}: {first}"
            raise
        self.refused = ""

    def note(
        self,
        at: datetime,
        seconds: float,
        why: tuple[str, ...],
        guards: Guards,
        front_end: str,
        cache: str = "",
    ) -> None:
        """Add a compilation; the arguments are its attributes."""
        number = len(self._all) + 1
        self._all.append(Compilation(number, at, seconds, why, guards, front_end, cache))

    @property
    def later(self) -> list[str]:
        """What else has taken time, and how much, in words."""
        graphs, checks = len(self.lowered), len(self.checks)
        said = []
        if graphs:
            several = f"{graphs} graph{'s' * (graphs > 1)} of all micro-batches"
            took = human_time(sum(self.lowered))
            said.append(f"{several}, with the check of what a loss means, took {took}")
        if checks:
            several = f"{checks} checks of later mini-batches"
            several = several if checks > 1 else "1 check of a later mini-batch"
            said.append(f"{several} took {human_time(sum(self.checks))}")
        return said

    def why(self, call: GuardedCall, programs: Iterable[Guards]) -> tuple[str, ...]:
        """Why none of the programs serves a call: the guard of each that fails, the latest first.

        Guards come one after the other, so that several programs may fail one for the same reason;
        it is said once.
        """
        if not self._all:
            return (FIRST,)
        reasons = [guards.first_failure(call) for guards in programs]
        return tuple(dict.fromkeys(reversed(reasons))) or (FORGOTTEN,)

    @overload
    def __getitem__(self, index: int) -> Compilation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Compilation]: ...
    def __getitem__(self, index: int | slice) -> Compilation | list[Compilation]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __str__(self) -> str:
        count = f"{len(self)} compilation{'s' * (len(self) != 1)} of {self._name}"
        return "\n".join([count, *map(str, self._all), *self.later])

    __repr__ = __str__
