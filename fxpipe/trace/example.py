"""One call of a model: the tensors among its inputs, which vary, and all else, which does not."""

from __future__ import annotations

import inspect
import keyword
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

# The pytree that torch.export and Hugging Face register their types with.
from fxpipe.ir._torch import pytree
from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.structure import Structure, leaves
from fxpipe.runtime.microbatch import first_rows
from fxpipe.trace import checkpoints
from fxpipe.trace.isolation import (
    Args,
    Kwargs,
    Write,
    called,
    parameters_put_back,
    untouched,
)
from fxpipe.trace.patches import tensor_hooks

BatchDims = Sequence[int | None]


@dataclass
class Traced:
    """A model graph, and how to call it as the model is called."""

    graph_module: fx.GraphModule
    front_end: str  # "symbolic", "export" or "custom"
    bind: Callable[[Args, Kwargs], list[Any]]
    """The model's ``(args, kwargs)`` as placeholder values, in order."""
    rebuild: Callable[[Any], Any]
    """The graph's output as the model's own structure."""
    largest_batch: int = sys.maxsize
    """Beyond it the model takes another branch, which the graph has not."""
    refused_sizes: frozenset[int] = frozenset()
    """Small batch sizes that the model itself has been seen to refuse."""
    warning: str = ""
    """What to say besides if the graph turns out not to be the model."""
    otherwise: Callable[[Example], Traced] | None = None
    """What to try then, if anything."""


def canonical(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The same call, with each argument where the signature of ``model.forward`` puts it.

    Raises TypeError, as the model would, for arguments that the model does not take.
    """
    bound = bound_arguments(model, args, kwargs)
    return bound.args, bound.kwargs


def autocast_of(tensors: Sequence[Tensor]) -> tuple[torch.dtype | None, ...]:
    """The autocast dtype, or None, of each kind of device that the tensors are on."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in sorted({tensor.device.type for tensor in tensors} - {"meta"})
    )


class Same:
    """Stands for a module in a key: equal to what stands for the very same one.

    Its ``id`` alone would not do: another module may have it once this one is gone. The module is
    not kept alive, and of one that is gone nothing is equal to what stood for it.
    """

    __slots__ = "_hash", "_module"

    def __init__(self, module: nn.Module) -> None:
        self._module, self._hash = weakref.ref(module), id(module)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        module = self._module()
        return self is other or (module is not None and module is other._module())


class InputKey(NamedTuple):
    """What a trace is specialised on."""

    spec: Hashable  # of the inputs, as pytree has it
    constants: tuple[Hashable, ...]  # the inputs that are no tensors, in the order of the leaves
    modules: tuple[tuple[Same, bool, bool], ...]  # with their training flags, and whether hooked
    autocast: tuple[torch.dtype | None, ...]
    shapes: tuple[Hashable, ...] = ()


def input_key(
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    batch_dims: BatchDims | None = None,
    shapes: bool = True,
) -> InputKey:
    """What a trace is specialised on: two calls with equal keys may share one.

    That is the structure of the inputs, the values of those that are not tensors, every module, its
    training flag and whether it has hooks, and the autocast state. ``torch.export`` also fixes
    dtypes and all sizes but the batch's; ``shapes=False`` leaves them out, which is right for a
    "symbolic" trace.
    """
    inputs = canonical(model, args, kwargs)
    parts, spec = pytree.tree_flatten(inputs)
    tensors, _ = Structure.of(inputs)
    constants = tuple(
        (path, type(part), _constant_key(leaf)) for part in parts for path, leaf in leaves(part)
    )
    modules = tuple((Same(m), m.training, has_hooks(m)) for m in model.modules())
    key = InputKey(spec, constants, modules, autocast_of(tensors))
    if not shapes:
        return key
    dims = infer_batch_dims(tensors) if batch_dims is None else batch_dims
    sizes = tuple(_shape_key(t, dim) for t, dim in zip(tensors, dims, strict=True))
    return key._replace(shapes=sizes)


