"""A part of the kit, and the report that it writes while it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

OK, PROBLEM, ERROR, KILLED, SKIPPED, NOT_RUN = (
    *("ok", "problem", "error", "killed", "skipped"),
    "not run",
)
"""What may become of a part: it ran and all is as it should be; it ran and found what should not
be; it raised an exception; it was killed at its time limit, or died; it cannot run on this machine;
its turn has not come."""


class Skip(Exception):
    """Raised by a part that cannot run on this machine, with the reason."""


@dataclass(frozen=True)
class Part:
    """A question that the kit asks of the machine.

    Args:
        name: what ``--parts`` takes.
        title: the question, for the table.
        function: ``"module:function"``, called with the machine and a report in a new process.
        seconds: the limit on its time, after which it is killed.
        devices: how many GPUs it needs; with fewer it is skipped.
        environment: variables of the new process's environment.
    """

    name: str
    title: str
    function: str
    seconds: float
    devices: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Callable[..., None]:
        """The function itself. Its module is imported where the part runs, and nowhere else."""
        module, _, name = self.function.partition(":")
        function: Callable[..., None] = getattr(import_module(module), name)
        return function


@dataclass
class Outcome:
    """What became of a part; this is what ``results.json`` has for it.

    ``rows`` are those of the part's table, ``notes`` sentences below it, ``problems`` what should
    not be, ``files`` what it has written into the folder, by their names. ``cpu_seconds`` are those
    of the part's processes, which hardly depend on what else the machine does.
    """

    name: str
    title: str
    status: str = NOT_RUN
    why: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    traceback: str = ""


class Report:
    """What a part says. Each call writes all that has been said so far to a file, so that a part
    that is killed has not worked in vain.

    Args:
        outcome: to be filled in.
        folder: of the results; files of the part's own belong there.
        path: the file, which the process that runs the parts reads afterwards.
    """

    def __init__(self, outcome: Outcome, folder: Path, path: Path) -> None:
        self.outcome, self.folder, self._path = outcome, folder, path

    def row(self, **cells: Any) -> None:
        """A row of the part's table: a value, or None, for each column's name."""
        self.outcome.rows.append(cells)
        self.write()

    def note(self, sentence: str) -> None:
        """What a reader of the table has to know."""
        self.outcome.notes.append(sentence)
        self.write()

    def problem(self, sentence: str) -> None:
        """Something that should not be. The part goes on."""
        self.outcome.problems.append(sentence)
        self.write()

    def file(self, name: str) -> Path:
        """Where to write a file of the results of that name."""
        self.outcome.files.append(name)
        self.write()
        return self.folder / name

    def end(self, status: str, why: str = "", traceback: str = "") -> None:
        """The part has ended, so; it has problems if one was reported."""
        self.outcome.status, self.outcome.why, self.outcome.traceback = status, why, traceback
        self.outcome.cpu_seconds = round(sum(os.times()[:4]), 1)
        if status == OK and self.outcome.problems:
            self.outcome.status = PROBLEM
        self.write()

    def write(self) -> None:
        """Write what has been said so far."""
        write_json(self._path, asdict(self.outcome))


def write_json(path: Path, value: Any) -> None:
    """Write a file as a whole or not at all, so that whoever reads it never reads a half."""
    write_text(path, json.dumps(value, indent=1, default=str))


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)
