"""The cache of what has been compiled for a model: which program serves a call, by its guards.

::

    call ── signature ────────────────── mode         an equal call has come before
       `─── kind, structure, constants ── modes        ... one of them, whose guards hold
"""

from __future__ import annotations

import reprlib
import warnings
from typing import Any

from torch import nn

from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.guards import KINDS, CallKey, ModelState, signature
from fxpipe.trace import varying_constant
from fxpipe.trace.premises import Premises

MANY = 100  # programs, and signatures of calls, that are remembered
OFTEN = 8  # times that a model is compiled for other constants before that is said


class Cache:
    """The modes of a model, by the calls that they serve."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes: dict[CallKey, list[Mode]] = {}
        self._signatures: dict[Any, tuple[Mode, list[int]]] = {}
        self._state = ModelState(model)

    def forget(self) -> None:
        """Forget every mode: the next call is compiled."""
        self._modes.clear()
        self._signatures.clear()

    @property
    def modes(self) -> list[Mode]:
        """All modes that there are, the oldest of each key first."""
        return [mode for alike in self._modes.values() for mode in alike]

    def at_once(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any]] | None:
        """The mode for a call that equals one before, and the values of its inputs."""
        if not self._state.holds() or len(self._signatures) > MANY:
            self._signatures.clear()
            self._state = ModelState(self.model)
        found, tensors = signature(args, kwargs)
        if found is None or found not in self._signatures:
            return None
        mode, order = self._signatures[found]
        return (mode, [tensors[i] for i in order]) if mode.guards.hold() else None

    def remember(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode, values: list[Any]
    ) -> None:
        """Let a mode serve calls that equal this one, at once."""
        found, tensors = signature(args, kwargs)
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        if found is not None and len(places) == len(tensors):  # it is clear which is which
            self._signatures[found] = mode, [places[id(value)] for value in values]

    def mode(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None]
    ) -> Mode | None:
        """The mode whose guards hold for a call; None if there is none."""
        for kind in KINDS:
            key = CallKey.of(self.model, kind, args, kwargs, dims)
            for mode in self._modes.get(key, ()):
                if mode.guards.serve(mode.batch_in(args, kwargs) or 0):
                    return mode
        return None

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Mode:
        """The mode that has been compiled for a call, or one that there was already, if what has
        changed since makes no difference."""
        if sum(map(len, self._modes.values())) > MANY:
            self._modes.clear()
        key = mode.guards.learn(args, kwargs, mode.in_dims)
        self._tell_of_constants(key, args, kwargs)
        alike = self._modes.setdefault(key, [])
        changed = [premises for each in alike for premises in each.guards.premises]
        if len(changed) == OFTEN - 1:
            self._tell_of_attributes(changed[-1])
        for each in alike:
            if not each.guards.hold() and each.equals(mode):
                each.guards.widen(mode.guards, each.kept_modules(self.model))
                del each.guards.premises[:-OFTEN]
                return each
        alike.append(mode)
        del alike[:-OFTEN]
        return mode

    def _tell_of_constants(
        self, key: CallKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Say so, once, where calls that differ in constants only are compiled again and again."""
        alike = [other for other in self._modes if other.but_for_constants == key.but_for_constants]
        if len(alike) + 1 != OFTEN:
            return
        varying = varying_constant(self.model, args, kwargs, alike[-1].inputs)
        if varying is not None:
            path, value = varying
            warnings.warn(
                f"{type(self.model).__name__} has been compiled {OFTEN} times, since {path}, which "
                f"is no tensor, differs between the calls ({reprlib.repr(value)} in this one): "
                "leave out what the model does not need, and give numbers as tensors",
                stacklevel=2,
            )

    def _tell_of_attributes(self, before: Premises) -> None:
        """Say so where attributes that differ make it compile again and again."""
        names = {module: name for name, module in self.model.named_modules()}
        for module, attribute in before.broken()[:1]:
            path = f"{names[module]}.{attribute}".removeprefix(".")
            value = reprlib.repr(getattr(module, attribute, None))
            warnings.warn(
                f"{type(self.model).__name__} has been compiled {OFTEN} times, since {path}, an "
                f"attribute that is no tensor, differs between the calls ({value} in this one): "
                "make it a buffer, or an argument",
                stacklevel=2,
            )
