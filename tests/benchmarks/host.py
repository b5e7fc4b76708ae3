"""What a pipeline costs the host, for each stage and micro-batch.

::

    python -m tests.benchmarks.host
    python -m tests.benchmarks.host --one-core          # without what waking threads costs
    python -m tests.benchmarks.host --dropout           # each stage draws random numbers, too
    python -m tests.benchmarks.host --profile 1f1b      # where it goes, by cProfile
    python -m tests.benchmarks.host --device cuda:0     # all lanes on one GPU

Each stage is one small linear layer, so that hardly anything is computed. The time by which a
training step takes longer than a plain loop over the micro-batches is spent in Python and in
PyTorch's own bookkeeping. It is given in CPU microseconds (of all threads) for one stage and one
micro-batch, forward and backward. Since all lanes of a process share one interpreter, a stage on an
accelerator cannot take less than this.

On several cores, lanes with so little to do want the interpreter at the same time: they take it
from each other at each operator, and have to be woken each time, which on some machines takes
longer than the Python of a stage. ``--one-core`` keeps all threads on one core, without that.

torch.distributed.pipelining runs in one rank with one stage, so nothing is sent; torchgpipe is
measured if it is installed (pip install --no-deps torchgpipe==0.0.7).
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.runtime import lanes
from fxpipe.runtime.streams import has_streams
from tests.benchmarks.timing import show

WIDTH, CHUNKS = 8, 8
SCHEDULES = "gpipe", "1f1b", "zb_h1"

Run = Callable[[], object]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).mean()


def net(stages: int, draws: bool = False) -> nn.Sequential:
    """A linear layer for each stage, with a dropout behind it if the stages are to draw."""
    also = [nn.Dropout(0.1)] if draws else []
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), *also) for _ in range(stages)))


def backward(model: Callable[[Tensor], Any], x: Tensor, target: Tensor) -> None:
    loss_fn(model(x), target).backward()


def loop(model: nn.Module, x: Tensor, target: Tensor) -> None:
    for part, wanted in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        (loss_fn(model(part), wanted) / CHUNKS).backward()


def fxpipes(stages: int, draws: bool, x: Tensor, target: Tensor) -> dict[str, Run]:
    """``step`` in the order of each schedule, and ``pipe(x)``."""
    runs: dict[str, Run] = {}
    cut = [str(i) for i in range(1, stages)]
    for schedule, checkpoint in itertools.product(SCHEDULES, ("never", "selective", "always")):
        pipe = fxpipe.compile(
            net(stages, draws).to(x.device),
            [x.device] * stages,
            chunks=CHUNKS,
            schedule=schedule,
            loss_fn=loss_fn,
            partition=cut,
            checkpoint=checkpoint,
        )
        also = "" if checkpoint == "never" else f', checkpoint="{checkpoint}"'
        runs[f"step, {schedule}{also}"] = partial(pipe.step, x, target=target)
        if schedule == "gpipe":
            runs[f"pipe(x) and backward(){also}"] = partial(backward, pipe, x, target)
    return runs


def torchgpipe(stages: int, draws: bool, x: Tensor, target: Tensor) -> dict[str, Run]:
    try:
        from torchgpipe import GPipe
    except ImportError:
        return {}
    places = [x.device] * stages
    model = GPipe(
        net(stages, draws).to(x.device),
        [1] * stages,
        devices=places,
        chunks=CHUNKS,
        checkpoint="never",
    )
    return {"torchgpipe 0.0.7": partial(backward, model, x, target)}


def pipelining(stages: int, draws: bool, x: Tensor, target: Tensor) -> dict[str, Run]:
    """Of torch.distributed; one stage is all that one rank has with these schedules."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    if stages > 1:
        return {}
    stage = PipelineStage(net(1, draws).to(x.device), 0, 1, x.device)
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_fn)
    return {"torch.distributed.pipelining, 1F1B": partial(schedule.step, x, target=target)}


def microseconds(runs: dict[str, Run], rounds: int, wait: Run, times: int = 3) -> dict[str, float]:
    """CPU microseconds of one call of each, the least of rounds in which they take turns. ``wait``
    waits for the device; its time does not count, since it spins."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            wait()
            begin = time.process_time()
            for _ in range(times):
                run()
            taken[name].append((time.process_time() - begin) / times)
    return {name: 1e6 * min(seconds) for name, seconds in taken.items()}


def profile(run: Run, times: int, lines: int) -> None:
    """Print where the time of calls goes, in the caller's thread and in the lanes."""
    profiles = [cProfile.Profile()]
    in_thread = lanes._ProgramCall.in_thread

    def profiled(self: Any, *args: Any, **kwargs: Any) -> None:
        mine = cProfile.Profile()
        profiles.append(mine)
        mine.runcall(in_thread, self, *args, **kwargs)

    lanes._ProgramCall.in_thread = profiled  # type: ignore[method-assign]
    try:
        profiles[0].runcall(lambda: [run() for _ in range(times)])
    finally:
        lanes._ProgramCall.in_thread = in_thread  # type: ignore[method-assign]
    stats = pstats.Stats(*profiles)
    stats.sort_stats("tottime").print_stats(lines)


@click.command()
@click.option("--stages", default="1,2,4", show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--dropout", "draws", is_flag=True, help="Behind the linear layer of each stage.")
@click.option("--one-core", is_flag=True, help="Keep all threads on one core (Linux).")
@click.option("--device", default="cpu", show_default=True, help="All lanes are on this one.")
@click.option("--profile", "profiled", help="Where the time of this run goes: 1f1b, pipe(x), ...")
def main(
    stages: str, rounds: int, draws: bool, one_core: bool, device: str, profiled: str | None
) -> None:
    torch.set_num_threads(1)
    if one_core:  # threads that are started from now on inherit it
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    place = torch.device(device)
    x, target = (torch.randn(CHUNKS * 2, WIDTH, device=place) for _ in range(2))
    wait = partial(torch.accelerator.synchronize, place) if has_streams(place) else lambda: None
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file.name}", rank=0, world_size=1
        )
    rows = []
    for count in map(int, stages.split(",")):
        runs = {"loop": partial(loop, net(count, draws).to(place), x, target)}
        for others in fxpipes, torchgpipe, pipelining:
            runs |= others(count, draws, x, target)
        if profiled:
            for name, run in runs.items():
                if profiled in name:
                    print(f"{count} stages, {name}")
                    run()
                    profile(run, 50, 45)
            continue
        found = microseconds(runs, rounds, wait)
        for name, taken in found.items():
            over = (taken - found["loop"]) / (count * CHUNKS)
            each = taken / (count * CHUNKS)
            rows.append([str(count), name, f"{each:.0f}", "" if name == "loop" else f"{over:.0f}"])
    if rows:
        title = f"CPU µs for a stage and micro-batch, {CHUNKS} micro-batches"
        show(title, ["stages", "", "in all", "over the loop"], rows)


if __name__ == "__main__":
    main()
