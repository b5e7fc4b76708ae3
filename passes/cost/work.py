"""Work: what a node computes, moves and keeps, counted by running it on fake tensors.

::

    linear (2, 8) → (2, 4)      forward:  128 FLOPs; the input, the weight and the result are moved
                                backward: twice as many; it needs the input, which is saved

Of several nodes that do the same (the same operator, shapes, dtypes and settings) only one is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.autograd import leaf_of
from fxpipe.ir.cost import copies_of, memories_of
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.graph import GROWS, NO_BACKWARD, PART, VALUE, attribute, mutable
from fxpipe.ir.load import Counting, Load
from fxpipe.ir.tensors import (
    memory_bytes,
    memory_of,
    new_memory,
    tensor_bytes,
    tensors_of,
    with_tensors,
)
from fxpipe.ir.workspace import NodeWorkspace
from passes.common.fakes import FakeInterpreter, backward_edges, fake_mode
from passes.common.signature import signature

BACKWARD = 2  # where a backward cannot be counted, it is taken for so many times its forward


@dataclass
class Work:
    """The work of a node, for a mini-batch.

    ``saved_inputs`` and ``saved_outputs`` are the indices, among the node's input and output
    tensors, of those that it saves for the backward; ``saved_inside`` has the bytes of each further
    saved tensor. ``products`` are the indices of those outputs that are results of products.
    ``edges`` says how many edges of the autograd graph lead to each of its inputs,
    ``gradients`` how large their gradients are, and ``weights`` how large the largest gradient of a
    parameter is, times the number of micro-batches (:class:`fxpipe.ir.workspace.NodeWorkspace`).
    ``accumulation`` is the work of adding the gradients of parameters of one micro-batch to those
    that are there, and ``rest`` that of the forward without products.
    """

    forward: Load
    backward: Load
    rest: Load
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_inside: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    weights: int = 0
    accumulation: Load = field(default_factory=Load)

    @property
    def workspace(self) -> NodeWorkspace:
        """The memory that the node needs while it runs, for a mini-batch."""
        return NodeWorkspace(
            self.forward.memory, self.backward.memory, self.gradients, self.weights
        )

    def times(self, count: int) -> Work:
        """The work of ``count`` such nodes, one for each part of a mini-batch."""
        loads: Any = {
            name: getattr(self, name).times(count) for name in ("forward", "backward", "rest")
        }
        return replace(
            self,
            **loads,
            saved_inside=tuple(size * count for size in self.saved_inside),
            gradients=tuple(size if size < 0 else size * count for size in self.gradients),
            weights=self.weights * count,
        )

    def seconds(self, device: DeviceSpec) -> float:
        """The seconds of forward and backward together, by the roofline model."""
        return self.forward.seconds(device) + self.backward.seconds(device)


class Runs:
    """Runs nodes of a graph on fake tensors; of several nodes that do the same, only one is run.

    Args:
        chunks: the number of micro-batches.
        times: how many times as many rows the mini-batch has as its first micro-batch, as
            :func:`microbatches` says it.
        training: whether there are backwards.
    """

    def __init__(
        self, gm: fx.GraphModule, chunks: int, times: float | None, training: bool
    ) -> None:
        self.gm, self.chunks, self.times, self.training = gm, chunks, times, training
        self.interpreter = FakeInterpreter(gm, fake_mode(gm.graph), counts=True)
        self.known: dict[Any, Work] = {}
        self.outputs = set(gm.graph.output_node().all_input_nodes)
        self.state = _memories(gm.graph.find_nodes(op="get_attr")).keys()
        self.given = self.state | _memories(gm.graph.find_nodes(op="placeholder")).keys()

    def of(self, node: fx.Node) -> Work:
        """The work of one node, counted by running it on fake tensors."""
        key = signature(self.gm, node)
        if key is None:
            return self._run(node)
        key = key, signature(self.gm, node, lambda n: n.meta.get(PART, n.meta[VALUE]))
        if key not in self.known:
            self.known[key] = self._run(node)
        return self.known[key]

    def saved(self, node: fx.Node, work: Work) -> dict[int, int]:
        """The memories that a node saves for its backward, other than those of parameters and
        buffers that it uses itself, and their bytes. If there are no backwards: the memories of its
        outputs, which are kept to the end of the call if they are the model's."""
        if not self.training:
            made = _memories([node] if node in self.outputs else [])
            return {memory: size for memory, size in made.items() if memory not in self.given}
        inputs, outputs = _input_memories(node), memories_of(node)
        shown = [inputs[i] for i in work.saved_inputs] + [outputs[i] for i in work.saved_outputs]
        found = dict(shown)
        for size in work.saved_inside:
            found[new_memory()] = size
        own = _memories([source for source in node.all_input_nodes if source.op == "get_attr"])
        return {memory: size for memory, size in found.items() if memory not in own}

    def _run(self, node: fx.Node) -> Work:
        with self.interpreter.mode, torch.set_grad_enabled(self.training):
            ahead = larger = self._forward(node, PART)
            ends = ((end, leaf_of(end)) for end in backward_edges(ahead.outputs))
            edges = Counter(end if leaf is None else id(leaf) for end, leaf in ends)
            back = larger_back = self._backward(node, ahead)
            is_known = any(PART in source.meta for source in node.all_input_nodes)
            if is_known and self.times != self.chunks:
                larger = self._forward(node, VALUE)
                larger_back = self._backward(node, larger)
        where_in = {memory_of(t): i for i, t in reversed(list(enumerate(ahead.inputs)))}
        where_out = {memory_of(t): i for i, t in reversed(list(enumerate(ahead.outputs)))}
        counts = self._counts(node)
        return Work(
            self._of_all(ahead.load, larger.load),
            self._of_all(back.load, larger_back.load),
            self._of_all(ahead.rest, larger.rest),
            tuple(where_in[m] for m in ahead.kept if m in where_in),
            tuple(where_out[m] for m in ahead.kept if m not in where_in and m in where_out),
            self._inside(ahead.inside, larger.inside),
            tuple(i for i, t in enumerate(ahead.outputs) if memory_of(t) in ahead.products),
            tuple(edges[end] for end in ahead.ends),
            tuple(
                round(size * count) if size > 0 else size
                for size, count in zip(back.gradients, counts, strict=False)
            ),
            back.weights * self.chunks,
            back.accumulation,
        )

    def _of_all(self, load: Load, larger: Load) -> Load:
        """The load of all micro-batches, from that of the first one and that of the mini-batch in
        one piece, which is asked for only where not all have as many rows. Where the rows of a
        micro-batch are not known, ``load`` is that of the mini-batch, and only launches are as many
        for few rows."""
        if self.times is None:
            return load.of_all(Load(operators=load.operators), 1, self.chunks)
        if self.times == self.chunks:
            return load.times(self.chunks)
        return load.of_all(load.fixed(larger, self.times - 1), self.times, self.chunks)

    def _inside(self, sizes: tuple[int, ...], larger: tuple[int, ...]) -> tuple[int, ...]:
        """The bytes of each tensor, beside inputs and outputs, that a node saves for its backward,
        for a mini-batch. A tensor is saved once for each micro-batch if its size does not depend on
        the batch size."""
        if self.times is None:
            return sizes
        if len(larger) != len(sizes):
            return tuple(round(size * self.times) for size in sizes)
        return tuple(
            round(size * (self.chunks if size == other else self.times))
            for size, other in zip(sizes, larger, strict=True)
        )

    def _counts(self, node: fx.Node) -> list[float]:
        """How many gradients of its size there are in a mini-batch of each tensor that a node is
        given."""
        found: list[float] = []

        def count(source: fx.Node) -> None:
            is_fixed = source.op == "get_attr"
            found.extend(
                self.chunks if is_fixed or copies == self.chunks else self.times or 1
                for copies in copies_of(source)
            )

        fx.map_arg((node.args, node.kwargs), count)
        return found

    def _forward(self, node: fx.Node, values: str) -> _Forward:
        """Run the forward of a node on fake tensors. ``values`` is the key of the metadata in which
        its inputs are: VALUE for those of the example's batch, PART for those of a micro-batch, if
        these are known."""
        interpreter = self.interpreter
        wants = iter([t.requires_grad for t in _inputs(node)])
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: n.meta.get(values, n.meta.get(VALUE))
        )
        leaves: list[Tensor] = []
        args, kwargs = with_tensors(
            lambda tensor: _fresh(tensor, leaves, next(wants, False)), (args, kwargs)
        )
        args, kwargs = mutable((args, kwargs))
        inputs = tensors_of((args, kwargs))
        ends = [tensor.grad_fn or id(tensor) for tensor in inputs]  # ahead of writes
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[memory_of(tensor)] = memory_bytes(tensor)
            return tensor

        load, rest = Load(), Load()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, Counting(load, rest) as counting:
            result = getattr(interpreter, node.op)(node.target, args, kwargs)
        parameters = [interpreter.fake(t) for t in state_of_node(self.gm, node)]
        for parameter in parameters:
            kept.pop(memory_of(parameter), None)
        outputs, products = tensors_of(result), counting.products
        return _Forward(load, rest, leaves, inputs, ends, outputs, parameters, kept, products)

    def _backward(self, node: fx.Node, ahead: _Forward) -> _FakeBackward:
        """Run the backward of a node on fake tensors."""
        if not self.training or NO_BACKWARD in node.meta:
            return _FakeBackward()
        try:
            return _run_backward(ahead)
        except Exception as error:  # a user's backward may raise anything on fake tensors
            if not is_the_models(error):
                raise
        # The backward may need values, or run the module on real tensors: its load is estimated
        # from the forward's.
        trained = [tensor for tensor in ahead.parameters if tensor.requires_grad]
        return _FakeBackward(ahead.load.times(BACKWARD), accumulation=_accumulation(trained))


