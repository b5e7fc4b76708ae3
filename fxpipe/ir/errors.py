"""Errors that say what may be tried next: raised in one room, and acted on in another."""

from __future__ import annotations


class TraceError(RuntimeError):
    """No front end can turn the model into a graph; the message says why, for each of them."""


class NeedsValues(TraceError):
    """A graph cannot be examined on fake tensors, since values decide sizes or numbers in it.

    ``torch.export`` may still trace the model: it keeps modules whole whose control flow depends on
    values.
    """
