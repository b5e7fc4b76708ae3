"""The segments in which checkpointed stages are recomputed, for the passes "partition",
"checkpoint" and "step".

::

    segments      1                          3
    recomputed    ├────── stage_1 ──────┤    ├─ 0 ─┤    ├─ 1 ─┤    ├─ 2 ─┤
    there are     all activations            those of one segment, and the inputs of all

One number is for all stages, or each stage has its own. A stage of mode "never" or "offload" is
not recomputed, so that it has one segment, whatever is given. Of one of mode "always 1/2" half of
the segments are, so that it has at least two. For "auto" the compiler chooses the
numbers once it knows the cut and the modes; for None it does so where it chooses the modes, too,
and stages have one segment elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from fxpipe.ir.counts import integer
from passes.common import modes
from passes.common.modes import AUTO, Modes, choices, is_recomputed, of_stages

NUMBERS = (1, 2, 4, 8)
"""The numbers of segments among which the compiler chooses."""

Segments = int | str | Sequence[int] | None
"""The number of segments of all stages, or the number of each stage; "auto", or None."""


def segments_of(given: Any, checkpoint: Modes) -> Segments:
    """What a user gives as ``checkpoint_segments``, together with these modes: one number, "auto",
    None, or a tuple of one number for each stage.

    Raises ValueError for anything else, and for several segments if no stage is recomputed.
    """
    if given is None or (isinstance(given, str) and given == AUTO):
        return given
    found = [integer(each) for each in (given if _is_list(given) else [given])]
    numbers = [number for number in found if number is not None and number > 0]
    if not numbers or len(numbers) < len(found):
        raise ValueError(
            f"checkpoint_segments is {given!r}: give the number of segments that a stage is "
            f"recomputed in, 1 or more, a list with one such number for each stage, or {AUTO!r}"
        )
    if max(numbers) > 1 and not _may_recompute(checkpoint):
        raise ValueError(
            f"checkpoint_segments is {given}, but checkpoint is {checkpoint!r}: give "
            'checkpoint="always" or "except_last" with it'
        )
    return tuple(numbers) if _is_list(given) else numbers[0]


def is_open(segments: Segments, checkpoint: Modes) -> bool:
    """Whether the compiler chooses the numbers of segments of stages with these modes."""
    if segments is None:
        return checkpoint == AUTO
    return segments == AUTO and _may_recompute(checkpoint)


def _may_recompute(checkpoint: Modes) -> bool:
    """Whether some stage runs forwards again, or may come to do so."""
    return any(map(is_recomputed, modes.listed(checkpoint)))


def _has_numbers(checkpoint: Modes) -> bool:
    """Whether a stage is worth trying in several numbers of segments: where it is run again, and
    not in parts already."""
    return any(is_recomputed(m) and modes.again(m) in (0, 1) for m in modes.listed(checkpoint))


def counts(segments: Segments, checkpoint: Modes, stages: int) -> list[int]:
    """The number of segments of each stage.

    Raises ValueError if there are numbers, or modes, for another number of stages, or for "auto".
    """
    known = of_stages(checkpoint, stages)
    if is_open(segments, checkpoint):
        raise ValueError(
            f"checkpoint_segments is {AUTO!r}: the numbers are known once the model has been cut"
        )
    number: Any = 1 if segments is None or isinstance(segments, str) else segments
    given = segments if _is_list(segments) else [number] * stages
    if len(given) != stages:
        raise ValueError(
            f"checkpoint_segments has {len(given)} numbers, and there are {stages} stages: give "
            "one number for each stage, or one for all of them"
        )
    return [
        math.lcm(own, modes.again(mode).denominator) if is_recomputed(mode) else 1
        for mode, own in zip(known, given, strict=True)
    ]


def simplest(numbers: Sequence[int], checkpoint: Modes) -> int | tuple[int, ...]:
    """One number that stands for those of all stages, if there is one; else the number of each."""
    for number in (1, *numbers):
        if counts(number, checkpoint, len(numbers)) == list(numbers):
            return number
    return tuple(numbers)


def ways(
    checkpoint: Modes, segments: Segments, has_host: bool = False, is_eager: bool = True
) -> list[tuple[Modes, Segments]]:
    """The modes, each with numbers of segments, among which a stage may choose. They are in the
    order of what a stage recomputes, and then of how little of that is there at one time.

    ``has_host``: whether there is a memory of the host beside that of the devices; ``is_eager``:
    whether stages run operator by operator.
    """
    may_choose = is_open(segments, checkpoint)
    several = NUMBERS if may_choose else (segments,)
    return [
        (mode, number)
        for mode in choices(checkpoint, has_host, is_eager, has_parts=may_choose)
        for number in (several if _has_numbers(mode) else several[:1])
    ]


def in_words(checkpoint: Modes, segments: Segments) -> str:
    """The modes as text, with the numbers of segments if there are several: one for all stages, or
    those of the stages in order. What is still to be chosen is left out."""
    if checkpoint == AUTO or is_open(segments, checkpoint):
        return modes.in_words(checkpoint)
    stages = max(len(each) if _is_list(each) else 1 for each in (checkpoint, segments))
    own = zip(of_stages(checkpoint, stages), counts(segments, checkpoint, stages), strict=True)
    return ", ".join(
        f"{mode} in {n} segments" if n > modes.again(mode).denominator else mode for mode, n in own
    )


def _is_list(given: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str)
