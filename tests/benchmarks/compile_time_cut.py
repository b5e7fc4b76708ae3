"""How the time of the cost pass and of the partitioner grows with the graph.

Run: python -m tests.benchmarks.compile_time_cut

The graphs are chains. Every fourth node begins a skip over eight nodes, and every fiftieth a long
one. The exponent is fitted to the CPU time (least squares of the logarithms).
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import fx

from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, VALUE
from passes import Alias, AnalyticCost
from passes.partition.automatic import Auto, automatic
from passes.partition.cut.dag import Machine
from passes.partition.cut.solve import solve
from passes.partition.problem import problem
from tests.benchmarks.timing import show

STAGES = 4


def skips(n: int) -> dict[int, int]:
    """The node whose value another one adds to its own."""
    found = {v: v - 8 for v in range(8, n, 4)}
    found.update({v: v - n // 4 for v in range(n // 4 + 1, n, 50)})
    return found


def graph_of(n: int, *, with_costs: bool) -> fx.GraphModule:
    """Of ``n`` nodes, sines and sums."""
    rng = random.Random(0)
    graph, fake = fx.Graph(), torch.empty(4, 3, device="meta")
    made = [graph.placeholder("x")]
    extra = skips(n)
    for v in range(n):
        if v in extra:
            made.append(graph.call_function(torch.add, (made[-1], made[extra[v] + 1])))
        else:
            made.append(graph.call_function(torch.sin, (made[-1],)))
    graph.output(made[-1])
    if with_costs:
        for node in graph.nodes:
            node.meta = {VALUE: fake, COST: Cost(forward_s=rng.random())}
    return fx.GraphModule({}, graph)


def costed(n: int) -> Callable[[], object]:
    gm = Alias((torch.ones(4, 3),))(graph_of(n, with_costs=False))
    return lambda: AnalyticCost()(gm)


def cut(n: int) -> Callable[[], object]:
    graph = graph_of(n, with_costs=True).graph
    return lambda: automatic(graph, Machine(STAGES), Auto())


def cut_freely(n: int) -> Callable[[], object]:
    """Without slack: nothing is good enough before the refinement has come to its end."""
    dag = problem(graph_of(n, with_costs=True).graph).dag
    return lambda: solve(dag, Machine(STAGES))


SIDES: dict[str, tuple[Callable[[int], Callable[[], object]], tuple[int, ...]]] = {
    "cost pass": (costed, (300, 1_000, 3_000)),
    "partition": (cut, (1_000, 10_000, 100_000)),
    "partition, no slack": (cut_freely, (1_000, 10_000, 100_000)),
}


def main() -> None:
    rows = []
    for name, (make, sizes) in SIDES.items():
        seconds = []
        for n in sizes:
            run = make(n)
            start = time.process_time()
            run()
            seconds.append(time.process_time() - start)
        exponent = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
        for n, s in zip(sizes, seconds, strict=True):
            rows.append([name, f"{n:,}", f"{s:.2f}", f"{s / n * 1e6:.0f}", f"{exponent:.2f}"])
    show("time by nodes", ["", "nodes", "CPU s", "µs a node", "exponent"], rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"at most {peak:.1f} GiB")


if __name__ == "__main__":
    main()
