"""Samples of a call, on which the check runs the model: the inputs of the call with fewer or more
rows, in another order and with other values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir.structure import map_tensors
from fxpipe.meaning.listed import Column
from fxpipe.runtime.microbatch import InDim, first_rows, rows_at

MIXED, WHOLE, MOVED, GIVEN = LEVELS = "mixed", "whole rows", "moved", "given"
"""How much a sample differs from the example, the largest difference first:

- "mixed": rows are in another order, and each integer or flag is replaced by one that is drawn from
  the same tensor, in some rows more often by one and the same. Rows of one number each, such as
  lengths, classes or flags, get numbers that tell the parts apart (:func:`_apart`);
- "whole rows": rows are in another order, and keep their integers and flags. Only in a tensor whose
  numbers are all equal, numbers are changed; and of rows of one number each, one row of the second
  part gets that of the last row of the first part (:func:`_with_a_pair`);
- "moved": rows are in another order;
- "given": rows are as they are, and in their order.

Floating-point values are changed at all levels but the last. A model may raise an error on a sample
(if lengths have to be sorted, say), and a row with mixed integers may be one that the model is not
made for (with more placeholders for patches of a picture than the picture has, say). Then the next
level is tried."""

OF_LABELS = 1
"""The seed of the sample in which rows have any labels, as a loss may weigh rows by theirs. In
others the numbers of rows tell the parts apart, see :func:`_apart`."""

OF_PARTS_APART = 0, 4
"""The seeds of the samples in which real numbers of the first part are far from those of the other
parts, so that decisions by all rows show. In others rows differ from each other only, since places
of largest values, say, are often the same in such samples, and hits of labels are none."""

OF_TWINS = 2, 3
"""The seeds of the samples in which a row of the second part is nearly one of the first part, since
rows may see each other by their distance, and those of other samples are far from each other. The
second one tells whether what differs in the first one was tipped by rounding errors. Of rows of one
number each, all in the first part have the largest in these samples (:func:`_apart`)."""

NEAR = 0.02  # of the way from a row to its twin


@dataclass
class Sample:
    """Two rows of the inputs that a mode has been compiled for.

    They are kept as long as the mode is, in the memory of the host: a device has room for its
    stage, and maybe for no more.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    dims: Sequence[InDim]  # the batch dimension of each tensor
    batch: int | None  # the number of rows that the inputs had
    devices: Sequence[torch.device] = ()  # where each tensor was; none: where it is

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], dims: Sequence[InDim], batch: int | None
    ) -> Sample:
        """Make the sample of a call: its inputs, with two rows of them at most."""
        few = with_rows((args, kwargs), dims, min(2, batch or 0))
        devices: list[torch.device] = []

        def waiting(tensor: Tensor) -> Tensor:
            devices.append(tensor.device)
            return tensor if tensor.is_meta else tensor.cpu()

        return Sample(map_tensors(waiting, few), dims, batch, devices)

    def repeated(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the original shapes, on their devices, in which the two rows are repeated."""
        remaining = iter(self.devices)
        inputs = map_tensors(lambda tensor: tensor.to(next(remaining, tensor.device)), self.inputs)
        return with_rows(inputs, self.dims, self.batch or 0)


def batch_size(values: Sequence[Any], dims: Sequence[InDim]) -> int | None:
    """The number of rows that all of these tensors have; None if none has a batch dimension."""
    sizes = (v.shape[dim] for v, dim in zip(values, dims, strict=True) if isinstance(dim, int))
    return next(sizes, None)


def with_rows(
    inputs: tuple[tuple[Any, ...], dict[str, Any]], dims: Sequence[InDim], rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same inputs with ``rows`` rows: the first ones, or, if there are fewer, all of them
    repeated."""
    remaining = iter(dims)

    def resized(tensor: Tensor) -> Tensor:
        dim = next(remaining)
        return first_rows(tensor.detach(), dim, rows) if isinstance(dim, int) else tensor

    args, kwargs = map_tensors(resized, inputs)
    return args, kwargs


def out_of_inference_mode(inputs: Any) -> Any:
    """The inputs, copied out of inference mode if they have been made in it."""
    return map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)


