"""An entry of the chain: the name of a pass, the levels of the graphs that it takes and gives, the
passes that it needs before it, and how it is made from what is known of the compilation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import fx, nn

from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.text import summary
from fxpipe.runtime.compiled.stage import CompiledStages
from fxpipe.runtime.microbatch import Dims, InDim
from fxpipe.schedule import Schedule
from passes.common.modes import Modes
from passes.common.segments import Segments
from passes.cost.analytic import ADAM, ADAMS_UPDATE
from passes.cost.choice import Costs
from passes.cost.update import Update


class Pass(Protocol):
    """A named function from a graph module to a graph module that computes the same."""

    @property
    def name(self) -> str:
        """The name of the pass in the chain."""

    def __call__(self, gm: fx.GraphModule, /) -> fx.GraphModule:
        """Rewrite a graph module and return it. The given one may be changed in place."""


class Level(StrEnum):
    """The kinds of graph between the traced model and the training step; a pass takes one of them,
    and gives the same or another one."""

    MODEL = "model"
    STAGE = "stage"
    PIPELINE = "pipeline"
    STEP = "step"


# --------------------------------------------------- contexts: what is known when passes are made


@dataclass(frozen=True)
class ToStages:
    """What is known when a model graph is lowered to a stage graph.

    Args:
        inputs: example inputs of the model, one for each placeholder of its graph.
        in_dims: the batch dimension of each input; None for one that all micro-batches share.
        devices: the names of the devices, one for each stage.
        partition: the pass that gives each node its stage; None as long as nothing is cut.
        outputs: the pass that finds the batch dimensions of the outputs; None if nobody needs them.
        chunks: the number of micro-batches for which passes "rows" and "cost" count time and
            memory.
        chunks_asked_for: the number of micro-batches that the user has asked for; None if the
            compiler chooses it.
        traced_chunks: None for a graph that takes any batch size. For one that was traced with a
            single micro-batch: how many of these there are in a mini-batch.
        costs: where the costs of nodes come from, as for :func:`fxpipe.compile`.
        spec: the description of the device by which times are estimated.
        optimizer_states: how many tensors of a parameter's size the optimizer keeps for it.
        optimizer_update: what its step takes while it runs.
        measured_on: the device on which costs are measured; None: the model's.
        measured_with: the number of intra-op threads with which they are; None: those that are set.
        deferred_batch_norm: whether batch norms update their running statistics once for each
            mini-batch.
        places: for each stage the rank that runs it, if there are several; see pass "tied".
        training: whether there are backwards; if not, nothing is counted or kept for them.
    """

    leads_to: ClassVar[Level] = Level.STAGE
    inputs: tuple[Any, ...]
    in_dims: tuple[int | None, ...]
    devices: tuple[str, ...] = ()
    partition: Pass | None = None
    outputs: Pass | None = None
    chunks: int = 1
    chunks_asked_for: int | None = None
    traced_chunks: int | None = None
    costs: Costs = "analytic"
    spec: DeviceSpec = CPU_CORE
    optimizer_states: float = ADAM
    optimizer_update: Update = ADAMS_UPDATE
    measured_on: torch.device | None = None
    measured_with: int | None = None
    deferred_batch_norm: bool = False
    places: tuple[int, ...] = ()
    training: bool = True


@dataclass(frozen=True)
class ToPipeline:
    """What is known when a stage graph is unrolled over ``chunks`` micro-batches.

    Args:
        devices, in_dims: as for :class:`ToStages`.
        out_dims: for each node that the stage graph returns, in order, the batch dimension of its
            tensors.
        checkpoint, checkpoint_segments: as for :func:`fxpipe.compile`.
        loss_weight: the module that gives the weight of a micro-batch's loss; None unless an output
            is averaged with such weights.
        compiled: makes compiled stages; None: stages run uncompiled.
        training: as for :class:`ToStages`.
        apart: as for :class:`passes.Microbatch`.
    """

    leads_to: ClassVar[Level] = Level.PIPELINE
    devices: tuple[str, ...]
    chunks: int
    in_dims: tuple[InDim, ...]
    out_dims: tuple[Dims, ...]
    checkpoint: Modes = "never"
    checkpoint_segments: Segments = 1
    loss_weight: nn.Module | None = None
    compiled: CompiledStages | None = None
    training: bool = True
    apart: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ToStep:
    """What is known when a stage graph becomes a training step; see :class:`passes.Step`, and
    :class:`ToPipeline` for ``compiled``."""

    leads_to: ClassVar[Level] = Level.STEP
    loss: nn.Module
    schedule: Schedule
    devices: tuple[str, ...]
    in_dims: tuple[InDim, ...]
    targets: tuple[bool, ...] = ()
    checkpoint: Modes = "never"
    checkpoint_segments: Segments = 1
    summed: bool = False
    loss_weight: nn.Module | None = None
    weighs_inputs: bool = False
    compiled: CompiledStages | None = None


Context = ToStages | ToPipeline | ToStep
C = TypeVar("C", ToStages, ToPipeline, ToStep)


# ----------------------------------------------------------------------------------- the entry


def _always(context: Any) -> bool:
    """The ``applies`` of an entry whose pass is always run."""
    return True


@dataclass(frozen=True)
class Entry(Generic[C]):
    """One pass of a chain.

    Args:
        name: what it is called in the chain.
        make: makes the pass, from what is known of the compilation.
        source, target: the level of the graph that the pass takes, and of the one that it gives.
        about: the class of the pass, whose documentation says what it does; or a sentence.
        needs: the names of passes that have to come before it, since it reads metadata that they
            write, or a graph that they give.
        applies: tells from what is known of the compilation whether the pass is run; ``when`` says
            the same in words, for the printed chain.
        leads_to: the level of the graph that the compiler is making when the pass runs.
    """

    name: str
    make: Callable[[C], Pass] = field(repr=False)
    source: Level
    target: Level
    about: type | str = field(repr=False)
    needs: tuple[str, ...] = ()
    applies: Callable[[C], bool] = field(default=_always, repr=False)
    when: str = ""
    leads_to: Level = Level.STAGE

    @property
    def summary(self) -> str:
        """What the pass does, in one sentence, and when it runs."""
        if isinstance(self.about, str):
            said = self.about
        elif self.about.__module__.startswith("passes."):
            said = summary(sys.modules[self.about.__module__]).partition(": ")[2]
        else:
            said = summary(self.about)
        said = said[:1].upper() + said[1:]
        return f"{said} Runs only {self.when}." if self.when else said

    @property
    def levels(self) -> str:
        """``model``, or ``model → stage`` for a pass that leads from one level to the next."""
        return self.source if self.source == self.target else f"{self.source} → {self.target}"
