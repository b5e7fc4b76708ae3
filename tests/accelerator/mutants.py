"""Whether the tests on the simulated accelerator notice that a wait is missing.

    python -m tests.accelerator.mutants [--jobs 2] [WORD ...]

A mutant is a copy of the repository without one of the calls by which the runtime orders streams,
keeps memory alive or stops the host from running too far ahead; or with code by which streams share
too much, or wait for too much. For each mutant the tests on the simulated accelerator are run until
one of them fails. The program prints a line for each: the call that was taken away, or the code
that was exchanged, and the test that failed, or ``SURVIVES``. With words, only mutants are tried
whose line has one of the words. A mutant takes about half a minute of one core. The exit status is
the number of survivors.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    f"fxpipe/runtime/{name}.py"
    for name in (
        "streams",
        "copy",
        "portal",
        "dependency",
        "step",
        "lanes",
        "checkpointing/checkpoint",
    )
]
CALLS = {
    "await_callers",
    "await_made",
    "give_back",
    "keep",
    "keep_pace",
    "made",
    "pass_on",
    "read_callers",
    "record_stream",
    "synchronize",
    "wait_event",
    "wait_stream",
}
CONTEXTS = {"beside", "on", "on_the_way_back", "handed_over", "_current"}

_EVERYTHING = "wait_stream(torch.accelerator.current_stream(waiting.device))"
# By file: code, and what is put in its place.
EXCHANGED = {
    "fxpipe/runtime/streams.py": [
        # One stream for all copies that a device sends or receives.
        (
            "one, other = (None if device is None else torch.Stream(device) for device in ends)",
            "one, other = (None if device is None else _aside(device) for device in ends)",
        ),
        # A link waits for all that its device has been given, and not for a value.
        ("keep(waiting, tensors)", f"waiting.{_EVERYTHING}; keep(waiting, tensors)"),
        # A link of inputs waits for all that stages have been given since the call.
        (
            "    given = _given()\n    event",
            f"    waiting.{_EVERYTHING}\n    given = _given()\n    event",
        ),
        ("return self._begun.get(device)", "return None"),
    ],
    "fxpipe/runtime/copy.py": [
        # Inputs queue behind what stages send.
        (
            "ends = link(tensor.device, device, source == CALLER)",
            "ends = link(tensor.device, device)",
        ),
    ],
}

TESTS = ["times.py", "memory.py", "pipelines.py"]
# Of the last file, one test for each way in which values cross streams.
CHOSEN = (
    "times or memory or batch_may or penalty or current or share_a or unet-never or tied"
    " or together"
)
TIMEOUT_S = 600
SURVIVES = "SURVIVES"


@dataclass(frozen=True)
class Mutant:
    """A file without one of its calls, or with other code."""

    file: str
    line: int
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def mutants() -> Iterator[Mutant]:
    """Each file without one call that is a statement, or one context; and with other code."""
    for file, pairs in EXCHANGED.items():
        source = (ROOT / file).read_text()
        for code, other in pairs:
            assert source.count(code) == 1, f"{file} does not have, or has twice: {code}"
            line = source[: source.index(code)].count("\n") + 1
            what = re.sub(r"\s+", " ", f"{code} -> {other}")
            yield Mutant(file, line, what, source.replace(code, other))
    for file in FILES:
        source = (ROOT / file).read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and _called(node.value) in CALLS:
                yield _without(file, source, node, "pass")
            elif isinstance(node, ast.With):
                for item in node.items:
                    if _called(item.context_expr) in CONTEXTS:
                        nothing = "__import__('contextlib').nullcontext()"
                        yield _without(file, source, item.context_expr, nothing)


def _called(value: ast.expr) -> str | None:
    if not isinstance(value, ast.Call):
        return None
    function = value.func
    if isinstance(function, ast.IfExp):  # (one if ... else other)(...)
        function = function.body
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _without(file: str, source: str, node: ast.expr | ast.Expr, instead: str) -> Mutant:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    what = re.sub(r"\s+", " ", source[start:end])
    return Mutant(file, node.lineno, what, source[:start] + instead + source[end:])


def preload() -> None:
    """Import what the tests import from other packages, once for all processes that are forked."""
    listing = "import sys, pytest, tests.zoo, fxpipe.api; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True)
    for name in done.stdout.split():
        if not _is_ours(name):
            with suppress(Exception):
                importlib.import_module(name)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("fxpipe", "passes", "tests")


@dataclass
class Trial:
    """A mutant that is being tried, in a process of its own."""

    mutant: Mutant
    copy: Path
    pid: int = 0
    began: float = 0.0

    def begin(self) -> None:
        """Change the copy of the repository, and begin with the tests."""
        (self.copy / self.mutant.file).write_text(self.mutant.source)
        self.began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            try:
                os._exit(_run_tests(self.copy))
            except BaseException:
                os._exit(70)

    def has_ended(self) -> str | None:
        """The first test that has failed, or what else has happened; None as long as they run."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            if time.monotonic() - self.began < TIMEOUT_S:
                return None
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        (self.copy / self.mutant.file).write_text((ROOT / self.mutant.file).read_text())
        if not pid:
            return f"the tests have not ended after {TIMEOUT_S} s"
        said = (self.copy / "said").read_text(errors="replace")
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return SURVIVES if status == 0 else found[1] if found else "the tests do not run"


def _run_tests(copy: Path) -> int:
    """Run the tests of a copy, in a process that has been forked for them."""
    said = os.open(copy / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    for name in [name for name in sys.modules if _is_ours(name)]:
        del sys.modules[name]
    sys.dont_write_bytecode = True  # of a file that is changed twice in a second
    sys.path.insert(0, str(copy))
    os.chdir(copy / "tests/accelerator")
    import pytest

    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "tests.accelerator.plugin"]
    return pytest.main([*options, *TESTS, "-k", CHOSEN])


def main(words: list[str], jobs: int) -> int:
    """Try all mutants, or those with one of the words. Returns how many survive."""
    wanted = [each for each in mutants() if not words or any(word in str(each) for word in words)]
    survivors, running = 0, list[Trial]()
    preload()
    with tempfile.TemporaryDirectory() as folder:
        copies = [_copy(Path(folder) / str(job)) for job in range(jobs)]
        while wanted or running:
            while wanted and copies:
                running.append(Trial(wanted.pop(0), copies.pop()))
                running[-1].begin()
            time.sleep(0.1)
            for trial in list(running):
                if (found := trial.has_ended()) is not None:
                    running.remove(trial)
                    copies.append(trial.copy)
                    survivors += found == SURVIVES
                    took = time.monotonic() - trial.began
                    print(f"{trial.mutant}\n    {found} ({took:.0f} s)", flush=True)
    return survivors


def _copy(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.ipynb", "docs")
    shutil.copytree(ROOT, folder, ignore=ignored)
    for package in ("fxpipe", "passes", "tests/accelerator"):
        compileall.compile_dir(folder / package, quiet=2)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads of OpenMP cannot be forked
    sys.exit(main(given.words, given.jobs))
