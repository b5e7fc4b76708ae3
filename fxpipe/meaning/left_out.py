"""Labels that a loss leaves out, which may come long after the loss has been checked.

::

    first mini-batch     labels  3  1 | 4  1       a mean over the rows: micro-batches count alike
    a later one          labels  3  1 | 4  -100    its second micro-batch has one label that counts

The check of the first mini-batch sees a plain mean over the rows. It also notes by which conditions
the loss may tell which labels count: the ``ignore_index`` of a cross entropy, and what the loss
compares with a number. Others are looked at whatever the loss does: values that are no number or
far from those of the first mini-batch, and values that were all equal there. Once some
micro-batches of a mini-batch have a larger share of labels that meet a condition than others, the
loss is to be checked again, with rows that differ by it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.meaning.sample import count_of_rows
from fxpipe.runtime.streams import current, has_streams

MOST = 16
"""How many conditions of a loss are looked at: a loss may compare labels with each of its classes,
and these are rarely in equal shares in the first mini-batch."""
MOST_OF_OTHERS = 4
"""How many of them are looked at in inputs that are not named as labels."""
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
_TURNED = {"eq": "eq", "lt": "le", "le": "lt"}
"""By a comparison of a number with labels, the one of labels with that number."""
_CLAMPING = {  # by an operator, the places of its least and its greatest number
    _aten.clamp.default: (1, 2),
    _aten.clamp.Tensor: (1, 2),
    _aten.clamp_min.default: (1, None),
    _aten.clamp_max.default: (None, 1),
}
_OF_ZEROS = (
    _aten.nonzero.default,
    _aten.count_nonzero.default,
    _aten.count_nonzero.dim_IntList,
    _aten.logical_not.default,
    _aten.any.default,
    _aten.any.dim,
)
_NAMES_OF_ZEROS = "bool", *{each.__name__.split(".")[0] for each in _OF_ZEROS}


@dataclass(frozen=True)
class LabelCondition:
    """What some labels meet.

    Attributes:
        comparison: "eq", "lt" or "le" for labels that equal, are below, or are at most ``number``;
            "isnan" for those that are no number, "endless" for these and the infinite ones.
        is_sure: whether the loss is known to leave these labels out. Otherwise it may do something
            else by the comparison.
        place: that of the only tensor whose values it is for; None: it is for all.
    """

    comparison: str
    number: float = 0
    is_sure: bool = False
    place: int | None = None

    @property
    def is_of_any_input(self) -> bool:
        """Whether it is also a cause to look again at an input that is not named as labels: where
        values are missing, or no longer all equal, as in a mask."""
        return self.comparison in ("endless", "eq")

    def of(self, labels: Tensor) -> Tensor:
        """For each label, whether it meets the condition."""
        if self.comparison == "isnan":
            return labels.isnan()
        if self.comparison == "endless":
            return ~labels.isfinite()
        found: Tensor = getattr(torch, self.comparison)(labels, self.number)
        return found

    def may_be_met(self, least: float, greatest: float) -> bool:
        """Whether some labels may meet it, and others may not, if all are within this range."""
        if not math.isfinite(least) or not math.isfinite(greatest):
            return True
        if self.comparison in ("isnan", "endless"):
            return False
        is_below = self.number < least or (self.comparison == "lt" and self.number == least)
        return not is_below and not (self.number > greatest)


class LabelsLeftOut(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that notes, in ``conditions``, by what the losses called in it may tell which
    labels count, and in ``weight`` by how much."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conditions: dict[LabelCondition, None] = {}  # in the order in which they were met
        self.weight: Tensor | None = None  # by which a cross entropy weighs the classes

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.conditions.update(dict.fromkeys(_conditions_of(function, args, kwargs or {})))
        if function in _NLL and args[2] is not None and not args[2].is_meta:
            self.weight = args[2].detach()
        return function(*args, **(kwargs or {}))


def _conditions_of(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[LabelCondition]:
    if function in _NLL:
        *_, weight, reduction, label = args
        if reduction == _MEAN:
            yield LabelCondition("eq", label, is_sure=True)
            yield from (LabelCondition("eq", each) for each in _weighted_apart(weight))
    elif function in _COMPARING:
        same, number, other = _COMPARING[function], _number(args[1]), args[0]
        if number is None:
            same, number, other = _TURNED[same], _number(args[0]), args[1]
        if number is not None and _number(other) is None:
            yield LabelCondition(same, number)
    elif function is _aten.isnan.default:
        yield LabelCondition("isnan")
    elif function in _OF_ZEROS or kwargs.get("dtype") is torch.bool:
        yield LabelCondition("eq", 0)
    elif function is _aten.isin.Tensor_Tensor:
        yield from (LabelCondition("eq", number) for number in args[1].flatten()[:MOST].tolist())
    elif function in _CLAMPING:
        for place, same, name in zip(
            _CLAMPING[function], ("le", "lt"), ("min", "max"), strict=True
        ):
            given = kwargs.get(name, args[place] if place and len(args) > place else None)
            if (number := _number(given)) is not None:
                yield LabelCondition(same, number)


def _weighted_apart(weight: Any) -> list[int]:
    """The classes that do not weigh as most others do."""
    if not isinstance(weight, Tensor) or weight.is_meta or not weight.numel():
        return []
    usual = weight.mode().values
    found: list[int] = (weight != usual).nonzero().flatten()[:MOST].tolist()
    return found


def _number(value: Any) -> float | None:
    """The number that labels are compared with; None for a tensor of several."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    return value if isinstance(value, int | float) else None


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
        elif _name(node) in _NAMES_OF_ZEROS:
            yield LabelCondition("eq", 0)


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


