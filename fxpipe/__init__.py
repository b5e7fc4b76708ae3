"""fxpipe: a compiler that turns any PyTorch model into a pipeline over several devices."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fxpipe import loss_weight, skip
    from fxpipe.api import compile
    from fxpipe.dynamo import BackendError, backend
    from fxpipe.inspect.stage import Stage
    from fxpipe.ir.devices import DeviceSpec
    from fxpipe.meaning.errors import BatchError, BatchWarning
    from fxpipe.pipeline import Pipeline
    from fxpipe.planning import Plan, plan
    from fxpipe.runtime.checkpointing.checkpoint import CheckpointError, checkpoint
    from fxpipe.runtime.ranks.errors import RankError
    from fxpipe.schedule import Schedule, ScheduleError, simulate
    from fxpipe.trace import TraceError
    from fxpipe.tuning.results import Tuning
    from fxpipe.tuning.tune import tune
    from passes.chain import Chain, default_chain
    from passes.cost.given import Profile
    from passes.partition.automatic import Auto, DoesNotFit
    from passes.partition.partition import PartitionError

__all__ = [
    "Auto",
    "BackendError",
    "BatchError",
    "BatchWarning",
    "Chain",
    "CheckpointError",
    "DeviceSpec",
    "DoesNotFit",
    "PartitionError",
    "Pipeline",
    "Plan",
    "Profile",
    "RankError",
    "Schedule",
    "ScheduleError",
    "Stage",
    "TraceError",
    "Tuning",
    "backend",
    "checkpoint",
    "compile",
    "default_chain",
    "loss_weight",
    "plan",
    "simulate",
    "skip",
    "tune",
]

_HOMES = {
    "Pipeline": "fxpipe.pipeline",
    "Stage": "fxpipe.inspect.stage",
    "compile": "fxpipe.api",
    "Chain": "passes.chain",
    "default_chain": "passes.chain",
    "checkpoint": "fxpipe.runtime.checkpointing.checkpoint",
    "CheckpointError": "fxpipe.runtime.checkpointing.checkpoint",
    "BatchError": "fxpipe.meaning.errors",
    "BatchWarning": "fxpipe.meaning.errors",
    "TraceError": "fxpipe.trace",
    "PartitionError": "passes.partition.partition",
    "Auto": "passes.partition.automatic",
    "DoesNotFit": "passes.partition.automatic",
    "DeviceSpec": "fxpipe.ir.devices",
    "Plan": "fxpipe.planning",
    "plan": "fxpipe.planning",
    "Tuning": "fxpipe.tuning.results",
    "tune": "fxpipe.tuning.tune",
    "backend": "fxpipe.dynamo",
    "BackendError": "fxpipe.dynamo",
    "Profile": "passes.cost.given",
    "RankError": "fxpipe.runtime.ranks.errors",
    "Schedule": "fxpipe.schedule",
    "ScheduleError": "fxpipe.schedule",
    "simulate": "fxpipe.schedule",
}


def __getattr__(name: str) -> Any:
    # At first use: the passes need fxpipe.ir, and so this file, before the front door, which
    # needs the passes, can be opened.
    if name in ("skip", "loss_weight"):
        return importlib.import_module(f"fxpipe.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    _name_errors()
    return found


def _name_errors() -> None:
    # A traceback gives the module of an error ahead of its name: let it be the one that has the
    # error for users. Whoever uses fxpipe has come through __getattr__ ahead of any error.
    for name, home in _HOMES.items():
        kind = getattr(sys.modules.get(home), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            kind.__module__ = __name__


def __dir__() -> list[str]:
    # Editors complete names by this, also those that are imported at first use.
    return sorted({*globals(), *__all__})
