"""Cost: the pass estimates the time and the memory that each node of the model graph takes, so that
the cut can balance the stages.

::

    conv  ──  relu  ──  linear            conv:   4.1 ms, 1.2 MB of parameters, 3 MB kept, 2 MB out
                                          relu:   0.2 ms, 0, 2 MB, 2 MB ...

No numbers are computed: nodes run on fake tensors, forward and backward, and the FLOPs and bytes
that they would compute and move are counted. Of several nodes that do the same (the same operator,
shapes, dtypes and settings) only one is run.

Measured and given costs, which replace the times of this pass, are in
:mod:`passes.cost.measured` and :mod:`passes.cost.given`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxpipe import ops
from fxpipe.ir._torch import pytree
from fxpipe.ir.cost import Cost, batch_bytes, copies_of, times_done
from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.errors import is_the_models
from fxpipe.ir.graph import (
    COST,
    LARGER,
    NO_BACKWARD,
    SAVED,
    VALUE,
    WORKSPACE,
    attribute,
    mutable,
    stage_nodes,
)
from fxpipe.ir.tensors import memory_bytes, memory_of, tensor_bytes, tensors_of
from fxpipe.ir.workspace import NodeWorkspace
from passes.common.fakes import FakeInterpreter, backward_edges, fake_mode
from passes.common.signature import signature
from passes.cost.load import Counting, Load

WORK = "work"  # key of ``node.meta``: the node's :class:`Work`
BACKWARD = 2  # where a backward cannot be counted, it is taken for so many times its forward
ADAM = 2  # how many tensors of a parameter's size Adam keeps for it


@dataclass(frozen=True)
class AnalyticCost:
    """Model graph with fake values (pass "alias") → the same, with a :class:`Cost` at each node.

    ``meta["saved"]`` lists the memories of the tensors that a node saves for its backward. A memory
    that several nodes save counts to ``activation_bytes`` of the first of them.

    Args:
        device: the description of the device, by which times are estimated.
        optimizer_states: how many tensors of a parameter's size the optimizer keeps for it: 2 for
            Adam, 1 for SGD with momentum.
        chunks: the number of micro-batches. A cost is that of a mini-batch: each micro-batch
            launches every operator, and a tensor that is not divided among the micro-batches (pass
            "rows") is computed and saved once for each.
        training: whether there are backwards. If not, they take no time, parameters have no
            gradients and no states of an optimizer, and what a call keeps to its end, in place of
            activations, are its outputs.
    """

    name: ClassVar[str] = "cost"
    device: DeviceSpec = CPU_CORE
    optimizer_states: float = ADAM
    chunks: int = 1
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        runs = _Runs(gm, self.chunks, self.training)
        counted: set[int] = set()  # tensors and memories that an earlier node has been charged for
        for node in stage_nodes(gm.graph):
            work = runs.of(node).repeated(times_done(node), self.chunks)
            node.meta[WORK] = work
            node.meta[SAVED] = tuple(runs.saved(node, work).items())
            node.meta[WORKSPACE] = work.workspace
            tensors = {id(t): t for t in _state(gm, node) if id(t) not in counted}
            memories = {m: size for m, size in node.meta[SAVED] if m not in counted}
            counted.update(tensors, memories)
            trained = {i: t for i, t in tensors.items() if t.requires_grad}
            parameters = [t for t in tensors.values() if isinstance(t, nn.Parameter)]
            gradients = tensor_bytes(list(trained.values())) if self.training else 0
            node.meta[COST] = Cost(
                forward_s=work.forward.seconds(self.device),
                backward_s=work.backward.seconds(self.device),
                param_bytes=tensor_bytes(parameters),
                activation_bytes=sum(memories.values()),
                output_bytes=batch_bytes(node),
                flops=work.forward.flops,
                backward_flops=work.backward.flops,
                gradient_bytes=gradients,
                optimizer_bytes=round(gradients * self.optimizer_states),
                buffer_bytes=tensor_bytes(list(tensors.values())) - tensor_bytes(parameters),
            )
        return gm


@dataclass
class Work:
    """The work of a node, for a mini-batch.

    ``saved_inputs`` and ``saved_outputs`` are the indices, among the node's input and output
    tensors, of those that it saves for the backward; ``saved_inside`` has the bytes of each further
    saved tensor. ``edges`` says how many edges of the autograd graph lead to each of its inputs,
    ``gradients`` how large their gradients are, and ``weights`` how large the largest gradient of a
    parameter is, times the number of micro-batches (:class:`fxpipe.ir.workspace.NodeWorkspace`).
    """

    forward: Load
    backward: Load
    saved_inputs: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    saved_inside: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    weights: int = 0

    @property
    def workspace(self) -> NodeWorkspace:
        """The memory that the node needs while it runs, for a mini-batch."""
        return NodeWorkspace(
            self.forward.memory, self.backward.memory, self.gradients, self.weights
        )

    def repeated(self, count: int, chunks: int) -> Work:
        """The work of a node that is done ``count`` times in a mini-batch, and launched once for
        each of ``chunks`` micro-batches."""
        if chunks == 1:
            return self
        forward, backward = (load.times(count, chunks) for load in (self.forward, self.backward))
        gradients = tuple(size * count if size > 0 else size for size in self.gradients)
        return replace(
            self,
            forward=forward,
            backward=backward,
            gradients=gradients,
            weights=self.weights * chunks,
        )

    def seconds(self, device: DeviceSpec) -> float:
        """The seconds of forward and backward together, by the roofline model."""
        return self.forward.seconds(device) + self.backward.seconds(device)


def relative_time(node: fx.Node, device: DeviceSpec, reference: DeviceSpec) -> float:
    """How many times as long a node takes on ``device`` as on ``reference``."""
    work: Work | None = node.meta.get(WORK)
    seconds = 0.0 if work is None else work.seconds(reference)
    return 1.0 if work is None or not seconds else work.seconds(device) / seconds


def edges_to(node: fx.Node) -> Counter[fx.Node]:
    """How many edges of the autograd graph lead from a node to each node that it uses: the number
    of gradients that it gives to each.

    For a parameter that pass "shared" hands to a module the number is not known: it is given as 2,
    which stands for "several".
    """
    work: Work | None = node.meta.get(WORK)
    places = iter(() if work is None else work.edges)
    args: Any = node.args
    found: Counter[fx.Node] = Counter()
    if node.target is ops.call:
        _, values, *args = args
        found.update({value: 2 for value in values.values()})
    for leaf in pytree.tree_leaves((args, node.kwargs)):
        if isinstance(leaf, fx.Node):
            for _ in tensors_of(leaf.meta.get(VALUE)):
                found[leaf] += next(places, 1)
    return found


class _Runs:
    """Runs nodes on fake tensors; of several nodes that do the same, only one is run.

    ``chunks``: the number of micro-batches; ``training``: whether there are backwards.
    """

    def __init__(self, gm: fx.GraphModule, chunks: int, training: bool) -> None:
        self.gm, self.chunks, self.training = gm, chunks, training
        self.interpreter = FakeInterpreter(gm, fake_mode(gm.graph))
        self.known: dict[Any, Work] = {}
        self.inside = 0  # memories that hold no node's value get the numbers -1, -2, ...
        self.copies: dict[int, int] = {}  # how many of each memory there are in a mini-batch
        self.outputs = set(gm.graph.output_node().all_input_nodes)
        self.given = {
            memory_of(tensor)
            for node in gm.graph.nodes
            if node.op in ("placeholder", "get_attr")
            for tensor in tensors_of(node.meta.get(VALUE))
        }
        for node in gm.graph.nodes:
            if LARGER in node.meta:
                self._count(node)

    def _count(self, node: fx.Node) -> None:
        pairs = zip(tensors_of(node.meta[VALUE]), tensors_of(node.meta[LARGER]), strict=False)
        for one, larger in pairs:
            is_divided = memory_bytes(one) != memory_bytes(larger)
            self.copies.setdefault(memory_of(one), 1 if is_divided else self.chunks)

    def of(self, node: fx.Node) -> Work:
        """The work of one node, counted by running it on fake tensors."""
        key = signature(self.gm, node)
        if key is None:
            return self._run(node)
        key = key, tuple(map(copies_of, node.all_input_nodes))
        if key not in self.known:
            self.known[key] = self._run(node)
        return self.known[key]

    def saved(self, node: fx.Node, work: Work) -> dict[int, int]:
        """The memories that a node saves for its backward, other than those of parameters and
        buffers, and their bytes. If there are no backwards: the memories of its outputs, which are
        kept to the end of the call if they are the model's."""
        if not self.training:
            made = tensors_of(node.meta[VALUE]) if node in self.outputs else []
            sizes = {memory_of(t): memory_bytes(t) for t in made if memory_of(t) not in self.given}
            return {memory: size * self.copies.get(memory, 1) for memory, size in sizes.items()}
        inputs, outputs = _inputs(node), tensors_of(node.meta[VALUE])
        shown = [inputs[i] for i in work.saved_inputs] + [outputs[i] for i in work.saved_outputs]
        state = [n for n in node.all_input_nodes if n.op == "get_attr"]
        own = {memory_of(t) for t in _values(state)}
        found = {memory_of(t): memory_bytes(t) for t in shown}
        found = {memory: size * self.copies.get(memory, 1) for memory, size in found.items()}
        for size in work.saved_inside:
            self.inside -= 1
            found[self.inside] = size
        return {memory: size for memory, size in found.items() if memory not in own}

    def _run(self, node: fx.Node) -> Work:
        backward, gradients, weights = Load(), tuple[int, ...](), 0
        with self.interpreter.mode, torch.set_grad_enabled(self.training):
            ahead = self._forward(node, VALUE)
            edges = Counter(
                id(f.variable) if hasattr(f, "variable") else f
                for f in backward_edges(ahead.outputs)
            )
            if self.training and NO_BACKWARD not in node.meta:
                try:
                    gradients, weights = _run_backward(ahead, backward)
                except Exception as error:  # a user's backward may raise anything on fake tensors
                    if not is_the_models(error):
                        raise
                    # The backward may need values, or run the module on real tensors: its load is
                    # estimated from the forward's.
                    backward = ahead.load.times(BACKWARD)
        where_in = {memory_of(t): i for i, t in reversed(list(enumerate(ahead.inputs)))}
        where_out = {memory_of(t): i for i, t in reversed(list(enumerate(ahead.outputs)))}
        return Work(
            ahead.load,
            backward,
            tuple(where_in[m] for m in ahead.kept if m in where_in),
            tuple(where_out[m] for m in ahead.kept if m not in where_in and m in where_out),
            self._inside(node, ahead),
            tuple(edges[end] for end in ahead.ends),
            gradients,
            weights,
        )

    def _forward(self, node: fx.Node, values: str) -> _Forward:
        """Run the forward of a node on fake tensors. ``values`` is the key of the metadata in which
        its inputs are: VALUE for those of the example's batch, LARGER for those of a larger one."""
        interpreter = self.interpreter
        wants = iter([t.requires_grad for t in _inputs(node)])
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: n.meta.get(values, n.meta.get(VALUE))
        )
        leaves: list[Tensor] = []
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda tensor: _fresh(tensor, leaves, next(wants, False)), (args, kwargs)
        )
        args, kwargs = mutable((args, kwargs))
        inputs = tensors_of((args, kwargs))
        ends = [tensor.grad_fn or id(tensor) for tensor in inputs]  # ahead of writes
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[memory_of(tensor)] = memory_bytes(tensor)
            return tensor

        load = Load()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, Counting(load):
            result = getattr(interpreter, node.op)(node.target, args, kwargs)
        parameters = [interpreter.fake(t) for t in _state(self.gm, node)]
        for parameter in parameters:
            kept.pop(memory_of(parameter), None)
        return _Forward(load, leaves, inputs, ends, tensors_of(result), parameters, kept)

    def _inside(self, node: fx.Node, ahead: _Forward) -> tuple[int, ...]:
        """The bytes of each tensor, beside inputs and outputs, that a node saves for its backward,
        for a mini-batch. A tensor is saved once for each micro-batch if its size does not depend on
        the batch size."""
        sizes = ahead.inside
        if not sizes or not any(LARGER in source.meta for source in node.all_input_nodes):
            return sizes
        with self.interpreter.mode, torch.set_grad_enabled(self.training):
            others = self._forward(node, LARGER).inside
        if len(others) != len(sizes):
            return sizes
        return tuple(
            size * self.chunks if size == other else size
            for size, other in zip(sizes, others, strict=True)
        )


