"""What has been compiled for a model, and which of it serves a call.

::

    call ── shortcut ─────────────────────── mode         tensors of these shapes have come before
       `─── kind, structure, constants ───── modes        ... one of them, whose premises hold
"""

from __future__ import annotations

import reprlib
import warnings
from typing import Any, NamedTuple

from torch import Tensor, nn

from fxpipe.compiler.compiled import ANY_SHAPES, KINDS, ONE_SIZE, Mode
from fxpipe.ir.hooks import has_hooks
from fxpipe.trace import InputKey, autocast_of, input_key, varying_constant
from fxpipe.trace.premises import Premises

MANY = 100  # kinds of calls to remember a shortcut for
OFTEN = 8  # times that a model is compiled for other constants before that is said


class _Key(NamedTuple):
    """What one mode serves."""

    kind: str
    inputs: InputKey
    dims: tuple[int | None, ...]

    @property
    def but_for_constants(self) -> _Key:
        return self._replace(inputs=self.inputs._replace(constants=()))


def _shortcut(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """What decides, the model being as it was, which program a call runs, and the tensors in it;
    None if it takes more to decide.

    For the usual call, of tensors, numbers and names, so that a small model is not held up by ours.
    """
    parts = [*args, *kwargs.values()]
    tensors = [part for part in parts if type(part) is Tensor]
    if not all(isinstance(part, _CONSTANTS) or type(part) is Tensor for part in parts):
        return None, tensors
    kinds = [
        (part.shape, part.dtype) if isinstance(part, Tensor) else (type(part), part)
        for part in parts
    ]
    return (autocast_of(tensors), len(args), *kwargs, *kinds), tensors


_CONSTANTS = (type(None), bool, int, float, str)


class _Structure:
    """The modules of a model, their training flags and whether they have hooks, as they were."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(m, m.training, has_hooks(m)) for m in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _, _ in self.modules
            if module._modules
        ]

    def holds(self) -> bool:
        """Whether they still are."""
        return all(m.training is t and has_hooks(m) is h for m, t, h in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )


class Known:
    """The modes of a model, by the calls that they serve."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes: dict[_Key, list[Mode]] = {}
        self._shortcuts: dict[Any, tuple[Mode, list[int]]] = {}
        self._structure = _Structure(model)

    def forget(self) -> None:
        """All of it."""
        self._modes.clear()
        self._shortcuts.clear()

    def at_once(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any]] | None:
        """The mode for a call like one before, and the values of its inputs."""
        if not self._structure.holds() or len(self._shortcuts) > MANY:
            self._shortcuts.clear()
            self._structure = _Structure(self.model)
        shortcut, tensors = _shortcut(args, kwargs)
        if shortcut is None or shortcut not in self._shortcuts:
            return None
        mode, order = self._shortcuts[shortcut]
        return (mode, [tensors[i] for i in order]) if mode.holds() else None

    def remember(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode, values: list[Any]
    ) -> None:
        """Calls like this one are served by a mode, at once."""
        shortcut, tensors = _shortcut(args, kwargs)
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        if shortcut is not None and len(places) == len(tensors):  # it is clear which is which
            self._shortcuts[shortcut] = mode, [places[id(value)] for value in values]

    def mode(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None]
    ) -> Mode | None:
        """What has been compiled for calls like this one."""
        for kind in KINDS:
            for mode in self._modes.get(self._key(kind, args, kwargs, dims), ()):
                batch = mode.batch_in(args, kwargs) or 0
                if batch <= mode.traced.largest_batch and mode.holds():
                    return mode
        return None

    def learn(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Mode:
        """The mode that has been compiled for a call, or one that there was already, if what has
        changed makes no difference."""
        if sum(map(len, self._modes.values())) > MANY:
            self._modes.clear()
        key = self._key(mode.kind, args, kwargs, mode.in_dims)
        self._tell_of_constants(key, args, kwargs)
        known = self._modes.setdefault(key, [])
        changed = [premises for each in known for premises in each.premises]
        if len(changed) == OFTEN - 1:
            self._tell_of_attributes(changed[-1])
        for each in known:
            if not each.holds() and each.accepts(mode, self.model):
                del each.premises[:-OFTEN]
                return each
        known.append(mode)
        del known[:-OFTEN]
        return mode

    def _tell_of_constants(self, key: _Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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

    def _key(
        self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None]
    ) -> _Key:
        """What calls have in common that one mode of a kind serves."""
        varying = [None] * len(dims) if kind == ONE_SIZE else dims
        shapes = kind != ANY_SHAPES
        inputs = input_key(self.model, args, kwargs, batch_dims=varying, shapes=shapes)
        return _Key(kind, inputs, tuple(dims))
