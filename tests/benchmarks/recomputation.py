"""Steps with recomputations in idle time beside steps with recomputations right ahead of their
backward, as the simulator predicts them. Run: python -m tests.benchmarks.recomputation

That takes several minutes. A number after the command is the largest number of lanes: up to 4 take
one minute. Nothing is timed, so that every run prints the same.

A forward and its recomputation take one unit of time, and so does each half of a backward, or two
units where backwards are whole. Copies take a tenth. Four pipelines of one stage on each lane:

- even: all stages are alike, and all micro-batches are recomputed;
- first half: only the first half of the stages recompute, since they have most micro-batches under
  way, and they are shorter, so that all lanes have as much work;
- every other: only the first stage, the third, and so on recompute, and all are as long;
- uneven: all recompute, and the first stage takes twice as long as the others.

A micro-batch keeps 10 units of memory at a stage, or 1 if it is recomputed. The bound on memory is
in multiples of what the fullest lane keeps with 1F1B.

Each column is a ratio of two steps. "ahead": 1F1B with recomputations that begin ahead of the
gradient's arrival, over 1F1B with recomputations within the backward, as PyTorch's own checkpoints
do them. "1f1b", "zb_h1", "search": with recomputations in idle time, over recomputations right
ahead of their backward, of the order of a named schedule, where only recomputations and forwards
are done earlier, and of the order that the search finds. "search / 1f1b": the search with
recomputations in idle time, over 1F1B without. "-": the schedule needs more memory than the bound.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from fxpipe.schedule import Kind, Link, Links, Memory, StageCost, named, peaks, search, simulate
from fxpipe.schedule.placing import placed
from fxpipe.schedule.problem import SchedulingProblem
from fxpipe.schedule.world import World

LINKS = Links(link=Link(latency=0.1))
EFFORT = 20  # moves that the search may try; more take longer and change little


def pipelines(
    lanes: int, microbatches: int, *, halves: bool
) -> Iterator[tuple[str, list[StageCost]]]:
    """The costs of the stages of each pipeline, with its name."""

    def stage(seconds: float, is_again: bool) -> StageCost:
        back, second = (seconds, seconds) if halves else (2 * seconds, 0.0)
        return StageCost(
            seconds, back, second, recompute=seconds, checkpointed=microbatches * is_again
        )

    yield "even", [stage(1, True)] * lanes
    half = lanes // 2
    yield "first half", [stage(3 / 4, True)] * half + [stage(1, False)] * (lanes - half)
    yield "every other", [stage(1, i % 2 == 0) for i in range(lanes)]
    yield "uneven", [stage(2, True)] + [stage(1, True)] * (lanes - 1)


def ratios(costs: list[StageCost], microbatches: int, times: float) -> list[str]:
    """The cells of a row: ratios, if the bound is so many times what 1F1B keeps."""
    lanes = len(costs)
    memory = Memory([10.0] * lanes, checkpointed=[c.checkpointed for c in costs], inputs=1.0)
    one_f_one_b = named("1f1b", lanes=lanes, microbatches=microbatches)
    bound = times * max(peaks(one_f_one_b, memory).lanes)
    world = World(range(lanes), costs, LINKS)
    problem = SchedulingProblem(world, lanes, microbatches, memory, (bound,) * lanes)
    cells = []
    for name in ("1f1b", "zb_h1"):
        order = named(name, lanes=lanes, microbatches=microbatches)
        if problem.fits(problem.kept(order)):
            step = simulate(placed(problem, order), costs, LINKS).makespan
            cells.append(f"{step / simulate(order, costs, LINKS).makespan:.3f}")
        else:
            cells.append("-")
    found, before = (
        search(
            costs,
            lanes,
            microbatches,
            placement=range(lanes),
            links=LINKS,
            memory=memory,
            max_bytes=bound,
            effort=EFFORT,
            moves_recomputations=moves,
        ).timeline.makespan
        for moves in (True, False)
    )
    usual = simulate(one_f_one_b, costs, LINKS).makespan
    within = simulate(one_f_one_b, [within_backward(cost) for cost in costs], LINKS).makespan
    return [f"{usual / within:.3f}", *cells, f"{found / before:.3f}", f"{found / usual:.3f}"]


def within_backward(cost: StageCost) -> StageCost:
    """The cost of a stage whose backward begins with the recomputation, once the gradient is
    there."""
    more = cost.recompute * (cost.checkpointed > 0)
    whole = cost.seconds(Kind.BACKWARD) + more
    return StageCost(cost.forward, cost.backward_input + more, cost.weight_grad, whole)


def main(most: int = 8) -> None:
    for halves in (False, True):
        said = "in two halves" if halves else "whole"
        table = Table(title=f"Backwards {said}: step with recomputations in idle time / without")
        for column in ("pipeline", "lanes", "micro-batches", "memory"):
            table.add_column(column, justify="left" if column == "pipeline" else "right")
        for column in ("ahead", "1f1b", "zb_h1", "search", "search / 1f1b"):
            table.add_column(column, justify="right")
        for lanes in (n for n in (2, 4, 8) if n <= most):
            for microbatches in (lanes, 2 * lanes):
                for name, costs in pipelines(lanes, microbatches, halves=halves):
                    for times in (1, 2):
                        cells = ratios(costs, microbatches, times)
                        table.add_row(name, str(lanes), str(microbatches), f"{times} x", *cells)
        Console(width=100).print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