def whatever_it_does(values: Iterable[tuple[int, Any]]) -> Iterator[LabelCondition]:
    """By what any loss may tell which labels count: for each tensor among values with their places,
    that some are no number, or far from those of the first mini-batch. For one whose values are all
    equal there, such as the lengths of its sequences or a mask, that they are this number: a loss
    that was a mean over the rows with them may be none with others."""
    for place, labels in values:
        if not _may_be_labels(labels) or labels.numel() < 2:
            continue
        least, greatest = _range(labels)
        if labels.is_floating_point():
            yield LabelCondition("endless", place=place)
        if least == greatest:
            yield LabelCondition("eq", least, place=place)
        elif math.isfinite(width := greatest - least) and labels.dtype != torch.bool:
            yield LabelCondition("lt", least - width, place=place)
            yield LabelCondition("le", greatest + width, place=place)


def _range(labels: Tensor) -> tuple[float, float]:
    """The smallest and the largest of some labels; NaN if any of them is none."""
    least, greatest = (labels.byte() if labels.dtype == torch.bool else labels).aminmax()
    return least.item(), greatest.item()


class LabelWatch:
    """Looks for mini-batches whose micro-batches have unequal shares of labels that meet a
    condition.

    On an accelerator the answer for a mini-batch is copied to the host, and read with a later one,
    once it has come, so that the host does not wait for the device. If it is that there are such
    labels, every mini-batch is looked at when it comes, until one has been told of.

    Args:
        conditions: those by which the loss may tell which labels count. The first ones of them are
            looked at, and all that are sure or for one tensor only.

    Attributes:
        counts: for each condition that the last mini-batch has been the first to meet unevenly, how
            many labels of each row meet it.
    """

    def __init__(self, conditions: Iterable[LabelCondition]) -> None:
        known = list(dict.fromkeys(conditions))
        others = [c for c in known if c.place is None and not c.is_sure][MOST:]
        self._conditions = [c for c in known if c not in others]
        self.counts: list[Tensor] = []
        self._met: set[tuple[int, LabelCondition]] = set()  # by the places of values
        self._awaited: list[_DeviceAnswer] = []  # those of accelerators, for an earlier mini-batch
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
        self._is_near |= wait or self._has_come()
        self.counts = []
        is_met, asked = False, dict[torch.device, list[Tensor]]()
        for place, (value, dim) in enumerate(values):
            if not _may_be_labels(value) or value.ndim <= dim or value.shape[dim] != sum(sizes):
                continue
            is_far = has_streams(value.device) and not self._is_near
            if is_far and self._awaited:
                continue
            for condition in self._left(place, value):
                answer = _is_uneven(condition.of(value), dim, sizes)
                if is_far:
                    asked.setdefault(value.device, []).append(answer)
                elif bool(answer):
                    self._met.add((place, condition))
                    self.counts.append(count_of_rows(condition.of(value), dim))
                    is_met = True
        self._awaited += [_DeviceAnswer(*each) for each in asked.items()]
        self._is_near &= not (is_met or wait)
        return is_met

    def _has_come(self) -> bool:
        """Whether an accelerator has answered that a mini-batch has such labels."""
        if not all(answer.has_come for answer in self._awaited):
            return False
        come, self._awaited = self._awaited, []
        return any(answer.is_yes for answer in come)

    def _left(self, place: int, value: Tensor) -> list[LabelCondition]:
        """The conditions that the labels at a place may meet unevenly, and have not so far."""
        left = [
            condition
            for condition in self._conditions
            if condition.place in (None, place) and (place, condition) not in self._met
        ]
        if not left or not value.is_cpu or not value.numel():
            return left
        known = _range(value)  # one pass over the values in place of one for each condition
        return [condition for condition in left if condition.may_be_met(*known)]


class _DeviceAnswer:
    """Whether any of these is true, as an accelerator finds out while the host goes on."""

    def __init__(self, device: torch.device, answers: Sequence[Tensor]) -> None:
        (computing,) = current([device])
        self._on_host = torch.stack(list(answers)).any().to("cpu", non_blocking=True)
        self._event = computing.record_event()

    @property
    def has_come(self) -> bool:
        return self._event.query()

    @property
    def is_yes(self) -> bool:
        return bool(self._on_host)


def _may_be_labels(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    is_plain = tensor.dtype.is_signed or tensor.dtype in (torch.bool, torch.uint8)
    is_short = tensor.is_floating_point() and tensor.itemsize == 1  # without most operators
    return is_plain and not is_short and not tensor.is_complex()


def _is_uneven(is_met: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Whether a condition is met by a larger share of some micro-batches than of others, as a
    tensor. The sizes are factors and no tensor, which the host would have to copy to a device.

    Micro-batches of one size are counted together, since there are two sizes at most, and an
    accelerator needs a kernel for each operation.
    """
    count = is_met.shape[dim]
    rows = is_met.movedim(dim, 0).reshape(count, -1).sum(1)
    whole, begin, apart = rows.sum(), 0, []
    for size, equal in groupby(sizes):
        several = len(list(equal))
        parts = rows.narrow(0, begin, several * size).view(several, size).sum(1)
        apart.append((parts * count != whole * size).any())
        begin += several * size
    return functools.reduce(operator.or_, apart)
