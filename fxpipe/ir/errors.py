"""Errors by which the compiler decides whether to try another strategy for a model.

A model may be compiled by several strategies: for any batch size, with other batch dimensions, for
one batch size, by one front end or another. Only an :class:`AnotherStrategy` sends the compiler on
to the next of them. Whatever else is raised reaches the user at once: a bug, a lack of memory, or a
request that no strategy can fulfil.
"""

from __future__ import annotations

import traceback

import torch

from fxpipe.ir.source import is_ours


class AnotherStrategy(Exception):
    """What has been tried does not work for this model; another strategy may."""


class TraceError(AnotherStrategy, RuntimeError):
    """No front end can turn the model into a graph; the message says why, for each of them."""


class NeedsValues(TraceError):
    """A graph cannot be examined on fake tensors, since values decide sizes or numbers in it.

    ``torch.export`` may still trace the model: it keeps modules whole whose control flow depends on
    values.
    """


class Unsupported(TraceError):
    """The model, or an input, is of a kind that no strategy can compile, a nested tensor say."""


class OneSizeOnly(AnotherStrategy, RuntimeError):
    """A model, or its graph, does not take a batch of another size than the example's."""


_MODE = "__torch_function__", "__torch_dispatch__"  # what calls of a model's go through in a mode
_PASSES_ON = "func(*args"  # the line there that calls the function of PyTorch's

ITSELF = "itself fails on these inputs, ahead of compiling"
"""The words by which a note says that an error is the model's on the inputs of the call as they
are, see :mod:`fxpipe.trace.itself`."""


def is_itself(error: BaseException) -> bool:
    """Whether an error is the model's on the inputs of the call, which no strategy can avoid."""
    return any(ITSELF in note for note in getattr(error, "__notes__", ()))


def is_the_models(error: Exception) -> bool:
    """Whether a model's own code, or a library that it calls, has refused what it was given, so
    that something else may be tried.

    An error that fxpipe's own code raises is a bug, and an out-of-memory error says nothing about
    what the model accepts: neither may be taken for such a refusal. Nor is there anything else to
    try where the model refuses the inputs of the call as they are. A function of PyTorch's that the
    model calls within one of fxpipe's modes fails in the mode, which has only passed the call on.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or is_itself(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = frames[-1]
    has_passed_on = last.name in _MODE and _PASSES_ON in (last.line or "")
    return has_passed_on or not is_ours(last.filename)
