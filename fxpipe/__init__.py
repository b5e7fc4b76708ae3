"""fxpipe: a compiler that turns any PyTorch model into a pipeline over several devices."""

from fxpipe.api import Pipeline, Stage, compile
from fxpipe.runtime.checkpoint import checkpoint

__all__ = ["Pipeline", "Stage", "checkpoint", "compile"]
