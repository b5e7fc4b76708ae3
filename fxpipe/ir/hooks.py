"""Where a module keeps its hooks, and whether it has any."""

from __future__ import annotations

from typing import Any

from torch import nn

from fxpipe.ir._torch import any_global_module_hook

HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""The attributes of an nn.Module."""


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks on a module's calls, and on their backward."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def is_torchs(hook: Any) -> bool:
    """Whether PyTorch has made a hook: an old parametrization does, to compute a weight."""
    maker = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(maker.__module__).startswith("torch.")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls, or on their backward, other than PyTorch's own."""
    own = hooks_of(module)
    return any(own) and any(not is_torchs(hook) for hooks in own for hook in hooks.values())


def all_are_watched() -> bool:
    """Whether a hook is registered globally, for the calls of all modules."""
    return any_global_module_hook()
