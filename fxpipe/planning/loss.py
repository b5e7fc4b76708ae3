"""What a loss saves for its backward, and how long it takes, known ahead of the first step: the
loss function runs once on tensors without values, as the output and the target are tensors with
shapes.

::

    output (fake) ──┐
                    ├── loss_fn ── loss        saved: log-probabilities, 4 bytes x rows x classes
    target (fake) ──┘

The loss runs in the last stage, so that a language model's last device holds, beside its layers,
what a cross entropy keeps of all logits, and is busy for as long as it takes to read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    gradient_kinds,
    pytree,
)
from fxpipe.ir.autograd import next_edges, reached
from fxpipe.ir.cost import copies_of, memories_of
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.graph import PRODUCTS, SAVED, STAGE, VALUE, mutable, stage_nodes
from fxpipe.ir.load import Counting, Load
from fxpipe.ir.somewhere import Somewhere
from fxpipe.ir.structure import map_tensors
from fxpipe.ir.tensors import memory_bytes, memory_of, no_scalar, tensor_bytes, tensors_of
from fxpipe.meaning.loss import own_loss
from fxpipe.meaning.loss_state import left_as_it_was
from fxpipe.planning.estimates import LossMemory
from fxpipe.runtime.ambient import without_saved_tensors_hooks
from fxpipe.trace.errors import sentence
from fxpipe.trace.patches import prints
from passes.common.fakes import fake_mode

NO_TARGET = "no target is known when the model is cut: give example_target"
"""Why nobody knows what the loss will save, if no target is given ahead of the cut."""


@dataclass(frozen=True)
class SavedByLoss:
    """What a loss has saved for its backward.

    Attributes:
        outputs: the places, among the tensors of the graph's output, of those that it has saved.
        others: the bytes of all else, such as the logarithms of probabilities.
        output_bytes: the bytes of all tensors of the graph's output.
        gradients: the most bytes that are there at the same time in the loss's backward, beside
            what the loss has saved. If the backward has not run on tensors without values, these
            are the gradients that one of its functions takes and gives.
        forward, backward: the work of the loss and of its backward, for the output in one piece;
            none if it has not run on tensors without values.
        slower: how many times as long as is estimated from their work they have taken where they
            were measured: the loss, and its backward.
    """

    outputs: frozenset[int]
    others: int
    output_bytes: int
    gradients: int
    forward: Load = field(default_factory=Load, hash=False)
    backward: Load = field(default_factory=Load, hash=False)
    slower: tuple[float, float] = (1.0, 1.0)

    def known_by(self, other: SavedByLoss) -> SavedByLoss:
        """This, with the gradients and the work that another one has, of an output of another size
        maybe."""
        times = self.output_bytes / (other.output_bytes or 1)
        return replace(
            self,
            gradients=max(self.gradients, round(times * other.gradients)),
            forward=of_rows(other.forward, times),
            backward=of_rows(other.backward, times),
            slower=other.slower,
        )

    def seconds(self, part: float, device: DeviceSpec) -> tuple[float, float]:
        """The seconds that the loss of a part of the output takes on a device, and its backward."""
        loads = of_rows(self.forward, part), of_rows(self.backward, part)
        forward, backward = (
            times * load.seconds(device) for times, load in zip(self.slower, loads, strict=True)
        )
        return forward, backward

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


def saved_by(
    call: Callable[[Any, Sequence[Any]], Any], output: Any, target: Sequence[Any]
) -> tuple[Any, SavedByLoss]:
    """Call a loss with the output of a graph and the leaves of a target. Returns the loss, and what
    it has saved."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = call(output, target)
    found = SavedByLoss.of(value, saved, output, target)
    saved.clear()
    return value, found


def without_values(target: Any) -> Any:
    """A target with its tensors on "meta"."""
    return None if target is None else map_tensors(lambda t: t.detach().to("meta"), target)


