"""A training step on two CPU lanes against one thread. Run: python -m tests.benchmarks.step

A balanced conv net in two stages (or four, for schedules that want them), one intra-op thread a
lane, 8 micro-batches, forward and backward. The ideal for 1F1B is 16/9 = 1.78. Beside it, on the
same net: torchgpipe 0.0.7, and torch.distributed.pipelining with 1F1B in two gloo processes.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import threading
import time

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import fxpipe
from fxpipe.schedule import compare
from tests.benchmarks.lanes import CHUNKS, HALF, IDEAL, net, torchgpipe
from tests.benchmarks.timing import keep_memory, medians, show

SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zbv", "auto")
ROUNDS = 15


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean((1, 2, 3)) - target).square().mean()


def sequential(model: nn.Module, x: Tensor, target: Tensor) -> None:
    """A loop over the micro-batches, with one intra-op thread."""
    torch.get_num_threads()  # a new thread asks before it sets, or its number is not its own
    torch.set_num_threads(1)
    for part, y in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
        (loss_fn(model(part), y) / CHUNKS).backward()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(CHUNKS * 4, 3, 32, 32), torch.randn(CHUNKS * 4)


def main() -> None:
    keep_memory()
    torch.set_num_threads(2)
    model, (x, target) = net(), batch()

    def one_thread() -> None:
        sequential(model, x, target)
        torch.set_num_threads(2)

    twins = [copy.deepcopy(model) for _ in range(2)]

    def two_at_once() -> None:
        """What the machine gives: two threads that have nothing to do with each other."""
        threads = [threading.Thread(target=sequential, args=(twin, x, target)) for twin in twins]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pipes = {
        name: fxpipe.compile(
            model, ["cpu", "cpu"], chunks=CHUNKS, schedule=name, loss_fn=loss_fn, **_cut(name)
        )
        for name in SCHEDULES
    }
    sides = {"one thread": one_thread, "two such threads at once": two_at_once}
    for name, pipe in pipes.items():
        sides[f"fxpipe {name}"] = lambda pipe=pipe: pipe.step(x, target=target)
    sides |= torchgpipe(model, lambda gpipe: loss_fn(gpipe(x), target).backward())
    seconds = medians(sides, ROUNDS)
    seconds["torch.distributed.pipelining 1F1B"] = _distributed()
    base = seconds["one thread"]
    slowdown = seconds["two such threads at once"] / base
    print(f"two threads at once slow each other down by {slowdown - 1:.0%}: no pipeline of two")
    print(f"lanes can be faster here than {IDEAL / slowdown:.2f}")
    show(
        f"a step of {CHUNKS} micro-batches",
        ["", "ms", "speed-up", "of the ideal 16/9", "of what the machine gives"],
        [
            [name, f"{s * 1e3:.1f}", *(f"{base / s / x:.2f}" for x in (1, IDEAL, IDEAL / slowdown))]
            for name, s in seconds.items()
        ],
    )
    _where_the_time_goes(pipes, x, target)
    for pipe in pipes.values():
        pipe.close()


def _cut(schedule: str) -> dict[str, object]:
    """Equal stages: two of four convolutions, or four of two."""
    quarters = [HALF - 4, HALF, HALF + 4]
    return {"partition": [str(layer) for layer in (quarters if schedule == "zbv" else [HALF])]}


def _where_the_time_goes(pipes: dict[str, fxpipe.Pipeline], x: Tensor, target: Tensor) -> None:
    """Idle time, time between actions, and how near the prediction is."""
    rows = []
    for name, pipe in pipes.items():
        found = pipe.measure(x, target=target)
        predicted = pipe.timeline()
        rows.append(
            [
                name,
                f"{found.makespan * 1e3:.1f}",
                f"{predicted.makespan * 1e3:.1f}",
                f"{compare(predicted, found).error:+.1%}",
                f"{found.bubble:.1%}",
                f"{predicted.bubble:.1%}",
            ]
        )
    columns = ["", "measured ms", "predicted ms", "", "idle, measured", "idle, predicted"]
    show("where the time goes", columns, rows)


# ------------------------------------------------------------------- torch.distributed.pipelining


def _distributed() -> float:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous, result = os.path.join(folder, "meet"), os.path.join(folder, "seconds")
        mp.spawn(_rank, args=(rendezvous, result), nprocs=2)
        with open(result) as file:
            return float(file.read())


def _rank(rank: int, rendezvous: str, result: str) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    keep_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    layers = list(net())
    half = nn.Sequential(*(layers[:HALF] if rank == 0 else layers[HALF:]))
    x, target = batch()
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_fn)
    seconds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        with open(result, "w") as file:
            file.write(str(statistics.median(seconds[1:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
