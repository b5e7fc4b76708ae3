"""The loss among the outputs of a model, and by how much that of each micro-batch counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ROWS = "rows"
"""Said in place of a function of weights: the loss is a mean over the rows."""


def own_loss(output: Any, kind: type = Tensor) -> Any:
    """The loss in the output of a model: what is called ``loss`` in it, else the first element of a
    tuple or list, else the output.

    ``kind``: what stands for tensors in the output.
    """
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), kind):
        return output.loss
    if isinstance(output, tuple | list) and output:
        return output[0]
    return output
