"""A part of a model that the model checkpoints itself, as one module.

::

    model                                          model graph
    y = checkpoint(self.block, x)                  y = checkpoint_0(x)
                                                         │
                                                         body: the graph of self.block

The body runs under :func:`fxpipe.runtime.checkpointing.checkpoint.checkpoint`, so that only its
arguments are saved, as in the model. PyTorch's function cannot be used here, since it sets the
random state of the whole process while other lanes may draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.runtime.checkpointing.checkpoint import CheckpointOptions, checkpointed
from fxpipe.runtime.random import Seeded, unseeded

WITHIN = ".body."
"""Stands in the path of a region's parameter between the region's name and the parameter's path in
the model."""


@dataclass(frozen=True)
class Settings:
    """How a model asks for a checkpoint.

    Args:
        options: what it gives to the function that checkpoints.
        reentrant: as ``use_reentrant=True`` has it, nothing gets a gradient unless one of the
            tensors among the arguments requires one.
    """

    options: CheckpointOptions
    reentrant: bool = False

    @staticmethod
    def of_reentrant(preserve_rng_state: bool) -> Settings:
        """The settings of ``torch.utils.checkpoint`` with ``use_reentrant=True``."""
        options = CheckpointOptions(preserve_rng_state, early_stop=False, writes_again=True)
        return Settings(options, reentrant=True)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` under a checkpoint with these settings; return its result."""
        if self.reentrant and not any(isinstance(t, Tensor) and t.requires_grad for t in args):
            with torch.no_grad():
                return function(*args)
        return checkpointed(function, *args, options=self.options)[0]


class Region(nn.Module):
    """The body of a checkpoint in a model, which is called with all values that it needs.

    Args:
        body: a graph, with the parameters and modules of the model that it uses, by their paths in
            the model.
        settings: what the model has asked for.
        given: the indices of those inputs that the model passes to its checkpoint, which saves
            them. The other inputs are values that the function has taken from an enclosing scope:
            the checkpoint only refers to them, as it does in the model.
    """

    def __init__(self, body: fx.GraphModule, settings: Settings, given: tuple[int, ...]) -> None:
        super().__init__()
        self.body, self.settings, self.given = body, settings, given

    def forward(self, *inputs: Any) -> Any:
        """Run the body under the checkpoint, and return its outputs: they are computed again in the
        backward."""
        given = [inputs[i] for i in self.given]
        others = {i: value for i, value in enumerate(inputs) if i not in self.given}
        return self.settings.run(partial(self._run, others), *given)

    def _run(self, others: dict[int, Any], *given: Any) -> Any:
        inputs = {**others, **dict(zip(self.given, given, strict=True))}
        # The body's forward is called, and not the body itself, because fx prints an error in the
        # call of a graph module to stderr.
        return self.body.forward(*(inputs[i] for i in range(len(inputs))))

    def of(self, body: fx.GraphModule) -> Region:
        """A region with another body and the settings of this one."""
        return Region(body, self.settings, self.given)


def region_of(module: nn.Module) -> Region | None:
    """The region that a module is, or runs with a seed (:class:`Seeded`); None if there is none."""
    function = unseeded(module)
    return function if isinstance(function, Region) else None


def regions_within(module: nn.Module) -> Iterator[Region]:
    """The regions among the modules that a module consists of, itself included."""
    return (part for part in module.modules() if isinstance(part, Region))


def with_body(module: nn.Module, body: fx.GraphModule) -> nn.Module:
    """A module for a node to call in place of ``module``: the same region, with another body."""
    region = region_of(module)
    assert region is not None
    own = region.of(body)
    return module.of(own) if isinstance(module, Seeded) else own


def regions_in(gm: fx.GraphModule) -> Iterator[tuple[str, nn.Module, Region]]:
    """For each node that calls a region, or gets one for a call with values in place of parameters:
    the node's target, the module there, and the region."""
    if all(region_of(module) is None for module in gm.modules()):
        return  # to look up what each node reads takes long
    for node in gm.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            module = attrgetter(str(node.target))(gm)
            region = region_of(module) if isinstance(module, nn.Module) else None
            if region is not None:
                yield str(node.target), module, region
