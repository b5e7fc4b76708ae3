"""The loss of a training step: a function of output and target, or the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

LossFunction = Callable[[Any, Any], Tensor]


class Loss(nn.Module):
    """``loss_fn(output, target)`` for the output of a graph and the leaves of a target.

    Without a function the model returns its loss: as its output, or the first of a tuple, or what
    is called ``loss`` in it.
    """

    def __init__(
        self, loss_fn: LossFunction | None, rebuild: Callable[[Any], Any], spec: pytree.TreeSpec
    ) -> None:
        super().__init__()
        # A module is no submodule here: whose parameters it has is not for us to decide.
        self.call = None if loss_fn is None else lambda *args: loss_fn(*args)
        self.rebuild, self.spec = rebuild, spec

    def forward(self, output: Any, target: Sequence[Any]) -> Any:
        """The loss, a scalar if all is well."""
        output = self.rebuild(output)
        if self.call is None:
            return own_loss(output)
        whole = pytree.tree_unflatten(list(target), self.spec)
        try:
            return self.call(output, whole)
        except Exception as error:
            if whole is None:
                error.add_note("step() was given no target=, so that loss_fn was called with None")
            raise


def own_loss(output: Any) -> Any:
    """What a model returns as its loss."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    if isinstance(output, tuple | list) and output:
        return output[0]
    return output


@dataclass(frozen=True)
class Target:
    """A target, leaf by leaf."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    has_batch: tuple[bool, ...]

    @staticmethod
    def of(target: Any, batch: int | None) -> Target:
        """The target of a mini-batch of that size.

        Raises:
            ValueError: if a tensor in it has another number of rows, or rows are in no tensor.
        """
        leaves, spec = pytree.tree_flatten(target)
        has_batch = []
        for leaf in leaves:
            is_array = not isinstance(leaf, Tensor) and getattr(leaf, "ndim", 0) > 0
            if is_array and batch is not None:
                raise ValueError(
                    f"the target has a {type(leaf).__name__}, which cannot be cut into "
                    "micro-batches: give it as a tensor"
                )
            is_split = isinstance(leaf, Tensor) and leaf.ndim > 0 and batch is not None
            if is_split and leaf.shape[0] != batch:
                raise ValueError(
                    f"the target has a tensor of shape {tuple(leaf.shape)}, and the batch has "
                    f"{batch} rows: its first dimension must be as large"
                )
            has_batch.append(is_split)
        return Target(leaves, spec, tuple(has_batch))