def varying_constant(
    model: nn.Module, args: Args, kwargs: Kwargs, before: InputKey
) -> tuple[str, Any] | None:
    """The first input of a call that is no tensor and was another before, by its path; if any."""
    now = input_key(model, args, kwargs)
    arguments = dict(bound_arguments(model, args, kwargs).arguments)
    for old, new, (path, value) in zip(
        before.constants, now.constants, leaves(arguments), strict=False
    ):
        if old != new:
            return path.removeprefix("."), value
    return None


def bound_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> inspect.BoundArguments:
    """The arguments by name, as ``model.forward`` takes them. Raises TypeError if it does not."""
    try:
        return inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}.forward(): {error}") from None


@dataclass(frozen=True)
class Example:
    """One call of the model, taken apart: tensors, which vary, and constants, which do not."""

    model: nn.Module
    names: list[str]  # of the tensors
    structure: Structure  # of (args, kwargs)
    tensors: list[Tensor]
    batch_dims: list[int | None]  # of the tensors
    whole: Mapping[nn.Module, str] = field(default_factory=dict)
    """Modules that no front end may look into, with their paths."""

    @staticmethod
    def of(model: nn.Module, args: Args, kwargs: Kwargs, batch_dims: BatchDims | None) -> Example:
        bound = bound_arguments(model, args, kwargs)
        tensors, structure = Structure.of((bound.args, bound.kwargs))
        dims = infer_batch_dims(tensors) if batch_dims is None else list(batch_dims)
        if len(dims) != len(tensors):
            raise ValueError(
                f"batch_dims has {len(dims)} entries, but the inputs hold {len(tensors)} tensors: "
                "give one, an int or None, for each"
            )
        _, by_name = Structure.of(dict(bound.arguments))
        detached = [tensor.detach() for tensor in tensors]
        return Example(model, _identifiers(by_name.paths()), structure, detached, dims)

    @property
    def batch(self) -> int | None:
        """The size of the batch, None if no input has one."""
        sizes = (
            t.shape[d] for t, d in zip(self.tensors, self.batch_dims, strict=True) if d is not None
        )
        return next(sizes, None)

    def resized(self, batch: int) -> list[Tensor]:
        """The tensors at another batch size: the first rows, or all of them over and over."""
        return [
            tensor if dim is None else first_rows(tensor, dim, batch)
            for tensor, dim in zip(self.tensors, self.batch_dims, strict=True)
        ]

    def arguments(self, tensors: Sequence[Any]) -> tuple[Args, Kwargs]:
        """The call ``(args, kwargs)`` with these in place of the tensors."""
        args, kwargs = self.structure.fill(tensors)
        return args, kwargs

    def binder(self) -> Callable[[Args, Kwargs], list[Any]]:
        """``Traced.bind``; it does not keep the example's tensors alive."""
        model, structure = self.model, self.structure

        def bind(args: Args, kwargs: Kwargs) -> list[Any]:
            tensors, other = Structure.of(canonical(model, args, kwargs))
            if not structure.fits(other):
                raise TypeError("these inputs are built otherwise than the model was traced with")
            return tensors

        return bind

    def run(
        self,
        tensors: Sequence[Tensor],
        traced: Traced | None = None,
        *,
        recorded: bool = False,
        backward: bool = False,
        watched: bool = False,
    ) -> Effects:
        """What the model, or its graph, does with these tensors; without effect on the model.

        A run that is ``recorded`` has a history for a backward; with ``backward`` that is run too.
        What it writes to its parameters is put back where it is ``watched``, which takes time.
        """
        clones = [tensor.clone() for tensor in tensors]  # the model may write to its inputs
        watch: AbstractContextManager[Mapping[str, Write]] = (
            parameters_put_back(self.model) if watched else nullcontext({})
        )
        mode = _with_gradients() if recorded or backward else torch.no_grad()
        with (
            untouched(self.model) as since,
            watch as written,
            mode,
            checkpoints.with_any_backward(),
            tensor_hooks() as hooks,
        ):
            # Cloned, since an output may be a buffer, and buffers are about to be restored.
            results, structure = Structure.of(self.call(clones, traced))
            output = structure.fill(
                t.detach().clone() if isinstance(t, Tensor) else t for t in results
            )
            buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}
            gradients = self._gradients(results) if backward else []
            changed, history = since.changed(), None
            if recorded:
                history, nodes = _history(results)
                if hooks:  # which may do anything to gradients: it is like no other
                    history = object()
                del results
                # From the outputs on: each would else free the next, recursively.
                nodes.reverse()
                while nodes:
                    nodes.pop()
        where = {name: write.where for name, write in written.items()}
        return Effects(output, buffers, where, history, gradients, changed)

    def _gradients(self, results: Sequence[Any]) -> list[Tensor]:
        """The parameters' gradients, zero where there is none, of some scalar of the outputs."""
        outputs = [t for t in results if _has_gradient(t)]
        # Not the sum: that of a softmax, or of a normalised tensor, has no gradient.
        weights = [torch.arange(t.numel()).view(t.shape).to(t).cos() for t in outputs]
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not outputs or not parameters:
            return []
        gradients = torch.autograd.grad(
            outputs, parameters, weights, allow_unused=True, materialize_grads=True
        )
        return [g.to_dense() if g.is_sparse else g for g in gradients]

    def call(self, tensors: Sequence[Tensor], traced: Traced | None = None) -> Any:
        """The output of the model, or of its graph."""
        if traced is not None:
            # Not called as a module, since fx then prints what goes wrong to stderr.
            return traced.rebuild(traced.graph_module.forward(*tensors))
        args, kwargs = self.arguments(tensors)
        return called(self.model, args, kwargs)


