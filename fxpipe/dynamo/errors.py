"""The error of the backend of ``torch.compile``."""

from __future__ import annotations


class BackendError(RuntimeError):
    """The graph that Dynamo has captured cannot become a pipeline; the message says why."""