@dataclass(frozen=True)
class ExpectedLoss:
    """A loss function, with a target like those that it will get.

    Args:
        function: the user's function of output and target.
        target: the target of a mini-batch. Its tensors may be on "meta".
        rebuild: puts a graph's output into the structure that the model returns.
        rows: how many rows of the target belong to the output of the graph, and how many there are
            in all: they differ where the graph is that of one micro-batch.
    """

    function: Callable[[Any, Any], Any]
    target: Any
    rebuild: Callable[[Any], Any]
    rows: tuple[int, int] = (0, 0)

    @prints()
    def saved(self, graph: fx.Graph) -> SavedByLoss | str:
        """What the loss saves, given the output of a model graph; or in words why that is not
        known. The function runs on fake tensors, which have no values: it may need some."""
        try:
            return self.computed(graph)[1]
        except Exception as error:  # it is the user's function, which may raise anything
            return _not_counted(error)

    def computed(self, graph: fx.Graph) -> tuple[Any, SavedByLoss]:
        """The loss, as a tensor without a value, and what it saves. Raises what the function raises
        for fake tensors.

        What it changes is put back.
        """
        mode = fake_mode(graph) or Somewhere()
        known, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # weights of classes
        try:
            with (
                left_as_it_was(self.function, has_values=False)(),
                mode,
                torch.enable_grad(),
                without_saved_tensors_hooks(),
            ):
                output = pytree.tree_map_only(Tensor, _fresh, output_of(graph))
                devices = [tensor.device for tensor in tensors_of(output)]
                target = map_tensors(lambda t: self._part(t, mode, devices), self.target)
                with Counting(forward := Load()):
                    value, found = saved_by(self._call, output, [target])
                backward = _backward(value, output)
                most = max(found.gradients, backward.memory)
                return value, replace(found, gradients=most, forward=forward, backward=backward)
        finally:
            mode.allow_non_fake_inputs = known

    def call(self, output: Any, target: Any) -> Any:
        """What the user's loss function returns for what a model graph has given, in the structure
        that the model returns, and for a target."""
        return self.function(self.rebuild(output), target)

    def _call(self, output: Any, leaves: Sequence[Any]) -> Any:
        return self.call(output, leaves[0])

    def _part(self, tensor: Tensor, mode: Any, devices: Sequence[torch.device]) -> Tensor:
        """The fake of a tensor of the target, on the device of the output, with those of its rows
        that belong to this output."""
        some, whole = self.rows
        fake: Tensor = mode.from_tensor(tensor.detach(), static_shapes=True)
        fake = fake.to(devices[0]) if devices else fake
        return fake[:some].clone() if whole and fake.ndim and len(fake) == whole else fake


def _not_counted(error: Exception) -> str:
    """In words why a loss that raises an error on fake tensors cannot be counted: at which line,
    and what to do."""
    why = f"loss_fn does not run on tensors without values: {sentence(error)}"
    leave_room = (
        "leave room for it on the lane of the last stage, by a smaller figure for that lane, as in "
        'memory=["20GiB", "18GiB"]'
    )
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"{why}; what it computes there depends on the values of tensors: {leave_room}"
    if isinstance(error, RuntimeError) and "devices" in str(error):
        return (
            f"{why}: bring the tensors that are its own to the device of the output, as in "
            "torch.arange(n, device=output.device) or weight.to(output.device); or give those that "
            "have an element for each row in the target, which is brought there; or " + leave_room
        )
    return f"{why}: {leave_room}"


def no_loss(graph: fx.Graph, rebuild: Callable[[Any], Any]) -> str:
    """What a model returns in place of a loss: empty if its output, or the part of it that would be
    the loss, is a scalar tensor. ``rebuild`` is as for :class:`ExpectedLoss`."""
    return no_scalar(taken_for_loss(graph, rebuild))


def taken_for_loss(graph: fx.Graph, rebuild: Callable[[Any], Any]) -> Any:
    """What a training step takes for the loss where there is no ``loss_fn``: the output of a model
    graph, or the part of it that would be the loss, with fake tensors. ``rebuild`` is as for
    :class:`ExpectedLoss`."""
    return own_loss(rebuild(output_of(graph)))


