"""Shortage: what to say when a device runs out of memory in the middle of a call.

::

    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB ...
    in fxpipe: stage 1, micro-batch 3, node ... from        where: fxpipe.runtime.notes
      x = self.layer(x)
    in fxpipe: a training step of 8 micro-batches was predicted to need 20.1 GiB on lane 0 (cuda:0,
    where 22.0 GiB are to be had), ...; with a tenth less it would fit with checkpoint="auto" ...
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.options import Options
from fxpipe.compiler.replanned import Replanned
from fxpipe.ir.text import human_bytes

LESS = 0.9
"""Settings are named that are predicted to need at most this part of what the step has been
predicted to need: a prediction that has come true too late is too low."""


def shortage(options: Options, layout: Layout, mode: Mode, chunks: int) -> str:
    """The note for an error of a device that has too little memory: what a training step has been
    predicted to need on each lane, and settings that are predicted to need less."""
    compiled = Replanned(options, layout, mode, chunks)
    plan, room = compiled.as_it_is(), compiled.memory
    said = ", ".join(
        f"{human_bytes(round(needed))} on lane {lane} ({options.lanes[lane]}"
        + ("" if limit is None else f", where {human_bytes(round(limit))} are to be had")
        + ")"
        for lane, (needed, limit) in enumerate(zip(plan.memory, room, strict=True))
    )
    limits = [
        LESS * (needed if limit is None else min(needed, limit))
        for needed, limit in zip(plan.memory, room, strict=True)
    ]
    less = tuple(spec.with_memory(limit) for spec, limit in zip(options.specs, limits, strict=True))
    asked = compiled.asked((None,) * len(options.lanes))
    ways = replace(asked, specs=less).ways_out(None)
    run = "training step" if options.training else "call"
    return (
        f"in fxpipe: a {run} of {chunks} micro-batches was predicted to need {said}; for a "
        f"tenth less, {ways}"
    )
