"""Which module to blame where ``torch.export`` cannot decide a branch, because the condition has a
number that was read from a tensor: the module that has read the number, not the one that branches.

::

    n = int(self.columns)       a module that reads: to keep it whole helps, as its output then
    pad(x, (0, n))              has a known size
    ...
    if x.shape[1] > 6:          a module that cannot be traced because of the one above
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from fxpipe.trace.blame import Blamed
from fxpipe.trace.errors import DEPENDS_ON_VALUES, at, is_model_line
from fxpipe.trace.patches import patched
from fxpipe.trace.running import Running

Symbol = Any  # of sympy

_KINDS = "create_unbacked_symint", "create_unbacked_symfloat", "create_unbacked_symbool"


@contextmanager
def values_read(running: Running) -> Iterator[dict[Symbol, Blamed]]:
    """Yields, for each number that the export reads from a tensor, an error that blames the module
    that has read it. The dictionary grows while the export runs."""
    found: dict[Symbol, Blamed] = {}

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any, **kwargs: Any) -> Any:
            number = original(*args, **kwargs)
            reader = running.part
            for symbol in number.node.expr.free_symbols:
                found.pop(symbol, None)  # an earlier export may have given out the same symbol
                if reader is not None:
                    found[symbol] = Blamed(reader, _reading())
            return number

        return create

    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(patched(ShapeEnv, kind, replace))
        yield found


def blamed_on_the_reader(error: Exception, read: Mapping[Symbol, Blamed]) -> Exception:
    """The error to act on: if a branch could not be decided because it depends on a number read
    from a tensor, the module that has read the number is to blame, not the one that branches."""
    if not isinstance(error, GuardOnDataDependentSymNode):
        return error
    symbols = getattr(error.cond, "free_symbols", ())
    return next((blamed for symbol, blamed in read.items() if symbol in symbols), error)


def _reading() -> str:
    """The message for a number that is being read now, with the line of the model that reads it."""
    lines = [frame for frame in traceback.extract_stack() if is_model_line(frame)]
    where = f" (read at {at(lines[-1])})" if lines else ""
    return f"{DEPENDS_ON_VALUES}{where}"