@dataclass(frozen=True)
class Effects:
    """What a forward pass leaves behind, and what a backward pass gives, if there was one."""

    output: Any
    buffers: dict[str, Tensor]
    written: dict[str, str]  # the parameters that were written to, if watched: where
    history: Hashable  # what a backward would do, if recorded: see _history
    gradients: list[Tensor]  # of the parameters, if there was a backward
    changed: list[tuple[nn.Module, str]]  # the attributes of modules that have changed


@contextmanager
def _with_gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _history(results: Sequence[Any]) -> tuple[Hashable, list[Any]]:
    """The autograd graph behind the outputs as a value, its nodes' kinds and what leads where; and
    the nodes, from the outputs on.

    Two runs with the same values and the same history have the same gradients; a backward of the
    user's own (``torch.autograd.Function``) is like no other, since it may do anything.

    ::

        conv(x).relu()      ("ReluBackward0", ((1, 0),))
                            ("ConvolutionBackward0", (None, (2, 0), (3, 0)))
                            the parameters 2 and 3, by their ids
    """
    ends = [get_gradient_edge(t)[:2] if _has_gradient(t) else None for t in results]
    number: dict[Any, int] = {}
    nodes: list[Any] = []

    def numbered(node: Any) -> int:
        if node not in number:
            number[node] = len(number)
            nodes.append(node)
        return number[node]

    starts = tuple(end and (numbered(end[0]), end[1]) for end in ends)
    found: list[Hashable] = []
    for node in nodes:  # which grows meanwhile
        if isinstance(node, BackwardCFunction):
            found.append(object())
        if hasattr(node, "variable"):
            found.append(id(node.variable))
        edges = tuple(n and (numbered(n), place) for n, place in node.next_functions)
        found.append((node.name(), edges))
    return (starts, tuple(found)), nodes


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def infer_batch_dims(tensors: Sequence[Tensor]) -> list[int | None]:
    sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.ndim)
    batch = sizes.most_common(1)[0][0] if sizes else None
    return [0 if tensor.ndim and tensor.shape[0] == batch else None for tensor in tensors]


def _constant_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return Tensor
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf)
    return type(leaf), leaf  # the type as well: 1 == 1.0 == True


def _shape_key(tensor: Tensor, batch_dim: int | None) -> Hashable:
    sizes: list[int | None] = list(tensor.shape)
    if batch_dim is not None:
        sizes[batch_dim] = None
    return tensor.dtype, tuple(sizes)


def _identifiers(paths: Sequence[str]) -> list[str]:
    """Names for placeholders: the argument's, or the path of a tensor within one, ``ids_0``."""
    names: list[str] = []
    taken = {*keyword.kwlist, "self", "torch"}  # the latter two in the code that fx generates
    for path in paths:
        name = re.sub(r"\W+", "_", path).strip("_")
        while name in names or name in taken:
            name += "_"
        names.append(name)
    return names