@dataclass
class _Forward:
    """The forward of a node on fake tensors, with all tensors that its backward needs."""

    load: Load
    leaves: list[Tensor]
    inputs: list[Tensor]
    ends: list[Any]  # for each input the autograd node that made it; of a leaf, its id
    outputs: list[Tensor]
    parameters: list[Tensor]
    kept: dict[int, int]  # the bytes of each memory that is saved for the backward

    @property
    def inside(self) -> tuple[int, ...]:
        """The bytes of each tensor that is saved for the backward and is no input or output."""
        shown = {memory_of(t) for t in (*self.inputs, *self.outputs)}
        return tuple(size for memory, size in self.kept.items() if memory not in shown)


def _run_backward(ahead: _Forward, load: Load) -> tuple[tuple[int, ...], int]:
    """Run the backward of a node. Returns the bytes of the gradients of its inputs: 0 where there
    is none, -1 for one of the node's own gradients; and those of the largest gradient of a
    parameter. These are added to what is there one by one, so that only one is there at a time.
    They are not part of the load's memory, as they are as large for few rows as for many."""
    given = [t for t in ahead.outputs if t.grad_fn is not None]
    inputs = [*ahead.leaves, *ahead.parameters]
    wanted = list({id(t): t for t in inputs if t.requires_grad}.values())
    if not (given and wanted):
        return (), 0
    gradients = [torch.empty_like(t) for t in given]
    with Counting(load):
        found = torch.autograd.grad(given, wanted, gradients, allow_unused=True)
    same = set(map(memory_of, gradients))
    sizes = {
        id(tensor): -1 if memory_of(grad) in same else memory_bytes(grad)
        for tensor, grad in zip(wanted, found, strict=True)
        if grad is not None
    }
    of_parameters = [max(sizes.get(id(t), 0), 0) for t in ahead.parameters]
    load.memory = max(0, load.memory - sum(of_parameters))
    return tuple(sizes.get(id(t), 0) for t in ahead.leaves), max(of_parameters, default=0)


def _fresh(tensor: Tensor, leaves: list[Tensor], wants_gradient: bool) -> Tensor:
    """An input for a node that may write to it: a clone of a new autograd leaf, or, for a
    parameter, the parameter itself. The leaf, which gets the gradient, is added to ``leaves``."""
    if isinstance(tensor, nn.Parameter):
        leaves.append(tensor)
        return tensor
    leaves.append(tensor.detach().requires_grad_(wants_gradient))
    return leaves[-1].clone()


def _values(nodes: Sequence[fx.Node]) -> list[Tensor]:
    return tensors_of([node.meta.get(VALUE) for node in nodes])


def _inputs(node: fx.Node) -> list[Tensor]:
    return tensors_of(fx.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE]))


def _state(gm: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """The parameters and buffers that a node uses."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    found: list[Tensor] = []
    for each in node.all_input_nodes:
        if each.op == "get_attr":
            value = attribute(gm, str(each.target))
            is_module = isinstance(value, nn.Module)
            own = [*value.parameters(), *value.buffers()] if is_module else [value]
            found += [tensor for tensor in own if isinstance(tensor, Tensor)]
    return found