def has_loss(
    loss_fn: Any, graph: fx.Graph, rebuild: Callable[[Any], Any], rows: int | None
) -> bool:
    """Whether a training step has a loss: by a ``loss_fn``, or since the model returns what can be
    one, for so many rows. ``rebuild`` is as for :class:`ExpectedLoss`."""
    return loss_fn is not None or is_loss(taken_for_loss(graph, rebuild), rows)


def is_loss(found: Any, rows: int | None) -> bool:
    """Whether what is taken for the loss can be one, as far as its shape tells: a scalar, or a loss
    for each of so many rows, as it is where each micro-batch has one row."""
    return isinstance(found, Tensor) and found.numel() in (1, rows)


def output_of(graph: fx.Graph) -> Any:
    """The output of a model graph, with its fake tensors."""
    return mutable(fx.map_arg(graph.output_node().args[0], lambda node: node.meta[VALUE]))


def _fresh(tensor: Tensor) -> Tensor:
    """A tensor on the same memory, without history. As an output of the pipeline it has one."""
    wants = tensor.requires_grad
    fresh = tensor.detach().requires_grad_(wants)
    return fresh.view_as(fresh) if wants else fresh


def of_rows(load: Load, part: float) -> Load:
    """The load of a part of the rows, for which as many operators are launched."""
    return replace(load, flops=round(load.flops * part), bytes=round(load.bytes * part))


def loss_seconds(
    saved: SavedByLoss | None, graph: fx.Graph, chunks: int, device: DeviceSpec
) -> tuple[float, float]:
    """The seconds that the loss of a micro-batch takes on a device, and its backward. ``graph`` is
    the model graph; None: nothing is known of the loss."""
    if saved is None:
        return 0.0, 0.0
    whole = sum(size for _, size in _output_sizes(graph))
    return saved.seconds(whole / chunks / (saved.output_bytes or 1), device)


def _output_sizes(graph: fx.Graph) -> list[tuple[Tensor, int]]:
    """The tensors of a graph's output, each with its bytes for a mini-batch."""
    output = graph.output_node()
    copies = {
        id(tensor): count
        for node in output.all_input_nodes
        for tensor, count in zip(tensors_of(node.meta[VALUE]), copies_of(node), strict=True)
    }
    return [(t, tensor_bytes(t) * copies[id(t)]) for t in tensors_of(output_of(graph))]


def loss_memory(saved: SavedByLoss | None, graph: fx.Graph) -> LossMemory:
    """The memory that a loss takes for a mini-batch beside what the last stage saves. ``graph`` is
    the model graph, which has been cut, with costs. None: nothing is known of the loss."""
    if saved is None:
        return LossMemory()
    given = _output_sizes(graph)
    times = sum(size for _, size in given) / (saved.output_bytes or 1)
    kept = [given[i] for i in saved.outputs]
    nodes = list(stage_nodes(graph))
    last = max(node.meta[STAGE] for node in nodes)
    nodes = [node for node in nodes if node.meta[STAGE] == last]
    known = {memory for node in nodes for memory, _ in node.meta.get(SAVED, ())}
    products = {memories_of(node)[i][0] for node in nodes for i in node.meta.get(PRODUCTS, ())}
    memories = {
        id(tensor): memory
        for node in graph.output_node().all_input_nodes
        for tensor, (memory, _) in zip(tensors_of(node.meta[VALUE]), memories_of(node), strict=True)
    }

    def within(some: Set[int]) -> float:
        return sum(size for tensor, size in kept if memories[id(tensor)] in some)

    return LossMemory(
        times * saved.others + sum(size for _, size in kept),
        within(known),
        within(products),
        times * saved.gradients,
    )


def _backward(value: Any, output: Any) -> Load:
    """The work of a loss's backward, on tensors without values; none if it has none, or does not
    run on these. What the loss has saved is there afterwards."""
    wanted = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if not wanted or not isinstance(value, Tensor) or value.grad_fn is None or value.numel() != 1:
        return Load()
    try:
        with Counting(load := Load()):
            torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
    except Exception as error:  # a user's backward may raise anything on fake tensors
        if not is_the_models(error):
            raise
        return Load()
    return load


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
