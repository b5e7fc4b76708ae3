"""Comparing the gradients of two runs of a model, without keeping both sets of gradients in memory.

Two runs with equal outputs and equal autograd graphs have equal gradients. So the autograd graphs,
the runs' *histories*, are compared first (:func:`history_of`). A backward runs only where they
differ, or where a history does not determine the gradients; of each gradient a few numbers are kept
(:func:`projections`). For a history alone no tensors are saved for a backward
(:func:`without_saved_tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import filterfalse
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from fxpipe.ir._torch import gradient_kinds, next_sequence_number, sequence_number, viewed
from fxpipe.ir.autograd import Edge, Node, leaf_of, next_edges, reached
from fxpipe.ir.heap import keep_low
from fxpipe.ir.progress import phase
from fxpipe.ir.tensors import own_part

Result = TypeVar("Result")

TOLERANCE = 1e-3  # relative to a gradient's norm: two runs may add up in different orders
AHEAD = 12  # nodes by which uses of leaves are told apart
SOME = 2**20  # elements of a gradient that are copied at a time
AT_ONCE = 2**21
"""The bytes of activations after which memory is kept low (:func:`fxpipe.ir.heap.keep_low`), and by
which the process may grow meanwhile."""
SMALL = 0.01  # a gradient below this share of the largest one may be a mere rounding error


def has_gradient(value: Any) -> bool:
    """Whether a value is a floating-point tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def without_saved_tensors(run: Callable[[], Result]) -> Result:
    """The result of ``run()``, in which no operator saves tensors for its backward: autograd graphs
    have the nodes and edges that they always have, and take hardly any memory. No backward can go
    through them.

    If ``run`` needs saved tensors (it runs a backward of its own, or a transform of ``torch.func``,
    which refuses hooks on saved tensors), it is called once more, and tensors are saved as usual.
    So it must have no side effects.
    """
    missed: list[bool] = []
    freed = 0  # bytes of activations, most of which have been freed since

    def drop(tensor: Tensor) -> None:
        """Save nothing in place of a tensor."""
        nonlocal freed
        freed += _bytes_of_activation(tensor)
        if freed > AT_ONCE:
            freed = 0
            keep_low(AT_ONCE)

    def refuse(_: None) -> NoReturn:
        missed.append(True)
        raise RuntimeError("no tensors have been saved for this backward")

    try:
        with saved_tensors_hooks(drop, refuse):
            result = run()
        if not missed:
            return result
    except Exception as error:
        if not missed and "saved tensor hooks" not in str(error):
            raise
    return run()


def _bytes_of_activation(tensor: Tensor) -> int:
    """The bytes in the host's memory of a tensor that an operator saves for its backward; 0 for a
    parameter, which stays."""
    is_here = type(tensor) is Tensor and tensor.is_cpu and tensor.layout == torch.strided
    if not is_here or isinstance(viewed(tensor), nn.Parameter):
        return 0
    return tensor.nbytes


