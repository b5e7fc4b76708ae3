"""The checkpoint modes, which say which micro-batches keep no activations, for the passes
"partition", "checkpoint" and "step".

::

    micro-batch     0        1        2        3
    never           keeps    keeps    keeps    keeps
    selective       in part  in part  in part  in part
    except_last     again    again    again    keeps       whose backward follows at once
    always          again    again    again    again
    offload         moves    moves    moves    moves       unless its backward follows at once
    offload 1/2     half     half     half     half        moves, and the other half keeps
    always 1/2      half     half     half     half        is run again, and the other half keeps

"keeps": the forward keeps its activations until the backward. "again": the forward keeps no
activations, and is run again for the backward. "in part": it keeps the results of products, which
take most of its time, and the rest is run again. "moves": the activations wait in the host's
memory. "half": of the bytes that move, or of the segments that are run again; it may be any part.
All stages have one mode, or each has its own. For "auto" the compiler chooses the mode of each
stage when it cuts the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache

from fxpipe.schedule import Memory, Schedule, peaks

SELECTIVE, ALWAYS, OFFLOAD = "selective", "always", "offload"
MODES = ("never", SELECTIVE, "except_last", ALWAYS)
"""The modes by what they recompute: nothing, what takes little time, nearly all, all."""
MOVING = 2
"""How many micro-batches of a stage whose activations move to the host are on its device at one
time: one that is computed, and one on its way."""
SHARES = "1/4", "1/2", "3/4"
"""The parts among which the compiler chooses, where a part of a stage's activations moves, or a
part of its segments is run again."""
PARTS = tuple(f"{ALWAYS} {share}" for share in SHARES)  # "always 1/4", and so on
AUTO = "auto"  # asks the compiler for the mode of each stage

Modes = str | Sequence[str]
"""The mode of all stages, or the mode of each stage; or "auto", until the model has been cut."""


def modes_of(given: Modes) -> str | tuple[str, ...]:
    """What a user gives as ``checkpoint``: one mode, "auto", or a tuple of one for each stage.

    Raises ValueError for anything else.
    """
    if isinstance(given, str) and given == AUTO:
        return given
    modes, known = [given] if isinstance(given, str) else given, (*MODES, OFFLOAD)
    if not isinstance(modes, Sequence) or not modes or not all(map(_is_known, modes)):
        raise ValueError(
            f'checkpoint is {given!r}: give {", ".join(map(repr, known))}, "{ALWAYS} 1/2", '
            f'"{OFFLOAD} 1/2" or another part, a list with one of these for each stage, or {AUTO!r}'
        )
    return given if isinstance(given, str) else tuple(given)


def _is_known(mode: object) -> bool:
    return isinstance(mode, str) and (mode in MODES or bool(moved(mode) or again(mode)))


def moved(mode: str) -> float:
    """The part of a stage's activations that waits in the host's memory: 1.0 for "offload", 0.5 for
    "offload 1/2", and 0.0 for a mode that moves nothing."""
    return float(_part(mode, OFFLOAD))


def again(mode: str) -> Fraction:
    """The part of a stage that is run again for each micro-batch: 1 for "always", 1/2 for
    "always 1/2", and 0 for another mode. Its first segments are, and the others keep their
    activations."""
    return _part(mode, ALWAYS)


@cache
def _part(mode: str, what: str) -> Fraction:
    kind, _, part = mode.partition(" ")
    if kind != what:
        return Fraction(0)
    try:
        share = Fraction(part or 1)
    except (ValueError, ZeroDivisionError):
        return Fraction(0)
    return share if 0 < share <= 1 else Fraction(0)


def run_again(mode: str, segments: int) -> int:
    """How many of a stage's segments are run again if the stage is checkpointed: the first ones."""
    share = again(mode)
    return max(1, round(share * segments)) if share else segments


def of_segment(mode: str, index: int, segments: int) -> str:
    """The mode of one of a stage's segments."""
    if again(mode) in (0, 1):
        return mode
    return ALWAYS if index < run_again(mode, segments) else "never"


def of_stages(modes: Modes, stages: int) -> list[str]:
    """The mode of each stage.

    Raises ValueError if there are modes for another number of stages, or for "auto".
    """
    if isinstance(modes, str) and modes == AUTO:
        raise ValueError(f"checkpoint is {AUTO!r}: the modes are known once the model has been cut")
    if not isinstance(modes, str) and len(modes) != stages:
        raise ValueError(
            f"checkpoint has {len(modes)} modes, and there are {stages} stages: give one mode for "
            "each stage, or one for all of them"
        )
    return [modes] * stages if isinstance(modes, str) else list(modes)


def choices(
    modes: Modes, has_host: bool = False, is_eager: bool = True, has_parts: bool = False
) -> tuple[Modes, ...]:
    """The modes among which a stage may choose: those given, or for "auto" each there is, in the
    order of what they compute again.

    ``has_host``: whether there is a memory of the host beside that of the devices; ``is_eager``:
    whether stages run operator by operator; ``has_parts``: whether stages may be cut in segments.
    """
    if not (isinstance(modes, str) and modes == AUTO):
        return (modes,)
    never, selective, *others = MODES
    moving = (*(f"{OFFLOAD} {share}" for share in SHARES), OFFLOAD)
    return (never, *moving * has_host, *[selective] * is_eager, *PARTS * has_parts, *others)


def listed(modes: Modes) -> Sequence[str]:
    """The mode of all stages, or "auto", as a list of one; or the modes of the stages."""
    return [modes] if isinstance(modes, str) else modes


