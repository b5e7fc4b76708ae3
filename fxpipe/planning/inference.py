"""Inference (``training=False``): what a pipeline that computes no gradients refuses.

There is no backward, so that nothing is kept for one, and no gradients, states of an optimizer or
checkpoints count as memory. An option that is only about those is most likely a mistake.
"""

from __future__ import annotations

from typing import Any

from fxpipe.schedule import Schedule
from passes.common.modes import AUTO, Modes, is_never
from passes.partition.automatic import Auto

FORWARDS = "gpipe"
"""The schedule in whose order a call runs its forwards; it is the default one."""


def check_training(
    training: bool,
    *,
    schedule: str | Schedule,
    checkpoint: Modes,
    partition: Any,
    optimizer: Any = None,
    loss_fn: Any = None,
) -> None:
    """Check the option ``training`` together with those that say how to train.

    Raises ValueError for what is no bool, and for ``training=False`` with an option that needs a
    backward.
    """
    if not isinstance(training, bool):
        raise ValueError(
            f"training is {training!r}: give True, for a pipeline that can be trained, or False, "
            "for one that only computes outputs"
        )
    if training:
        return
    if optimizer is not None:
        _refuse("optimizer=", "nothing is trained whose states would count as memory")
    if loss_fn is not None:
        _refuse("loss_fn=", "there is no training step that computes a loss")
    if checkpoint != AUTO and not is_never(checkpoint):
        _refuse(
            f"checkpoint={checkpoint!r}", "there is no backward for which to recompute anything"
        )
    if schedule != FORWARDS:
        given = f"the schedule {schedule.name!r}" if isinstance(schedule, Schedule) else None
        _refuse(given or f"schedule={schedule!r}", "there are no backwards to be put in order")
    if isinstance(partition, Auto) and partition.objective == "activations":
        _refuse('partition=Auto(objective="activations")', "no activations are kept")


def _refuse(what: str, why: str) -> None:
    raise ValueError(
        f"training=False is given with {what}, but {why}: leave it out, or give training=True"
    )
