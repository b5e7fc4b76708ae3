"""What a user says of how a call is to be read, what the check finds, and how it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fxpipe.ir.log import warn
from fxpipe.meaning import messages
from fxpipe.meaning.errors import BatchError, BatchWarning
from fxpipe.meaning.listed import Listed
from fxpipe.runtime.microbatch import Dim, InDim
from fxpipe.trace import Traced
from fxpipe.trace.premises import Reads


@dataclass(frozen=True)
class Compared:
    """A graph of the model that the check has run on parts of samples, and compared with what the
    model gives for the whole samples."""

    traced: Traced
    reads: Reads
    """The attributes of the model's modules that have been read."""
    as_it_runs: bool
    """Whether model and graph have run as they always do, so that there is nothing left to compare.
    If not, random numbers and statistics of the batch have been replaced."""


@dataclass
class Meaning:
    """How a call is cut into micro-batches, and how their outputs are put together."""

    in_dims: Sequence[InDim]
    outputs: dict[str, Dim] = field(default_factory=dict)
    """How each output is put together, by its path; empty where the model could not be run."""
    is_checked: bool = False
    """Whether the model has been run on samples and on their parts."""
    differing: frozenset[str] = frozenset()
    """The paths of the outputs that the parts of a sample do not give, such as a loss that compares
    rows with each other."""
    unclear: dict[str, bool] = field(default_factory=dict)
    """The outputs, by their paths, that are zero for every sample, so that they may be means or
    sums: whether each has a gradient."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the report, such as that dropout masks are those of each micro-batch."""
    one_row_only: bool = False
    """Whether the example has one row, and the model does not run on more than one."""
    listed: Listed | None = None
    """The call, if it has lists with one element for each row."""
    refused_sizes: frozenset[int] = frozenset()
    """The sizes of micro-batches for which the model gives something else than for the same rows
    among others."""
    goes_by_size: bool = False
    """Whether the model gives something else for some numbers of rows than for the same rows among
    others, or does not take them, so that each size of micro-batches is to be checked."""
    graph: Compared | None = None
    """The model's graph, if the check has been made with it."""
    is_told: bool = False
    """Whether the user has been warned that the loss which the model returns depends on all
    rows."""


@dataclass
class Asked:
    """The options with which a user says how a call is to be read.

    Args:
        in_dims, out_dims: as for :func:`fxpipe.compile`.
        check: True: what differs from the model is refused; "warn": it is warned of; False: it is
            accepted.
        sizes: a function from the number of rows of a mini-batch to the sizes of its micro-batches.
        loss_weight: as for :func:`fxpipe.compile`.
        returns_loss: whether ``loss_weight`` is about a loss that the model returns.
        training: whether gradients are wanted, so that they have to be right.
        counts: what rows of the mini-batch differ by, so that the rows of samples have to.
        is_again: whether an earlier mini-batch has told, so that one which does not (its loss is
            NaN, as with a scale of gradients that is too large) leaves it at that.
        told: what the user has been warned of, which is not said again; None: that is not kept.
        calls_are_trained: whether ``pipe(x)`` has a backward of its own, as it has not on ranks.
        deferred_batch_norm: as for :func:`fxpipe.compile`.
    """

    in_dims: Any = None
    out_dims: Any = None
    check: bool | str = True
    sizes: Callable[[int], tuple[int, ...]] = lambda batch: ()
    loss_weight: Any = None
    returns_loss: bool = False
    training: bool = True
    counts: Sequence[Tensor] = ()
    is_again: bool = False
    told: set[str] | None = None
    calls_are_trained: bool = True
    deferred_batch_norm: bool = False

    def warn(self, text: str, about: str = "") -> None:
        """Warn, unless the user has been told the same. A model with state is compiled again and
        again, and checked each time: what has other numbers then, and no other words, is no news.

        ``about``: what the text is about, where other words about it are no news either.
        """
        said = about or _NUMBERS.sub("", text)
        if self.told is None or said not in self.told:
            warn(text, BatchWarning)
        if self.told is not None:
            self.told.add(said)


_NUMBERS = re.compile(r"(?<![\w\[.])\d[\d.]*(e[+-]\d+)?")
"""The numbers in a text, but for those in the paths of outputs and modules."""


def refuse(asked: Asked, text: str) -> None:
    """Raise BatchError, or warn, or do nothing, as the option ``check`` says."""
    if asked.check is True:
        raise BatchError(text)
    if asked.check:
        asked.warn(text)


def refuse_unclear(meaning: Meaning, check: bool | str, path: str) -> None:
    """Raise an error for an output that is zero for every sample, so that it may be a mean or a
    sum, if it has a gradient; warn of one that has none."""
    if path in meaning.unclear and check:
        text = messages.unclear(path)
        if meaning.unclear[path] and check is True:
            raise BatchError(text)
        warn(text, BatchWarning)
