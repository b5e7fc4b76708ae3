"""A module that wraps a model and behaves like it towards other code: it has the same parameters,
state dict, hooks and attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxpipe.ir.hooks import HOOKS

_OF_ARGUMENTS = {"prepare_decoder_input_ids_from_labels"}
"""Methods of models of transformers that compute from their arguments and the configuration only.
Other code asks whether a model has them, and does something else if it has not."""


def _as_the_models(name: str) -> Any:
    """A method of ``nn.Module`` that calls the model's own, which a model may define anew: its
    ``train`` keeps a part in eval mode, say. What returns the model returns the proxy."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: ModelProxy, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    method.__doc__ = f"As ``torch.nn.Module.{name}``: the model's own ``{name}``."
    return method


class ModelProxy(nn.Module):
    """Shares parameters, buffers, submodules and hooks with a model, and shows its attributes.

    A name that the proxy's class defines takes precedence over the model's, so that
    ``proxy.chunks`` means the same for every model. Such a name cannot be set at the proxy; an
    attribute of the model that has the name is read and set as ``proxy.module.chunks``.
    """

    module: nn.Module
    _OPEN: ClassVar[frozenset[str]] = frozenset({"training", "forward"})
    """Names that the proxy's class defines and that may be set at the proxy nevertheless."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            module=model,
            # The dictionaries are shared: what is registered at one module is registered at both.
            _parameters=model._parameters,
            _buffers=model._buffers,
            _modules=model._modules,
            **{name: vars(model)[name] for name in HOOKS},
        )

    train = _as_the_models("train")
    eval = _as_the_models("eval")
    requires_grad_ = _as_the_models("requires_grad_")
    zero_grad = _as_the_models("zero_grad")
    apply = _as_the_models("apply")
    parameters = _as_the_models("parameters")
    named_parameters = _as_the_models("named_parameters")
    buffers = _as_the_models("buffers")
    named_buffers = _as_the_models("named_buffers")
    state_dict = _as_the_models("state_dict")
    load_state_dict = _as_the_models("load_state_dict")

    @property
    def training(self) -> bool:
        """Whether the model is in train mode."""
        return self.module.training if "module" in self.__dict__ else True

    @training.setter
    def training(self, value: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = value

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """The kind of backward hooks: it is the model's, since the hooks themselves are shared."""
        return self.module._is_full_backward_hook if "module" in self.__dict__ else None

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        if "module" in self.__dict__:
            self.module._is_full_backward_hook = value

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model, such as its configuration.

        Raises AttributeError for methods of the model: they would run it as a plain module, while
        its stages are on several devices. Those that do not run it are the model's.
        """
        own = getattr(type(self), name, None)
        if isinstance(own, property):  # it has raised an AttributeError: raise that again
            return own.__get__(self)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            value = getattr(self.__dict__.get("module"), name, error)
            if value is error:
                raise
            if callable(value) and name not in _OF_ARGUMENTS:
                raise AttributeError(
                    f"{error}, but its model has: take pipe.module.{name}"
                ) from None
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model. Functions that the model does not have are set at the
        proxy only, as are names that begin with an underscore: other code keeps its own there.

        Raises:
            AttributeError: for a name that the proxy's class defines.
        """
        model = self.__dict__.get("module")
        if model is not None and self._is_own(name):
            kind, owner = type(self).__name__, type(model).__name__
            there = (
                f"the {owner} has a {name!r} too: set"
                if hasattr(model, name)
                else f"to keep it with the {owner}, set"
            )
            raise AttributeError(
                f"{name!r} is a name of every {kind} and cannot be set; {there} pipe.module.{name}"
            )
        if model is not None and name not in self.__dict__ and self._is_the_models(name, value):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

    def _is_the_models(self, name: str, value: Any) -> bool:
        """Whether an attribute is set at the model; what PyTorch registers is at both anyway."""
        if name in vars(self.module):
            return True
        if hasattr(nn.Module, name) or isinstance(value, nn.Module | nn.Parameter):
            return False
        if hasattr(type(self.module), name):
            return True
        return not (callable(value) or name.startswith("_") or hasattr(type(self), name))

    def _is_own(self, name: str) -> bool:
        """Whether a name is one of those that the proxy adds to ``nn.Module``."""
        if name in ("module", "losses", "grad_norm"):
            return True
        is_added = hasattr(type(self), name) and not hasattr(nn.Module, name)
        return is_added and not name.startswith("_") and name not in self._OPEN

    def _get_name(self) -> str:
        """The name of the model's class, by which libraries know what kind of model it is:
        ``transformers.Trainer`` whether labels have to be shifted, say."""
        return str(self.module._get_name())  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        text: str = super().__repr__()
        return text.replace(self._get_name(), type(self).__name__, 1)


def calling(model: nn.Module, call: Callable[..., Any]) -> Any:
    """A view of a model: it has the model's attributes and methods, but to call it is to call
    another function. The model's methods that call it, on this view, call that function."""
    kind = type(model)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    own = {"__call__": __call__, "__module__": kind.__module__, "__doc__": kind.__doc__}
    view: Any = object.__new__(type(kind.__name__, (kind,), own))
    object.__setattr__(view, "__dict__", vars(model))
    return view


def moved_to(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> torch.device | None:
    """The device to which ``fn``, a function as ``nn.Module.to`` applies it to each tensor, would
    move tensors of the model; None if it leaves every tensor on its device."""
    tensors: Sequence[Tensor] = (*model.parameters(), *model.buffers())
    for tensor in tensors:
        device = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
        if device != tensor.device:
            return device
    return None
