"""The loss of a training step: the result of the user's ``loss_fn(output, target)``, or the loss
that the model itself returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import gradient_kinds, pytree, saved_tensors_hooks
from fxpipe.ir.autograd import next_edges, reached
from fxpipe.ir.structure import Structure
from fxpipe.ir.tensors import memory_bytes, memory_of, tensor_bytes, tensors_of
from fxpipe.meaning.loss import own_loss
from fxpipe.runtime.microbatch import ListOfRows
from fxpipe.runtime.random import alone

LossFunction = Callable[[Any, Any], Tensor]
LossWeightFunction = Callable[..., Any]


@dataclass(frozen=True)
class SavedByLoss:
    """What the loss of a micro-batch has saved for its backward.

    Attributes:
        outputs: the places, among the tensors of the graph's output, of those that it has saved.
        others: the bytes of all else, such as the logarithms of probabilities.
        output_bytes: the bytes of all tensors of the graph's output.
        gradients: the most bytes of gradients that are there at the same time in the loss's
            backward: those that a function takes and gives. What it needs inside is not known.
    """

    outputs: frozenset[int]
    others: int
    output_bytes: int
    gradients: int

    @staticmethod
    def of(value: Any, saved: Iterable[Tensor], output: Any, target: Sequence[Any]) -> SavedByLoss:
        """Sort the tensors that a loss has saved, by where they come from.

        A parameter, on which a penalty depends, is not counted. Of a target only the part that
        belongs to the micro-batch is.
        """
        given = tensors_of(output)
        places = {memory_of(tensor): i for i, tensor in enumerate(given)}
        parts = {memory_of(tensor): tensor_bytes(tensor) for tensor in tensors_of(target)}
        sizes = {
            memory_of(tensor): memory_bytes(tensor)
            for tensor in saved
            if not isinstance(tensor, nn.Parameter)
        }
        return SavedByLoss(
            frozenset(places[memory] for memory in sizes if memory in places),
            sum(parts.get(m, size) for m, size in sizes.items() if m not in places),
            tensor_bytes(given),
            _most_gradients(value) if isinstance(value, Tensor) else 0,
        )


def _most_gradients(value: Tensor) -> int:
    """The most bytes that a function of a value's backward takes and gives."""
    starts = [] if value.grad_fn is None else [value.grad_fn]
    return max(
        (
            sum(map(_gradient_bytes, {node, *(other for other, _ in next_edges(node) if other)}))
            for node in reached(starts)
        ),
        default=0,
    )


def _gradient_bytes(node: Any) -> int:
    """The bytes of the gradients that a node of an autograd graph takes; those of tensors without a
    shape are not known."""
    kinds = gradient_kinds(node)
    return sum(math.prod(s) * dtype.itemsize for s, dtype, _ in kinds if isinstance(s, tuple))


class Loss(nn.Module):
    """A module that computes the loss from the output of a graph and the leaves of a target.

    Args:
        loss_fn: the user's function of output and target. None: the model returns its loss, as its
            output, as the first element of a tuple, or under the name ``loss``.
        rebuild: puts the graph's output into the structure that the model returns.
        nesting: the structure of the target.

    ``saved`` says what the loss saves for its backward, once it has been computed. Nobody can know
    it before: ``loss_fn`` is not called but to train, as it may note what it is called with.
    """

    def __init__(
        self, loss_fn: LossFunction | None, rebuild: Callable[[Any], Any], nesting: Nesting
    ) -> None:
        super().__init__()
        # The lambda keeps a loss_fn that is a module from becoming a submodule here, which would
        # register its parameters with the pipeline.
        self.call = None if loss_fn is None else lambda *args: loss_fn(*args)
        self.rebuild, self.nesting = rebuild, nesting
        self.saved: SavedByLoss | None = None

    def forward(self, output: Any, target: Sequence[Any]) -> Any:
        """The loss of a micro-batch. ``target`` has the leaves of its part of the target."""
        if self.call is None:
            return own_loss(self.rebuild(output))
        if self.saved is not None or saved_tensors_hooks() is not None:
            return self._of(output, target)
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = self._of(output, target)
        self.saved = SavedByLoss.of(value, saved, output, target)
        saved.clear()
        return value

    def _of(self, output: Any, target: Sequence[Any]) -> Any:
        output = self.rebuild(output)
        whole = self.nesting.fill(target)
        try:
            with alone():
                return self.call(output, whole)  # type: ignore[misc]
        except Exception as error:
            if whole is None:
                error.add_note(
                    "step() was given no target=, so that loss_fn was called with None for it: "
                    "give step(x, target=y)"
                )
            raise


