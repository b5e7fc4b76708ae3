"""The passes of fxpipe: one file, one pass, from the model graph to the pipeline graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import fx

from fxpipe.runtime.microbatch import Dims
from passes.alias import Alias
from passes.batch_norm import DeferredBatchNorm
from passes.checkpoint import Checkpoint
from passes.copies import Copies
from passes.cost import AnalyticCost
from passes.defer import Defer
from passes.dependencies import Dependencies
from passes.devices import Devices
from passes.free import Free
from passes.inputs import InputError, WrittenInputs
from passes.microbatch import Microbatch
from passes.partition import Partition, PartitionError
from passes.portals import Portals
from passes.random import Random
from passes.rows import Rows
from passes.shared import Shared
from passes.split import Split, SplitError
from passes.step import Step, StepError
from passes.streams import Streams
from passes.tied import Tied
from passes.verify import Verify, VerifyError

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
