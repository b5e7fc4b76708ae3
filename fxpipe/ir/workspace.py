"""The memory that a stage needs while it computes, from what its nodes need.

::

    x ──┬── linear ── h ── tanh ── t ── + ── y      forward of tanh: x, which "linear" has saved
        └───────────────────────────────┘           and "+" needs, h, and t, which is being made
                                                    backward of tanh: x and t, which have been
                                                    saved, the gradient of y, and that of h

A stage is walked node by node, as it will run: a value is there from the node that makes it until
the last one that uses it, a saved tensor until the backward of the first node that has saved it, a
gradient until it has been used. What the caller of a stage gives to it, inputs or gradients, the
caller holds until the stage is done. So the most at any time is found, without running anything.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import Tensor, fx

from fxpipe.ir.cost import copies_of, memories_of, state_of
from fxpipe.ir.graph import ORIGIN, PRODUCTS, SAVED, VALUE, WORKSPACE, nodes_of_stages
from fxpipe.ir.tensors import tensor_bytes, tensors_of


@dataclass(frozen=True)
class NodeWorkspace:
    """What a node needs while it runs, for a mini-batch: the bytes of the tensors that are made in
    it, as many as are there at the same time.

    Attributes:
        forward, backward: the most in each of the two.
        gradients: by the node's input tensors, the bytes of their gradients: 0 for one that gets
            none, and -1 for one that gets the gradient of the node's own value, as a sum gives it.
        weights: the bytes of the largest gradient of a parameter, times the micro-batches, since
            each of them makes one of this size, however few rows it has. It is not part of
            ``backward``.
        is_deferrable: whether a backward in two halves makes those in the second one. Until then
            it keeps the gradient of the node's value, and what the node has saved.
    """

    forward: int = 0
    backward: int = 0
    gradients: tuple[int, ...] = ()
    weights: int = 0
    is_deferrable: bool = False

    def times(self, count: int) -> NodeWorkspace:
        """What ``count`` such nodes need, one for each part of a mini-batch."""
        return replace(
            self,
            forward=self.forward * count,
            backward=self.backward * count,
            gradients=tuple(size if size < 0 else size * count for size in self.gradients),
            weights=self.weights * count,
        )


@dataclass(frozen=True)
class StageWorkspace:
    """What a stage needs while it runs, for a mini-batch: the most bytes at any time, beyond the
    activations that it keeps from the forward to the backward.

    Attributes:
        forward: in a forward that keeps activations, or that no backward follows. It includes the
            results, and the inputs.
        again: in a forward that keeps the stage's inputs only, beyond these. It saves activations
            too, and frees them at its end.
        selective: in one that keeps the inputs and the results of products, beyond these.
        rerun: in a forward that is run again, beyond activations and inputs.
        backward: in a backward that frees activations as it goes, with the gradients of results.
        half: in the first half of a backward, which frees what the second half does not need, and
            keeps gradients for it.
        weights: in the second half of a backward: the largest gradient of a parameter, which is
            there beside the ``.grad`` that it is added to.
        kept_inputs: how many bytes of the stage's inputs are among its activations.
        between: all bytes that are kept from the first half of a backward to the second.
    """

    forward: int = 0
    again: int = 0
    selective: int = 0
    rerun: int = 0
    backward: int = 0
    half: int = 0
    weights: int = 0
    kept_inputs: int = 0
    between: int = 0

    def or_more(self, other: StageWorkspace) -> StageWorkspace:
        """What is enough for this stage, and for another one, whichever runs; the inputs are those
        of this one."""
        return StageWorkspace(
            max(self.forward, other.forward),
            max(self.again, other.again),
            max(self.selective, other.selective),
            max(self.rerun, other.rerun),
            max(self.backward, other.backward),
            max(self.half, other.half),
            max(self.weights, other.weights),
            self.kept_inputs,
            max(self.between, other.between),
        )


def stage_workspaces(stage_graph: fx.GraphModule) -> list[StageWorkspace]:
    """What each stage of a stage graph needs, whose nodes have costs."""
    return list(map(workspace_of, nodes_of_stages(stage_graph)))


def workspace_of(nodes: Sequence[fx.Node], state: Set[int] = frozenset()) -> StageWorkspace:
    """What a stage needs that consists of these nodes. ``state``: the memories of parameters that
    are there and that these nodes, which may be a part of a stage, do not use themselves."""
    walk = _Walk(nodes, state)
    kept = sum(walk.kept.values())
    backward, *_ = walk.backward(in_halves=False)
    half, between, _ = walk.backward(in_halves=True)
    forward = walk.forward()
    return StageWorkspace(
        forward - kept,
        forward - sum(walk.inputs.values()),
        walk.forward(walk.products) - sum((walk.products | walk.inputs).values()),
        forward - sum((walk.kept | walk.inputs).values()),
        backward - kept,
        half - kept,
        max((_workspace(node).weights for node in nodes), default=0),
        sum(size for memory, size in walk.inputs.items() if memory in walk.kept),
        between,
    )


def sent_gradients(nodes: Sequence[fx.Node]) -> dict[str, dict[int, int]]:
    """The memories of the gradients of a stage's inputs, for a mini-batch: by the name in the model
    graph of what is the input, the bytes of each memory, which has a number.

    A gradient may be a view of a larger one, as for an input of a concatenation, and keep all of
    that. Then several inputs may have one memory, and one number.
    """
    walk = _Walk(nodes)
    _, _, grads = walk.backward(in_halves=False)
    return {
        source.meta.get(ORIGIN, source.name): {
            number: size
            for tensor, _ in _tensors(source)
            for number, size in grads.memory(tensor).items()
        }
        for source in walk.sources
    }


class _Walk:
    """The nodes of a stage, with the memories of their values."""

    def __init__(self, nodes: Sequence[fx.Node], state: Set[int] = frozenset()) -> None:
        self.nodes, members = nodes, set(nodes)
        self.saved = {node: dict(node.meta.get(SAVED, ())) for node in nodes}
        self.kept = {m: size for saved in self.saved.values() for m, size in saved.items()}
        self.products = {
            memory: size
            for node in nodes
            for memory, size in (memories_of(node)[i] for i in node.meta.get(PRODUCTS, ()))
        }
        self.state = state | state_of(nodes)
        self.sources = {source for node in nodes for source in node.all_input_nodes} - members
        self.inputs: dict[int, int] = {}
        for source in self.sources:
            self.inputs |= self._memories(source)
        self.results = [node for node in nodes if not members.issuperset(node.users)]

    def _memories(self, node: fx.Node) -> dict[int, int]:
        """The memories of a node's value, other than those of parameters, and their bytes."""
        return {memory: size for memory, size in memories_of(node) if memory not in self.state}

    def forward(self, held: Iterable[int] = ()) -> int:
        """The most bytes in a forward, which saves activations. Its caller holds its inputs, and
        maybe further memories once they are there."""
        uses = Counter(m for node in self.nodes for m in self._uses(node))
        uses.update(m for node in self.results for m in self._memories(node))
        uses.update([*self.kept, *self.inputs, *held])
        there = _Bytes(self.inputs)
        most = there.total
        for node in self.nodes:
            most = max(most, there.total + _workspace(node).forward)
            own = self._memories(node)
            there.add(own)
            there.add(self.saved[node])
            uses.subtract(self._uses(node))
            there.drop(m for m in (*own, *self._uses(node)) if not uses[m])
        return max(most, there.total)

    def _uses(self, node: fx.Node) -> list[int]:
        return [memory for source in node.all_input_nodes for memory in self._memories(source)]

    def backward(self, in_halves: bool) -> tuple[int, int, _PendingGradients]:
        """The most bytes in a backward, or in its first half; those that are kept from this half
        to the second one, which is for nodes whose gradients of parameters are put off; and the
        gradients of the stage's inputs."""
        uses = Counter(memory for saved in self.saved.values() for memory in saved)
        there, grads, put_off = _Bytes(self.kept), _PendingGradients(), set[int]()
        for node in self.results:
            for tensor, count in zip(
                tensors_of(node.meta.get(VALUE)), copies_of(node), strict=True
            ):
                # As large as the result, which may be a view of a larger memory.
                grads.put(tensor, count * tensor_bytes(tensor) * tensor.requires_grad)
        grads.hold()  # whoever calls the backward holds them until it has ended
        most = there.total + grads.bytes.total
        for node in reversed(self.nodes):
            found = (grads.take(tensor) for tensor, _ in _tensors(node))
            incoming = [number for number in found if number is not None]
            is_put_off = in_halves and bool(incoming) and _workspace(node).is_deferrable
            added = 0
            if incoming:
                needed = _workspace(node).backward + _workspace(node).weights * (not is_put_off)
                most = max(most, there.total + grads.bytes.total + needed)
                inputs = zip(_inputs(node), _workspace(node).gradients, strict=False)
                for (tensor, (memory, _)), size in inputs:
                    if memory not in self.state:  # ``.grad`` is there all the time
                        added += grads.put(tensor, size, incoming[0])
            if is_put_off:
                put_off.update(incoming)
                continue
            grads.drop(incoming)
            uses.subtract(list(self.saved[node]))
            there.drop(m for m in self.saved[node] if not uses[m])
            most = max(most, there.total + grads.bytes.total + added)  # sums come afterwards
        return most, there.total + grads.bytes.of(put_off), grads


