"""A log of compilations: why each is made, for which calls, where it cuts the model, and how long
each of its phases takes.

The times of phases are logged at level DEBUG, and at level INFO if ``compile(verbose=True)`` is
given or the environment asks for it::

    FXPIPE_LOGS=compile python train.py

A compilation that takes long says so once, whoever looks at the log or not: nothing else tells a
user who waits from one whose program hangs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fxpipe.compiler.compilations import Compilation
from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.options import Options
from fxpipe.ir.graph import CONTAINS, stages_of
from fxpipe.ir.log import COMPILATIONS, GUARDS, LOGGER, PLAN
from fxpipe.ir.progress import Phase, telling, timed
from fxpipe.ir.text import human_time
from passes.common.modes import of_stages
from passes.common.segments import counts, in_words

VARIABLE = "FXPIPE_LOGS"
COMPILE = "compile"
LONG = 20.0
"""Seconds after which a compilation says that it is at work."""


def log_reasons(model: str, why: Sequence[str]) -> None:
    """Log why a call has to be compiled."""
    GUARDS.info("%s is compiled for a new kind of call: %s", model, "; ".join(why))


def log_compilation(model: str, done: Compilation) -> None:
    """Log a compilation that has been made."""
    how = ", ".join(filter(None, (done.front_end, done.cache)))
    took = human_time(done.seconds)
    COMPILATIONS.info(
        "%s: compilation %d in %s, %s, %s", model, done.number, took, how, done.guards.brief
    )


def log_cut(model: str, mode: Mode, options: Options, layout: Layout) -> None:
    """Log where a model has been cut, and how its stages run."""
    stages = len(options.devices)
    numbers = counts(layout.segments, layout.modes, stages)
    ways = map(in_words, of_stages(layout.modes, stages), numbers)
    each = zip(stages_of(mode.stage_graph), options.devices, ways, strict=True)
    for number, (stage, device, kept) in enumerate(each):
        contains = stage.meta.get(CONTAINS, "")
        PLAN.info("%s: stage %d on %s, checkpoint %s: %s", model, number, device, kept, contains)


def wants_log() -> bool:
    """Whether the environment asks for a log of compilations."""
    return COMPILE in os.environ.get(VARIABLE, "").replace(" ", "").split(",")


@contextmanager
def logged(title: str, is_wanted: bool) -> Iterator[None]:
    """The ``with`` block is a phase of the compilation. At the end of the block, also if an
    exception ends it, a table is logged: how long the block took, and how long each phase within
    it. If ``is_wanted``, the table is shown also where logging has not been set up. So is a line
    that says what is done, if it takes long."""
    whole = Phase(title)

    def tell(part: str, seconds: float) -> None:
        _show(
            f"{title} has taken {human_time(seconds)} so far, and is in the phase {part!r}; "
            f"verbose=True logs how long each phase takes{_fewer_threads()}"
        )

    try:
        with timed(title) as whole, telling(LONG, tell):
            yield
    finally:
        if is_wanted:
            _show(whole.table())
        else:
            COMPILATIONS.debug("%s", whole.table())


def _fewer_threads() -> str:
    """The advice to compile with one thread: several wait for each other where other processes keep
    the cores busy. "" where there is only one."""
    if torch.get_num_threads() == 1:
        return ""
    return "; OMP_NUM_THREADS=1 in the environment helps where other processes keep the cores busy"


def _show(text: str) -> None:
    """Log a message so that it is seen: where logging has not been set up, on stderr."""
    level = COMPILATIONS.level
    handler = None if _is_set_up() else logging.StreamHandler()
    if handler is not None:
        COMPILATIONS.addHandler(handler)
    if not COMPILATIONS.isEnabledFor(logging.INFO):
        COMPILATIONS.setLevel(logging.INFO)
    try:
        COMPILATIONS.info("%s", text)
    finally:
        COMPILATIONS.setLevel(level)
        if handler is not None:
            COMPILATIONS.removeHandler(handler)


def _is_set_up() -> bool:
    """Whether a handler that the user has added gets what is logged."""
    own = [*COMPILATIONS.handlers, *LOGGER.handlers]
    if any(not isinstance(handler, logging.NullHandler) for handler in own):
        return True
    return COMPILATIONS.propagate and LOGGER.propagate and logging.getLogger().hasHandlers()
