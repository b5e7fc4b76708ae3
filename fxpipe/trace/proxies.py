"""What stands for a value in a symbolic trace, and what a model does with it that fx does not see.

::

    scales = {3: 2.0, 9: 3.0}
    return h * scales.get(x.shape[1], 1.0)      the size of the trace is no key: always 1.0
    return self.per_length[str(x.shape[1])](h)  its text is "getitem_1"
    if x.__class__ is Tensor:                   its class is that of a proxy
    x.data = h                                  an attribute of the proxy, and of nothing else
    x[0] = 0                                    an error, which the model may catch

Python asks a key for its hash, and compares only what has the same: a proxy has a hash of its own,
so that nothing is found, and nothing tells of it. A trace is refused in which a value has been used
so, at the line that does it; the class of an input is known, and is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, fx

from fxpipe.ir import augmented
from fxpipe.trace.asker import asks_for_a_class, is_called_by_a_model
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
        if asks_for_a_class(frame):
            tracer: Any = self.tracer
            return type(tracer.real(self))
        return Proxy

    def __getattr__(self, name: str) -> Any:
        """An attribute that the user has set on a parameter or a buffer; for any other, a node."""
        if self.node.op == "get_attr" and not hasattr(Tensor, name):
            tracer: Any = self.tracer
            own = vars(tracer.real(self))
            if name in own and not isinstance(own[name], Tensor):
                return own[name]
        return super().__getattr__(name)

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
        if is_called_by_a_model(frame) and not (as_text and is_only_told(frame)):
            tracer.note(
                "it looks something up by a size, or writes a size as text, which fx does not see"
            )


def _recorded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _each in augmented.FUNCTIONS:  # as fx adds the other operators to its own class
    setattr(Proxy, f"__{_each.__name__}__", _recorded(_each))
