"""What a forward computes from trained parameters.

::

    if self.start is None:                       the first call sets it, later ones find it there
        self.start = self.weight.detach().clone()
    return y + (self.weight - self.start).norm()

Later runs on the same parameters do not show that this differs from ``self.weight`` itself, which a
graph would have in its place. An optimizer changes the parameter, and not what has been kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.runtime.writes import written_by


class Derived(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors through operators: what an operator computes from one of them, or writes to
    with one of them, is derived from them.

    Args:
        tensors: the tensors to follow, such as parameters. Neither they nor their views are derived
            from them: they have new values as soon as the tensors have.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = set(map(memory_of, tensors))
        self._derived: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        memory = {memory_of(t) for t in (*tensors_of(made), *written_by(func, args, kwargs))}
        given = set(map(memory_of, tensors_of((args, kwargs))))
        if given & (self._own | self._derived):
            self._derived |= memory - self._own
        else:  # it may be memory that a derived tensor has had
            self._derived -= memory
        return made

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is derived from those that are followed."""
        return memory_of(tensor) in self._derived
