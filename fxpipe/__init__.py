"""fxpipe: a compiler that turns any PyTorch model into a pipeline over several devices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpipe.api import Pipeline, Stage, compile
    from fxpipe.runtime.checkpoint import checkpoint

__all__ = ["Pipeline", "Stage", "checkpoint", "compile"]

_HOMES = {
    "Pipeline": "fxpipe.api",
    "Stage": "fxpipe.api",
    "compile": "fxpipe.api",
    "checkpoint": "fxpipe.runtime.checkpoint",
}


def __getattr__(name: str) -> Any:
    # At first use: the passes need fxpipe.graph, and so this file, before the front door, which
    # needs the passes, can be opened.
    if name not in _HOMES:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