def plain(modes: Sequence[str]) -> Modes:
    """One mode, if it is that of all stages; else the mode of each stage."""
    return modes[0] if len(set(modes)) == 1 else tuple(modes)


def in_words(modes: Modes) -> str:
    """The modes as text: one for all stages, or those of the stages in order."""
    return modes if isinstance(modes, str) else ", ".join(modes)


def is_never(modes: Modes) -> bool:
    """Whether all micro-batches keep their activations at all stages."""
    return all(mode == "never" for mode in listed(modes))


def is_recomputed(mode: str) -> bool:
    """Whether a stage of this mode runs some forwards again."""
    return mode != "never" and not moved(mode)


def offloaded(modes: Modes, stages: int) -> frozenset[int]:
    """The stages whose activations wait in the host's memory."""
    found = enumerate(of_stages(modes, stages))
    return frozenset(stage for stage, mode in found if moved(mode))


def is_checkpointed(mode: str, microbatch: int, chunks: int) -> bool:
    """Whether micro-batch number ``microbatch``, of ``chunks``, keeps no activations, so that its
    forward is run again."""
    if mode == "except_last":
        return microbatch < chunks - 1
    return mode == SELECTIVE or again(mode) > 0


def recomputed(mode: str, chunks: int) -> float:
    """The part of a mini-batch's forward that a mode runs a second time, from 0.0 to 1.0;
    "selective" without its products."""
    if moved(mode):
        return 0.0
    return float(again(mode)) if again(mode) else checkpointed(mode, chunks) / chunks


def recomputing_less(mode: str) -> tuple[str, ...]:
    """The modes that recompute less than this one does, without those that move activations."""
    if moved(mode):
        return ("never",)
    own = again(mode)
    if 0 < own < 1:
        return ("never", SELECTIVE, *(part for part in PARTS if again(part) < own))
    less = MODES[: _rank(mode)]
    return (*less[:2], *PARTS * (SELECTIVE in less), *less[2:])


def _rank(mode: str) -> int:
    """The place of a mode among :data:`MODES`; a part is at the place of the whole."""
    return MODES.index(ALWAYS if again(mode) else mode)


def milder(modes: Modes) -> tuple[str, ...]:
    """The modes that, given for all stages, compute more again than these modes do at some stage,
    and less at none; so they mostly need less memory. There are none for "auto", which tries all of
    them, nor where activations wait in the host's memory."""
    if modes == AUTO or any(map(moved, listed(modes))):
        return ()
    given = [_rank(mode) - (0 < again(mode) < 1) / 2 for mode in listed(modes)]
    return tuple(
        mode
        for i, mode in enumerate(MODES)
        if all(i >= own for own in given) and any(i > own for own in given)
    )


def checkpointed(mode: str, chunks: int) -> int:
    """How many of ``chunks`` micro-batches are run again: these are the first ones."""
    return sum(is_checkpointed(mode, i, chunks) for i in range(chunks))


def away(mode: str, chunks: int) -> int:
    """How many of ``chunks`` micro-batches have no activations on the device between their forward
    and their backward: these are the first ones. They are run again, or on the host."""
    return chunks if moved(mode) else checkpointed(mode, chunks)


def alive(
    modes: Modes,
    chunks: int,
    stages: int,
    order: Schedule | None = None,
    segments: Sequence[int] | None = None,
) -> tuple[list[float], list[float]]:
    """For each stage, the number of micro-batches whose activations it holds at the same time, at
    most, and the number of checkpointed ones of which it holds the inputs only.

    Args:
        order: the schedule of the step; None: all forwards may come before the first backward.
        segments: in how many segments each stage is recomputed, one at a time; None: in one. They
            are taken to be equal, each with inputs as large as those of the stage.
    """
    own_modes = tuple(of_stages(modes, stages))
    held, inputs = _alive(own_modes, chunks, order, tuple(segments or [1] * stages))
    return list(held), list(inputs)


@lru_cache(maxsize=512)  # a search for a cut asks the same for each cut
def _alive(
    own_modes: tuple[str, ...], chunks: int, order: Schedule | None, counts: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The numbers of micro-batches that :func:`alive` returns, for arguments that can be cached."""
    stages = len(own_modes)
    hosts = offloaded(own_modes, stages)
    gone = [away(mode, chunks) for mode in own_modes]
    shares = [float(moved(mode) or again(mode)) for mode in own_modes]  # what is away of these
    numbers = [
        0 if i in hosts else run_again(own_modes[i], count) for i, count in enumerate(counts)
    ]
    parts = [1 / number if number else min(MOVING, chunks) for number in numbers]
    ones, zeros = [1.0] * stages, [0.0] * stages
    if order is None:
        kept = [float(chunks)] * stages
        held = [chunks - n + (n > 0) * part for n, part in zip(gone, parts, strict=True)]
        inputs = [float(n * number) for n, number in zip(gone, numbers, strict=True)]
    else:
        kept = list(peaks(order, Memory(ones)).stages)
        held = list(peaks(order, Memory(ones, checkpointed=gone, recomputed=parts)).stages)
        inputs = list(peaks(order, Memory(zeros, checkpointed=gone, inputs=numbers)).stages)
    for i, share in enumerate(shares):
        if i in hosts:  # a schedule that has fewer under way at once needs no more than these
            held[i] = min(held[i], kept[i])
        if share:  # the rest of the stage is kept
            held[i] = share * held[i] + (1 - share) * kept[i]
    return tuple(held), tuple(inputs)
