"""Actions: the parts of a training step that lanes do, written as ``torch.distributed.pipelining``
writes them: ``2F0`` is the forward of stage 2 for micro-batch 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from fxpipe.ir.text import shortened


class Kind(StrEnum):
    """The kind of an action. The value is the letter that stands for it in text: ``F`` in 2F0."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the stage's inputs and of its parameters."""
    BACKWARD_INPUT = "I"
    """The first half of a backward: gradients of the inputs, for which the stage before waits."""
    WEIGHT_GRAD = "W"
    """The second half of a backward: gradients of the parameters, for which no stage waits."""
    RECOMPUTE = "R"
    """The forward again, of a checkpointed micro-batch, ahead of its backward; or the activations
    back from the host's memory. A schedule need not have it: see
    :mod:`fxpipe.schedule.recomputation`."""

    @property
    def begins_backward(self) -> bool:
        """Whether it is a backward that is given gradients: a whole one, or the first half."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """A forward, a backward, half of a backward or a recomputation, at one stage, for one
    micro-batch. ``str`` of it is the stage, the letter of the kind and the micro-batch: ``2F0``."""

    stage: int
    kind: Kind
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        """A tuple of this action. An :class:`Overlap` has ``parts`` too, so that the entries of a
        lane need not be told apart."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


_OVERLAP = "OVERLAP_F_B"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Actions that may run interleaved, so that one computes while the other's data travels.

    They give the same results if they run one after the other, in this order. ``str`` of it is
    ``(0F4;7B1)OVERLAP_F_B``.
    """

    parts: tuple[Action, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))  # a list may be given

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.parts))}){_OVERLAP}"


Entry = Action | Overlap
"""An element of a lane. ``entry.parts`` are its actions."""

_COMPUTE = re.compile(r"([0-9]{1,6})([FBIWR])([0-9]{1,6})")
_OTHER = re.compile(r"\d+((?:WAIT_)?(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]))\d*")
_PAIR = re.compile(rf"\(([^()]*)\){_OVERLAP}")


class NotAnAction(ValueError):
    """A text that should be an action, and is none."""


def parse_entry(text: str) -> Entry | str:
    """Read an action or an overlap from its ``str``. For an entry that computes nothing, as
    ``torch.distributed.pipelining`` writes them, the result is its name, such as ``"SEND_F"``.

    Raises:
        NotAnAction: if the text is none of these.
    """
    text = text.strip()
    if found := _COMPUTE.fullmatch(text):
        return Action(int(found[1]), Kind(found[2]), int(found[3]))
    if found := _OTHER.fullmatch(text):
        return found[1]
    if found := _PAIR.fullmatch(text):
        parts = tuple(parse_entry(part) for part in found[1].split(";"))
        actions = tuple(part for part in parts if isinstance(part, Action))
        if len(actions) == len(parts):
            return Overlap(actions)
    raise NotAnAction(
        f"{shortened(text)!r} is not an action: write stage, kind (F, B, I, W or R) and "
        f"micro-batch, such as 2F0, or two of them as (0F4;7B1){_OVERLAP}"
    )
