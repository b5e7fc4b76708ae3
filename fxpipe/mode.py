"""What has been compiled for one kind of call: its graphs, its example, its bindings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.graph import COST, STAGE, Cost, attribute, stage_nodes
from fxpipe.runtime.microbatch import Dims
from fxpipe.runtime.program import Program
from fxpipe.structure import map_tensors
from fxpipe.trace import Traced


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
    example: Example | None = None
    bindings: list[Binding] = field(default_factory=list)
    unrolled: dict[int, Unrolled] = field(default_factory=dict)
    steps: dict[Any, Unrolled] = field(default_factory=dict)

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model."""
        return self.traced.graph_module

    @property
    def costs(self) -> list[Cost]:
        """Of each stage, for the example's mini-batch."""
        nodes = list(stage_nodes(self.model_graph.graph))
        costs = [Cost() for _ in {node.meta[STAGE] for node in nodes}]
        for node in nodes:
            costs[node.meta[STAGE]] += node.meta.get(COST, Cost())
        return costs

    def batch_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The size of the mini-batch of a call."""
        return self.batch_of(self.traced.bind(args, kwargs))

    def refresh(self) -> None:
        """Take what the model has now, where its tensors have been exchanged."""
        for binding in self.bindings:
            binding.refresh()

    def batch_of(self, values: Sequence[Any]) -> int | None:
        """The size of the mini-batch."""
        for value, dim in zip(values, self.in_dims, strict=True):
            if dim is not None:
                size: int = value.shape[dim]
                return size
        return None


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
        def first_two(tensor: Tensor, dim: int) -> Tensor:
            return tensor.narrow(dim, 0, min(2, tensor.shape[dim])).clone()

        return Example(_along((args, kwargs), dims, first_two), dims, batch)

    def repeated(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs of the shapes they were: the two rows over and over."""

        def repeat(tensor: Tensor, dim: int) -> Tensor:
            rows = torch.arange(self.batch or 0, device=tensor.device) % tensor.shape[dim]
            return tensor.index_select(dim, rows)

        args, kwargs = _along(self.inputs, self.dims, repeat)
        return args, kwargs


def _along(inputs: Any, dims: Sequence[int | None], change: Callable[[Tensor, int], Tensor]) -> Any:
    """The inputs, with each tensor that has a batch dimension changed."""
    remaining = iter(dims)

    def each(tensor: Tensor) -> Tensor:
        dim = next(remaining)
        return tensor if dim is None else change(tensor.detach(), dim)

    return map_tensors(each, inputs)


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

    def refresh(self) -> None:
        """It may be another object by now: assigned, loaded, or exchanged by functional_call."""
        if self.name in self.theirs and self.ours[self.name] is not self.theirs[self.name]:
            self.ours[self.name] = self.theirs[self.name]


def bindings(gm: fx.GraphModule, model: nn.Module) -> list[Binding]:
    """Of all tensors that a graph has of a model."""
    found = []
    for node in gm.graph.find_nodes(op="get_attr"):
        path, _, name = str(node.target).rpartition(".")
        try:
            source, owner = model.get_submodule(path), gm.get_submodule(path)
        except AttributeError:  # a constant of the trace
            continue
        for theirs, ours in (
            (source._parameters, owner._parameters),
            (source._buffers, owner._buffers),
        ):
            if name in theirs and name in ours:
                found.append(Binding(name, ours, theirs))
    return found
