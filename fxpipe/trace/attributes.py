"""The attributes that a user has set on an input, where the forward asks for one.

::

    x.is_causal = True                         the whole batch has it, and no micro-batch,
    getattr(x, "is_causal", False)             which is another tensor

PyTorch does not hand such attributes on: a part of a tensor has none. So a model whose forward asks
for one is refused; who sets attributes that no forward asks for may go on with that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fxpipe.ir.errors import Unsupported
from fxpipe.trace.asker import by_the_model
from fxpipe.trace.errors import line_of_the_model
from fxpipe.trace.example import Example
from fxpipe.trace.patches import LOCK


@contextmanager
def attributes_refused(example: Example) -> Iterator[None]:
    """Raise Unsupported after the ``with`` block if the model has asked in it, in this thread, for
    an attribute that is set on an input of the call.

    The inputs of a run are copies that have none of them. So Python asks ``Tensor.__getattr__``,
    which PyTorch does not define, for what a tensor does not have by itself.
    """
    if not example.attributes:
        yield
        return
    asked: list[str] = []
    asks = by_the_model()

    def missing(tensor: Tensor, name: str) -> Any:
        frame = sys._getframe(1)
        if name in example.attributes and asks(frame):
            asked.append(f"the attribute {name} of an input (at {line_of_the_model(frame)})")
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")

    with LOCK:
        Tensor.__getattr__ = missing  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del Tensor.__getattr__  # type: ignore[attr-defined]
            if asked:
                _refuse(example, asked[0])


def _refuse(example: Example, asked: str) -> None:
    raise Unsupported(
        f"the forward of {type(example.model).__name__} asks for {asked}, which no micro-batch "
        "has, as PyTorch hands it on to no part of a tensor: give it as an argument of its own"
    ) from None