@dataclass
class _Forward:
    """The forward of a node on fake tensors, with all tensors that its backward needs."""

    load: Load
    rest: Load  # of operators other than products
    leaves: list[Tensor]
    inputs: list[Tensor]
    ends: list[Any]  # for each input the autograd node that made it; of a leaf, its id
    outputs: list[Tensor]
    parameters: list[Tensor]
    kept: dict[int, int]  # the bytes of each memory that is saved for the backward
    products: set[int]  # the memories of results of products

    @property
    def inside(self) -> tuple[int, ...]:
        """The bytes of each tensor that is saved for the backward and is no input or output."""
        shown = {memory_of(t) for t in (*self.inputs, *self.outputs)}
        return tuple(size for memory, size in self.kept.items() if memory not in shown)


@dataclass
class _FakeBackward:
    """The backward of a node on fake tensors.

    Attributes:
        load: without the memory of gradients of parameters, which are added to what is there one by
            one, so that only one is there at a time.
        gradients: the bytes of the gradients of the node's inputs: 0 where there is none, -1 for
            one of the node's own gradients.
        weights: the bytes of the largest gradient of a parameter.
        accumulation: the work of adding the gradients of parameters to those that are there.
    """

    load: Load = field(default_factory=Load)
    gradients: tuple[int, ...] = ()
    weights: int = 0
    accumulation: Load = field(default_factory=Load)


