"""Labels that a loss leaves out, which may come long after the loss has been checked.

::

    first mini-batch     labels  3  1 | 4  1       a mean over the rows: micro-batches count alike
    a later one          labels  3  1 | 4  -100    its second micro-batch has one label that counts

The check of the first mini-batch sees a plain mean over the rows. It also notes by which conditions
the loss may tell which labels count: the ``ignore_index`` of a cross entropy, and what the loss
compares with a number. Once some micro-batches of a mini-batch have a larger share of labels that
meet a condition than others, the loss is to be checked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import tensors_of

MOST = 16
"""How many conditions of a loss are looked at: a loss may compare labels with each of its classes,
and these are rarely in equal shares in the first mini-batch."""
_MEAN = 1  # how the operators call the reduction "mean"

_aten = torch.ops.aten
_NLL = _aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default
_SHARED_BY = {"eq": "eq", "ne": "eq", "lt": "lt", "ge": "lt", "le": "le", "gt": "le"}
"""By the name of a comparison, the one that holds for the same labels, or for all others."""
_COMPARING = {
    overload: same
    for name, same in _SHARED_BY.items()
    for overload in (getattr(_aten, name).Scalar, getattr(_aten, name).Tensor)
}


@dataclass(frozen=True)
class LabelCondition:
    """What some labels meet.

    Attributes:
        comparison: "eq", "lt" or "le" for labels that equal, are below, or are at most ``number``;
            "isnan" for those that are no number.
        is_sure: whether the loss is known to leave these labels out. Otherwise it may do something
            else by the comparison.
    """

    comparison: str
    number: float = 0
    is_sure: bool = False

    def of(self, labels: Tensor) -> Tensor:
        """For each label, whether it meets the condition."""
        if self.comparison == "isnan":
            return labels.isnan()
        found: Tensor = getattr(torch, self.comparison)(labels, self.number)
        return found


class LabelsLeftOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes, in ``conditions``, by what the losses called in it may tell which
    labels count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conditions: dict[LabelCondition, None] = {}  # in the order in which they were met

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.conditions.update(dict.fromkeys(_conditions_of(function, args, kwargs or {})))
        return function(*args, **(kwargs or {}))


def _conditions_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[LabelCondition]:
    if function in _NLL:
        *_, reduction, label = args
        if reduction == _MEAN:
            yield LabelCondition("eq", label, is_sure=True)
    elif function in _COMPARING:
        number = args[1]
        if isinstance(number, Tensor) and not number.ndim and not number.is_meta:
            number = number.item()
        if isinstance(number, int | float):
            yield LabelCondition(_COMPARING[function], number)
    elif function is _aten.isnan.default:
        yield LabelCondition("isnan")
    elif function is _aten.nonzero.default or kwargs.get("dtype") is torch.bool:
        yield LabelCondition("eq", 0)


def conditions_in(gm: fx.GraphModule) -> Iterator[LabelCondition]:
    """By what a model that computes its loss may tell which labels count: what its graph compares
    with a number, and the ``ignore_index`` of its cross entropies."""
    for node in gm.graph.nodes:
        ignored = _ignored_by(gm, node)
        comparison = _SHARED_BY.get(_name(node))
        if isinstance(ignored, int):
            yield LabelCondition("eq", ignored, is_sure=True)
        elif comparison and len(node.args) == 2 and isinstance(node.args[1], int | float):
            yield LabelCondition(comparison, node.args[1])


def _name(node: fx.Node) -> str:
    """The name of what a node calls, without that of an overload."""
    name: str = node.target if isinstance(node.target, str) else node.target.__name__
    return name.split(".")[0]


def _ignored_by(gm: fx.GraphModule, node: fx.Node) -> Any:
    """The label that a cross entropy leaves out; None for other nodes."""
    if node.op == "call_module":
        return getattr(gm.get_submodule(str(node.target)), "ignore_index", None)
    if not any(name in _name(node) for name in ("cross_entropy", "nll_loss")):
        return None
    given = node.normalized_arguments(gm, normalize_to_only_use_kwargs=True)
    return None if given is None else given.kwargs.get("ignore_index")


def of_equal_labels(values: Iterable[Any]) -> Iterator[LabelCondition]:
    """For labels that are all equal in the first mini-batch, such as the lengths of its sequences,
    that they are this number: a loss that was a mean over the rows with them may be none with
    others."""
    for labels in tensors_of(list(values)):
        if not _may_be_labels(labels) or labels.is_floating_point() or labels.numel() < 2:
            continue
        first = labels.flatten()[0]
        if bool((labels == first).all()):
            yield LabelCondition("eq", first.item())


class LabelWatch:
    """Looks for mini-batches whose micro-batches have unequal shares of labels that meet a
    condition.

    On an accelerator the answer for a mini-batch is read when the next one comes, so that the host
    does not wait for the device. From then on every mini-batch is looked at when it comes.

    Args:
        conditions: those by which the loss may tell which labels count. The first ones of them are
            looked at, and all that are sure.
    """

    def __init__(self, conditions: Iterable[LabelCondition]) -> None:
        known = list(dict.fromkeys(conditions))
        self._conditions = [c for i, c in enumerate(known) if c.is_sure or i < MOST]
        self._met: set[tuple[int, LabelCondition]] = set()  # by the places of values
        self._answers: list[Tensor] = []  # of the last mini-batch, on an accelerator
        self._is_near = False  # whether such a mini-batch has been there, and has not been told of

    def meets(
        self, values: Sequence[tuple[Any, int]], sizes: Sequence[int], wait: bool = False
    ) -> bool:
        """Whether this mini-batch is the first such one for a value and a condition. After it, no
        other is told of for these.

        Args:
            values: those that may be labels, each with its batch dimension.
            sizes: the numbers of rows of the micro-batches.
            wait: whether to wait for an accelerator's answer.
        """
        if not self._conditions or len(sizes) < 2:
            return False
        self._is_near |= wait or any(self._answers)
        self._answers = []
        is_met = False
        for place, (value, dim) in enumerate(values):
            if not _may_be_labels(value) or value.ndim <= dim or value.shape[dim] != sum(sizes):
                continue
            for condition in self._conditions:
                if (place, condition) in self._met:
                    continue
                answer = _is_uneven(condition.of(value), dim, sizes)
                if not value.is_cpu and not self._is_near:
                    self._answers.append(answer)
                elif bool(answer):
                    self._met.add((place, condition))
                    is_met = True
        self._is_near &= not (is_met or wait)
        return is_met


def _may_be_labels(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return not tensor.is_complex()


def _is_uneven(is_met: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Whether a condition is met by a larger share of some micro-batches than of others, as a
    tensor."""
    rows = is_met.movedim(dim, 0).reshape(is_met.shape[dim], -1).sum(1)
    counts = torch.stack([part.sum() for part in torch.split(rows, list(sizes))])
    even = counts.sum() * torch.tensor(sizes, device=counts.device)
    return (counts * sum(sizes) != even).any()
