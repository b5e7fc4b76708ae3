"""An entry of the chain: the name of a pass, the levels that it leads from and to, what it needs,
and how it is made from what is known of the compilation."""

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
from fxpipe.runtime.compiled_stage import CompiledStages
from fxpipe.runtime.microbatch import Dims, InDim
from fxpipe.schedule import Schedule
from passes.cost.analytic import ADAM
from passes.cost.choice import Costs


class Pass(Protocol):
    """A named function from a graph module to a graph module that computes the same."""

    @property
    def name(self) -> str:
        """The name it is listed under."""

    def __call__(self, gm: fx.GraphModule, /) -> fx.GraphModule:
        """Rewrite. The module given may be changed in place and returned."""


class Level(StrEnum):
    """What kind of graph it is that a pass takes or gives."""

    MODEL = "model"
    STAGE = "stage"
    PIPELINE = "pipeline"
    STEP = "step"


# ---------------------------------------------------------------- what passes are made from


@dataclass(frozen=True)
class ToStages:
    """What is known when a model graph is lowered to a stage graph.

    Args:
        inputs: the model's, one for each placeholder.
        in_dims: the batch dimension of each input; None for one that all micro-batches share.
        devices: the names of the devices, one for each stage.
        partition: the pass that gives each node its stage; None as long as nothing is cut.
        outputs: the pass that finds the batch dimensions of the outputs; None if nobody needs them.
        chunks: how many micro-batches the costs and the rows are for.
        chunks_asked_for: how many micro-batches the user has asked for, if any.
        traced_chunks: None for a graph that takes any batch size. For one that was traced with a
            single micro-batch: how many of these there are in a mini-batch.
        costs, spec, optimizer_states, measured_on: what a node costs, for the pass "cost".
        deferred_batch_norm: whether running statistics are updated once for each mini-batch.
        places: for each stage the process that runs it, if there are several; see pass "tied".
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
    measured_on: torch.device | None = None
    deferred_batch_norm: bool = False
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToPipeline:
    """What is known when a stage graph is unrolled over ``chunks`` micro-batches.

    ``loss_weight``: the module that gives the weight of a micro-batch's loss, if an output has it.
    ``out_dims``: for each node that the stage graph returns, in order, the batch dimension of its
    tensors. ``compiled`` makes compiled stages; None: stages run as they are. The others are those
    of :func:`fxpipe.compile`, and of :class:`ToStages`.
    """

    leads_to: ClassVar[Level] = Level.PIPELINE
    devices: tuple[str, ...]
    chunks: int
    in_dims: tuple[InDim, ...]
    out_dims: tuple[Dims, ...]
    checkpoint: str = "never"
    checkpoint_segments: int = 1
    loss_weight: nn.Module | None = None
    compiled: CompiledStages | None = None


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
    checkpoint: str = "never"
    checkpoint_segments: int = 1
    summed: bool = False
    loss_weight: nn.Module | None = None
    weighs_inputs: bool = False
    compiled: CompiledStages | None = None


Context = ToStages | ToPipeline | ToStep
C = TypeVar("C", ToStages, ToPipeline, ToStep)


# ----------------------------------------------------------------------------------- the entry


def _always(context: Any) -> bool:
    """Whether a pass applies to which nothing else is said."""
    return True


@dataclass(frozen=True)
class Entry(Generic[C]):
    """One pass of a chain.

    Args:
        name: what it is called in the chain.
        make: makes the pass, from what is known of the compilation.
        source, target: the level of the graph that it takes, and of the one that it gives.
        about: the class of the pass, whose documentation says what it does; or a sentence.
        needs: the names of passes that have to come before it, as it reads what they note.
        applies: whether it is run; ``when`` says the same for people.
        leads_to: the graph that is being made when it runs: "stage", "pipeline" or "step".
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
