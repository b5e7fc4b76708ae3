"""The refusal of a training step that has no loss."""

from __future__ import annotations

from torch import Tensor

from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.options import Options
from fxpipe.ir.text import kind
from fxpipe.planning.loss import is_loss


class NoLoss(ValueError):
    """A training step is asked of a model that returns no loss, without a ``loss_fn``."""


def refuse_no_loss(mode: Mode, options: Options, name: str) -> None:
    """Raise :class:`NoLoss` if a training step has no loss, as far as the shapes of the model's
    output tell. A loss for each row is one where each micro-batch has one row.

    Args:
        name: the class of the model.
    """
    if options.loss_fn is not None:
        return
    found = mode.output_taken_for_loss
    if is_loss(found, mode.example.batch):
        return
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind(found)
    why = "" if options.loss_weight is None else ", and loss_weight= only says what a loss counts"
    raise NoLoss(
        f"a training step needs a loss, and {name} returns {what}{why}: give "
        "compile(loss_fn=...), a function of output and target, or let the model return its loss, "
        "a scalar tensor"
    )
