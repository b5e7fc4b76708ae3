"""Runs the tests that need an accelerator on the simulated one.

They run in processes of their own, since an accelerator has to be there before the first backward
of a process, and stays for the rest of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.sim.build import built, compiler

ROOT = Path(__file__).parents[2]

RUN = """
import os, sys, pytest
status = pytest.main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""
# The status is that of the tests. In some runs on one machine such a process was aborted as it
# ended, after all tests had passed ("terminate called without an active exception"). Why is not
# known: in 34 further runs it did not happen.

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="the simulated accelerator needs a C++ compiler: g++, or CXX=..."
)


@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "tests",
    [
        [f"tests/accelerator/{what}.py" for what in ("races", "pipelines", "mutated")],
        [f"tests/accelerator/{what}.py" for what in ("memory", "fitting", "times")],
        [f"tests/accelerator/{what}.py" for what in ("spread", "together")],
        pytest.param(
            [
                f"tests/fxpipe/runtime/{what}.py"
                for what in ("test_streams", "test_random", "checkpointing/test_surroundings")
            ],
            marks=pytest.mark.long,  # "make kit" runs these, too
        ),
    ],
    ids=lambda tests: Path(tests[0]).stem,
)
def test_on_the_simulated_accelerator(tests, which):
    built()  # what a compiler says is said once, and here
    options = ["-q", "-p", "tests.accelerator.plugin", "-m", which]
    command = [sys.executable, "-c", RUN, *options, *tests]
    without_workers = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=without_workers, capture_output=True, text=True)
    well = [0, pytest.ExitCode.NO_TESTS_COLLECTED] if which == "long" else [0]
    assert done.returncode in well, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
