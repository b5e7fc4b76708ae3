"""Progress and times of work that takes long, such as a compilation.

The work is divided into phases, which may have phases of their own. A listener is told of each
phase as it begins, so that it may be shown; within :func:`timed` the time that each phase takes is
added up; and within :func:`telling` somebody is told once if all of it takes long.

::

    compile                     11.7 s
    ├─ check                     2.3 s        the time of a phase includes the phases within it;
    │   └─ model  5 times        2.2 s        those of one name are added up
    └─ trace                     9.1 s
        ├─ symbolic              0.1 s
        └─ export                4.0 s
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from fxpipe.ir.text import human_time

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@dataclass
class Phase:
    """A part of the work: how often it was done, how long that took, and what it consisted of."""

    name: str
    count: int = 0
    seconds: float = 0.0
    """The time that has passed."""
    cpu: float = 0.0
    """The CPU time of all threads of the process, in seconds: with one thread it hardly depends on
    what else the machine does."""
    parts: dict[str, Phase] = field(default_factory=dict)
    """The phases within it, by their names, in the order in which they began."""

    def table(self) -> str:
        """A line for the phase, and one for each of its parts, indented."""
        rows = list(self._rows(0, self.seconds))
        width = max(len(name) for name, *_ in rows)
        return "\n".join(
            f"{name:{width}}  {seconds:>8}  {cpu:>8} of CPU  {share:4.0%}  {count}".rstrip()
            for name, seconds, cpu, share, count in rows
        )

    def _rows(self, depth: int, whole: float) -> Iterator[tuple[str, str, str, float, str]]:
        share = self.seconds / whole if whole else 0.0
        count = f"{self.count} times" if self.count > 1 else ""
        name = "  " * depth + self.name
        yield name, human_time(self.seconds), human_time(self.cpu), share, count
        for part in self.parts.values():
            yield from part._rows(depth + 1, whole)


_now: ContextVar[Phase | None] = ContextVar("phase", default=None)


def report_progress(part: str) -> None:
    """Tell the listener of this context, if there is one, that a part of the work begins.

    ``part`` names it in a word or two: the name of a pass, say.
    """
    listener = _listener.get()
    if listener is not None:
        listener(part)
    _notice(part)


@contextmanager
def phase(name: str, *, quiet: bool = False) -> Iterator[None]:
    """The ``with`` block is a phase of the work: the listener is told that it begins, unless it is
    ``quiet``, and within :func:`timed` its time is taken."""
    if not quiet:
        report_progress(name)
    around = _now.get()
    if around is None:
        yield
        return
    with _taken(around.parts.setdefault(name, Phase(name))):
        yield


@contextmanager
def timed(name: str) -> Iterator[Phase]:
    """Take the times of the ``with`` block and of all phases in it, as far as they are in this
    thread. They are complete when the block has ended. Within a phase, the block is a part of it.
    """
    around = _now.get()
    whole = Phase(name)
    try:
        with _taken(whole):
            yield whole
    finally:
        if around is not None:
            _add(around, whole)


@contextmanager
def _taken(now: Phase) -> Iterator[None]:
    token = _now.set(now)
    _notice(now.name)
    seconds, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        _now.reset(token)
        now.count += 1
        now.seconds += time.perf_counter() - seconds
        now.cpu += time.process_time() - cpu
        _notice(now.name)


def _add(around: Phase, more: Phase) -> None:
    """Add the times of a phase to those of the phase of that name within another one."""
    found = around.parts.setdefault(more.name, Phase(more.name))
    found.count += more.count
    found.seconds += more.seconds
    found.cpu += more.cpu
    for each in more.parts.values():
        _add(found, each)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within it, ``listener`` is told of each phase that begins in this thread.

    An outer listener is told nothing meanwhile.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@dataclass
class _Patience:
    """When somebody is told that it takes long, and who."""

    begin: float
    after: float
    tell: Callable[[str, float], None]
    is_told: bool = False


_patience: ContextVar[_Patience | None] = ContextVar("patience", default=None)


def _notice(name: str) -> None:
    """Tell who wants to know if it takes long; a phase of this name begins or ends."""
    patience = _patience.get()
    if patience is not None and not patience.is_told:
        passed = time.perf_counter() - patience.begin
        if passed >= patience.after:
            patience.is_told = True
            patience.tell(name, passed)


@contextmanager
def telling(after: float, tell: Callable[[str, float], None]) -> Iterator[None]:
    """Within it, ``tell`` is called once if it takes more than ``after`` seconds, as soon as a
    phase then begins or ends, with the name of the phase and the seconds that have passed. It is
    not called where a listener is told of each phase.

    The clock is read only where a phase begins or ends: a thread that waits would have to be ended,
    and could not say much more.
    """
    if _patience.get() is not None or _listener.get() is not None:
        yield
        return
    token = _patience.set(_Patience(time.perf_counter(), after, tell))
    try:
        yield
    finally:
        _patience.reset(token)
