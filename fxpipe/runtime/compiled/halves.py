"""The compiled backward of a stage in two halves: gradients of the inputs, and of the parameters.

::

    joint graph of a stage              cut in three

    x ── forward ── y                   x ── forward ─┬─ y
           ⋮                                          └─ saved
    grad x ◁─ backward ◁─ grad y        grad x ◁─ first half ◁─ grad y, saved
    grad weight ◁─┘                              └─ kept ── second half ── grad weight

AOTAutograd traces the joint graph, and cuts it into forward and backward. The backward is cut once
more along its data dependencies: the first half computes all that the gradients of inputs depend
on, and the second half the rest (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). The backend
compiles each of the three graphs, so that no Python runs for the operators in a half.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import (
    COMPILED_NODE,
    SymbolicInputs,
    boxed,
    compiled_ahead,
)
from fxpipe.runtime.step import Deferred, Tape, recording

_here = threading.local()  # .deferral: of the compiled backward that is about to run in this thread
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_MASK = -1  # its last argument says which gradients it computes: (input, weight, bias)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compiled_in_halves(
    gm: fx.GraphModule,
    inputs: SymbolicInputs,
    fakes: Sequence[Any],
    later: Collection[int],
    compile: Compile,
) -> Callable[..., Any]:
    """Compile a graph as a function whose backward can run in two halves.

    Args:
        inputs: has the symbols for those sizes of the inputs that may differ from call to call.
        fakes: fake tensors of the inputs.
        later: the indices of those inputs whose gradients are computed in the second half.
        compile: compiles a graph without gradients for example inputs.
    """

    def forward(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return boxed(_compile_without_gradients(graph, examples, inputs, compile))

    def backward(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        halves = cut(graph, later)
        if halves is None:
            return forward(graph, examples)
        first, second = (
            _compile_without_gradients(half, _values(half), inputs, compile)
            for half in (halves.first, halves.second)
        )
        return boxed(_Backward(halves, first, second))

    return compiled_ahead(gm, fakes, forward, backward)


def _values(gm: fx.GraphModule) -> list[Any]:
    """Example inputs of a graph: the fake tensors that it was traced with."""
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _compile_without_gradients(
    gm: fx.GraphModule, examples: Sequence[Any], inputs: SymbolicInputs, compile: Compile
) -> Callable[..., Any]:
    with torch.no_grad(), inputs.compiling():
        return compile(gm, examples)


# ------------------------------------------------------------------------------------- the cut


@dataclass(frozen=True)
class Halves:
    """A backward in two halves.

    Args:
        first, second: the graphs. The first returns gradients, and after them the values that the
            second needs from it.
        takes: for each half, which inputs of the whole backward it takes, by index. Ahead of these
            inputs the second half takes the values that the first returns for it.
        gives: for each half, which gradients of the whole backward it computes, by index.
        count: how many gradients the whole backward returns.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    takes: tuple[list[int], list[int]]
    gives: tuple[list[int], list[int]]
    count: int


def cut(backward: fx.GraphModule, later: Collection[int]) -> Halves | None:
    """Cut the graph of a backward into two halves. None if the second would compute nothing.

    ``later``: which of its results are gradients for the second half to compute, by index.
    """
    _take_convolutions_apart(backward, later)
    grads = _results(backward)
    gives: tuple[list[int], list[int]] = [], []
    for i in grads:
        gives[i in later].append(i)
    now, then = ([grads[i] for i in half] for half in gives)
    early = _needed(now)
    for node in backward.graph.nodes:  # the first half cannot return a tuple: it takes its elements
        if node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    late = _needed(then) - early
    if not late:
        return None
    borders = {source for node in late for source in node.all_input_nodes} | set(then)
    placeholders = backward.graph.find_nodes(op="placeholder")
    kept = [
        node
        for node in backward.graph.nodes
        if node in borders & early and node.op not in ("placeholder", "get_attr")
    ]
    first = _part(backward, placeholders, early, [*now, *kept])
    second = _part(backward, [*kept, *placeholders], late, then)
    takes = _used(first, placeholders), _used(second, placeholders)
    count = len(backward.graph.output_node().args[0])  # type: ignore[arg-type]
    return Halves(first, second, takes, gives, count)


def _results(gm: fx.GraphModule) -> dict[int, fx.Node]:
    """The nodes that a graph returns, by their indices among its results; others are None."""
    results: Any = gm.graph.output_node().args[0]
    return {i: result for i, result in enumerate(results) if isinstance(result, fx.Node)}


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes, and all nodes that they depend on."""
    needed: set[fx.Node] = set()
    front = list(nodes)
    while front:
        node = front.pop()
        if node not in needed:
            needed.add(node)
            front += node.all_input_nodes
    return needed


def _part(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    inside: Collection[fx.Node],
    results: list[fx.Node],
) -> fx.GraphModule:
    """A graph of the nodes ``inside`` that returns ``results``. Its placeholders are those of the
    ``inputs`` that it needs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needed = {source for node in inside for source in node.all_input_nodes} | set(results)
    for node in inputs:
        # Every size is an input, used or not: shapes of other inputs are expressions of the sizes,
        # and a compiler has to know each symbol in them.
        if node in needed or isinstance(node.meta.get("val"), torch.SymInt):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in copies or node.op in ("placeholder", "output"):
            continue
        if node in inside or node.op == "get_attr":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(gm, graph)


