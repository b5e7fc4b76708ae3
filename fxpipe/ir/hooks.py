"""Where a module keeps its hooks, and whether it has any."""

from __future__ import annotations

import functools
import weakref
from types import CodeType
from typing import Any

from torch import nn

from fxpipe.ir._torch import any_global_module_hook

Kind = CodeType | type

HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""The attributes in which an ``nn.Module`` keeps its hooks."""


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks on a module's calls, and on their backward."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def is_torchs(hook: Any) -> bool:
    """Whether a hook is PyTorch's own, such as that of ``torch.nn.utils.weight_norm``, which
    computes a weight."""
    maker = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(maker.__module__).startswith("torch.")


RECORDING: weakref.WeakKeyDictionary[nn.Module, frozenset[Kind]] = weakref.WeakKeyDictionary()
"""For each model, the kinds of hooks on its modules that record values for the model's outputs, and
so are part of the model."""


def code_of(hook: Any) -> Kind:
    """The kind of a hook: its code, or its class. Hooks that a loop has put on many modules are of
    one kind."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    code: Kind = getattr(function, "__code__", type(hook))
    return code


def records(model: nn.Module, hook: Any) -> bool:
    """Whether a hook on a module of the model is known to record values for the model's outputs."""
    return code_of(hook) in RECORDING.get(model, ())


def is_watched(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module of a model has hooks, other than those that are part of the model."""
    own = hooks_of(module)
    return any(own) and any(
        not is_torchs(hook) and not (module is not model and records(model, hook))
        for hooks in own
        for hook in hooks.values()
    )


def is_recorded(model: nn.Module, module: nn.Module) -> bool:
    """Whether what a module gives is recorded by a hook that is part of the model."""
    own = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return module is not model and any(records(model, hook) for hook in own)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls, or on their backward, other than PyTorch's own."""
    own = hooks_of(module)
    return any(own) and any(not is_torchs(hook) for hooks in own for hook in hooks.values())


def all_are_watched() -> bool:
    """Whether a hook is registered globally, for the calls of all modules."""
    return any_global_module_hook()
