"""Bindings: links from the tensors that a pipeline's graph modules hold to those of the model. A
parameter may be assigned anew after compilation; before each run the graphs take the model's
present tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import version_of
from fxpipe.runtime.checkpointing.regions import regions_in

META = torch.device("meta")


@dataclass
class Binding:
    """A link from a tensor that a graph module holds to the tensor of that name in the model.

    ``ours`` and ``theirs`` are the dictionaries of parameters or buffers of the two modules. A
    plain attribute of the model's module is a buffer of the graph module, as fx makes it one.
    """

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    device: torch.device | None = None
    """The device of the stage, for a buffer. A stage on another device than the model's buffer
    reads a replica of it."""
    _replicated: tuple[Tensor, int] | None = None  # the buffer that was copied, and its version

    def refresh(self) -> None:
        """Let the graph module hold the tensor that the model has now: the model's may have been
        assigned, loaded, or exchanged by ``torch.func.functional_call``. A replica is copied again
        if the buffer has been written to."""
        if self.name not in self.theirs:
            return
        theirs = self.theirs[self.name]
        if theirs is None or theirs.device in (self.device, META) or self.device is None:
            self.ours[self.name] = theirs
            return
        now = (theirs, 0 if theirs.is_inference() else version_of(theirs))
        known, version = self._replicated or (None, 0)
        if known is not theirs or version != now[1]:
            self.ours[self.name], self._replicated = theirs.detach().to(self.device), now


def bindings(
    gm: fx.GraphModule,
    model: nn.Module,
    device: torch.device | None = None,
    stage: fx.GraphModule | None = None,
) -> list[Binding]:
    """The bindings of all tensors of a model that a graph reads.

    Args:
        device: the device of the stage, if the graph is one; its buffers are then read as replicas
            where they are elsewhere.
        stage: the stage that a pass has made the graph of. The graph reads the same replicas.
    """
    found: list[Binding] = []
    for _, _, region in regions_in(gm):
        found += bindings(region.body, model, device)
    owners: dict[str, tuple[nn.Module, nn.Module]] = {}  # found once for all tensors of a module
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        try:
            if path not in owners:
                owners[path] = model.get_submodule(path), gm.get_submodule(path)
        except AttributeError:  # the tensor is a constant of the trace, and not in the model
            continue
        source, owner = owners[path]
        if name in source._parameters and name in owner._parameters:
            found.append(Binding(name, owner._parameters, source._parameters))
        if name in owner._buffers:
            if stage is not None:
                read = stage.get_submodule(path)._buffers
                found.append(Binding(name, owner._buffers, read))
            elif name in source._buffers:
                found.append(Binding(name, owner._buffers, source._buffers, device))
            elif _is_constant(vars(source).get(name)):
                found.append(Binding(name, owner._buffers, vars(source), device))
    return found


def _is_constant(value: object) -> bool:
    """Whether a value is a tensor that needs no gradient, so that a replica of it will do."""
    return isinstance(value, Tensor) and not value.requires_grad
