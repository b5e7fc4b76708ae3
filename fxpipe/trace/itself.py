"""A model that fails by itself, on the very inputs of the call that it is compiled for.

Most errors that a model raises while it is compiled say something about what has been tried: a
sample of the rows, another batch size, fake tensors. Then something else is tried. An error on the
inputs as they are is the user's own, and nothing else that is tried can end otherwise::

    a run on a sample fails ── the inputs as they are ─┬─ fail, too: the user gets that error, noted
                                                       └─ are taken: the next sample is tried
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch
from torch import nn

from fxpipe.ir.errors import ITSELF, TraceError, is_the_models
from fxpipe.ir.tensors import devices_of
from fxpipe.trace import recorders
from fxpipe.trace.checks import on_the_example
from fxpipe.trace.errors import first_line, is_model_line
from fxpipe.trace.example import Example
from fxpipe.trace.isolation import Args, Kwargs
from fxpipe.trace.spread import is_spread


@dataclass
class OnTheInputs:
    """Whether a model takes the inputs of a call. It is run with them once it matters."""

    model: nn.Module
    args: Args
    kwargs: Kwargs
    are_taken: bool = False
    """Whether the model has been run with the inputs, and takes them."""
    _is_asked: bool = False

    def refuse(self) -> None:
        """Raise what the model raises on the inputs, with a note. The model runs at the first call
        of this method only, and without side effects.

        Nothing is raised where a failure would not be the user's: where nothing has values, and
        where the user has put the model on several devices, or where it lacks hooks that are not
        called here, of which a trace tells more. A lack of memory says nothing either:
        micro-batches need less.
        """
        if self._is_asked or not self._tells():
            return
        self._is_asked = True
        try:
            on_the_example(Example.of(self.model, self.args, self.kwargs, None))
            self.are_taken = True
        except Exception as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                return
            if not is_the_models(error):
                raise
            explain(self.model, error)
            raise

    def _tells(self) -> bool:
        own = (*self.model.parameters(), *self.model.buffers())
        tensors = (*own, *Example.of(self.model, self.args, self.kwargs, None).tensors)
        has_values = not any(tensor.is_meta for tensor in tensors)
        is_together = len({tensor.device for tensor in own}) < 2
        return has_values and is_together and not recorders.has_hooks(self.model)


def explain(model: nn.Module, error: Exception) -> None:
    """Note on what a model has raised on the inputs of a call that the model itself fails, and at
    which of its lines. From then on no other strategy is tried after this error
    (:func:`fxpipe.ir.errors.is_the_models`).

    Raises ``TraceError`` where the model may have failed because it is on several devices.
    """
    own = (*model.parameters(), *model.buffers())
    if any(tensor.is_meta for tensor in own):
        return
    _explain_several_devices(model, error)
    how = ", run without its hooks," if recorders.has_hooks(model) else ""
    text = f"in fxpipe: {type(model).__name__}{how} {ITSELF}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_model_line(f)]
    if frames:
        last = frames[-1]
        line = f'  File "{last.filename}", line {last.lineno}, in {last.name}\n    {last.line}'
        text = f"{text}, from\n{line}"
    error.add_note(text)


def _explain_several_devices(model: nn.Module, error: Exception) -> None:
    """Raise ``TraceError`` where a model may have failed because it is on several devices."""
    where: dict[torch.device, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        (device,) = devices_of((tensor,))
        where.setdefault(device, name)
    found = ", ".join(f"{name} on {device}" for device, name in where.items())
    if is_spread():
        if "device" in str(error):
            raise TraceError(
                f"{type(model).__name__} does not run while its stages are on several devices "
                f"({found}), as it has to when it is compiled for another kind of call, "
                f"{first_line(error)}; tensors that functions of PyTorch get are brought to one "
                "device, but others do not come together by themselves: call .to(device) of all "
                "that such code gets"
            ) from error
    elif len(where) > 1:
        raise TraceError(
            f"{type(model).__name__} is on several devices ({found}) and does not run as it is, "
            f"{first_line(error)}; move it to one, model.to(device): compiled, each stage is moved "
            "to its own"
        ) from error