def _run_backward(ahead: _Forward) -> _FakeBackward:
    given = [t for t in ahead.outputs if t.grad_fn is not None]
    inputs = [*ahead.leaves, *ahead.parameters]
    wanted = list({id(t): t for t in inputs if t.requires_grad}.values())
    if not (given and wanted):
        return _FakeBackward()
    gradients, load = [torch.empty_like(t) for t in given], Load()
    with Counting(load):
        found = torch.autograd.grad(given, wanted, gradients, allow_unused=True)
    same = set(map(memory_of, gradients))
    made = {id(t): grad for t, grad in zip(wanted, found, strict=True) if grad is not None}
    sizes = {i: -1 if memory_of(grad) in same else memory_bytes(grad) for i, grad in made.items()}
    parameters = {id(t): t for t in ahead.parameters if id(t) in made}
    of_parameters = [max(sizes[i], 0) for i in parameters]
    load.memory = max(0, load.memory - sum(of_parameters))
    return _FakeBackward(
        load,
        tuple(sizes.get(id(t), 0) for t in ahead.leaves),
        max(of_parameters, default=0),
        _accumulation([t for i, t in parameters.items() if made[i].layout == torch.strided]),
    )


def _accumulation(parameters: Sequence[Tensor]) -> Load:
    """The work of adding gradients of these parameters to those that are there: both are read, and
    the sum is written. A sparse gradient is put beside those that are there, with no work."""
    return Load(bytes=3 * tensor_bytes(parameters), operators=len(parameters))


def microbatches(graph: fx.Graph) -> float | None:
    """How many times as many rows the mini-batch has as its first micro-batch: the number of micro-
    batches, if all have as many. None if the rows of a micro-batch are not known (pass "rows")."""
    for node in graph.find_nodes(op="placeholder"):
        whole, part = (tensors_of(node.meta.get(key)) for key in (VALUE, PART))
        for tensor, other, dims in zip(whole, part, node.meta.get(GROWS, ()), strict=False):
            for dim in dims:
                return float(tensor.shape[dim] / other.shape[dim])
    return None


def _fresh(tensor: Tensor, leaves: list[Tensor], wants_gradient: bool) -> Tensor:
    """An input for a node that may write to it: a clone of a new autograd leaf, or, for a
    parameter, the parameter itself. The leaf, which gets the gradient, is added to ``leaves``."""
    if isinstance(tensor, nn.Parameter):
        leaves.append(tensor)
        return tensor
    leaves.append(tensor.detach().requires_grad_(wants_gradient))
    return leaves[-1].clone()


def _memories(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """The memories of the values of some nodes, and their bytes for a mini-batch."""
    return {memory: size for node in nodes for memory, size in memories_of(node)}


def _input_memories(node: fx.Node) -> list[tuple[int, int]]:
    """The memories of the tensors that a node is given, in order."""
    found: list[tuple[int, int]] = []
    fx.map_arg((node.args, node.kwargs), lambda source: found.extend(memories_of(source)))
    return found


def _inputs(node: fx.Node) -> list[Tensor]:
    return tensors_of(fx.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE]))


def state_of_node(gm: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """The parameters and buffers that a node uses: those of the module that it calls, and those
    that it is given."""
    found: list[Tensor] = []
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        found += [*module.parameters(), *module.buffers()]
    for each in node.all_input_nodes:
        if each.op == "get_attr":
            value = attribute(gm, str(each.target))
            is_module = isinstance(value, nn.Module)
            own = [*value.parameters(), *value.buffers()] if is_module else [value]
            found += [tensor for tensor in own if isinstance(tensor, Tensor)]
    return found
