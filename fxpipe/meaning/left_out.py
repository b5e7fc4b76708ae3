"""Labels that a loss leaves out, which may come long after the loss has been checked.

::

    first mini-batch     labels  3  1 | 4  1       a mean over the rows: micro-batches count alike
    a later one          labels  3  1 | 4  -100    its second micro-batch has one label that counts

The check of the first mini-batch sees a plain mean over the rows. It also notes which labels the
loss leaves out, from what the loss calls. Once a mini-batch has such labels, in some of its
micro-batches more than in others, the loss is to be checked again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode

_NLL = torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default
_MEAN = 1  # how the operators call the reduction "mean"


class LabelsLeftOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes, in ``labels``, which labels the losses called in it leave out: what
    cross entropies that are means have been given for ``ignore_index``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.labels: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _NLL:
            *_, reduction, label = args
            if reduction == _MEAN:
                self.labels.add(label)
        return function(*args, **(kwargs or {}))


class LabelWatch:
    """Looks for the first mini-batch whose micro-batches leave out unequal shares of their labels.

    On an accelerator the answer for a mini-batch is read when the next one comes, so that the host
    does not wait for the device. From then on every mini-batch is looked at when it comes.

    Args:
        labels: those that the loss leaves out.
    """

    def __init__(self, labels: Collection[int]) -> None:
        self._labels = sorted(labels)
        self._answers: list[Tensor] = []  # of the last mini-batch, on an accelerator
        self._is_near = False  # whether such a mini-batch has been there, and has not been told of

    def meets(self, tensors: Sequence[tuple[Any, int]], sizes: Sequence[int]) -> bool:
        """Whether this mini-batch is the first such one. After it, no other is told of.

        Args:
            tensors: the values that may be labels, each with its batch dimension.
            sizes: the numbers of rows of the micro-batches.
        """
        if not self._labels or len(sizes) < 2:
            return False
        self._is_near |= any(self._answers)
        self._answers, is_met = [], False
        for tensor, dim in tensors:
            if not _may_be_labels(tensor, dim, sum(sizes)):
                continue
            for label in self._labels:
                if not tensor.is_cpu and not self._is_near:
                    self._answers.append(_is_uneven(tensor, dim, sizes, label))
                elif bool((tensor == label).any()):
                    is_met |= bool(_is_uneven(tensor, dim, sizes, label))
        if is_met:
            self._labels = []
        return is_met


def _may_be_labels(tensor: Any, dim: int, rows: int) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    is_integer = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.is_signed
    return is_integer and tensor.ndim > dim and tensor.shape[dim] == rows


def _is_uneven(labels: Tensor, dim: int, sizes: Sequence[int], label: int) -> Tensor:
    """Whether some micro-batches have a larger share of a label than others, as a tensor."""
    rows = (labels == label).movedim(dim, 0).reshape(labels.shape[dim], -1).sum(1)
    counts = torch.stack([part.sum() for part in torch.split(rows, list(sizes))])
    even = counts.sum() * torch.tensor(sizes, device=counts.device)
    return (counts * sum(sizes) != even).any()
