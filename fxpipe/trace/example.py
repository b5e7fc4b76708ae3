"""One call of a model, taken apart for tracing: tensors become inputs of the graph, and all other
arguments become constants of it."""

from __future__ import annotations

import inspect
import keyword
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import next_sequence_number
from fxpipe.ir.progress import phase
from fxpipe.ir.structure import Structure
from fxpipe.ir.tensors import attributes_of
from fxpipe.runtime.microbatch import first_rows
from fxpipe.trace import checkpoints
from fxpipe.trace.gradients import (
    Projections,
    has_gradient,
    history_of,
    projections,
    without_saved_tensors,
)
from fxpipe.trace.isolation import (
    Args,
    Kwargs,
    Write,
    called,
    parameters_put_back,
    untouched,
)
from fxpipe.trace.left_behind import LeftBehind
from fxpipe.trace.outer import OuterVariable
from fxpipe.trace.patches import tensor_hooks
from fxpipe.trace.sizes import Sizes
from fxpipe.trace.twin import model_of

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
    """The largest batch that the graph is right for: on a larger one the model takes another
    branch, which is not in the graph."""
    refused_sizes: frozenset[int] = frozenset()
    """Small batch sizes that the model itself has been seen to refuse."""
    sizes: Sizes | None = None
    """The sizes of inputs that the graph is right for, if the front end knows them."""
    settled: Mapping[tuple[nn.Module, str], Any] = field(default_factory=dict)
    """The attributes of modules that the first call of the model sets, and later calls find set."""
    folded: Sequence[Tensor] = ()
    """The tensors of the model of which the graph has something as a constant."""
    may_lose_gradients: bool = False
    """Whether parts of the model have a backward of their own, or no gradients: inputs ahead of the
    first parameter may have got others for it."""
    tried: tuple[str, ...] = ()
    """Why other front ends, which come first, have not given the graph: a line for each, such as
    "symbolic: TypeError: ... (at model.py:7: if x.sum() > 0:)"."""
    prints: Sequence[str] = ()
    """The lines of the model that have printed during the trace, and print no more in the graph."""
    hooked: Sequence[str] = ()
    """The lines of the model that have registered a gradient hook on a tensor during the trace: the
    graph calls no such hooks."""
    left: Sequence[LeftBehind] = ()
    """What code of the user's changes which the graph runs as it is: kept modules, functions and
    hooks (:mod:`fxpipe.trace.handed`)."""
    warning: str = ""
    """What to add to the message if the graph turns out to differ from the model."""
    otherwise: Callable[[Example], Traced] | None = None
    """Another front end, to try if the graph turns out to differ from the model; None if there is
    no other."""


