"""Sizes that the forward uses as a key, or writes as text.

::

    scales = {3: 2.0, 9: 3.0}
    return h * scales.get(x.shape[1], 1.0)      the size of the trace is no key: always 1.0
    return self.per_length[str(x.shape[1])](h)  its text is "getitem_1"
    logger.debug(f"{x.shape}")                  nothing is computed by this text, which is let be

Python asks a key for its hash, and compares only what has the same. The proxy that stands for a
size in a symbolic trace has a hash of its own, so that nothing is found, and nothing tells of it:
such a trace is refused (:class:`Proxy`). ``torch.export`` takes a size that is a key for a
constant, with a guard. It does not so where the size becomes text, which is "s77" then:
:func:`texts_guarded` makes it a constant there, too.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpipe.ir import augmented
from fxpipe.ir.source import is_of_a_model, is_pythons
from fxpipe.trace.errors import TextOfValues
from fxpipe.trace.patches import patched
from fxpipe.trace.told import is_only_told


class Proxy(fx.Proxy):
    """A proxy that tells its tracer where a model has used it as a key, or written it as text, or
    has written to a part or an attribute of it."""

    def __hash__(self) -> int:
        self._note(sys._getframe(1))
        return super().__hash__()

    def __repr__(self) -> str:
        self._note(sys._getframe(1), as_text=True)
        return super().__repr__()

    def __str__(self) -> str:
        self._note(sys._getframe(1), as_text=True)
        return super().__repr__()

    def __format__(self, specification: str) -> str:
        self._note(sys._getframe(1), as_text=True)
        return super().__repr__()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the tensor for which the proxy stands, where a model asks for it by
        ``x.__class__``, ``match`` or ``functools.singledispatch``; else the proxy's own."""
        frame = sys._getframe(1)
        if _asks_for_a_class(frame):
            tracer: Any = self.tracer
            return type(tracer.real(self))
        return Proxy

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name):  # any other is an attribute of the model's own
            tracer: Any = self.tracer
            tracer.note(f"it sets .{name} of a value, which fx does not record")
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        tracer: Any = self.tracer
        tracer.note("it writes to a part of a value, which fx does not record")
        raise TypeError(f"{type(self).__name__!r} object does not support item assignment")

    def _note(self, frame: FrameType, as_text: bool = False) -> None:
        tracer: Any = self.tracer
        if _is_of_the_model(frame) and not (as_text and is_only_told(frame)):
            tracer.note(
                "it looks something up by a size, or writes a size as text, which fx does not see"
            )


def _recorded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _each in augmented.FUNCTIONS:  # as fx adds the other operators to its own class
    setattr(Proxy, f"__{_each.__name__}__", _recorded(_each))

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
    thread = threading.get_ident()

    def replaced(number: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def replace(original: Callable[..., str]) -> Callable[..., str]:
            def text(symbol: Any, *specification: str) -> str:
                if threading.get_ident() == thread:
                    frame = sys._getframe(1)
                    if _is_of_the_model(frame) and not is_only_told(frame):
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


def _asks_for_a_class(frame: FrameType) -> bool:
    """Whether a frame, which has asked an object for its ``__class__``, is of the model, and is at
    an instruction of Python's that does so: by ``x.__class__``, by ``match``, or in
    ``functools.singledispatch``. In a call it is PyTorch that asks, which would take a proxy that
    says that it is a tensor for one."""
    code = frame.f_code.co_code[frame.f_lasti]
    return dis.opname[code] in ("LOAD_ATTR", "MATCH_CLASS") and _is_of_the_model(frame)


def _is_of_the_model(frame: FrameType | None) -> bool:
    """Whether a frame is of the model, or of Python's own library, which the model has called (an
    ``Enum``, a ``Counter``, a logger)."""
    while frame is not None and is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_of_a_model(frame.f_code.co_filename)
