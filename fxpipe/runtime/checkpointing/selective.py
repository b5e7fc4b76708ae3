"""The results of products that a forward keeps for the second run of a checkpointed stage.

::

    first run     linear ── gelu ── linear ── dropout ── add
                     :                :
                   kept             kept
                     :                :
    second run      ( )  ── gelu ──  ( )   ── dropout ── add        autograd records all of them

Products of matrices, convolutions and attention take nearly all of a forward's time, and their
results are a small part of what it saves for its backward. The second run is given these results
as they were, and computes the rest anew. Which operators count as products is decided by
:func:`fxpipe.ir.flops.is_product`, for the estimates of pass "cost" as well.

A result to which something has been written since (by ``relu_``, say) is not what the product gave:
it is not kept, and the second run computes the product again. So does an attention with dropout,
which draws random numbers. Within the first run the operators say what they write to, since the
version counter of a result does not count all writes: the parts that ``unsafe_chunk`` gives (a GRU
on the CPU writes to such parts of its gates) and ``.data`` have counters of their own. A write
between the two runs is noticed by the version counter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode, alias_below_autograd, pytree
from fxpipe.ir.flops import is_product
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.runtime.checkpointing.options import Contexts
from fxpipe.runtime.checkpointing.recomputation import CheckpointError, version_in
from fxpipe.runtime.writes import written_by


def keeping_products(once: bool) -> Contexts:
    """Two contexts, for the first run of a stage, in which the results of its products are kept,
    and for the second, in which these results take the place of the products.

    Args:
        once: whether there is one second run at most. It then takes each result away, so that those
            that no backward needs are freed while it runs.

    The second run raises a :class:`CheckpointError` if it has other products than the first one.
    """
    results: list[_Result | None] = []
    return _KeepProducts(results), _GiveProducts(results, once)


class _Result:
    """What one product gave: its operator, and its result without history."""

    def __init__(self, operator: Any, value: Any) -> None:
        self.operator, self.value = operator, _aliased(value)
        self._versions = self._now
        self.memories = {memory_of(tensor) for tensor in tensors_of(self.value)}

    @property
    def _now(self) -> list[int]:
        return [version_in(tensor) for tensor in tensors_of(self.value)]

    @property
    def is_written_to(self) -> bool:
        return self._now != self._versions


class _KeepProducts(TorchDispatchMode):
    """Adds the result of each product to a list, in which None stands for one to which something
    has been written."""

    supports_higher_order_operators = True

    def __init__(self, results: list[_Result | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self._places: dict[int, int] = {}  # in the list, by the memory of each result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            place = self._places.get(memory_of(tensor))
            if place is not None:
                self.results[place] = None
        result = func(*args, **(kwargs or {}))
        if is_product(func, args, kwargs or {}):
            kept = _Result(func, result)
            self._places.update(dict.fromkeys(kept.memories, len(self.results)))
            self.results.append(kept)
        return result


class _GiveProducts(TorchDispatchMode):
    """Gives the results of products that have run before, in their order.

    Args:
        once: whether a result is forgotten when it has been given.
    """

    supports_higher_order_operators = True

    def __init__(self, results: list[_Result | None], once: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self.once, self.count = results, once, 0

    def __enter__(self) -> _GiveProducts:
        self.count = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_product(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        place, self.count = self.count, self.count + 1
        is_further = place >= len(self.results)
        result = None if is_further else self.results[place]
        if is_further or (result is not None and result.operator is not func):
            before = "there was none" if result is None else f"it was {result.operator}"
            raise CheckpointError(
                f"product number {place + 1} of a stage is {func} in its second run, and {before} "
                "in its first: it must do the same both times, so it may not depend on anything "
                "that changes between them"
            )
        if self.once:
            self.results[place] = None
        if result is None or result.is_written_to:
            return func(*args, **(kwargs or {}))
        return result.value if self.once else _aliased(result.value)


def _aliased(value: Any) -> Any:
    """The same tensors without history. What a run is given, or gives, gets a history, which keeps
    all that the run has saved."""
    return pytree.tree_map_only(Tensor, alias_below_autograd, value)
