"""Weights of micro-batches' losses: functions for ``fxpipe.compile(loss_weight=...)``.

A loss may be a mean over tokens, of which some rows have more than others: labels of padding do
not count. Such a loss is not the mean of its micro-batches' losses, since a micro-batch with more
tokens counts for more. It is their mean weighted by the number of tokens in each micro-batch. So it
is with a mean over values of which some are missing::

    loss_weight=fxpipe.loss_weight.tokens("labels", shifted=True)     # of a causal language model
    loss_weight=fxpipe.loss_weight.observed()                         # of targets with NaN
    loss_weight=lambda target: (target != -100).sum()                 # of a loss_fn
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxpipe.ir.structure import leaves

IGNORED = -100
"""The label that ``torch.nn.functional.cross_entropy`` leaves out by default."""


def _values(
    name: str, target: Sequence[Any], inputs: Mapping[str, Any], what: str, maker: str, count: str
) -> Any:
    """The tensor of a micro-batch that is counted: the target itself, or the one of this name in it
    or among the model's arguments, or the one at this path in them ("batch.labels").

    Args:
        what, maker, count: what its values are, the function that counts them, and how a user
            counts those of ``target[0]``, for messages.
    """
    given = target[0] if target else inputs
    found = at_path(given, name)
    if isinstance(found, Mapping) or (isinstance(given, Mapping) and found is None):
        there = leaves(given) if found is None else leaves(found, name)
        raise ValueError(
            f"loss_weight counts the {what} in {name!r}, and there are "
            f"{', '.join(repr(path.removeprefix('.')) for path, _ in there)}: give the name of the "
            f"{what}, fxpipe.loss_weight.{maker}(name)"
        )
    if isinstance(given, tuple | list):
        raise ValueError(
            f"loss_weight counts {what}, and the target is a {type(given).__name__} of "
            f"{len(given)}: say which of them are {what}, by a function of the target such as "
            f"loss_weight=lambda target: {count}"
        )
    return found if isinstance(given, Mapping) else given


def at_path(value: Any, path: str) -> Any:
    """What a dict holds under a key, or at a path through dicts, whose keys are joined by dots;
    None if that is not there."""
    for key in [path] if isinstance(value, Mapping) and path in value else path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


@dataclass(frozen=True)
class Tokens:
    """The function that :func:`tokens` returns, which a pickle can hold."""

    name: str = "labels"
    ignore_index: int = IGNORED
    shifted: bool = False

    def __call__(self, *target: Any, **inputs: Any) -> Tensor:
        count = f"(target[0] != {self.ignore_index}).sum()"
        labels = _values(self.name, target, inputs, "labels", "tokens", count)
        if self.shifted:
            labels = labels[..., 1:]
        found: Tensor = (labels != self.ignore_index).sum()
        return found


def tokens(name: str = "labels", *, ignore_index: int = IGNORED, shifted: bool = False) -> Tokens:
    """The number of labels in a micro-batch that count: those that are not ``ignore_index``.

    Args:
        name: the argument of the model, or the key of the target, that holds the labels; within an
            argument that is a dict, "batch.labels". A target that is a tensor is the labels itself.
        ignore_index: the label that the loss leaves out.
        shifted: whether the loss leaves out the first label of each row, as models do that predict
            each token from those before it.
    """
    return Tokens(name, ignore_index, shifted)


@dataclass(frozen=True)
class Observed:
    """The function that :func:`observed` returns, which a pickle can hold."""

    name: str = "target"

    def __call__(self, *target: Any, **inputs: Any) -> Tensor:
        count = "(~target[0].isnan()).sum()"
        values = _values(self.name, target, inputs, "values", "observed", count)
        found: Tensor = (~values.isnan()).sum()
        return found


def observed(name: str = "target") -> Observed:
    """The number of values in a micro-batch that have been observed: those that are not NaN.

    Args:
        name: the argument of the model, or the key of the target, that holds the values; within an
            argument that is a dict, "batch.values". A target that is a tensor is the values itself.
    """
    return Observed(name)
