"""Whether the tests on the simulated accelerator notice that a wait is missing.

    python -m tests.accelerator.mutants [WORD ...]

A mutant is a copy of the repository without one of the calls by which the runtime orders streams,
keeps memory alive or stops the host from running too far ahead. For each mutant the tests on the
simulated accelerator are run until one of them fails. The program prints a line for each: the call
that was taken away, and the test that failed, or ``SURVIVES``. With words, only mutants are tried
whose line has one of the words. A mutant takes a minute on two cores. The exit status is the number
of survivors.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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

# The fast ones first.
TESTS = [
    ["times.py", "memory.py"],
    ["pipelines.py", "-k", "batch_may or penalty or current or share_a or unet-never or tied"],
]


@dataclass(frozen=True)
class Mutant:
    """A file without one of its calls."""

    file: str
    line: int
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def mutants() -> Iterator[Mutant]:
    """Each file without one call that is a statement, or one context."""
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
        return next(filter(None, (_failure(tests, copy) for tests in TESTS)), None)
    finally:
        target.write_text(before)


def _failure(tests: list[str], copy: Path) -> str | None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "tests.accelerator.plugin", *tests]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    where = copy / "tests/accelerator"
    try:
        done = subprocess.run(
            command, cwd=where, env=env, capture_output=True, text=True, timeout=1200
        )
    except subprocess.TimeoutExpired:
        return f"{tests[0]}: does not end"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"{tests[0]}: does not run"


def main(words: list[str]) -> int:
    """Try all mutants, or those with one of the words. Returns how many survive."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "*.ipynb", "docs")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in mutants():
            if words and not any(word in str(mutant) for word in words):
                continue
            found = killer(mutant, copy)
            survivors += found is None
            print(f"{mutant}\n    {found or 'SURVIVES'}", flush=True)
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