def sampled(
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    sizes: Sequence[int],
    level: str,
    seed: int,
    counts: Sequence[Tensor] = (),
    has_twins: bool = False,
) -> list[Tensor]:
    """A sample for parts of these sizes, which differs from the example as ``level`` says.

    Rows of different tensors that belong together stay together, so that what a model takes for
    granted of one row remains true. Tensors that all rows share keep their size.

    Args:
        counts: what some rows have more of than others, as a tensor with a number for each row: the
            first and the last row of the sample are to differ by it. By default, what is no number
            and, where integers are not mixed, the smallest and the largest ones.
        has_twins: whether the first row of the second part is nearly the first row of the first
            one, as far as it has real numbers.
    """
    rows = sum(sizes)
    draw = torch.Generator().manual_seed(seed)
    batch = batch_size(tensors, dims) or 0
    order = torch.arange(rows) % batch
    uneven = list(counts)
    if level != GIVEN:
        order = torch.randperm(max(batch, rows), generator=draw)[:rows] % batch
        uneven += _uneven_counts(tensors, dims, level)
    if uneven and rows < batch:
        order = _differing(order, uneven[seed % len(uneven) :] + uneven[: seed % len(uneven)])
        order = order.sort().values if level == GIVEN else order
    if level != GIVEN and not counts and seed != OF_LABELS:
        order = _apart_by_numbers(order, tensors, dims, sizes[0], seed)
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if isinstance(tensor, Column):
            found.append(_rows_of(tensor, order.tolist(), level, draw))
            continue
        value = tensor.detach()
        if dim is not None:
            chosen = rows_at(value, dim, order)
            if level != GIVEN:
                chosen = _perturbed(chosen, value, dim, level, sizes[0], draw)
                chosen = _uneven(chosen, value, dim, level, sizes[0], draw)
                if level == MIXED:
                    chosen = _with_other_beginnings(chosen, value, dim, sizes[0])
                if level != MOVED and seed != OF_LABELS:
                    chosen = _with_a_pair(chosen, dim, sizes[0], seed)
                if has_twins and has_fractions(value):
                    chosen = _with_a_twin(chosen, dim, sizes[0])
            value = chosen
        elif level != GIVEN:
            value = _perturbed(value, value, 0, MOVED, 0, draw)
        found.append(value)
    return found


def _is_storage(tensor: Tensor) -> bool:
    """Whether the values of a tensor are of a dtype that PyTorch stores, and hardly computes with:
    integers without a sign of several bytes, or real numbers of one byte. Their rows are put in
    another order, and keep their values."""
    is_small_float = tensor.is_floating_point() and tensor.element_size() == 1
    return is_small_float or tensor.dtype in (torch.uint16, torch.uint32, torch.uint64)


