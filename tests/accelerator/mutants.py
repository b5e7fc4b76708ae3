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
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[2]
FILES = [
    f"fxpipe/runtime/{name}.py"
    for name in ("streams", "copy", "portal", "dependency", "step", "lanes", "checkpoint")
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
        ("keep(waiting, tensor)", f"waiting.{_EVERYTHING}; keep(waiting, tensor)"),
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
CHOSEN = "times or memory or batch_may or penalty or current or share_a or unet-never or tied"
TIMEOUT_S = 600


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
            before, found, _ = source.partition(f"{code}\n")
            assert found, f"{file} does not have: {code}"
            changed = source.replace(f"{code}\n", f"{other}\n", 1)
            yield Mutant(file, before.count("\n") + 1, f"{code} -> {other}", changed)
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


def killer(mutant: Mutant, copy: Path) -> str | None:
    """The first test that fails with the mutant, or None."""
    target = copy / mutant.file
    before = target.read_text()
    target.write_text(mutant.source)
    try:
        return _failure(copy)
    finally:
        target.write_text(before)


def _failure(copy: Path) -> str | None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "tests.accelerator.plugin", *TESTS, "-k", CHOSEN]
    env = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    where = copy / "tests/accelerator"
    try:
        done = subprocess.run(
            command,
            cwd=where,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"the tests have not ended after {TIMEOUT_S} s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else "the tests do not run"


def main(words: list[str], jobs: int) -> int:
    """Try all mutants, or those with one of the words. Returns how many survive."""
    wanted = [each for each in mutants() if not words or any(word in str(each) for word in words)]
    copies: SimpleQueue[Path] = SimpleQueue()

    def tried(mutant: Mutant) -> str | None:
        copy = copies.get()
        try:
            return killer(mutant, copy)
        finally:
            copies.put(copy)

    survivors = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        for job in range(jobs):
            copies.put(_copy(Path(folder) / str(job)))
        for mutant, found in zip(wanted, threads.map(tried, wanted), strict=True):
            survivors += found is None
            print(f"{mutant}\n    {found or 'SURVIVES'}", flush=True)
    return survivors


def _copy(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.ipynb", "docs")
    shutil.copytree(ROOT, folder, ignore=ignored)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    sys.exit(main(given.words, given.jobs))
