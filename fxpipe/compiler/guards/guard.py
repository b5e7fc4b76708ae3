"""What a guard is, and how names and sizes are printed in what it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

import torch

from fxpipe.compiler.guards.calls import GuardedCall

SHOWN = 8  # the most attributes, or names of modules, that are printed


class Guard(Protocol):
    """One condition. ``str`` of it says what is expected, in words; "" where that says nothing."""

    kind: ClassVar[str]

    def holds(self, call: GuardedCall) -> bool:
        """Whether the condition holds for a call, if all guards ahead of this one do."""

    def failure(self, call: GuardedCall) -> str:
        """What was expected, and what the call has instead; for a condition that does not hold."""


def dtype_text(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: ``float32``."""
    return str(dtype).removeprefix("torch.")


def sizes_text(sizes: Iterable[int | None]) -> str:
    """Sizes as they are printed, with "*" for None, a size that may vary: ``[*, 64]``."""
    return f"[{', '.join('*' if n is None else str(n) for n in sizes)}]"


def some_of(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