class LossWeight(nn.Module):
    """A module that computes the weight of a micro-batch's loss.

    Args:
        function: the user's ``loss_weight``.
        fill: makes the arguments of ``function``, positional and named ones, from the tensors of a
            micro-batch: of its target, or of its inputs if the model returns its loss.
    """

    def __init__(
        self,
        function: LossWeightFunction,
        fill: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> None:
        super().__init__()
        # A lambda, so that a function that is a module does not become a submodule.
        self.call = lambda *args, **kwargs: function(*args, **kwargs)
        self.fill = fill

    def forward(self, *leaves: Any) -> Any:
        """The weight of a micro-batch."""
        args, kwargs = self.fill(leaves)
        with alone(), torch.no_grad():
            return self.call(*args, **kwargs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Nesting:
    """The structure of a target: how it is put together from its leaves.

    An object that pytree does not know is opened, to find its tensors: it becomes several leaves,
    first its structure without the tensors, and then the tensors.
    """

    spec: pytree.TreeSpec
    tensors: tuple[int | None, ...]
    """For each leaf of the spec: how many tensors have been taken out of it; None if it has not
    been opened."""

    @cached_property
    def _is_a_leaf(self) -> bool:
        """Whether the target is a single leaf, such as one tensor."""
        return self.tensors == (None,) and self.spec.is_leaf()

    def fill(self, leaves: Sequence[Any]) -> Any:
        """Put a target together from its leaves."""
        if self._is_a_leaf:
            return leaves[0]
        remaining = iter(leaves)
        parts = []
        for count in self.tensors:
            first = next(remaining)
            parts.append(first if count is None else first.fill(list(islice(remaining, count))))
        return pytree.tree_unflatten(parts, self.spec)


@dataclass(frozen=True)
class Target:
    """A target taken apart: its leaves, its structure, and for each leaf whether it is split into
    micro-batches."""

    leaves: list[Any]
    nesting: Nesting
    has_batch: tuple[bool, ...]

    @staticmethod
    def readings(target: Any, batch: int | None, lists_first: bool) -> list[Target]:
        """The ways in which the target of a mini-batch of ``batch`` rows may be cut into
        micro-batches, the likeliest first: its tensors along their first dimensions; or lists of as
        many elements between these, the outermost such lists or the innermost ones.

        Args:
            lists_first: whether rows are elements of lists in the inputs as well.

        Raises:
            ValueError: if there is none, as a tensor in it has another number of rows.
            TypeError: for an array of another library, which would not be split.
        """

        def is_list(value: Any) -> bool:
            return type(value) in (list, tuple) and len(value) == batch

        def is_innermost(value: Any) -> bool:
            return is_list(value) and not any(map(has_list, value))

        def has_list(value: Any) -> bool:
            return any(map(is_list, pytree.tree_leaves(value, is_leaf=is_list)))

        def is_none(value: Any) -> bool:
            return False

        if not has_list(target):
            return [Target.of(target, batch)]
        found: dict[Nesting, Target] = {}
        refused: list[ValueError] = []
        lists = is_list, is_innermost
        for is_rows in (*lists, is_none) if lists_first else (is_none, *lists):
            try:
                each = Target.of(target, batch, is_rows)
                found.setdefault(each.nesting, each)
            except ValueError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        return list(found.values())

    @staticmethod
    def of(
        target: Any, batch: int | None, is_rows: Callable[[Any], bool] = lambda value: False
    ) -> Target:
        """Take apart the target of a mini-batch of ``batch`` rows.

        Args:
            is_rows: whether a value within the target is a list that is cut between its elements.

        Raises:
            ValueError: if a tensor in it has another number of rows.
            TypeError: for an array of another library, which would not be split.
        """
        parts, spec = pytree.tree_flatten(target, is_leaf=is_rows)
        leaves: list[Any] = []
        counts: list[int | None] = []
        for part in parts:
            if is_rows(part):
                leaves.append(ListOfRows(part))
                counts.append(None)
                continue
            tensors, structure = Structure.of(part)
            is_whole = isinstance(part, Tensor) or not tensors
            leaves += [part] if is_whole else [structure, *tensors]
            counts.append(None if is_whole else len(tensors))
        has_batch = tuple(_is_split(leaf, batch) for leaf in leaves)
        return Target(leaves, Nesting(spec, tuple(counts)), has_batch)


def _is_split(leaf: Any, batch: int | None) -> bool:
    if isinstance(leaf, ListOfRows):
        return True
    if isinstance(leaf, Tensor) and leaf.is_meta:
        raise ValueError('the target has no values: it is on the device "meta"; give one that has')
    is_array = isinstance(leaf, Tensor) or hasattr(leaf, "__array__")
    if batch is None or not is_array or len(leaf.shape) == 0:
        return False
    if not isinstance(leaf, Tensor):
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        raise TypeError(
            f"the target has a {kind} of shape {tuple(leaf.shape)}, which is not split into "
            "micro-batches: give a tensor, as torch.as_tensor makes it"
        )
    if leaf.shape[0] != batch:
        raise ValueError(
            f"the target has a tensor of shape {tuple(leaf.shape)}, and the batch has "
            f"{batch} rows: its first dimension must be as large; or give a list with one element "
            "for each row"
        )
    return True
