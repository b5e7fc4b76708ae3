"""Parts that ask how far predictions are from what a GPU does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.gpu.machine import Machine
from tests.gpu.nets import Large, large, pipeline
from tests.gpu.part import Report

CHUNKS, MIB = 8, 2**20
WAYS = (8, "never"), (8, "always"), (1, "never")
"""How many times as many rows a micro-batch has, and what is recomputed."""


def predicted(machine: Machine, report: Report) -> None:
    """Memory and time of a step of three large models on one GPU, with Adam: what the pipeline
    predicts ahead of the first step, with the measured times of its nodes, and what the allocator
    and the clock say. The batch is the caller's, and not counted. With few rows the host is slower
    than the GPU; with eight times as many it is not."""
    torch.set_float32_matmul_precision("high")  # TF32, as most people train
    for times, checkpoint in machine.pick(WAYS, WAYS[-1:]):
        for make in large(machine, CHUNKS, times):
            gc.collect()
            torch.accelerator.empty_cache()
            _compare(machine, report, make(), checkpoint)
    report.note(
        f"{CHUNKS} micro-batches, 1F1B, one lane, TF32. loop_ms: a loop over micro-batches, with "
        "Adam; predicted_ms: by the times of nodes (costs='measured'); again_ms: by pipe.measure."
    )


def _compare(machine: Machine, report: Report, work: Large, checkpoint: str) -> None:
    before, here = machine.allocated(), machine.name()
    model = work.model.to(here)
    x, target = tuple(t.to(here) for t in work.inputs), work.target.to(here)
    batch = sum(t.nbytes for t in (*x, target))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    how: dict[str, Any] = {"chunks": CHUNKS, "schedule": "1f1b", "checkpoint": checkpoint}
    how |= {"loss_fn": work.loss_fn, "optimizer": optimizer, "costs": "measured"}
    how |= {"example_inputs": x, "example_target": target}
    plain = machine.seconds(_loop(work, model, x, target, optimizer), rounds=3)
    with pipeline(model, [here], **how) as pipe:
        timeline = pipe.timeline()
        step = partial(pipe.step, *x, target=target, optimizer=optimizer, zero_grad=True)
        seconds = machine.seconds(step, rounds=3)
        torch.accelerator.empty_cache()
        machine.forget_peaks()
        step()
        machine.synchronize()
        allocated, reserved = machine.most_allocated(), machine.most_reserved()
        pipe.measure(*x, target=target, rounds=1)
        again = pipe.timeline().makespan
    needed = allocated - before - batch
    (bytes_predicted,) = timeline.peak_memory
    report.row(
        model=work.name,
        checkpoint=checkpoint,
        rows=len(target) // CHUNKS,
        predicted_mib=bytes_predicted / MIB,
        allocated_mib=needed / MIB,
        off_by=bytes_predicted / needed - 1,
        reserved_mib=reserved / MIB,
        loop_ms=1e3 * plain,
        step_ms=1e3 * seconds,
        predicted_ms=1e3 * timeline.makespan,
        again_ms=1e3 * again,
    )


def _loop(
    work: Large, model: nn.Module, x: tuple[Tensor, ...], target: Tensor, optimizer: Any
) -> Callable[[], None]:
    def run() -> None:
        for *given, wanted in zip(*(t.chunk(CHUNKS) for t in (*x, target)), strict=True):
            (work.loss_fn(model(*given), wanted) / CHUNKS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run
