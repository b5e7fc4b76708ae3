"""Which output of a model is its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ROWS = "rows"
"""The value of ``loss_weight`` for a loss that is a mean over the rows."""


def own_loss(output: Any, kind: type = Tensor) -> Any:
    """The loss in the output of a model: its entry or attribute ``loss``, else the first element of
    a tuple or list, else the output itself.

    ``kind`` is the type of the objects that stand for tensors in the output.
    """
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), kind):
        return output.loss
    if isinstance(output, tuple | list) and output:
        return output[0]
    return output