_AS_IT_IS = {
    *("AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "SliceBackward0"),
    *("ToCopyBackward0", "UnsafeViewBackward0", "ViewBackward0"),
}
"""The kinds of nodes that hand a gradient on as it is where its shape and dtype remain the same:
the node of a slice, say, that takes all of a tensor, or that of a copy to another device."""

_BY_FREQUENCY = "_saved_scale_grad_by_freq"

_EXPANDS = "ExpandBackward0"
"""The kind of the node that adds a gradient up over what ``expand`` has repeated. An operator that
broadcasts its input does that itself, and for a single row nothing is repeated. Where outputs are
equal the gradient is the same, whichever of them adds it up."""

_RESHAPES = "ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"
"""The kinds of nodes that give the gradient in the shape of the operator's input."""


def history_of(
    results: list[Any],
    then: Callable[[Hashable], None] = lambda history: None,
    inputs: Sequence[Tensor] = (),
) -> Hashable:
    """The autograd graph behind the results as a value that can be compared: the kinds of its nodes
    and their edges. Nodes that hand the gradient on as it is are left out, and so are those of
    ``expand``.

    A history with a backward that a user has written (``torch.autograd.Function``) equals no other,
    since that backward may compute anything; nor does one with a lookup in an embedding that
    divides gradients by how often each index occurs among all rows (``scale_grad_by_freq``).

    ::

        conv(x).relu()      ("ReluBackward0", None, ((1, 0),))
                            ("ConvolutionBackward0", None, (None, (2, 0), (3, 0)))
                            ("torch::autograd::AccumulateGrad", 140126, ())
                            ...

    ``inputs`` are leaves that stand for one another in the histories of several runs, by their
    places. ``then`` is called with the history before ``results`` is emptied and the graph freed.
    """
    held: list[Node] = []  # all nodes, those nearer to the results first
    nodes: list[Node] = []  # those that are described, in the order in which the walk meets them
    number: dict[Node, int] = {}  # the place of each among ``nodes``

    def followed(edge: Edge) -> tuple[int, int] | None:
        """The number of the node that an edge leads to, and the gradient's number there."""
        node, place = edge
        while node is not None and (_hands_on(node) or _expands(node)):
            held.append(node)
            ((node, place),) = node.next_functions
        if node is None:
            return None
        if node not in number:
            number[node] = len(nodes)
            nodes.append(node)
        return number[node], place

    places: dict[int, Hashable] = {id(t): ("input", i) for i, t in enumerate(inputs)}
    ends = (get_gradient_edge(t)[:2] if has_gradient(t) else (None, 0) for t in results)
    starts = tuple(map(followed, ends))

    def described(node: Node) -> Hashable:
        held.append(node)
        edges = next_edges(node)
        if _is_attention(node):
            edges = [_without_repeated_heads(edge, held) for edge in edges]
        return _kind(node), _leaf(node, places), tuple(map(followed, edges))

    history = starts, tuple(map(described, nodes))  # the list grows while it is walked
    then(history)
    # Nodes are freed from the outputs on, one by one: freeing the first would free the next
    # recursively, and a long chain would overflow the stack.
    for references in (results, nodes, number):
        references.clear()
    held.reverse()
    while held:
        held.pop()
    return history


def _kind(node: Node) -> Hashable:
    """The kind of a node; a new object for one that may do something else each time."""
    # ``name()`` is not called on the node of a user's Function: the user may have set ``name``.
    if isinstance(node, BackwardCFunction):
        return object()
    if hasattr(type(node), _BY_FREQUENCY) and getattr(node, _BY_FREQUENCY):
        return object()
    name = node.name()
    return _RESHAPES[0] if name in _RESHAPES else name


def _leaf(node: Node, places: Mapping[int, Hashable]) -> Hashable:
    """What stands for the leaf that a node accumulates gradients into: its place among the inputs,
    or else its id; None for all other nodes."""
    leaf = leaf_of(node)
    return None if leaf is None else places.get(id(leaf), id(leaf))


def _hands_on(node: Node) -> bool:
    """Whether a node gives the very gradient that it takes, be it on another device."""
    if isinstance(node, BackwardCFunction) or node.name() not in _AS_IT_IS:
        return False
    ((following, place),) = node.next_functions
    if following is None:
        return False
    shape, dtype, _ = gradient_kinds(node)[0]
    other_shape, other_dtype, _ = gradient_kinds(following)[place]
    return dtype == other_dtype and bool(shape == other_shape)


def _expands(node: Node) -> bool:
    is_users = isinstance(node, BackwardCFunction)
    return not is_users and node.name() == _EXPANDS and node.next_functions[0][0] is not None


def _is_attention(node: Node) -> bool:
    is_users = isinstance(node, BackwardCFunction)
    return not is_users and node.name().startswith("ScaledDotProduct")


def _without_repeated_heads(edge: Edge, held: list[Node]) -> Edge:
    """An edge from an attention to its keys or values. Where the edge leads to heads that are
    repeated for the groups of queries, the edge from there to the heads themselves is returned.

    ::

        attention ─ View (b, 8, t, d) ─ Expand (b, 2, 4, t, d) ─ Unsqueeze (b, 2, 1, t, d) ─ keys
        attention ────────────────────────────────────────────────────────────────────────── keys

    The attention of PyTorch does the same to heads that it is given once (``enable_gqa``): its
    backward adds up the gradients of the repeated heads, as that of ``expand`` does. torch.export
    gets the first way from transformers, where a model has the second. The shapes say what the
    three nodes do: each of the reshapes and the expansion is the only one between its two shapes.
    """
    passed: list[Node] = []
    shapes = []
    node, place = edge
    for kinds in (_RESHAPES, (_EXPANDS,), ("UnsqueezeBackward0",)):
        while node is not None and _hands_on(node):
            passed.append(node)
            ((node, place),) = node.next_functions
        if node is None or isinstance(node, BackwardCFunction) or node.name() not in kinds:
            return edge
        shapes.append(gradient_kinds(node)[0][0])
        passed.append(node)
        ((node, place),) = node.next_functions
    if node is None:
        return edge
    joined, repeated, apart = shapes
    heads = gradient_kinds(node)[place][0]
    if len(heads) != 4 or len(repeated) != 5:
        return edge
    rows, count, *each = heads
    times = repeated[2]
    are_alike = joined == (rows, count * times, *each) and apart == (rows, count, 1, *each)
    if not are_alike or repeated != (rows, count, times, *each):
        return edge
    held += passed
    return node, place


def without_repetitions(leaves: Mapping[str, Tensor], histories: Sequence[Any]) -> list[str]:
    """The names of leaves whose gradients tell whether all gradients agree between runs with these
    histories.

    The layers of a deep model repeat. Of the leaves that have one shape and are used alike, by the
    same kinds of nodes one after the other, the one nearest to the results is chosen, and the one
    farthest from them. This is enough: the nodes that use a leaf compute its gradient from the
    gradient that reaches them. Where these nodes are alike in every run, they make the same of it
    for every such leaf. And the gradient that reaches the layers in the middle is a factor of the
    one that reaches the farthest layer, whose leaves are compared.

    All leaves are chosen if a history has a backward that a user has written, or hooks, either of
    which may do anything. A leaf that is missing in a history is always chosen.
    """
    if any(not isinstance(each, tuple) or not is_torchs(each) for each in histories):
        return list(leaves)
    uses = [_uses(nodes) for _, nodes in histories]
    classes: dict[Hashable, list[tuple[int, str]]] = {}
    for name, leaf in leaves.items():
        found = [each.get(id(leaf)) for each in uses]
        places, kinds = zip(*(each or (0, name) for each in found), strict=True)
        key = leaf.shape, leaf.dtype, leaf.device, kinds
        classes.setdefault(key, []).append((places[0], name))
    ends = {name for each in classes.values() for _, name in (min(each), max(each))}
    return [name for name in leaves if name in ends]


def is_torchs(history: Any) -> bool:
    """Whether PyTorch's own operators alone make a history, so that it determines the gradients."""
    _, nodes = history
    return all(isinstance(kind, str) for kind, _, _ in nodes)


def _uses(nodes: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """For each leaf, by its id: its place in a history, and a number that is the same for leaves
    which the same kinds of nodes use, and these in turn, up to :data:`AHEAD` nodes ahead."""
    users: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for i, (_, _, edges) in enumerate(nodes):
        for place, edge in enumerate(edges):
            if edge is not None:
                users[edge[0]].append((i, place))
    colors = _numbered((kind, len(edges)) for kind, _, edges in nodes)
    for _ in range(AHEAD):
        colors = _numbered(
            (color, tuple(sorted((colors[user], place) for user, place in users[i])))
            for i, color in enumerate(list(colors))
        )
    return {leaf: (i, colors[i]) for i, (_, leaf, _) in enumerate(nodes) if leaf is not None}


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """A number for each value, the same for equal values."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@dataclass(frozen=True)
class Projection:
    """A gradient in a few numbers: its inner products with fixed tensors, and its norm (``size``).

    Almost any change of the gradient changes the inner products. The size of a sum of projections
    is the sum of their sizes, which the norm of the summed gradient does not exceed.
    """

    numbers: tuple[float, ...]
    size: float

    def __add__(self, other: Projection) -> Projection:
        pairs = zip(self.numbers, other.numbers, strict=True)
        return Projection(tuple(a + b for a, b in pairs), self.size + other.size)


Projections = dict[str, Projection | None]
"""The projection of each tensor's gradient, by the tensor's name; None if it has no gradient."""


def projections(
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    leaves: Mapping[str, Tensor],
    *,
    inputs: Sequence[Tensor] = (),
    since: int = 0,
    no_others: bool = False,
) -> Projections:
    """Run the backward of a weighted sum of the outputs; return the projection of each leaf's
    gradient, by the leaf's name.

    A gradient is projected and freed as soon as a node gives it: where a leaf is used several
    times (a tied weight), before the next one is added to it. So hardly ever is more than one in
    memory. ``grad`` of each leaf has to be None beforehand.

    The backward ends where the graph of the run does. The nodes beyond are the user's, who has
    computed an attribute of the model of some parameters, say: a backward through them would add to
    the gradients of these parameters, and free what the user's own backward needs. ::

        output ── mul ──┬── linear ── weight          nodes of the run
                        └── sum ── ...                model.gain = weights.sum(0), before the run

    Args:
        inputs: leaves that get their whole gradient, as ``grad``. All others, but for ``leaves``,
            have the ``grad`` afterwards that they have now.
        since: the number of the run's first node (:func:`~fxpipe.ir._torch.next_sequence_number`).
        no_others: the backward computes no gradients but these. It cannot contain another backward
            then, as that of a reentrant checkpoint does; nor can it where the graph leads beyond
            the run.
    """
    found: Projections = dict.fromkeys(leaves)
    names = {id(leaf): name for name, leaf in leaves.items()}

    def add(name: str, grad: Tensor) -> None:
        before, now = found[name], _projected(grad)
        found[name] = now if before is None else before + now

    def take(places: Mapping[int, str], given: Sequence[Tensor | None], _: Any) -> Any:
        for place, name in places.items():
            if (grad := given[place]) is not None:
                add(name, grad)
        return tuple(None if place in places else grad for place, grad in enumerate(given))

    def take_accumulated(name: str, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is not None:
            add(name, grad)

    made = range(since, next_sequence_number())

    def is_beyond(node: Node | None) -> bool:
        """Whether a node is neither of the run nor that of a leaf."""
        if node is None or leaf_of(node) is not None:
            return False
        return sequence_number(node) not in made

    def edges(node: Node) -> Sequence[Edge]:
        """Where the gradients go that a node gives, as far as the run has made the graph."""
        return [edge for edge in next_edges(node) if not is_beyond(edge[0])]

    starts = [get_gradient_edge(output).node for output in outputs]
    is_bounded = any(map(is_beyond, starts))
    visited = [*leaves.values(), *inputs]
    known = set(map(id, visited))
    with ExitStack() as hooks:
        for node in reached(filterfalse(is_beyond, starts), edges):
            leaf = leaf_of(node)
            if leaf is not None and id(leaf) not in known and not no_others:
                hooks.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None  # or the backward would write to it in place
                visited.append(leaf)
            ends = [end for end, _ in next_edges(node)]
            is_bounded |= any(map(is_beyond, ends))
            places = {i: names[id(t)] for i, t in enumerate(map(leaf_of, ends)) if id(t) in names}
            if places:
                hooks.callback(node.register_hook(partial(take, places)).remove)
        for name, leaf in leaves.items():  # what a nested backward, of a checkpoint say, gives
            register: Any = leaf.register_post_accumulate_grad_hook
            hooks.callback(register(partial(take_accumulated, name)).remove)
        if outputs and visited:
            with phase("backward", quiet=True):
                only = visited if is_bounded or no_others else None
                torch.autograd.backward(list(outputs), list(weights), inputs=only)
    return found


def irregular(shape: Sequence[int], seed: int) -> Tensor:
    """A fixed tensor of numbers without a pattern, about as large as one. They are computed, since
    random numbers are replaced by constants while a model is checked
    (:mod:`fxpipe.meaning.stilled`)."""
    count = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64)
    return (count * (1 + seed * 0.6180339887498949)).cos().view(tuple(shape)) * math.sqrt(2)


def _projected(grad: Tensor) -> Projection:
    """The projection of a gradient. The fixed tensors of its inner products are outer products of
    two vectors each, so that they need not be built in memory. Of a gradient that is in parts on
    several ranks, it is the projection of this rank's part."""
    grad = own_part(grad)
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    grad = grad.to_dense() if grad.layout != torch.strided else grad
    rows = grad.shape[0] if grad.ndim > 1 else 1
    grad = grad.reshape(rows, grad.numel() // max(1, rows))
    precise = torch.empty(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.device)
    left = torch.stack([irregular((rows,), seed) for seed in (1, 2)]).to(precise)
    right = irregular((grad.shape[1],), 3).to(precise)
    # Some rows at a time, since those of a half-precision gradient are copied.
    some = torch.split(grad, max(1, SOME // max(1, grad.shape[1])))
    products = torch.cat([part.to(precise) @ right for part in some])
    size = math.hypot(*(part.norm(dtype=precise.dtype).item() for part in some))
    return Projection(tuple((left @ products).tolist()), size)


def total(parts: Sequence[Projections]) -> Projections:
    """The projections of the gradients that several backwards accumulate, from the projections of
    each backward."""
    found: Projections = {}
    for name in parts[0]:
        given = [each for part in parts if (each := part[name]) is not None]
        found[name] = sum(given[1:], given[0]) if given else None
    return found


@dataclass(frozen=True)
class GradientDifference:
    """The names of the tensors whose gradients differ between two backwards."""

    lost: list[str]
    """Tensors that get a gradient in the first backward only."""
    gained: list[str]
    """Tensors that get a gradient in the second backward only."""
    others: list[str]
    """Tensors that get a gradient in both, of different values."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.gained or self.others)


def gradient_difference(
    expected: Projections, actual: Projections, eps: float
) -> GradientDifference:
    """How the gradients of two backwards differ.

    ``eps`` is the machine epsilon of the dtype that they are computed in (:func:`largest_eps`).
    """
    lost = [name for name, each in expected.items() if each and not actual[name]]
    gained = [name for name, each in expected.items() if actual[name] and not each]
    largest = max((each.size for each in expected.values() if each), default=0.0)
    tolerance = max(TOLERANCE, 32 * eps)
    others = []
    for name, each in expected.items():
        other = actual[name]
        if each is None or other is None:
            continue
        scale = max(each.size, SMALL * largest)
        moved = max(abs(a - b) for a, b in zip(each.numbers, other.numbers, strict=True))
        if not moved <= tolerance * scale and not _are_nan(each, other):
            others.append(name)
    return GradientDifference(lost, gained, others)


def largest_eps(dtypes: Iterable[torch.dtype]) -> float:
    """The largest machine epsilon of these dtypes; 0.0 if none is of floating point."""
    return max((torch.finfo(each).eps for each in dtypes if each.is_floating_point), default=0.0)


def _are_nan(one: Projection, other: Projection) -> bool:
    return one.size != one.size and other.size != other.size


def listed(names: Sequence[str]) -> str:
    """The first three names and the number of the others, as text."""
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")