def _used(part: fx.GraphModule, placeholders: Sequence[fx.Node]) -> list[int]:
    """The indices of those placeholders of the whole backward that a half has."""
    names = {node.name for node in part.graph.find_nodes(op="placeholder")}
    return [i for i, node in enumerate(placeholders) if node.name in names]


def _take_convolutions_apart(gm: fx.GraphModule, later: Collection[int]) -> None:
    """Replace the backward of each convolution by two nodes: one computes the gradient of its input
    and the other those of its weight and bias, so that the cut can go between them.

    PyTorch has one operator for all three, with a mask that says which of them to compute.
    """
    early = _needed([node for i, node in _results(gm).items() if i not in later])
    for node in gm.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        mask: Any = node.args[_MASK]
        others = [user for user in node.users if user.args[1] != 0]
        if not mask[0] or not any(mask[1:]) or any(user in early for user in others):
            continue
        for wanted, users in (
            ([mask[0], False, False], [user for user in node.users if user.args[1] == 0]),
            ([False, *mask[1:]], others),
        ):
            with gm.graph.inserting_before(node):
                args = (*node.args[:_MASK], wanted)
                half = gm.graph.call_function(_CONVOLUTION, args, node.kwargs)
            half.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, half)
        gm.graph.erase_node(node)


# ------------------------------------------------------------------------------------- at run time


@dataclass(frozen=True)
class _Deferral:
    """The tape that is to run the second half of a compiled backward, and the parameters that get
    their gradients from it, by their indices among the inputs of the compiled function."""

    tape: weakref.ref[Tape]
    parameters: dict[int, nn.Parameter]


class _Backward:
    """The compiled backward: it runs the first half at once, and leaves the second to a tape. If no
    tape is there to run the second half (see :func:`defer_to_tape`), it runs both."""

    def __init__(
        self, halves: Halves, first: Callable[..., Any], second: Callable[..., Any]
    ) -> None:
        self.halves, self.first, self.second = halves, first, second

    def __call__(self, *given: Any) -> list[Any]:
        early, late = self.halves.gives
        results: list[Any] = [None] * self.halves.count
        made = list(self.first(*(given[i] for i in self.halves.takes[0])))
        for i, grad in zip(early, made, strict=False):
            results[i] = grad
        kept = made[len(early) :]
        kept += [given[i] for i in self.halves.takes[1]]
        deferral: _Deferral | None = getattr(_here, "deferral", None)
        _here.deferral = None
        tape = None if deferral is None else deferral.tape()
        if deferral is None or tape is None:
            for i, grad in zip(late, self.second(*kept), strict=True):
                results[i] = grad
            return results
        parameters = [deferral.parameters[i] for i in late]

        def compute() -> Iterator[Deferred]:
            with without_autocast(kept):  # the compiled graph contains autocast's casts
                grads = self.second(*kept)
            for parameter, grad in zip(parameters, grads, strict=True):
                yield parameter, grad, [parameter]

        tape.later.append(compute)
        return results


@contextmanager
def without_autocast(values: Sequence[Any]) -> Iterator[None]:
    """A context in which autocast is off on the devices of these tensors."""
    with ExitStack() as stack:
        for kind in {value.device.type for value in values if isinstance(value, Tensor)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def defer_to_tape(outputs: Sequence[Any], parameters: dict[int, nn.Parameter]) -> None:
    """Put off the second half of the backward from these outputs, until the tape that records in
    this thread runs it. If no tape records here, the backward runs both halves.

    ``parameters``: those that get their gradients from the second half, by their indices among the
    inputs of the compiled function.
    """
    tape = recording()
    node = None if tape is None else _compiled_node(outputs)
    if tape is None or node is None:
        return
    deferral = _Deferral(weakref.ref(tape), parameters)

    def begin(*grads: Any) -> None:
        _here.deferral = deferral

    # The hook runs in the backward's thread, which on an accelerator is the autograd engine's.
    node.register_prehook(begin)


def _compiled_node(outputs: Sequence[Any]) -> torch.autograd.graph.Node | None:
    """The autograd node of the compiled backward; None if these outputs have none. The outputs may
    be views of what the compiled function returns, so the node may be a few nodes further back."""
    front = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
    for _ in range(len(front) * 4):
        if not front:
            break
        node = front.pop(0)
        if node.name() == COMPILED_NODE:
            return node
        front += [following for following, _ in node.next_functions if following is not None]
    return None
