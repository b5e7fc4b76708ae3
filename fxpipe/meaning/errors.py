"""What is raised, or warned of, where micro-batching would not mean what the model means."""

from __future__ import annotations


class BatchError(ValueError):
    """The batch dimension of an input or output is not what it has to be, or cannot be found; or
    the model does not compute row by row, so that micro-batches would change its results."""


class BatchWarning(UserWarning):
    """Warns of a result that is put together from those of micro-batches, and differs from the
    model's on the whole mini-batch."""
