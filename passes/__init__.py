"""The passes of fxpipe: one file, one pass, from the model graph to the pipeline graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import fx

from fxpipe.runtime.microbatch import Dims
from passes.cost.analytic import AnalyticCost
from passes.partition.partition import Partition, PartitionError
from passes.to_pipeline.checkpoint import Checkpoint
from passes.to_pipeline.copies import Copies
from passes.to_pipeline.dependencies import Dependencies
from passes.to_pipeline.microbatch import Microbatch
from passes.to_pipeline.portals import Portals
from passes.to_pipeline.streams import Streams
from passes.to_pipeline.verify import Verify, VerifyError
from passes.to_stages.alias import Alias
from passes.to_stages.batch_norm import DeferredBatchNorm
from passes.to_stages.devices import Devices
from passes.to_stages.free import Free
from passes.to_stages.inputs import InputError, WrittenInputs
from passes.to_stages.random import Random
from passes.to_stages.rows import Rows
from passes.to_stages.shared import Shared
from passes.to_stages.split import Split, SplitError
from passes.to_stages.tied import Tied
from passes.to_step.defer import Defer
from passes.to_step.step import Step, StepError

__all__ = [
    "Alias",
    "AnalyticCost",
    "Checkpoint",
    "Copies",
    "Defer",
    "DeferredBatchNorm",
    "Dependencies",
    "Devices",
    "Free",
    "InputError",
    "Microbatch",
    "Partition",
    "PartitionError",
    "Pass",
    "Portals",
    "Random",
    "Rows",
    "Shared",
    "Split",
    "SplitError",
    "Step",
    "StepError",
    "Streams",
    "Tied",
    "Verify",
    "VerifyError",
    "WrittenInputs",
    "default_passes",
]


class Pass(Protocol):
    """A named function from a graph module to a graph module that computes the same."""

    @property
    def name(self) -> str:
        """The name it is listed under."""

    def __call__(self, gm: fx.GraphModule, /) -> fx.GraphModule:
        """Rewrite. The module given may be changed in place and returned."""


def default_passes(
    *,
    devices: Sequence[str],
    chunks: int,
    in_dims: Sequence[int | None],
    out_dims: Sequence[Dims],
    checkpoint: str = "never",
    checkpoint_segments: int = 1,
) -> list[Pass]:
    """The passes from the stage graph to the pipeline graph of ``chunks`` micro-batches."""
    names = tuple(devices)
    return [
        Microbatch(chunks, tuple(in_dims), tuple(out_dims)),
        Portals(names),
        Copies(names),
        Streams(names),
        Checkpoint(checkpoint, checkpoint_segments),
        Dependencies(),
        Verify(),
    ]
