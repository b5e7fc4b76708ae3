"""Which tensors require gradients, where the forward asks for that.

::

    def forward(self, x):
        if self.weight.requires_grad:  ──────  a premise: the parameter is trained, or is not
            return checked(self.weight, x)
        return self.weight @ x

A parameter may be frozen at any time, and a graph stays right; but where the model branches by it,
the graph has one branch only. So the flag is noted as an attribute of the module that has the
parameter, ``weight.requires_grad``. The flag of any other tensor follows from those of the inputs
and of the parameters, so that all of these are noted where a forward asks for it.

Only code of a model counts: PyTorch's own asks to choose among kernels that compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn

from fxpipe.ir.source import is_a_models
from fxpipe.trace.asker import in_this_thread
from fxpipe.trace.patches import caller, patched

OF_INPUTS = "inputs.requires_grad"
"""Stands for the flags of all inputs of a call, which a guard on the call compares."""

_FLAG = "requires_grad"
_SUFFIX = f".{_FLAG}"


@contextmanager
def flags_read(model: nn.Module, note: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Inside the ``with`` block ``note(module, name)`` is called for each flag that code of a model
    reads in this thread: ``name`` is "weight.requires_grad", or :data:`OF_INPUTS` of the model."""
    is_here = in_this_thread()

    def replace(original: Any) -> property:
        def watched(tensor: Tensor) -> bool:
            if _is_read_by_a_model(caller()) and is_here():
                for module, name in _places(model, tensor):
                    note(module, name)
            return bool(original.__get__(tensor, type(tensor)))

        return property(watched, original.__set__)

    with patched(Tensor, _FLAG, replace, tells_threads=True):
        yield


def is_flag(name: str) -> bool:
    """Whether the name of an attribute is that of a parameter's flag, or of those of the inputs."""
    return name.endswith(_SUFFIX)


def flag_of(module: nn.Module, name: str) -> bool | None:
    """Whether a module's parameter or buffer requires a gradient, for ``name``
    "weight.requires_grad". None where there is no such tensor, and for :data:`OF_INPUTS`."""
    own = name.removesuffix(_SUFFIX)
    tensor = module._parameters.get(own, module._buffers.get(own))
    return None if tensor is None else tensor.requires_grad


def read_again(module: nn.Module, name: str) -> None:
    """Read a flag in the place of a model's code, which would read it, but is not run."""
    flag_of(module, name)


def _is_read_by_a_model(frame: FrameType) -> bool:
    """Whether the code that reads a flag is a model's, or stands in for it."""
    if frame.f_code is flag_of.__code__:
        return frame.f_back is not None and frame.f_back.f_code is read_again.__code__
    return is_a_models(frame)


def _places(model: nn.Module, tensor: Tensor) -> list[tuple[nn.Module, str]]:
    """The flags that decide a tensor's: that of a parameter or a buffer itself; else all that there
    are."""
    known = [
        (module, name + _SUFFIX, own)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, own in table.items()
        if own is not None
    ]
    its_own = [(module, name) for module, name, own in known if own is tensor]
    every = [(module, name) for module, name, _ in known]
    return its_own or [*every, (model, OF_INPUTS)]
