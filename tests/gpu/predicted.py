"""Parts that ask how far predictions are from what a GPU does."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch

from tests.gpu.machine import Machine
from tests.gpu.nets import large, pipeline
from tests.gpu.part import Report

CHUNKS, MIB = 8, 2**20


def predicted(machine: Machine, report: Report) -> None:
    """Memory and time of a step of three large models on one GPU, with Adam: what the pipeline
    predicts before it is measured, and what the allocator and the clock say. The batch is the
    caller's, and not counted."""
    torch.set_float32_matmul_precision("high")  # TF32, as most people train
    here = machine.name()
    for checkpoint in machine.pick(("never", "always"), ("never",)):
        for make in large(machine, CHUNKS):
            gc.collect()
            torch.accelerator.empty_cache()
            before = machine.allocated()
            work = make()
            model = work.model.to(here)
            x, target = tuple(t.to(here) for t in work.inputs), work.target.to(here)
            batch = sum(t.nbytes for t in (*x, target))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
            how: dict[str, Any] = {"chunks": CHUNKS, "schedule": "1f1b", "checkpoint": checkpoint}
            with pipeline(model, [here], loss_fn=work.loss_fn, **how) as pipe:
                step = partial(pipe.step, *x, target=target, optimizer=optimizer)
                seconds = machine.seconds(step, rounds=3)
                torch.accelerator.empty_cache()
                machine.forget_peaks()
                step()
                machine.synchronize()
                timeline = pipe.timeline()
                allocated = machine.most_allocated() - before - batch
                (bytes_predicted,) = timeline.peak_memory
                report.row(
                    model=work.name,
                    checkpoint=checkpoint,
                    predicted_mib=bytes_predicted / MIB,
                    allocated_mib=allocated / MIB,
                    off_by=bytes_predicted / allocated - 1,
                    reserved_mib=machine.most_reserved() / MIB,
                    predicted_ms=1e3 * timeline.makespan,
                    step_ms=1e3 * seconds,
                )
            del work, model, optimizer, x, target, pipe, step, timeline
    report.note(f"{CHUNKS} micro-batches, 1F1B, one lane, TF32.")
