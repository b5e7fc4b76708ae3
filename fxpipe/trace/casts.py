"""Casts: whether code switches autocast on by itself.

Autocast casts a parameter once for all its uses, as long as the parameter is a leaf of the autograd
graph. Of what stands in the place of a parameter it makes a copy for each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.trace.patches import patched


@contextmanager
def autocasts() -> Iterator[list[str]]:
    """Gives a list, which has the kind of device of each ``torch.autocast`` that this thread
    switches on inside the ``with`` block."""
    found: list[str] = []

    def replace(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def enter(context: Any) -> Any:
            entered = original(context)
            if torch.is_autocast_enabled(context.device):
                found.append(context.device)
            return entered

        return enter

    with patched(torch.autocast, "__enter__", replace):
        yield found
