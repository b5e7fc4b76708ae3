"""The checkpoint modes, which say which micro-batches keep no activations, for the passes
"partition", "checkpoint" and "step".

::

    micro-batch     0        1        2        3
    never           keeps    keeps    keeps    keeps
    except_last     again    again    again    keeps       whose backward follows at once
    always          again    again    again    again

"keeps": the forward keeps its activations until the backward. "again": the forward keeps no
activations, and is run again for the backward.
"""

from __future__ import annotations

from fxpipe.schedule import Memory, Schedule, peaks

MODES = ("never", "except_last", "always")


def is_checkpointed(mode: str, microbatch: int, chunks: int) -> bool:
    """Whether micro-batch number ``microbatch``, of ``chunks``, keeps no activations."""
    return mode == "always" or (mode == "except_last" and microbatch < chunks - 1)


def recomputed(mode: str, chunks: int) -> float:
    """The part of a mini-batch's forward that a mode runs a second time, from 0.0 to 1.0."""
    return {"never": 0.0, "except_last": 1 - 1 / chunks, "always": 1.0}[mode]


def milder(mode: str) -> tuple[str, ...]:
    """The modes that keep fewer activations than this one, and so need less memory."""
    return MODES[MODES.index(mode) + 1 :]


def checkpointed(mode: str, chunks: int) -> int:
    """How many of ``chunks`` micro-batches keep no activations: these are the first ones."""
    return sum(is_checkpointed(mode, i, chunks) for i in range(chunks))


def alive(
    mode: str, chunks: int, stages: int, order: Schedule | None = None, segments: int = 1
) -> tuple[list[float], list[float]]:
    """For each stage, the number of micro-batches whose activations it holds at the same time, at
    most, and the number of checkpointed ones of which it holds the inputs only.

    Args:
        order: the schedule of the step; None: all forwards may come before the first backward.
        segments: in how many segments a checkpointed stage is recomputed, one at a time. They are
            taken to be equal, and the inputs of all but the first are not counted.
    """
    again = checkpointed(mode, chunks)
    if again == chunks and segments > 1:
        activations, inputs = alive(mode, chunks, stages, order)
        return [number / segments for number in activations], inputs
    if order is None:
        return [float(chunks - again + (again > 0))] * stages, [float(again)] * stages
    ones, zeros = [1.0] * stages, [0.0] * stages
    of_activations = peaks(order, Memory(ones, checkpointed=again))
    of_inputs = peaks(order, Memory(zeros, checkpointed=again, inputs=1.0))
    return list(of_activations.stages), list(of_inputs.stages)
