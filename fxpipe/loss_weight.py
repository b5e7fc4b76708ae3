"""Weights of micro-batches' losses: functions for ``fxpipe.compile(loss_weight=...)``.

A loss may be a mean over tokens, of which some rows have more than others: labels of padding do
not count. Such a loss is not the mean of its micro-batches' losses, since a micro-batch with more
tokens counts for more. It is their mean weighted by the number of tokens in each micro-batch::

    loss_weight=fxpipe.loss_weight.tokens("labels", shifted=True)     # of a causal language model
    loss_weight=lambda target: (target != -100).sum()                 # of a loss_fn
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

IGNORED = -100
"""The label that ``torch.nn.functional.cross_entropy`` leaves out by default."""


@dataclass(frozen=True)
class Tokens:
    """See :func:`tokens`."""

    name: str = "labels"
    ignore_index: int = IGNORED
    shifted: bool = False

    def __call__(self, *target: Any, **inputs: Any) -> Tensor:
        given = target[0] if target else inputs
        if isinstance(given, Mapping) and self.name not in given:
            raise ValueError(
                f"loss_weight counts the labels in {self.name!r}, and there are "
                f"{', '.join(map(repr, given))}: give the name of the labels, "
                "fxpipe.loss_weight.tokens(name)"
            )
        if isinstance(given, tuple | list):
            raise ValueError(
                f"loss_weight counts labels, and the target is a {type(given).__name__} of "
                f"{len(given)}: say which of them are labels, by a function of the target such as "
                f"loss_weight=lambda target: (target[0] != {self.ignore_index}).sum()"
            )
        labels = given[self.name] if isinstance(given, Mapping) else given
        if self.shifted:
            labels = labels[..., 1:]
        found: Tensor = (labels != self.ignore_index).sum()
        return found


def tokens(name: str = "labels", *, ignore_index: int = IGNORED, shifted: bool = False) -> Tokens:
    """The number of labels in a micro-batch that count: those that are not ``ignore_index``.

    Args:
        name: the argument of the model, or the key of the target, that holds the labels. A target
            that is a tensor is the labels itself.
        ignore_index: the label that the loss leaves out.
        shifted: whether the loss leaves out the first label of each row, as models do that predict
            each token from those before it.
    """
    return Tokens(name, ignore_index, shifted)
