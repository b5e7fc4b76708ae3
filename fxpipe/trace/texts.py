"""Texts that a model makes of sizes while it is exported.

::

    return self.per_length[str(x.shape[1])](h)  a key: the size is a constant, with a guard
    logger.debug(f"{x.shape}")                  nothing is computed by this text, which is let be

``torch.export`` takes a size that is a key for a constant by itself, with a guard. It does not so
where the size becomes text, which would be "s77", whatever the size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.trace.asker import in_this_thread, is_called_by_a_model
from fxpipe.trace.errors import TextOfValues
from fxpipe.trace.patches import patched
from fxpipe.trace.told import is_only_told

_SYMBOLS: dict[type, Callable[[Any], Any]] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}
_AS_TEXT = "__repr__", "__str__", "__format__"


@contextmanager
def texts_guarded() -> Iterator[None]:
    """Inside the ``with`` block, a size of an export of which code of a model makes text is a
    constant with a guard, unless the text is only told."""
    is_here = in_this_thread()

    def replaced(number: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def replace(original: Callable[..., str]) -> Callable[..., str]:
            def text(symbol: Any, *specification: str) -> str:
                if is_here():
                    frame = sys._getframe(1)
                    if is_called_by_a_model(frame) and not is_only_told(frame):
                        try:
                            return format(number(symbol), *specification)
                        except GuardOnDataDependentSymNode as error:
                            raise TextOfValues(error.cond, str(error)) from error
                # A width or a precision is for numbers, and what is told here is a symbol.
                return original(symbol, *("" for _ in specification))

            return text

        return replace

    with ExitStack() as stack:
        for kind, number in _SYMBOLS.items():
            for name in _AS_TEXT:
                stack.enter_context(patched(kind, name, replaced(number), tells_threads=True))
        yield
