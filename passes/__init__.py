"""The passes of fxpipe, a file each, and the chain that says in which order they run."""

from __future__ import annotations

from passes.chain import Chain, Pass, default_chain
from passes.cost.all_microbatches import AllMicrobatches
from passes.cost.analytic import AnalyticCost
from passes.partition.partition import Partition, PartitionError
from passes.to_pipeline.checkpoint import Checkpoint
from passes.to_pipeline.copies import Copies
from passes.to_pipeline.dependencies import Dependencies
from passes.to_pipeline.microbatch import Microbatch
from passes.to_pipeline.portals import Portals
from passes.to_pipeline.streams import Streams
from passes.to_rank.early import PostEarly
from passes.to_rank.project import Project
from passes.to_rank.reduce import Reduce
from passes.to_rank.relay import Relay
from passes.to_rank.unshard import Unshard
from passes.to_stages.alias import Alias
from passes.to_stages.batch_norm import DeferredBatchNorm
from passes.to_stages.borders import Borders
from passes.to_stages.checks import EarlyChecks
from passes.to_stages.constants import CopiedConstants
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
from passes.verify.errors import VerifyError
from passes.verify.transfers import TransferError
from passes.verify.verify import Verify

__all__ = [
    "Alias",
    "AllMicrobatches",
    "AnalyticCost",
    "Borders",
    "Chain",
    "Checkpoint",
    "CopiedConstants",
    "Copies",
    "Defer",
    "DeferredBatchNorm",
    "Dependencies",
    "Devices",
    "EarlyChecks",
    "Free",
    "InputError",
    "Microbatch",
    "Partition",
    "PartitionError",
    "Pass",
    "Portals",
    "PostEarly",
    "Project",
    "Random",
    "Reduce",
    "Relay",
    "Rows",
    "Shared",
    "Split",
    "SplitError",
    "Step",
    "StepError",
    "Streams",
    "Tied",
    "TransferError",
    "Unshard",
    "Verify",
    "VerifyError",
    "WrittenInputs",
    "default_chain",
]
