"""The cache of the modes that have been compiled for a model. A call looks its mode up in two ways.

::

    call ── signature ────────────────── mode         fast: an equal call has come before
       `─── kind, structure, constants ── modes        slow: the first of these whose guards hold
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

MANY = 100  # the most modes, and the most signatures of calls, that are remembered
OFTEN = 8  # recompilations for other constants or attributes, before a warning says why


class Cache:
    """The modes that have been compiled for a model, looked up by the calls that they serve."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes: dict[CallKey, list[Mode]] = {}
        self._signatures: dict[Any, tuple[Mode, list[int]]] = {}
        self._state = ModelState(model)

    def forget(self) -> None:
        """Forget every mode, so that the next call is compiled."""
        self._modes.clear()
        self._signatures.clear()

    @property
    def modes(self) -> list[Mode]:
        """All modes, grouped by the keys of their calls, the oldest of each key first."""
        return [mode for alike in self._modes.values() for mode in alike]

    def at_once(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any]] | None:
        """The fast look-up, by a call's signature: the mode that has served an equal call, and the
        values of its inputs. None if there has been no equal call, or if the guards of its mode do
        not hold any more."""
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
        """Enter a mode for the fast look-up of calls that equal this one."""
        found, tensors = signature(args, kwargs)
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        # A tensor that is given twice cannot be told apart: such a call takes the slow look-up.
        if found is not None and len(places) == len(tensors):
            self._signatures[found] = mode, [places[id(value)] for value in values]

    def mode(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None]
    ) -> Mode | None:
        """The slow look-up, by a call's full key: a mode whose guards hold for the call; None if
        there is none."""
        for kind in KINDS:
            key = CallKey.of(self.model, kind, args, kwargs, dims)
            for mode in self._modes.get(key, ()):
                if mode.guards.serve(mode.batch_in(args, kwargs) or 0):
                    return mode
        return None

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Mode:
        """Enter a mode that has just been compiled for a call, and return it.

        If an older mode, whose guards have failed since the model has changed, equals the new one,
        the change makes no difference: then the older mode's guards are widened, and it is
        returned in place of the new one.
        """
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
        """Warn once, where calls that differ in arguments that are no tensors have led to OFTEN
        compilations."""
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
        """Warn where changes of an attribute of the model have led to OFTEN compilations.

        ``before``: the state of the attributes in the latest compilation before this one.
        """
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
