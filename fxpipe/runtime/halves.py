"""The compiled backward of a stage in two halves: gradients of the inputs, and of the parameters.

::

    joint graph of a stage              cut in three

    x ── forward ── y                   x ── forward ─┬─ y
           ⋮                                          └─ saved
    grad x ◁─ backward ◁─ grad y        grad x ◁─ first half ◁─ grad y, saved
    grad weight ◁─┘                              └─ kept ── second half ── grad weight

AOTAutograd traces the joint graph, and cuts it in forward and backward. The backward is cut once
more by what depends on what: the first half has all that gradients of inputs need, and the second
the rest. Each of the three graphs is compiled by the backend, so that a half costs no Python at
its operators (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
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

_here = threading.local()  # .deferral: that of the compiled backward which runs in this thread
_CONVOLUTION = torch.ops.aten.convolution_backward.default
_MASK = -1  # the place among its arguments of what it is to compute: (input, weight, bias)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compiled_in_halves(
    gm: fx.GraphModule,
    inputs: SymbolicInputs,
    fakes: Sequence[Any],
    later: Collection[int],
    compile: Compile,
) -> Callable[..., Any]:
    """A function that computes a graph, and whose backward can be had in two halves.

    Args:
        fakes: the inputs that it is compiled for.
        later: the indices of those inputs whose gradients are computed in the second half.
        compile: compiles a graph without gradients for example inputs.
    """

    def forward(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return boxed(_without_gradients(graph, examples, inputs, compile))

    def backward(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        halves = cut(graph, later)
        if halves is None:
            return forward(graph, examples)
        first = _without_gradients(halves.first, _values(halves.first), inputs, compile)
        second = _without_gradients(halves.second, _values(halves.second), inputs, compile)
        return boxed(_Backward(halves, first, second))

    return compiled_ahead(gm, fakes, forward, backward)


def _values(gm: fx.GraphModule) -> list[Any]:
    """Example inputs of a graph: the fakes that it has been traced with."""
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _without_gradients(
    gm: fx.GraphModule, examples: Sequence[Any], inputs: SymbolicInputs, compile: Compile
) -> Callable[..., Any]:
    with torch.no_grad(), inputs.compiling():
        return compile(gm, examples)


# ------------------------------------------------------------------------------------- the cut


@dataclass(frozen=True)
class Halves:
    """A backward in two halves.

    Args:
        first, second: the graphs. The first gives gradients, and after them what it keeps for the
            second.
        takes: of the inputs of the whole, those that each of the two takes. The second takes what
            is kept ahead of them.
        gives: of the gradients of the whole, those that each of the two gives.
        count: how many gradients the whole gives.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    takes: tuple[list[int], list[int]]
    gives: tuple[list[int], list[int]]
    count: int


def cut(backward: fx.GraphModule, later: Collection[int]) -> Halves | None:
    """A backward in two halves; None if there is nothing to be computed in the second.

    ``later``: which of its results are gradients that the second half is to give.
    """
    _take_convolutions_apart(backward, later)
    grads = _results(backward)
    gives: tuple[list[int], list[int]] = [], []
    for i in grads:
        gives[i in later].append(i)
    now, then = ([grads[i] for i in half] for half in gives)
    early = _needed(now)
    for node in backward.graph.nodes:  # a tuple cannot be kept, what is taken out of it can
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
    """The nodes that a graph returns, by their places among all that it returns."""
    results: Any = gm.graph.output_node().args[0]
    return {i: result for i, result in enumerate(results) if isinstance(result, fx.Node)}


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    found: set[fx.Node] = set()
    front = list(nodes)
    while front:
        node = front.pop()
        if node not in found:
            found.add(node)
            front += node.all_input_nodes
    return found


def _part(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    inside: Collection[fx.Node],
    results: list[fx.Node],
) -> fx.GraphModule:
    """A graph of some nodes. It has those of the inputs as placeholders that it needs."""
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    needed = {source for node in inside for source in node.all_input_nodes} | set(results)
    for node in inputs:
        # All sizes: shapes of other inputs are in terms of them, and a compiler has to know each.
        if node in needed or isinstance(node.meta.get("val"), torch.SymInt):
            own[node] = graph.placeholder(node.name)
            own[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in own or node.op in ("placeholder", "output"):
            continue
        if node in inside or node.op == "get_attr":
            own[node] = graph.node_copy(node, own.__getitem__)
    graph.output(tuple(own[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(gm, graph)


def _used(part: fx.GraphModule, placeholders: Sequence[fx.Node]) -> list[int]:
    """Which of the inputs of the whole a part of it takes."""
    names = {node.name for node in part.graph.find_nodes(op="placeholder")}
    return [i for i, node in enumerate(placeholders) if node.name in names]


def _take_convolutions_apart(gm: fx.GraphModule, later: Collection[int]) -> None:
    """Let gradients of a convolution's input and of its weight be computed by two nodes.

    PyTorch has one operator for both, with a mask that says which of them it is to compute.
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
    """Whose second half it is, and the parameters, by the indices of the inputs that they are."""

    tape: weakref.ref[Tape]
    parameters: dict[int, nn.Parameter]


class _Backward:
    """The backward of one call: the first half at once, the second when the tape asks for it."""

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
            with without_autocast(kept):  # the casts are in the graph
                grads = self.second(*kept)
            for parameter, grad in zip(parameters, grads, strict=True):
                yield parameter, grad, [parameter]

        tape.later.append(compute)
        return results


@contextmanager
def without_autocast(values: Sequence[Any]) -> Iterator[None]:
    """A context in which operators on these tensors take them as they are."""
    with ExitStack() as stack:
        for kind in {value.device.type for value in values if isinstance(value, Tensor)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def defer_to_tape(outputs: Sequence[Any], parameters: dict[int, nn.Parameter]) -> None:
    """Let the second half of the backward from these outputs be done when the tape that records in
    this thread asks for it. Where no tape does, the backward does both halves.

    ``parameters``: those that get their gradients then, by the indices of the inputs.
    """
    tape = recording()
    node = None if tape is None else _compiled_node(outputs)
    if tape is None or node is None:
        return
    deferral = _Deferral(weakref.ref(tape), parameters)

    def begin(*grads: Any) -> None:
        _here.deferral = deferral

    # By a hook, since an accelerator's backward runs in a thread of the autograd engine.
    node.register_prehook(begin)


def _compiled_node(outputs: Sequence[Any]) -> torch.autograd.graph.Node | None:
    """The autograd node of the compiled backward; views may have been made of what it gives."""
    front = [t.grad_fn for t in outputs if isinstance(t, Tensor) and t.grad_fn is not None]
    for _ in range(len(front) * 4):
        if not front:
            break
        node = front.pop(0)
        if node.name() == COMPILED_NODE:
            return node
        front += [following for following, _ in node.next_functions if following is not None]
    return None
