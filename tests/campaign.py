"""Random programs and training steps in large numbers, by many short runs of
``tests/test_random_programs.py``.

::

    python -m tests.campaign --programs 20000 --jobs 2

Each run is a process of its own, with a seed of its own: fx keeps the code of every graph that has
been made in a process, so that a long run takes more and more time for each program. For each five
programs there is one training step. A line is printed after each run, and what a run has found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import ceil

import click

EACH = 500
STEPS = 5  # programs for one training step, see tests/test_random_programs.py


def run(seed: int, programs: int) -> subprocess.CompletedProcess[str]:
    """One run, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += [f"--hypothesis-seed={seed}", "tests/test_random_programs.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FXPIPE_EXAMPLES": str(programs)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@click.command()
@click.option("--programs", default=20_000, help="How many programs, rounded up to whole runs.")
@click.option("--each", default=EACH, help="How many programs a run has.")
@click.option("--jobs", default=os.cpu_count() or 1, help="How many runs at a time.")
@click.option("--seed", default=1, help="The seed of the first run; others have those after it.")
def main(programs: int, each: int, jobs: int, seed: int) -> None:
    """Run random programs and steps, and exit with 1 if any of them goes wrong."""
    seeds = range(seed, seed + ceil(programs / each))
    done, found = 0, 0
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, each_seed, each): each_seed for each_seed in seeds}
        for ended in as_completed(runs):
            result, done = ended.result(), done + each
            found += result.returncode != 0
            click.echo(f"seed {runs[ended]}: {done} programs, {done // STEPS} steps, {found} finds")
            if result.returncode:
                click.echo(result.stdout + result.stderr)
    raise SystemExit(found > 0)


if __name__ == "__main__":
    main()
