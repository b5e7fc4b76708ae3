"""What has been compiled for one kind of call: its graphs, its example, its bindings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.graph import STAGE, Cost, attribute, cost_of, stage_nodes
from fxpipe.loss import own_loss
from fxpipe.premises import Premises, are_alike
from fxpipe.runtime.microbatch import SUM, Dims, first_rows
from fxpipe.runtime.program import Program
from fxpipe.structure import map_tensors
from fxpipe.trace import Traced

# For which calls what has been compiled for one serves too. Symbolic graphs have no shapes.
ANY_SHAPES, ANY_SIZE, ONE_SIZE = KINDS = "any shapes", "any batch size", "one batch size"


@dataclass
class Unrolled:
    """A pipeline graph for one number of micro-batches, ready to run."""

    graph_module: fx.GraphModule
    inline: Program
    lanes: Program | None


@dataclass
class Mode:
    """The model as traced for one kind of call: one structure of inputs, train or eval, ..."""

    traced: Traced
    stage_graph: fx.GraphModule
    in_dims: list[int | None]
    out_dims: list[Dims]
    example: Example
    premises: list[Premises]
    """States of the model's attributes by which it comes to these graphs."""
    chunks: int | None = None
    """Of how many micro-batches, if the graph is for those of one size and no other."""
    bindings: list[Binding] = field(default_factory=list)
    unrolled: dict[int, Unrolled] = field(default_factory=dict)
    steps: dict[Any, Unrolled] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """For which other calls this serves too."""
        if self.chunks is not None:
            return ONE_SIZE
        return ANY_SHAPES if self.traced.front_end == "symbolic" else ANY_SIZE

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model."""
        return self.traced.graph_module

    @property
    def costs(self) -> list[Cost]:
        """Of each stage, for the example's mini-batch."""
        members: dict[int, list[fx.Node]] = {}
        for node in stage_nodes(self.model_graph.graph):
            members.setdefault(node.meta[STAGE], []).append(node)
        return [cost_of(members[stage]) for stage in sorted(members)]

    @property
    def returns_a_sum(self) -> bool:
        """Whether the loss, if the model returns one, is a sum over the rows."""
        output = self.stage_graph.graph.output_node()
        marks = {
            node: pytree.tree_map(lambda dim: torch.tensor(dim == SUM), dims)
            for node, dims in zip(output.all_input_nodes, self.out_dims, strict=True)
        }
        mark = own_loss(self.traced.rebuild(fx.map_arg(output.args[0], marks.__getitem__)))
        return isinstance(mark, Tensor) and bool(mark)

    def batch_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The size of the mini-batch of a call."""
        return self.batch_of(self.traced.bind(args, kwargs))

    def refresh(self) -> None:
        """Take what the model has now, where its tensors have been exchanged."""
        for binding in self.bindings:
            binding.refresh()

    def holds(self) -> bool:
        """Whether the graphs are the model's, whose attributes may have changed."""
        return any(premises.hold() for premises in self.premises)

    def accepts(self, other: Mode, model: nn.Module) -> bool:
        """Whether what has been compiled for a changed model is the same: then it is known.

        Modules that the graph has as they are do what their attributes say: which of these may
        change is known from now on. What others have as attributes may make a difference next time.
        """
        if (self.in_dims, self.out_dims, self.chunks) != (
            other.in_dims,
            other.out_dims,
            other.chunks,
        ) or not are_alike(self.stage_graph, other.stage_graph):
            return False
        kept = set(model.modules()).intersection(self.stage_graph.modules())
        free = {each for p in self.premises for each in p.broken() if each[0] in kept}
        self.premises = [premises.without(free) for premises in self.premises]
        if not self.holds():
            self.premises += [premises.without(free) for premises in other.premises]
        return True

    def batch_of(self, values: Sequence[Any]) -> int | None:
        """The size of the mini-batch."""
        return batch_size(values, self.in_dims)


@dataclass
class Example:
    """The inputs that a mode has been compiled for, two rows of them."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    dims: list[int | None]  # of the tensors
    batch: int | None

    @staticmethod
    def of(
        args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[int | None], batch: int | None
    ) -> Example:
        """Of a call."""
        return Example(with_rows((args, kwargs), dims, min(2, batch or 0)), dims, batch)

    def repeated(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the shapes they were: the two rows over and over."""
        return with_rows(self.inputs, self.dims, self.batch or 0)


def batch_size(values: Sequence[Any], dims: Sequence[int | None]) -> int | None:
    """The size of the mini-batch that these tensors are of, None if none has one."""
    sizes = (v.shape[dim] for v, dim in zip(values, dims, strict=True) if dim is not None)
    return next(sizes, None)


def with_rows(
    inputs: tuple[tuple[Any, ...], dict[str, Any]], dims: Sequence[int | None], rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with so many rows, the first ones of this one's, or all of them over and over."""
    remaining = iter(dims)

    def resized(tensor: Tensor) -> Tensor:
        dim = next(remaining)
        return tensor if dim is None else first_rows(tensor.detach(), dim, rows)

    args, kwargs = map_tensors(resized, inputs)
    return args, kwargs


def usual(inputs: Any) -> Any:
    """The inputs, copied out of inference mode if they have been made in it."""
    return map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs)


def stages_of(stage_graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The modules of the stages, in order."""
    calls = stage_graph.graph.find_nodes(op="call_module")
    return [attribute(stage_graph, str(call.target)) for call in calls]


@dataclass
class Binding:
    """A tensor that a graph module holds by name, and where the model has it."""

    name: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    device: torch.device | None = None
    """Where a buffer has to be that several stages read: one of them has a replica."""
    _replicated: tuple[Tensor, int] | None = None  # and its version then

    def refresh(self) -> None:
        """It may be another object by now: assigned, loaded, or exchanged by functional_call."""
        if self.name not in self.theirs:
            return
        theirs = self.theirs[self.name]
        if theirs is None or self.device is None or theirs.device == self.device:
            self.ours[self.name] = theirs
            return
        now = (theirs, 0 if theirs.is_inference() else theirs._version)
        known, version = self._replicated or (None, 0)
        if known is not theirs or version != now[1]:
            self.ours[self.name], self._replicated = theirs.detach().to(self.device), now


def bindings(
    gm: fx.GraphModule, model: nn.Module, device: torch.device | None = None
) -> list[Binding]:
    """Of all tensors that a graph has of a model. ``device``: of the stage that the graph is."""
    found = []
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        try:
            source, owner = model.get_submodule(path), gm.get_submodule(path)
        except AttributeError:  # a constant of the trace
            continue
        if name in source._parameters and name in owner._parameters:
            found.append(Binding(name, owner._parameters, source._parameters))
        if name in source._buffers and name in owner._buffers:
            found.append(Binding(name, owner._buffers, source._buffers, device))
    return found
