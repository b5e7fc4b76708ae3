"""Not a pass: what pass "step" is told, which everything that writes a step graph reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fxpipe.schedule import Schedule


@dataclass(frozen=True)
class StepOptions:
    """The arguments of :class:`passes.Step`, which says what each means."""

    loss: nn.Module
    schedule: Schedule
    devices: tuple[str, ...]
    in_dims: tuple[int | None, ...]
    targets: tuple[bool, ...] = ()
    checkpoint: str = "never"
    checkpoint_segments: int = 1
    summed: bool = False
