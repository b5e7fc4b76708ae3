"""Calls that an explanation prints, with the names of the model's own inputs.

::

    forward(self, src, tgt), loss_fn given    ──▶  pipe.measure(src, tgt, target=target)
                                                   fxpipe.tune(model, ["cpu"], (src, tgt), ...

As in every call that is printed (:mod:`fxpipe.compiler.written`), what has a short literal is
written down, and all else stands there by the name of its parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.options import Options
from fxpipe.compiler.written import written
from fxpipe.planning.loss import no_loss

TUNED = {
    *("model", "devices", "example_inputs", "example_kwargs", "example_target"),
    *("chunks", "schedule", "stages", "checkpoint", "checkpoint_segments", "partition"),
}
"""The arguments of :func:`fxpipe.compile` that ``tune`` finds, or is given in another way."""


@dataclass(frozen=True)
class PrintedCalls:
    """The calls that can be made of a compiled model.

    Args:
        model, options: the model, and the options of the compilation.
        mode: what has been compiled for the last call.
    """

    model: nn.Module
    options: Options
    mode: Mode

    @property
    def has_loss(self) -> bool:
        """Whether a training step has a loss: by ``loss_fn``, or by the model."""
        if self.options.loss_fn is not None:
            return True
        return not no_loss(self.mode.model_graph.graph, self.mode.traced.rebuild)

    def of(self, method: str) -> str:
        """The call of a method of the pipeline that runs it: "step" or "measure"."""
        positional, named = self._inputs
        return f"pipe.{method}({', '.join([*positional, *_by_name(named | self._target)])})"

    def tune(self, measure: int) -> str:
        """The call of :func:`fxpipe.tune`, with the options that it does not choose."""
        positional, named = self._inputs
        given = {name: text for name, text in self.options.call.arguments if name not in TUNED}
        if self.options.loss_fn is None and not self.has_loss:
            given["loss_fn"] = "loss_fn"
        given |= self._target
        inputs = f"({', '.join(positional)}{',' * (len(positional) == 1)})"
        more = {"example_kwargs": "{" + ", ".join(f'"{name}": {name}' for name in named) + "}"}
        said = ["model", self._devices, inputs, *_by_name(more if named else {})]
        return f"fxpipe.tune({', '.join([*said, f'measure={measure}', *_by_name(given)])})"

    @property
    def _devices(self) -> str:
        known = dict(self.options.call.arguments).get("devices")
        return known or written("devices", [str(device) for device in self.options.lanes])

    @property
    def _target(self) -> dict[str, str]:
        """The target, if there is one: where the model returns its loss, its inputs have it."""
        if not self.options.training or (self.options.loss_fn is None and self.has_loss):
            return {}
        return {"target": "target"}

    @property
    def _inputs(self) -> tuple[list[str], dict[str, str]]:
        """The names of the inputs that the last call was given by position, and by name."""
        args, kwargs = self.mode.example.inputs
        return _positional(self.model, args), {name: name for name in kwargs}


def _positional(model: nn.Module, args: Sequence[Any]) -> list[str]:
    """The names of the parameters that take positional arguments; those of ``*args`` are one."""
    names: list[str] = []
    parameters = inspect.signature(model.forward).parameters.values()
    for parameter, _ in zip(parameters, args, strict=False):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return [*names, f"*{parameter.name}"]
        names.append(parameter.name)
    return names


def _by_name(arguments: Mapping[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in arguments.items()]
