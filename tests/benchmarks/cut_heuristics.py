"""Cuts found by refinement beside the best ones, on random DAGs of 30 to 60 nodes.

Run: python -m tests.benchmarks.cut_heuristics [how many]

For half of the DAGs links cost something. DAGs that are too wide to be solved exactly, even with
ten times the usual effort, are left out, and counted.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

from passes.partition.cut.dag import Machine
from passes.partition.cut.solve import DOWNSETS, WORK, Effort, solve
from tests.benchmarks.timing import show
from tests.passes.partition.cut.random_dags import random_dag

PATIENT = Effort(downsets=50 * DOWNSETS, work=10 * WORK)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    worse: dict[str, list[float]] = {"free links": [], "links that cost": []}
    gaps, seconds, too_wide, seed = [], [0.0, 0.0], 0, 0
    while sum(map(len, worse.values())) < count:
        rng = random.Random(seed)
        seed += 1
        k = rng.choice([2, 3, 4])
        dag = random_dag(rng, rng.randint(30, 60), edges=rng.choice([1.5, 2.0, 3.0]))
        kind = rng.choice(sorted(worse))
        machine = Machine(k)
        if kind != "free links":
            machine = Machine(k, bandwidth=np.full((k, k), 4.0))
        start = time.process_time()
        exact = solve(dag, machine, effort=PATIENT)
        middle = time.process_time()
        if exact is None or not exact.is_exact:
            too_wide += 1
            continue
        other = solve(dag, machine, effort=Effort(downsets=0))
        assert other is not None
        seconds[0] += middle - start
        seconds[1] += time.process_time() - middle
        worse[kind].append(other.prices.slowest / exact.prices.slowest - 1)
        gaps.append(other.gap)
    rows = [
        [
            kind,
            str(len(w)),
            f"{np.mean(w):.2%}",
            f"{np.max(w):.2%}",
            f"{np.mean(np.array(w) < 1e-9):.0%}",
        ]
        for kind, w in worse.items()
    ]
    show("slower than the exact cut", ["", "DAGs", "on average", "at worst", "equal"], rows)
    print(
        f"{too_wide} left out; the bound itself was {np.mean(gaps):.1%} away on average; "
        f"CPU seconds each: exact {seconds[0] / count:.2f}, refined {seconds[1] / count:.2f}"
    )


if __name__ == "__main__":
    main()