def canonical(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The same call, with each argument where the signature of ``model.forward`` puts it.

    Raises TypeError, as the model would, for arguments that the model does not take.
    """
    bound = bound_arguments(model, args, kwargs)
    return bound.args, bound.kwargs


def bound_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> inspect.BoundArguments:
    """The arguments by name, as ``model.forward`` takes them.

    Raises TypeError, with the name of the model, if it does not take them.
    """
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        name, taken = type(model).__name__, ", ".join(signature.parameters) or "no arguments"
        raise TypeError(f"{name}.forward(): {error}; it takes {taken}") from None


@dataclass(frozen=True)
class Example:
    """One call of the model, taken apart into tensors, which vary from call to call, and a
    structure, which holds the constants and says where the tensors belong."""

    model: nn.Module
    names: list[str]  # of the tensors
    structure: Structure  # of (args, kwargs)
    tensors: list[Tensor]
    batch_dims: list[int | None]  # of the tensors
    whole: Mapping[nn.Module, str] = field(default_factory=dict)
    """Modules that no front end may look into, with their paths."""
    any_size: bool = False
    """Whether sizes other than the batch's are to vary as well, where the model lets them."""
    is_compared: bool = True
    """Whether the graph will be compared with the model. If not, as on "meta", nothing may be taken
    for granted that only the comparison shows."""
    attributes: frozenset[str] = frozenset()
    """The names of the attributes that the user has set on the tensors."""

    @staticmethod
    def of(
        model: nn.Module,
        args: Args,
        kwargs: Kwargs,
        batch_dims: BatchDims | None,
        *,
        any_size: bool = False,
        is_compared: bool = True,
    ) -> Example:
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
        names = _identifiers(by_name.paths())
        return Example(
            model,
            names,
            structure,
            detached,
            dims,
            any_size=any_size and is_compared,
            is_compared=is_compared,
            attributes=frozenset(name for tensor in tensors for name in attributes_of(tensor)),
        )

    @property
    def batch(self) -> int | None:
        """The size of the batch; None if no input has a batch dimension."""
        sizes = (
            t.shape[d] for t, d in zip(self.tensors, self.batch_dims, strict=True) if d is not None
        )
        return next(sizes, None)

    def resized(self, batch: int) -> list[Tensor]:
        """The tensors at another batch size: a smaller batch has the first rows, a larger one
        repeats the rows."""
        return [
            tensor if dim is None else first_rows(tensor, dim, batch)
            for tensor, dim in zip(self.tensors, self.batch_dims, strict=True)
        ]

    def arguments(self, tensors: Sequence[Any]) -> tuple[Args, Kwargs]:
        """The call ``(args, kwargs)`` with these in place of the tensors."""
        args, kwargs = self.structure.fill(tensors)
        return args, kwargs

    def binder(self) -> Callable[[Args, Kwargs], list[Any]]:
        """The function for ``Traced.bind``: it takes the tensors out of the arguments of a call.

        It raises TypeError if they are nested otherwise than the example's. It does not keep the
        example's tensors alive.
        """
        model, structure = model_of(self.model), self.structure

        def bind(args: Args, kwargs: Kwargs) -> list[Any]:
            tensors, other = Structure.of(canonical(model, args, kwargs))
            if not structure.fits(other):
                raise TypeError("these inputs are nested otherwise than when the model was traced")
            return tensors

        return bind

    def run(
        self,
        tensors: Sequence[Tensor],
        traced: Traced | None = None,
        *,
        recorded: bool = False,
        backward: Collection[str] = (),
        watched: bool = False,
        given: Callable[[Tensor], Tensor] = torch.clone,
    ) -> Effects:
        """Run the model, or its graph, on these tensors, without side effects on the model.

        Args:
            tensors: the inputs; the run gets a copy of each.
            traced: the graph to run in place of the model.
            recorded: whether autograd records a history; ``Effects.history`` then describes it.
            backward: the names of the parameters whose gradients are wanted. If there are any, a
                history is recorded, and a backward is run for ``Effects.gradients``.
            watched: whether writes to parameters are noted and undone, which takes time.
            given: makes the copy of an input.
        """
        run = partial(self._run, tensors, traced, watched=watched, given=given)
        if recorded and not backward:
            return without_saved_tensors(partial(run, recorded=True))
        return run(recorded=recorded or bool(backward), backward=backward)

    def _run(
        self,
        tensors: Sequence[Tensor],
        traced: Traced | None,
        *,
        recorded: bool,
        backward: Collection[str] = (),
        watched: bool,
        given: Callable[[Tensor], Tensor],
    ) -> Effects:
        first = next_sequence_number()
        clones = [given(tensor) for tensor in tensors]  # the model may write to its inputs
        watch: AbstractContextManager[Mapping[str, Write]] = (
            parameters_put_back(self.model) if watched else nullcontext({})
        )
        mode = _with_gradients() if recorded else torch.no_grad()
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
            changed, modes = since.changed(), since.modes_changed()
            draws, replaced = since.drew_on_the_host(), since.replaced()
            outside, assigned = since.changed_outside(), since.assigned()
            effects = Effects(
                output, buffers, {}, None, {}, changed, modes, draws, outside, assigned, replaced
            )
            if recorded:

                def go_back(history: Hashable) -> None:
                    # Hooks may change gradients at will: the object equals no other history.
                    effects.history = object() if hooks else history
                    if backward:
                        self._go_back(results, effects, backward, first)

                history_of(results, go_back)
        effects.written = {name: write.where for name, write in written.items()}
        return effects

    def _go_back(
        self, results: Sequence[Any], effects: Effects, names: Collection[str], since: int
    ) -> None:
        try:
            effects.gradients = self._gradients(results, names, since)
        except Exception as error:
            effects.no_backward = error

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by their names."""
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def _gradients(self, results: Sequence[Any], names: Collection[str], since: int) -> Projections:
        """The gradients of these parameters for a fixed weighted sum of all outputs, of a run whose
        first node has the number ``since``."""
        outputs = [t for t in results if has_gradient(t)]
        # A plain sum would not do: the sum of a softmax, or of a normalised tensor, is constant,
        # and its gradient is zero.
        weights = [torch.arange(t.numel()).view(t.shape).to(t).cos() for t in outputs]
        trained = self.trained
        wanted = {name: trained[name] for name in names}
        is_some = len(wanted) < len(trained)
        return projections(outputs, weights, wanted, since=since, no_others=is_some)

    def gradients_of_inputs(
        self, tensors: Sequence[Tensor], traced: Traced | None = None
    ) -> list[Tensor | None]:
        """The gradients of the inputs of real numbers for a fixed weighted sum of all outputs, in a
        run of the model, or of its graph, without side effects on the model."""
        if not any(tensor.is_floating_point() for tensor in tensors):
            return [None] * len(tensors)
        with (
            untouched(self.model),
            parameters_put_back(self.model),
            _with_gradients(),
            checkpoints.with_any_backward(),
        ):
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
            results, _ = Structure.of(self.call([leaf.clone() for leaf in leaves], traced))
            outputs = [t for t in results if has_gradient(t)]
            weights = [torch.arange(t.numel()).view(t.shape).to(t).cos() for t in outputs]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, weights, inputs=wanted)
        return [leaf.grad for leaf in leaves]

    def call(self, tensors: Sequence[Tensor], traced: Traced | None = None) -> Any:
        """The output of the model on these tensors, or that of its graph."""
        if traced is not None:
            # ``forward`` is called directly: fx prints errors to stderr in a call of the module.
            with phase("graph", quiet=True):
                return traced.rebuild(traced.graph_module.forward(*tensors))
        args, kwargs = self.arguments(tensors)
        return called(self.model, args, kwargs)


@dataclass
class Effects:
    """The effects of one run: what a forward gives, writes and changes, and the gradients of a
    backward, if there was one."""

    output: Any
    buffers: dict[str, Tensor]  # the values of all buffers after the forward
    written: dict[str, str]  # if watched: the parameters written to, and the lines that write
    history: Hashable  # if recorded: the autograd graph as a value, see ``history_of``
    gradients: Projections  # the parameters' gradients; empty without a backward
    changed: list[tuple[nn.Module, str]]  # the attributes of modules that the forward has changed
    modes: list[tuple[nn.Module, str]]  # the modules that it puts into another mode, train or eval
    draws: bool  # whether the forward draws from Python's or NumPy's random number generator
    outside: list[str]  # the containers outside of modules into which the forward puts tensors
    assigned: list[OuterVariable]  # the variables outside of modules to which it assigns
    replaced: list[tuple[nn.Module, str, str]]  # what it does to tensors themselves
    no_backward: Exception | None = None  # the error that the backward has raised


@contextmanager
def _with_gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def infer_batch_dims(tensors: Sequence[Tensor]) -> list[int | None]:
    """0 for every tensor whose first dimension has the size that most of the tensors have there,
    None for the others."""
    sizes = Counter(tensor.shape[0] for tensor in tensors if tensor.ndim)
    batch = sizes.most_common(1)[0][0] if sizes else None
    return [0 if tensor.ndim and tensor.shape[0] == batch else None for tensor in tensors]


def _identifiers(paths: Sequence[str]) -> list[str]:
    """Names for placeholders, from the paths of tensors: ``ids`` for an argument that is a tensor,
    ``ids_0`` for the first tensor in a list."""
    names: list[str] = []
    taken = {*keyword.kwlist, "self", "torch"}  # the code that fx generates uses self and torch
    for path in paths:
        name = re.sub(r"\W+", "_", path).strip("_")
        while name in names or name in taken:
            name += "_"
        names.append(name)
    return names
