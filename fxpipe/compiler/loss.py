"""The loss of a training step: the result of the user's ``loss_fn(output, target)``, or the loss
that the model itself returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree, saved_tensors_hooks
from fxpipe.ir.given import shown
from fxpipe.ir.structure import Structure
from fxpipe.meaning.loss import own_loss
from fxpipe.planning.loss import SavedByLoss, saved_by
from fxpipe.runtime.microbatch import ListOfRows
from fxpipe.runtime.random import alone

LossFunction = Callable[[Any, Any], Tensor]
LossWeightFunction = Callable[..., Any]


class Loss(nn.Module):
    """A module that computes the loss from the output of a graph and the leaves of a target.

    Args:
        loss_fn: the user's function of output and target. None: the model returns its loss, as its
            output, as the first element of a tuple, or under the name ``loss``.
        rebuild: puts the graph's output into the structure that the model returns.
        nesting: the structure of the target.

    ``saved`` says what the loss has saved for its backward, once it has been computed. What it will
    save is known earlier where a target is (:mod:`fxpipe.planning.loss`).
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
        value, self.saved = saved_by(self._of, output, target)
        return value

    def _of(self, output: Any, target: Sequence[Any]) -> Any:
        output = self.rebuild(output)
        whole = self.nesting.fill(target)
        try:
            with alone():
                return self.call(output, whole)  # type: ignore[misc]
        except Exception as error:
            if whole is None:
                error.add_note(_without_target("loss_fn"))
            error.add_note(_given(output, whole))
            raise


def _without_target(function: str) -> str:
    return (
        f"no target= was given, so that {function} was called with None for it: give one, as in "
        "pipe.step(x, target=y)"
    )


def _given(output: Any, target: Any) -> str:
    """What a ``loss_fn`` that has failed was given, as the caller sees the mini-batch only."""
    of_target = "" if target is None else f", and the target is {shown(target)}"
    return (
        "in fxpipe: loss_fn is called for each micro-batch; here the output is "
        f"{shown(output)}{of_target}"
    )


class LossWeight(nn.Module):
    """A module that computes the weight of a micro-batch's loss.

    Args:
        function: the user's ``loss_weight``.
        fill: makes the arguments of ``function``, positional and named ones, from the tensors of a
            micro-batch: of its target, or of its inputs if the model returns its loss.
        of_target: whether it is those of the target.
    """

    def __init__(
        self,
        function: LossWeightFunction,
        fill: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
        of_target: bool = False,
    ) -> None:
        super().__init__()
        # A lambda, so that a function that is a module does not become a submodule.
        self.call = lambda *args, **kwargs: function(*args, **kwargs)
        self.fill, self.of_target = fill, of_target

    def forward(self, *leaves: Any) -> Any:
        """The weight of a micro-batch."""
        args, kwargs = self.fill(leaves)
        try:
            with alone(), torch.no_grad():
                return self.call(*args, **kwargs)  # type: ignore[no-untyped-call]
        except Exception as error:
            if self.of_target and args == (None,):
                error.add_note(_without_target("loss_weight"))
            raise


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
            TypeError: for an array of another library, which would not be split, and for an
                iterator, which the loss of the first micro-batch would use up.
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
            try:
                return [Target.of(target, batch)]
            except ValueError as error:
                if type(target) in (list, tuple):
                    error.add_note(
                        f"the target is a {type(target).__name__} of {len(target)} elements: to be "
                        f"cut between them, it would have to have {batch}, one for each row"
                    )
                raise
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
            TypeError: for an array of another library, which would not be split, and for an
                iterator, which the loss of the first micro-batch would use up.
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


@dataclass(frozen=True)
class MiniBatch:
    """What a training step is called with: the inputs of the model, and the target beside them."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model, positional and named ones."""
    readings: Sequence[Target]
    """The ways in which the target may be cut into micro-batches, the likeliest first."""
    target: Any = None
    """The target that the user has given to the step, not taken apart; None: there is none."""


def _along_another(target: Tensor, batch: int) -> str:
    """What to say of a target of which another dimension than the first is as large as the batch;
    "" if there is none."""
    dim = next((dim for dim, size in enumerate(target.shape) if size == batch), None)
    if dim is None:
        return ""
    return (
        f"Its dimension {dim} is: if the batch is along that one, give it transposed, by "
        f"target.transpose(0, {dim}), and let loss_fn take it so. "
    )


def _is_split(leaf: Any, batch: int | None) -> bool:
    if isinstance(leaf, ListOfRows):
        return True
    if isinstance(leaf, Tensor) and leaf.is_meta:
        raise ValueError('the target has no values: it is on the device "meta"; give one that has')
    if isinstance(leaf, Tensor) and leaf.layout != torch.strided and batch is not None:
        raise ValueError(
            f"the target has a tensor of layout {leaf.layout}, which is not split into "
            "micro-batches: give it dense, by target.to_dense()"
        )
    if isinstance(leaf, Iterator):
        raise TypeError(
            f"the target has a {type(leaf).__name__}, which can be gone through only once, and the "
            "loss is computed for each micro-batch: give a list or a tuple"
        )
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
            f"{batch} rows: its first dimension must be as large. {_along_another(leaf, batch)}"
            "Where rows of several lengths are joined in it, pad them to one length, or give a "
            "list with one element for each row. What all rows share is the loss function's: an "
            "attribute, or an argument by functools.partial(loss_fn, weight=weight). "
            "(pipe.explain() says along which dimensions of the inputs these rows are; in_dims= "
            "says it otherwise.)"
        )
    return True
