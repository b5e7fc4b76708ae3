"""Actions: what a lane does in a training step, written as in ``torch.distributed.pipelining``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done with a micro-batch at a stage; the value is the letter it is written with."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the stage's inputs and of its parameters."""
    BACKWARD_INPUT = "I"
    """The first half: gradients of the inputs, which is what the stage before waits for."""
    WEIGHT_GRAD = "W"
    """The second half: gradients of the parameters, which nobody waits for."""


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One kind of work, for one micro-batch, at one stage. ``str`` of it is ``2F0``."""

    stage: int
    kind: Kind
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        """Itself, so that lanes of actions and of :class:`Overlap` read alike."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


_OVERLAP = "OVERLAP_F_B"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Actions that may run interleaved, so that one computes while the other's data travels.

    Run one after the other, in this order, they mean the same. ``str`` is ``(0F4;7B1)OVERLAP_F_B``.
    """

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.parts))}){_OVERLAP}"


Entry = Action | Overlap
"""What a lane is a list of. ``entry.parts`` are its actions."""

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_OTHER = re.compile(r"\d+((?:WAIT_)?(?:UNSHARD|RESHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]))\d*")
_PAIR = re.compile(rf"\(([^()]*)\){_OVERLAP}")


class NotAnAction(ValueError):
    """Text that is no action."""


def parse_entry(text: str) -> Entry | str:
    """The inverse of ``str``. An action that computes nothing gives its name (``"SEND_F"``).

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
        f"{text!r} is not an action: write stage, kind (F, B, I or W) and micro-batch, "
        f"such as 2F0, or two of them as (0F4;7B1){_OVERLAP}"
    )
