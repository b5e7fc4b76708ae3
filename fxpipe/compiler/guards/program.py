"""All guards of one compiled program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.guards.guard import Guard
from fxpipe.compiler.guards.on_call import (
    ANY_SIZE,
    ArgumentsGuard,
    AutocastGuard,
    ConstantGuard,
    GradientsGuard,
    RowsGuard,
    ShapeGuard,
    SizesGuard,
)
from fxpipe.compiler.guards.on_model import ModulesGuard, StateGuard
from fxpipe.trace.flags import OF_INPUTS
from fxpipe.trace.premises import Premises
from fxpipe.trace.sizes import Sizes


class Guards:
    """The guards of one compiled program. ``str`` of them says what it has been compiled for;
    iterating gives them one by one, in the order in which they are checked.

    Args:
        call: the call that the program has been compiled for.
        kind: one of :data:`on_call.KINDS`.
        premises: the state of the model that the trace depends on.
        largest_batch: the largest number of rows for which the graph is right.
        sizes: the sizes of inputs for which the graph is right, as far as its front end knows them.
        parts: from the rows of a mini-batch to the sizes of its micro-batches.
    """

    def __init__(
        self,
        call: GuardedCall,
        kind: str,
        premises: Premises,
        largest_batch: int,
        sizes: Sizes | None = None,
        parts: Callable[[int], Iterable[int]] = lambda rows: (),
    ) -> None:
        self.model = call.model
        dims = tuple(call.dims or ())
        tensors = zip(call.paths, call.tensors, dims, strict=True)
        constants = zip(call.paths_of_constants, call.constants, strict=True)
        relations = []
        if sizes is not None and sizes.conditions and kind == ANY_SIZE:
            relations = [SizesGuard(sizes, tuple(call.paths), dims, parts)]
        self.modules = ModulesGuard(call.model)
        self.state = StateGuard(call.model, [premises])
        asks = any(name == OF_INPUTS for _, name in premises.attributes())
        self._all: tuple[Guard, ...] = (
            ArgumentsGuard(call.built, call.classes, tuple(call.arguments)),
            *(ShapeGuard.of(i, *each, kind, sizes) for i, each in enumerate(tensors)),
            *(ConstantGuard.of(i, *each) for i, each in enumerate(constants)),
            *([RowsGuard(largest_batch, dims)] if largest_batch < sys.maxsize else []),
            *relations,
            self.modules,
            AutocastGuard(call.autocast),
            *([GradientsGuard(call.require_gradients, call.records_gradients)] if asks else []),
            self.state,
        )

    def __iter__(self) -> Iterator[Guard]:
        return iter(self._all)

    def serve(self, call: GuardedCall) -> bool:
        """Whether the program may serve a call: whether all guards hold."""
        return all(guard.holds(call) for guard in self._all)

    def hold(self) -> bool:
        """Whether the guards on the model hold: its modules, their modes and hooks, the shapes of
        its parameters and the attributes that its forward reads."""
        return self.modules.holds() and self.state.holds()

    def other_sizes(self, call: GuardedCall) -> bool:
        """Whether a call differs from the one that the program was compiled for in the size of an
        input's dimension, other than the batch's. (Guards may hold all the same.)"""
        return any(guard.has_other_sizes(call) for guard in self.shapes)

    def failure(self, *args: Any, **kwargs: Any) -> str:
        """Which guard a call of the model fails first, and how; "" if the program may serve it.

        >>> pipe.guards.failure(torch.zeros(8, 6))
        shape of x: (8, 4) → (8, 6)
        """
        return self.first_failure(GuardedCall(self.model, args, kwargs))

    def first_failure(self, call: GuardedCall) -> str:
        """Which guard fails first for a call whose arguments have been bound, and how; see
        :meth:`failure`."""
        return next((guard.failure(call) for guard in self._all if not guard.holds(call)), "")

    def like(self, other: Guards, *but: str) -> bool:
        """Whether these guards equal those of another program, leaving out the kinds ``but``."""
        ours, theirs = (
            [guard for guard in guards if guard.kind not in but] for guards in (self, other)
        )
        return ours == theirs

    @property
    def shapes(self) -> list[ShapeGuard]:
        """The guards on the shapes of tensors."""
        return [guard for guard in self._all if isinstance(guard, ShapeGuard)]

    @property
    def constants(self) -> list[ConstantGuard]:
        """The guards on arguments that are no tensors."""
        return [guard for guard in self._all if isinstance(guard, ConstantGuard)]

    @property
    def attributes(self) -> dict[str, str]:
        """All attributes of the model that the program depends on, by their paths, with the values
        that they have to have, in words: ``{"head.scale": "3"}``. ``print`` shows a few."""
        return self.state.said()

    @property
    def brief(self) -> str:
        """The guards in words, with no more than the number of attributes of the model."""
        said = [str(guard) for guard in self._all if guard is not self.state]
        count = len(self.attributes)
        attributes = f"{count} attribute{'s' * (count != 1)} of the model" if count else ""
        return f"compiled for {', '.join(filter(None, [*said, attributes]))}"

    def __str__(self) -> str:
        return f"compiled for {', '.join(filter(None, map(str, self._all)))}"

    def __repr__(self) -> str:
        return f"<Guards: {self}>"
