"""The table of wrong calls, ``messages.txt``: how it is read and written, and how a call is made.

::

    >>> compile(Net(), [])                          a call, in Python, with the names of given.py
        ValueError: devices is empty: ...           what it raises; lines are as long as they are

    $ fxpipe schedule nosuch                        a call of the command line
        exit code 2: ...                            what it prints

    Devices                                         a heading
    -------

Messages are compared word for word. "[...]" stands for words of PyTorch or Python within them,
FOLDER for the folder that a call is made in, and PROJECT for that of the project.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from click.testing import CliRunner

import tests.bad_input.given as given
from fxpipe.cli import main

TABLE = Path(__file__).with_name("messages.txt")
PROJECT = str(Path(__file__).parents[2])
CALL, MORE, COMMAND, MESSAGE = ">>> ", "... ", "$ fxpipe ", "    "
WIDTH = 100
OTHERS_WORDS = "[...]"  # stands for what PyTorch or Python says, which depends on its version


@dataclass(frozen=True)
class Entry:
    """A wrong call and its message, or a heading, whose call is empty."""

    call: str
    message: str
    heading: str = ""

    def __str__(self) -> str:
        if self.heading:
            return f"{self.heading}\n{'-' * len(self.heading)}\n"
        lines = textwrap.wrap(
            self.message,
            WIDTH,
            initial_indent=MESSAGE,
            subsequent_indent=MESSAGE,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return "\n".join([_prompted(self.call), *lines, ""])


def _prompted(call: str) -> str:
    if call.startswith(COMMAND):
        return call
    first, *others = call.splitlines()
    return "\n".join([CALL + first, *(MORE + line for line in others)])


def entries() -> Iterator[Entry]:
    """The entries of the table, in its order."""
    for block in re.split(r"\n\s*\n", TABLE.read_text(encoding="utf-8").strip()):
        lines = block.splitlines()
        if len(lines) > 1 and set(lines[1]) == {"-"}:
            yield Entry("", "", lines[0])
            continue
        calls = [line for line in lines if line.startswith((CALL, MORE, COMMAND))]
        said = lines[len(calls) :]
        texts = (line.removeprefix(CALL).removeprefix(MORE) for line in calls)
        yield Entry("\n".join(texts), " ".join(" ".join(said).split()))


def answered(entry: Entry) -> Entry:
    """The entry with the message that its call gives now, in one line."""
    if not entry.call:
        return entry
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        said = _printed(entry.call) if entry.call.startswith(COMMAND) else _raised(entry.call)
        said = said.replace(os.getcwd(), "FOLDER").replace(PROJECT, "PROJECT")
        said = " ".join(said.split())
    words = map(re.escape, entry.message.split(OTHERS_WORDS))
    is_as_written = re.fullmatch(".*".join(words), said) is not None
    return entry if is_as_written else replace(entry, message=said)


def _raised(call: str) -> str:
    names = dict(vars(given))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(call, "<call>", "exec"), names)
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing is raised"


def _printed(call: str) -> str:
    result = CliRunner().invoke(main, shlex.split(call.removeprefix(COMMAND)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__} escapes: {result.exception}"
    return f"exit code {result.exit_code}: {result.output[result.output.find('Error: ') :]}"