def _differing(order: Tensor, counts: Sequence[Tensor]) -> Tensor:
    """The numbers of a sample's rows, some of them replaced, so that rows differ by these counts:
    the first one by the first count, in any case, and others where all rows are much alike."""
    order = order.clone()
    places = [place for i in range(len(order) // 2) for place in (i, -1 - i)]
    for i, count in enumerate(counts):
        found, span = count[order % len(count)], count.max() - count.min()
        if len(places) < 2 or (i and 2 * (found.max() - found.min()) >= span):
            continue
        order[places.pop(0)], order[places.pop(0)] = count.argmax(), count.argmin()
    return order


def _apart_by_numbers(
    order: Tensor, tensors: Sequence[Tensor], dims: Sequence[int | None], first: int, seed: int
) -> Tensor:
    """The numbers of a sample's rows, some of them replaced, so that the whole numbers of which
    each row has one, such as lengths, tell the parts apart (:func:`_apart`). If there are several,
    it is the first one of integers; flags, also as real numbers, may be a mask of rows."""
    known = [
        _ordered(tensor.detach().flatten().cpu())
        for tensor, dim in zip(tensors, dims, strict=True)
        if dim is not None and not isinstance(tensor, Column) and has_a_whole_number(tensor, dim)
    ]
    different = [numbers for numbers in known if bool((numbers != numbers[0]).any())]
    different.sort(key=lambda numbers: numbers.dtype == torch.bool or numbers.is_floating_point())
    return _apart(order, different[0], first, seed) if different else order


def _ordered(numbers: Tensor) -> Tensor:
    """The same numbers, those that are missing (NaN) as the least of all: NaN is equal to nothing,
    and has no place in an order."""
    if not numbers.is_floating_point():
        return numbers
    return torch.where(numbers.isnan(), -torch.inf, numbers)


def _apart(order: Tensor, numbers: Tensor, first: int, seed: int) -> Tensor:
    """The numbers of a sample's rows, of which the ``first`` ones are the first part, some of them
    replaced, so that what a model computes of the rows' numbers (``numbers``, at least two
    different ones) is something else for each part than for the whole::

        OF_TWINS    most | least most fewer     most most | least most fewer
        others      p | p fewer most            most p | p fewer fewer

    In the samples OF_TWINS the first part has the largest number (``most``) only; the second part
    begins with the smallest one and has the largest, too: a model may take the number of the first
    row for all rows, or that of the row before, or divide by the sum, or ask for any zero. In the
    others one row alone has the largest number, since a model may cut or scale all rows by it, and
    one of the parts lacks it; and the second part begins with the number of the row before, since a
    model may tell where numbers change. One sample cannot have all of this, so both kinds are taken
    (see :attr:`fxpipe.meaning.trial.Question.needed`). :func:`_with_a_pair` makes the equal numbers
    in both parts.
    """
    if len(order) < 2:
        return order
    is_largest = numbers == numbers.max()
    largest, lesser = is_largest.nonzero().flatten(), (~is_largest).nonzero().flatten()
    found = torch.where(is_largest[order], lesser[order % len(lesser)], order)
    places = slice(first) if seed in OF_TWINS else slice(1) if first > 1 else slice(-1, None)
    found[places] = largest[order[places] % len(largest)]
    if seed in OF_TWINS and first < len(order):
        found[first] = (numbers == numbers.min()).nonzero()[0]
    return found


def _with_a_pair(rows: Tensor, dim: int, first: int, seed: int) -> Tensor:
    """Rows of one number each, of which the last one of the first part (the ``first`` rows) and one
    of the second part have equal numbers: the second part's first row, or its last but one in the
    samples OF_TWINS. Rows of one group, or document, may see each other, wherever they are in the
    batch."""
    place = -2 if seed in OF_TWINS else first
    if not has_a_whole_number(rows, dim) or first > rows.numel() - 2:
        return rows
    numbers = rows.flatten().clone()
    numbers[place] = numbers[first - 1]
    return numbers.reshape(rows.shape)


def _with_a_twin(rows: Tensor, dim: int, first: int) -> Tensor:
    """Rows of real numbers, of which the one after the ``first`` ones is moved near the first."""
    found = rows.clone()
    one, other = found.select(dim, 0), found.select(dim, first)
    other.copy_(torch.lerp(one, other, NEAR))
    return found


def _with_other_beginnings(rows: Tensor, example: Tensor, dim: int, first: int) -> Tensor:
    """Rows of several integers or flags each, of which the first one of the second part (after the
    ``first`` ones) and the last one have no number where the first row has it: a model may take a
    number of the first row, or of the last one, for all rows, and of few different numbers two are
    often equal by chance."""
    if rows.is_meta or rows.layout != torch.strided or not rows.numel() or rows.is_complex():
        return rows
    if _has_one_a_row(rows, dim) or has_fractions(rows) or _is_storage(rows):
        return rows
    if _is_constant(example):
        return rows  # see _that_stay
    found, begin = rows.clone(), rows.select(dim, 0)
    for place in {first, rows.shape[dim] - 1} - {0}:
        own = found.select(dim, place)
        own.copy_(torch.where(own == begin, _another(begin, rows, example, dim), own))
    return found


def _another(numbers: Tensor, rows: Tensor, example: Tensor, dim: int) -> Tensor:
    """Other numbers than these, of one row: the next ones of a sample (``rows``); but on an
    accelerator, where each number has to stay at its place, one that the example has there, if it
    has one."""
    if rows.dtype == torch.bool:
        return ~numbers
    if rows.device.type == "cpu":
        known: Tensor = torch.unique(rows)
        return known[(torch.searchsorted(known, numbers.contiguous()) + 1) % len(known)]
    is_other = (example != numbers.unsqueeze(dim)).to(torch.uint8)
    return example.gather(dim, is_other.argmax(dim, keepdim=True)).squeeze(dim)


def has_a_whole_number(tensor: Tensor, dim: int) -> bool:
    """Whether each of several rows has one number, and none of them a fraction."""
    if not _has_one_a_row(tensor, dim) or tensor.is_meta or tensor.is_complex():
        return False
    return not has_fractions(tensor) and not _is_storage(tensor)


def _is_constant(tensor: Tensor) -> bool:
    """Whether all values of a tensor are equal, as those of a mask in which all count."""
    return bool((tensor == tensor.flatten()[0]).all())


def _has_one_a_row(tensor: Tensor, dim: int) -> bool:
    """Whether each of several rows has one number, such as its length."""
    is_strided = tensor.layout == torch.strided
    return is_strided and tensor.numel() == tensor.shape[dim] and tensor.numel() > 1


def _uneven_counts(
    tensors: Sequence[Tensor], dims: Sequence[int | None], level: str
) -> Iterator[Tensor]:
    """What some rows have more of than others, for each tensor that may be a mask or have one."""
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is None or isinstance(tensor, Column) or not tensor.numel() or tensor.is_meta:
            continue
        if tensor.layout != torch.strided or tensor.is_complex() or _is_storage(tensor):
            continue
        found = [~tensor.isfinite()] if tensor.is_floating_point() else []
        is_mixed = level == MIXED and tensor.is_cpu
        if not is_mixed and (not found or _is_mask_of_rows(tensor, dim)):
            found += [tensor == end for end in (tensor.min(), tensor.max())]
        for each in found:
            count = count_of_rows(each, dim)
            if count.min() < count.max():
                yield count


def _is_mask_of_rows(tensor: Tensor, dim: int) -> bool:
    """Whether a floating-point tensor has one number for each row, and no fractions."""
    return tensor.is_floating_point() and has_a_whole_number(tensor, dim)


def count_of_rows(is_met: Tensor, dim: int) -> Tensor:
    """How many values of each row meet a condition, on the CPU. A row of several values that all do
    is as others on average: a loss may be no number for it alone."""
    rows = is_met.detach().movedim(dim, 0).reshape(is_met.shape[dim], -1)
    count = rows.sum(1).float().cpu()
    is_full = count == rows.shape[1]
    some = count[~is_full]
    if some.numel() and bool(some.min() < some.max()):
        count[is_full] = some.mean()
    return count


def _rows_of(column: Column, order: Sequence[int], level: str, draw: torch.Generator) -> Any:
    """The rows of a column in this order, each perturbed by itself, as they may differ in shape."""
    rows = Column([column.tensors[i] for i in order]).detach()
    if level == GIVEN:
        return rows
    return rows.map(lambda row: _perturbed(row, row, 0, level if row.ndim else MOVED, 0, draw))


def spread(tensors: Sequence[Tensor], dims: Sequence[int | None], rows: int) -> list[Tensor]:
    """``rows`` rows of each tensor as they are, from all over the example."""
    batch = batch_size(tensors, dims) or 0
    return picked(tensors, dims, [i * batch // rows for i in range(rows)])


def picked(tensors: Sequence[Any], dims: Sequence[int | None], rows: Sequence[int]) -> list[Any]:
    """The rows of each tensor with these numbers, of which some may be one row, in their order; a
    tensor without a batch dimension as a whole. All are copies, as those of :func:`part`."""
    found: list[Any] = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if isinstance(tensor, Column):
            found.append(Column([tensor.tensors[row] for row in rows]).clone())
        elif dim is None:
            found.append(tensor.clone())
        else:
            found.append(rows_at(tensor, dim, torch.tensor(rows)))
    return found


def part(
    tensors: Sequence[Tensor], dims: Sequence[int | None], start: int, rows: int
) -> list[Tensor]:
    """``rows`` rows of each tensor, from row ``start`` on; a tensor without a batch dimension as a
    whole. All are copies, since a model may write to its inputs."""
    return [
        (tensor if dim is None else tensor.narrow(dim, start, rows)).clone()
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _perturbed(
    rows: Tensor, example: Tensor, dim: int, level: str, first: int, draw: torch.Generator
) -> Tensor:
    """The rows, of which the ``first`` ones are the first part, with other values of the same kind.
    They stay within the range of the example's values, unless these are all equal."""
    if not rows.numel() or rows.is_meta or rows.layout != torch.strided or _is_storage(rows):
        return rows
    if rows.is_complex():
        return rows * (1 + 0.1 * torch.rand(rows.shape, generator=draw)).to(rows.device)
    if rows.is_floating_point():
        is_finite = example.isfinite()
        # Indexing by a mask makes four indices of 64 bits for each element of pictures.
        finite = example if bool(is_finite.all()) else example[is_finite]
        if not finite.numel():
            return rows
        low, high = finite.min(), finite.max()
        if low == high == 1 and example.numel() > 1 and not _has_one_a_row(example, dim):
            # It may be a mask in which all count. (A single number is none.)
            return rows * _that_stay(rows, dim, first, draw).to(rows)
        if low == high or not bool((finite == finite.round()).all()):
            noise = torch.rand(rows.shape, generator=draw).to(rows)
            return _shaken(rows, low, high, noise)
    if level == MIXED or (level == WHOLE and _is_constant(example)):
        return _exchanged(rows, example, dim, first, draw)
    return rows


def _uneven(
    rows: Tensor, example: Tensor, dim: int, level: str, first: int, draw: torch.Generator
) -> Tensor:
    """The rows, less like each other: in each, a share of its own of the floating-point values is
    moved towards the smallest one, but in the samples OF_PARTS_APART those of the ``first`` rows,
    the first part, are moved elsewhere than those of the others. At the level "mixed" such a share
    of the integers and flags is replaced by a few of them: the smallest, the largest, and any other
    one. Rows of a single number stay as they are.

    What a loss computes of a whole row, such as how many of its labels count or how often a class
    occurs, is nearly the same for all rows of many numbers drawn alike; and then nearly any
    function of it is nearly a mean over the rows.
    """
    count = rows.shape[dim]
    if rows.numel() in (0, count) or rows.is_meta or rows.layout != torch.strided:
        return rows
    if rows.is_complex() or _is_storage(rows):
        return rows
    share = torch.tensor([0.9, 0.2, 0.5, 0.0, 0.7])[torch.arange(count) % 5]
    share = share.reshape([count if i == dim else 1 for i in range(rows.dim())])
    if has_fractions(example):
        if draw.initial_seed() in OF_PARTS_APART:
            return _moved_apart(rows, first, dim)
        return _lowered(rows, share.to(rows))
    if level != MIXED or example.device.type != "cpu":  # see _exchanged
        return rows
    flat = example.flatten()
    if _is_constant(example):
        return rows  # see _that_stay
    any_one = flat[torch.randint(flat.numel(), (), generator=draw)]
    few = torch.stack([flat.amin(), flat.amax(), any_one])
    replaced = few[torch.randint(len(few), rows.shape, generator=draw)]
    return torch.where(torch.rand(rows.shape, generator=draw) < share, replaced, rows)


def has_fractions(example: Tensor) -> bool:
    """Whether a tensor holds real numbers that are no integers."""
    if not example.is_floating_point() or _is_storage(example):
        return False
    return bool(((example != example.round()) & example.isfinite()).any())


def _lowered(rows: Tensor, share: Tensor) -> Tensor:
    """Finite values that have been moved towards the smallest of them."""
    is_finite = rows.isfinite()
    least = torch.where(is_finite, rows, torch.inf).min().nan_to_num(posinf=0.0)
    return torch.where(is_finite, torch.lerp(rows, least.expand_as(rows), share), rows)


def _moved_apart(rows: Tensor, first: int, dim: int) -> Tensor:
    """Finite values that have been moved, so that the ``first`` rows have little in common with the
    others: a model may decide something for all rows by their mean, their spread, or the largest of
    their values, and parts of the sample are to decide otherwise then. In the first rows all values
    are nearly one that is smaller than most; in each of the others most are nearly the largest, and
    a share of its own nearly the smallest."""
    is_finite = rows.isfinite()
    finite = rows[is_finite]
    if not finite.numel():
        return rows
    ordered, count = finite.sort().values, rows.shape[dim]
    row = torch.arange(count)
    is_first = (row < first).to(rows.device)
    # Places in a row, of which every fifth, say, gets the smallest value: shares of numbers that
    # are drawn would be others from sample to sample, and so would be the sign of the mean.
    place = torch.arange(rows.numel() // count)
    every = torch.tensor([5, 7, 4, 6, 8])[(row - first) % 5, None]
    is_small = (place + row[:, None]) % every == 0
    shape = rows.movedim(dim, 0).shape
    is_small = is_small.reshape(shape).movedim(0, dim).to(rows.device)
    is_first = is_first.reshape([count if i == dim else 1 for i in range(rows.dim())])
    towards = torch.where(is_small, ordered[0], ordered[-1])
    towards = torch.where(is_first, ordered[len(ordered) // 10], towards)
    by = torch.where(is_first, 0.95, 0.9).to(rows).expand_as(rows)
    return torch.where(is_finite, torch.lerp(rows, towards, by), rows)


def _shaken(rows: Tensor, low: Tensor, high: Tensor, noise: Tensor) -> Tensor:
    """Floating-point values with noise added, within the range from ``low`` to ``high``."""
    if low == high:
        return rows + noise * (low.abs() if low else 1)
    shaken = (rows + (noise - 0.5) * 0.5 * (high - low)).clamp(low, high)
    return torch.where(rows.isfinite(), shaken, rows)


def _with_one_other_row(rows: Tensor, dim: int, draw: torch.Generator) -> Tensor:
    """Flags that are all the same, turned over in one row: then "any" and "all" are something else
    for the part with that row than for the others."""
    turned = torch.zeros_like(rows)
    row = int(torch.randint(rows.shape[dim], (), generator=draw))
    own = turned.select(dim, row)
    own.copy_(torch.randint(2, own.shape, generator=draw))
    own[(0,) * own.ndim] = True
    return rows ^ turned


def _exchanged(
    rows: Tensor, example: Tensor, dim: int, first: int, draw: torch.Generator
) -> Tensor:
    """Integers and flags, each replaced by one that is drawn from all of the example's.

    On an accelerator, where an index out of range makes the process unusable, each is replaced by
    the one that another row has at the same place.
    """
    flat = example.flatten()
    is_constant = _is_constant(example)
    if _has_one_a_row(rows, dim):
        few = _near(flat[0]) if is_constant and example.device.type == "cpu" else flat
        return _numbers_of_rows(rows, few, first, draw)
    if example.device.type != "cpu":
        batch = example.shape[dim]
        index = torch.randint(batch, rows.shape, generator=draw).to(example.device)
        return example.gather(dim, index)
    if is_constant:
        if rows.dtype == torch.bool and draw.initial_seed() not in OF_PARTS_APART:
            return _with_one_other_row(rows, dim, draw)
        other = _near(flat[0])[:2][-1]
        return torch.where(_that_stay(rows, dim, first, draw), rows, other)
    return flat[torch.randint(flat.numel(), rows.shape, generator=draw)]


def _that_stay(rows: Tensor, dim: int, first: int, draw: torch.Generator) -> Tensor:
    """Which of many equal values stay as they are: half of them, and one in each row at least, as
    it may be a mask. In the samples OF_PARTS_APART these are all of the ``first`` rows, the first
    part, and few of the others: whether any one or all count, in a column or at all, is then
    something else for a part than for the whole, of several rows as well."""
    count = rows.shape[dim]
    share = torch.full((count,), 0.5)
    if first and draw.initial_seed() in OF_PARTS_APART:
        share = torch.where(torch.arange(count) < first, 1.0, 0.1)
    each = rows.movedim(dim, 0)
    stays = torch.rand((count, rows.numel() // count), generator=draw) < share[:, None]
    one = torch.randint(stays.shape[1], (count, 1), generator=draw)
    return stays.scatter(1, one, True).reshape(each.shape).movedim(0, dim).to(rows.device)


def _near(number: Tensor) -> Tensor:
    """A few numbers, of which the first is this one, for rows that all have it: smaller ones, as
    they may be lengths of rows that are full, or a mask in which all count, and a larger one would
    be out of the range of a table. None becomes zero that is larger than one, since lengths are
    not; and a negative one, which may say that a label is left out, stays alone."""
    if number.dtype == torch.bool:
        return torch.stack([number, ~number])
    if number.is_floating_point() or number < 0:
        return number.reshape(1)
    others = {0: [1], 1: [0], 2: [1]}.get(int(number), [int(number) - 1, int(number) - 2])
    return torch.tensor([int(number), *others], dtype=number.dtype)


def _numbers_of_rows(rows: Tensor, few: Tensor, first: int, draw: torch.Generator) -> Tensor:
    """A number for each row, drawn from a few, so that they tell the parts apart; but in the sample
    OF_LABELS those of the first and of the last row are any two of them."""
    order = torch.randint(len(few), (rows.numel(),), generator=draw)
    known = _ordered(few.cpu())
    different, seed = torch.unique(known), draw.initial_seed()
    if len(different) > 1 and seed == OF_LABELS:
        one, other = torch.randperm(len(different), generator=draw)[:2]
        order[0], order[-1] = (
            int((known == different[number]).nonzero()[0]) for number in (one, other)
        )
    elif len(different) > 1:
        order = _apart(order, known, first, seed)
    return few[order.to(few.device)].reshape(rows.shape)
