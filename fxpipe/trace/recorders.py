"""Hooks that record what a model gives: they are part of it, and of its graph.

::

    layer.register_forward_hook(record)           transformers puts such hooks on its layers, and
    ...                                           gives what they have recorded as hidden_states
    return output, tuple(recorded)

Whether the hooks of one kind record is found out by two runs of the model: one without hooks, and
one with the hooks of this kind, whose return values are dropped. If the outputs differ, they
record. All other hooks watch the model from outside. They are called when the pipeline runs. While
it is compiled, they are called in these runs only, and what they put into lists and objects is
taken out again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.hooks import RECORDING, code_of, hooks_of, is_torchs
from fxpipe.runtime.state import State
from fxpipe.runtime.writes import values_put_back
from fxpipe.trace.checks import difference
from fxpipe.trace.example import Example
from fxpipe.trace.isolation import parameters_put_back, untouched


def learn(example: Example) -> None:
    """Find out which hooks of the model record values that its forward returns.

    Their kinds are kept in ``RECORDING``, so that they are called from now on wherever the model is
    run or traced; all other hooks are not, since what they leave behind would outlive the trace.
    """
    model = example.model
    RECORDING.pop(model, None)
    kinds = {code_of(hook) for _, _, hook in _forward_hooks(model)}
    if not kinds:
        return
    plain = _output(example, frozenset())
    alone = {kind: _output(example, frozenset([kind])) for kind in kinds}
    found = frozenset(kind for kind, output in alone.items() if _differs(plain, output))
    if plain is None and not found and _output(example, frozenset(kinds)) is not None:
        found = frozenset(kinds)  # the model needs several kinds to run at all
    if found:
        RECORDING[model] = found


def has_hooks(model: nn.Module) -> bool:
    """Whether there are hooks on forwards of the model or of its submodules, other than PyTorch's
    own."""
    return any(not is_torchs(h) for m in model.modules() for d in hooks_of(m) for h in d.values())


@contextmanager
def changing_called(example: Example) -> Iterator[bool]:
    """Inside the ``with`` block, hooks whose return values change the model's output are called
    wherever the model is run or traced. So what they compute is part of a graph that has no modules
    left which hooks could be on. Yields whether there are such hooks."""
    model = example.model
    kinds = {code_of(hook) for _, _, hook in _forward_hooks(model)}
    before = RECORDING.get(model, frozenset())
    plain = _output(example, before) if kinds else None
    changing = frozenset(
        kind
        for kind in kinds
        if _differs(plain, _output(example, before | {kind}, with_results=True))
    )
    if not changing:
        yield False
        return
    RECORDING[model] = before | changing
    try:
        yield True
    finally:
        RECORDING[model] = before


def _forward_hooks(model: nn.Module) -> Iterator[tuple[dict[int, Any], int, Any]]:
    """The hooks on forwards of the model's submodules, PyTorch's own hooks left out.

    Yields, for each hook, the module's dictionary of hooks, the key that the hook has in it, and
    the hook, so that the caller can replace it.
    """
    for name, module in model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks) if name else ():
            for key, hook in hooks.items():
                if not is_torchs(hook):
                    yield hooks, key, hook


def _output(
    example: Example, kinds: frozenset[CodeType | type], *, with_results: bool = False
) -> list[Any] | None:
    """The output of the model, as a list of one, if only the hooks of these kinds are called; None
    if the model raises an error then.

    ``with_results``: whether what a hook returns replaces the output of its module, as usual.
    """
    model = example.model
    referred = State(())
    values = [value for _, _, hook in _forward_hooks(model) for value in refers_to(hook)]
    for value in values:
        referred.look_into(value)
    tensors = [value for value in values if isinstance(value, Tensor)]
    before = RECORDING.get(model)
    RECORDING[model] = kinds
    try:
        with (
            untouched(model),
            torch.no_grad(),
            parameters_put_back(model),
            values_put_back(tensors),
        ):
            for hooks, key, hook in () if with_results else list(_forward_hooks(model)):
                hooks[key] = _silenced(hook)
            output = example.call([tensor.clone() for tensor in example.tensors])
            return [pytree.tree_map_only(Tensor, Tensor.clone, output)]
    except Exception as error:
        if not is_the_models(error):
            raise
        return None  # without a hook that is part of it, a model may raise any error
    finally:
        referred.put_back()
        RECORDING.pop(model)
        if before is not None:
            RECORDING[model] = before


def _differs(plain: list[Any] | None, output: list[Any] | None) -> bool:
    if plain is None or output is None:
        return plain is None and output is not None
    return bool(difference(plain, output, 0.0))


def _silenced(hook: Callable[..., Any]) -> Callable[..., None]:
    """A hook that calls the given one and returns None, so that the inputs and outputs of the
    module stay as they are."""

    def silenced(*args: Any, **kwargs: Any) -> None:
        hook(*args, **kwargs)

    return silenced


def refers_to(hook: Any) -> list[Any]:
    """The objects that a hook may write to: those of its closure, its default arguments, and the
    object whose method it is. Of a partial function, the arguments that it has, too."""
    if isinstance(hook, functools.partial):
        return [*refers_to(hook.func), *hook.args, *hook.keywords.values()]
    function = getattr(hook, "__func__", hook)
    defaults = [*(getattr(function, "__defaults__", None) or ())]
    defaults += (getattr(function, "__kwdefaults__", None) or {}).values()
    owner = getattr(hook, "__self__", None)
    own = [owner, getattr(hook, "__dict__", None)]
    if not isinstance(owner, nn.Module):
        own.append(getattr(owner, "__dict__", None))  # of an object that may be called itself
    closed_over = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it may be empty
            closed_over.append(cell.cell_contents)
    return [*closed_over, *defaults, *own]
