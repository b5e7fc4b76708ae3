"""Hooks on parameters in a step of several micro-batches, which may not change parameters.

::

    loop    forward 0 ── backward 0 · hook ── forward 1 ── backward 1 · hook
    step    forward 0 ── forward 1 ── backward 0 · hook ── backward 1 · hook

Such a hook is called in the backward of each micro-batch. One that changes a parameter (it steps an
optimizer, say) changes it in a loop over the micro-batches ahead of the next one's forward. In a
step that forward may have run by then, so that the step would train on other weights than the loop.
The hook is stopped ahead of its write, so that the parameter stays as it was. After the last
backward no micro-batch uses the parameter, in the loop as in the step: there a hook may change it.

A write by an operator is seen ahead of it, also one by way of ``.data``. Other memory for the
hook's own parameter, and writes by compiled code, are seen once the hook has returned. A write by
no operator that raises no version counter (one by NumPy, say) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

from fxpipe.ir._torch import TorchDispatchMode, gradient_hooks
from fxpipe.ir.tensors import is_in_parts, memory_of
from fxpipe.runtime.writes import writes_counted, written_by


def have_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether some parameter of these modules has hooks on its gradient, or hooks that are called
    once that has been accumulated."""
    return any(
        parameter is not None and any(gradient_hooks(parameter))
        for module in modules
        for parameter in module._parameters.values()
    )


@contextmanager
def changing_none(
    parameters: Mapping[str, Tensor], calls: int, *, calls_are_trained: bool = True
) -> Iterator[None]:
    """Inside the ``with`` block a hook on a parameter raises RuntimeError where it changes one of
    the parameters, unless that one's hooks have been called for the last time.

    Hooks on parameters of which each rank has a part are left alone: they are called once for all
    micro-batches.

    Args:
        calls: how often each hook is called, which is once for each micro-batch.
        calls_are_trained: whether ``pipe(x)`` has a backward of its own, as it has not on ranks.
    """
    whole = {name: each for name, each in parameters.items() if not is_in_parts(each)}
    names = {memory_of(parameter): name for name, parameter in whole.items()}
    of_step = _HooksOfStep(names, {name: [] for name in whole}, calls_are_trained)
    places = []
    for name, parameter in whole.items():
        for hooks in gradient_hooks(parameter):
            for key, hook in (hooks or {}).items():
                watched = _Watched(hook, name, parameter, calls, of_step)
                of_step.hooks[name].append(watched)
                places.append((hooks, key, watched))
    for hooks, key, watched in places:
        hooks[key] = watched
    try:
        yield
    finally:
        for hooks, key, watched in places:
            if hooks.get(key) is watched:  # else a hook has taken it away
                hooks[key] = watched.hook


@dataclass(frozen=True)
class _HooksOfStep:
    """What the hooks of one step know of each other."""

    names: Mapping[int, str]  # of the parameters, by their memory
    hooks: Mapping[str, list[_Watched]]  # those of each parameter, by its name
    calls_are_trained: bool


class _Watched:
    """A hook on a parameter that is stopped where it changes a parameter too early."""

    def __init__(
        self,
        hook: Callable[..., Any],
        name: str,
        parameter: Tensor,
        calls: int,
        of_step: _HooksOfStep,
    ) -> None:
        self.hook, self.calls_left = hook, calls
        self._name, self._parameter, self._of_step = name, parameter, of_step
        self._changed = ""  # the name of a parameter that the hook has changed

    def __call__(self, *args: Any) -> Any:
        if self._changed:
            self._refuse(self._changed, is_done=True)
        self.calls_left -= 1
        before = memory_of(self._parameter), writes_counted(self._parameter)
        with _WritesTo(self._of_step.names, self._on_write):
            result = self.hook(*args)
        if (memory_of(self._parameter), writes_counted(self._parameter)) != before:
            self._changed = self._name
            if self.calls_left > 0:
                self._refuse(self._name, is_done=True)
        return result

    def _on_write(self, name: str) -> None:
        hooks = [self] if name == self._name else self._of_step.hooks[name]
        if not hooks or any(hook.calls_left > 0 for hook in hooks):
            self._refuse(name, is_done=False)
        self._changed = name

    def _refuse(self, changed: str, is_done: bool) -> NoReturn:
        what = "it" if changed == self._name else repr(changed)
        done = f"has changed {what}" if is_done else f"changes {what}"
        left = f"{changed!r} stays changed" if is_done else f"{changed!r} has not been changed"
        otherwise = ""
        if self._of_step.calls_are_trained:
            otherwise = (
                "or call pipe(x) and loss.backward(), where the hook is called once, with the "
                "whole gradient; "
            )
        raise RuntimeError(
            f"a hook on the parameter {self._name!r} {done} while micro-batches of the mini-batch "
            "are still to use it. pipe.step may have run forwards of these by now, so that it "
            "would train on other weights than a loop over micro-batches. If the hook steps an "
            "optimizer, remove it and give pipe.step(optimizer=...), which steps each stage as "
            f"soon as its gradients are complete; {otherwise}or compile with chunks=1. The step "
            f"has failed, and {left}; what else the hook has changed, such as the state of an "
            "optimizer, stays so"
        )


class _WritesTo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``on_write(name)`` ahead of each operator that writes to a memory with a name."""

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str], on_write: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._on_write = names, on_write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            name = self._names.get(memory_of(tensor))
            if name is not None:
                self._on_write(name)
        return func(*args, **(kwargs or {}))
