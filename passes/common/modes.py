"""Not a pass: the checkpoint modes, which say which micro-batches keep no activations.

::

    micro-batch     0        1        2        3
    never           keeps    keeps    keeps    keeps
    except_last     again    again    again    keeps       whose backward follows at once
    always          again    again    again    again

"keeps": the forward keeps its activations until the backward. "again": the forward keeps no
activations, and is run again for the backward.
"""

from __future__ import annotations

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
