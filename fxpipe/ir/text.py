"""Sizes, times and summaries for people."""

from __future__ import annotations

import inspect
import io
import math
import re
from typing import Any


class Word(str):
    """Text that is shown without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def human_bytes(count: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    if count < 1024:
        return f"{count:g} B"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with as many digits, four at least, as show that they differ."""
    for digits in range(4, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def too_little(who: str, needed: float, limit: float) -> str:
    """By how much a limit of memory is too low, in words. The difference is there by itself, as two
    sizes that differ by little are the same in words."""
    sizes = math.ceil(needed), math.floor(limit), math.ceil(needed - limit)
    most, has, short = map(human_bytes, sizes)
    return f"{who} needs {most} and has {has}, {short} short"


def human_time(seconds: float) -> str:
    """``0.0015`` → ``1.5 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def nice(least: float) -> float:
    """The next of 1, 2, 5, 10, 20 ..., or of 0.5, 0.2, 0.1 ..., that is at least this: a step for
    the numbers along an axis."""
    power = 1.0
    while power > least:
        power /= 10
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def optimality(gap: float, *, is_limited: bool = False) -> str:
    """A sentence on how good a cut is.

    Args:
        gap: the share by which its slowest stage takes longer than the lower bound, at most; 0.1 is
            10 %.
        is_limited: whether memory has a limit. Whether a cut fits is certain only once a step has
            been simulated, so that the bound is that of the cuts that were expected to fit.
    """
    if gap >= 1e-6:
        among = ", among the cuts that were expected to fit" if is_limited else ""
        return f"the slowest stage is at most {max(gap, 1e-3):.1%} from optimal{among}"
    if is_limited:
        return "no other cut that was expected to fit has a faster slowest stage"
    return "the cut is optimal: no other has a faster slowest stage"


def shortened(text: str, longest: int = 40) -> str:
    """``text``, or the beginning of it if it is too long for a message."""
    return text if len(text) <= longest else f"{text[:longest]}..."


def kind(value: object) -> str:
    """The kind of a value in words: "an int", "the class Adam", "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def summary(documented: object) -> str:
    """The first sentence of a docstring, without its markup; empty if there is none."""
    paragraph = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.) ", paragraph)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", sentence).replace("``", "")


def rendered(what: Any) -> str:
    """The text of something that rich can show, 100 columns wide and without colours. Lines below a
    table may be longer."""
    from rich.console import Console  # here, as hardly any message needs it

    file = io.StringIO()
    console = Console(file=file, width=100, color_system=None, force_jupyter=False)
    console.print(what, soft_wrap=True, highlight=False)
    return file.getvalue()
