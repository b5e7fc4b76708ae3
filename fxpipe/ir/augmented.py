"""Augmented assignments (``h *= mask``) to a value of a symbolic trace.

fx's proxy has none of their methods, so that Python falls back to ``h = h * mask``: a second name
of the tensor would keep the old values. Each is recorded as a call of a function of this module,
which does what Python does: a tensor is written to, a number is replaced. The functions of the
module ``operator`` do not serve: fx writes ``n += 1`` for them, which also rebinds the old number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def _function(name: str) -> Callable[[Any, Any], Any]:
    original: Callable[[Any, Any], Any] = getattr(operator, name)

    def function(value: Any, other: Any) -> Any:
        return original(value, other)

    function.__name__ = function.__qualname__ = name
    return function


iadd, isub, imul = _function("iadd"), _function("isub"), _function("imul")
itruediv, ifloordiv, imod = _function("itruediv"), _function("ifloordiv"), _function("imod")
ipow, imatmul, iand = _function("ipow"), _function("imatmul"), _function("iand")
ior, ixor = _function("ior"), _function("ixor")
ilshift, irshift = _function("ilshift"), _function("irshift")

FUNCTIONS = (
    iadd,
    isub,
    imul,
    itruediv,
    ifloordiv,
    imod,
    ipow,
    imatmul,
    iand,
    ior,
    ixor,
    ilshift,
    irshift,
)