class _Bytes:
    """Memories that are there, and the sum of their bytes."""

    def __init__(self, sizes: Mapping[int, int] = {}) -> None:
        self._sizes = dict(sizes)
        self.total = sum(sizes.values())

    def add(self, sizes: Mapping[int, int]) -> None:
        for memory, size in sizes.items():
            if memory not in self._sizes:
                self._sizes[memory] = size
                self.total += size

    def drop(self, memories: Iterable[int]) -> None:
        for memory in memories:
            self.total -= self._sizes.pop(memory, 0)

    def of(self, memories: Iterable[int]) -> int:
        """The sum of the bytes of some memories, of those among them that are there."""
        return sum(self._sizes.get(memory, 0) for memory in memories)


class _PendingGradients:
    """Gradients that have been computed and not yet used. Several tensors may have the same one."""

    def __init__(self) -> None:
        self.bytes = _Bytes()
        self._of: dict[int, int] = {}  # by tensors, the numbers of their gradients
        self._sums = set[int]()  # tensors whose gradients are sums, and so no views of others
        self._users: Counter[int] = Counter()
        self._numbers = itertools.count()

    def put(self, tensor: Tensor, size: int, same: int = -1) -> int:
        """Note a gradient of a tensor: a new one of ``size`` bytes; none if that is 0; the ``same``
        one as another tensor's if it is negative.

        If the tensor has a gradient, this one is added to it: in place, or, if others have that
        gradient too, in new memory. Returns the bytes of what is added, which is there meanwhile.
        """
        if not size:
            return 0
        number = same if size < 0 else next(self._numbers)
        before = self._of.get(id(tensor))
        if before is not None:
            self._sums.add(id(tensor))
            if self._users[before] == 1:
                return max(size, 0)
            size = size if size > 0 else self.bytes.of([before])
            number = next(self._numbers)
            self._users[before] -= 1
        self._of[id(tensor)] = number
        self._users[number] += 1
        if size > 0:
            self.bytes.add({number: size})
        return 0 if before is None else size

    def hold(self) -> None:
        """Let the gradients that are there be somebody else's as well, who keeps them."""
        self._users.update(list(self._users))

    def memory(self, tensor: Tensor) -> dict[int, int]:
        """The number of the memory of a tensor's gradient, with its bytes, which may be those of a
        larger gradient; none if there is no gradient, or if it is a sum, which has its own."""
        number = self._of.get(id(tensor))
        if number is None or id(tensor) in self._sums:
            return {}
        return {number: self.bytes.of([number])}

    def take(self, tensor: Tensor) -> int | None:
        """The number of a tensor's gradient, which is about to be used and then dropped."""
        return self._of.pop(id(tensor), None)

    def drop(self, numbers: Iterable[int]) -> None:
        """Free gradients, unless they are other tensors' as well."""
        for number in numbers:
            self._users[number] -= 1
            if not self._users[number]:
                self.bytes.drop([number])


_Known = tuple[Tensor, tuple[int, int]]
"""A tensor, with the number and the bytes of its memory."""


def _tensors(node: fx.Node) -> Iterator[_Known]:
    """The tensors of a node's value, each with the number and the bytes of its memory."""
    yield from zip(tensors_of(node.meta.get(VALUE)), memories_of(node), strict=True)


def _inputs(node: fx.Node) -> list[_Known]:
    """The tensors that a node is given, in order, each with the number and the bytes of its
    memory."""
    found: list[_Known] = []
    fx.map_arg((node.args, node.kwargs), lambda source: found.extend(_tensors(source)))
    return found


def _workspace(node: fx.Node) -> NodeWorkspace:
    found: NodeWorkspace = node.meta.get(WORKSPACE, _NOTHING)
    return found


_NOTHING = NodeWorkspace()
