"""The guards on a model: its modules, their modes and hooks, its parameters and attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from fxpipe.compiler.guards.calls import GuardedCall
from fxpipe.compiler.guards.guard import SHOWN, some_of
from fxpipe.ir.hooks import has_hooks
from fxpipe.trace.premises import Attribute, Premises
from fxpipe.trace.unregistered import paths_of


class ModulesGuard:
    """The modules of a model, their training flags, and which of them have hooks."""

    kind: ClassVar[str] = "modules"

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_modules()]
        self.modules = [(m, m.training, has_hooks(m)) for m in model.modules()]
        self.children = [
            (module._modules, list(module._modules.values()))
            for module, _, _ in self.modules
            if module._modules
        ]

    def holds(self, call: GuardedCall | None = None) -> bool:
        return all(m.training is t and has_hooks(m) is h for m, t, h in self.modules) and all(
            [*now.values()] == then for now, then in self.children
        )

    def failure(self, call: GuardedCall) -> str:
        for name, (module, training, hooked) in zip(self.names, self.modules, strict=True):
            said = name or "the model"
            if module.training is not training:
                return f"mode of {said}: {_mode(training)} → {_mode(module.training)}"
            if has_hooks(module) is not hooked:
                now = "some → none" if hooked else "none → some"
                return f"hooks on {said}: {now}"
        return "modules: some have been added, removed or replaced"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModulesGuard) and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        _, training, _ = self.modules[0]
        pairs = list(zip(self.names, self.modules, strict=True))
        others = [name for name, (_, t, _) in pairs if t is not training]
        hooked = [name or "the model" for name, (_, _, h) in pairs if h]
        said = _mode(training) + (f" but for {some_of(others)}" if others else "")
        return said + (f", hooks on {some_of(hooked)}" if hooked else "")


class StateGuard:
    """The shapes of the model's parameters and buffers, and the attributes that were read.

    Args:
        premises: the states for which the program is right; the model has to be in one of them.
    """

    kind: ClassVar[str] = "state"

    def __init__(self, model: nn.Module, premises: list[Premises]) -> None:
        self.model, self.premises = model, premises

    def holds(self, call: GuardedCall | None = None) -> bool:
        return any(premises.hold() for premises in self.premises)

    def failure(self, call: GuardedCall) -> str:
        return self.premises[-1].difference(paths_of(self.model))

    def broken(self) -> list[Attribute]:
        """The attributes that have changed since the latest state was noted."""
        return self.premises[-1].broken()

    def attributes(self) -> list[Attribute]:
        """The attributes that the program depends on in the latest state."""
        return self.premises[-1].attributes()

    def said(self) -> dict[str, str]:
        """The attributes that the program depends on, in the order of their paths, and the values
        that they had, in words."""
        return dict(sorted(self.premises[-1].said(paths_of(self.model))))

    def widen(self, other: StateGuard, free: Iterable[nn.Module]) -> None:
        """Let this guard also hold in the states in which ``other`` holds, the guard of a program
        that computes the same.

        ``free``: the modules that the graphs call as a whole. They run their own Python, which
        reads their attributes at every call; so those of their attributes that have changed are
        dropped from the guard. An attribute of any other module stays guarded: although this
        change has made no difference, the next one may.
        """
        modules = set(free)
        changed = {each for p in self.premises for each in p.broken() if each[0] in modules}
        known = (premises for premises in self.premises if not premises.are_past)
        self.premises = [premises.without(changed) for premises in known]
        if not any(premises.hold() for premises in self.premises):
            self.premises += [premises.without(changed) for premises in other.premises]

    def __str__(self) -> str:
        said = [f"{name} = {value}" for name, value in self.said().items()]
        more = len(said) - SHOWN
        if not said:
            return ""
        return f"attributes {', '.join(said[:SHOWN])}" + f" and {more} more" * (more > 0)


def _mode(training: bool) -> str:
    return "train" if training else "eval"
