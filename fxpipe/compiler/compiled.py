"""A mode: the graphs that have been compiled for one kind of call, with their guards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from fxpipe.compiler.bindings import Binding
from fxpipe.compiler.guards.program import Guards
from fxpipe.compiler.history import History
from fxpipe.compiler.loss import Loss
from fxpipe.ir._torch import pytree
from fxpipe.ir.cost import Cost, stage_costs
from fxpipe.ir.graph import written_inputs
from fxpipe.ir.structure import Structure
from fxpipe.meaning.batches import Batches
from fxpipe.meaning.left_out import LabelWatch
from fxpipe.meaning.loss import own_loss
from fxpipe.meaning.loss_of_target import FoundLoss
from fxpipe.meaning.numbers_read import ModelNumbers, NumberWatch, TextsGiven
from fxpipe.meaning.sample import Sample, batch_size
from fxpipe.meaning.weights import Fill
from fxpipe.planning.estimates import LossMemory
from fxpipe.planning.loss import NO_TARGET, SavedByLoss, loss_memory, taken_for_loss
from fxpipe.runtime.apart import Apart, as_tensors
from fxpipe.runtime.compiled.stage import CompiledStages
from fxpipe.runtime.microbatch import SUM, WEIGHTED, Dim, Dims, InDim, Parts, joined
from fxpipe.runtime.program import Program
from fxpipe.trace import Traced
from fxpipe.trace.arguments import WrittenArguments
from fxpipe.trace.premises import are_alike


class Label(NamedTuple):
    """An input, which may have labels, of a model that returns its loss."""

    place: int
    """The input's place among the placeholders."""
    dim: int
    """The input's batch dimension."""
    is_named: bool
    """Whether the input's name says that it has labels, which only decides how closely it is
    looked at."""


@dataclass
class Unrolled:
    """A pipeline or step graph for one number of micro-batches, ready to run inline or in lanes."""

    graph_module: fx.GraphModule
    inline: Program
    lanes: Program | None
    history: History


@dataclass
class Mode:
    """The model as compiled for one kind of call, such as: images of one size, in train mode. Its
    guards say for which calls it is right."""

    traced: Traced
    as_cut: fx.GraphModule
    """The model graph as pass "partition" has left it. The passes after it compute values again in
    stages that use them, and send parameters, which is right for this cut only: the planner, which
    tries other cuts, begins with this graph."""
    stage_graph: fx.GraphModule
    in_dims: Sequence[InDim]
    out_dims: list[Dims]
    example: Sample
    history: History
    guards: Guards
    """The conditions under which these graphs compute what the model computes."""
    arguments: Fill
    """Fills the arguments of the call, by their names, with tensors."""
    chunks: int | None = None
    """The number of micro-batches, where the graph is for one batch size only; else None."""
    rows: int | None = None
    """The number of rows, where they are elements of lists; else None."""
    notes: list[str] = field(default_factory=list)
    """Remarks of the check, for the report, such as which results micro-batches change."""
    expected_loss: SavedByLoss | str = NO_TARGET
    """What the loss will save for its backward, or why that is not known when the model is cut."""
    seen_loss: SavedByLoss | None = None
    """What the loss saves and how long it takes, known by the target of the first step, where the
    model was cut without one; else None."""
    is_checked: bool = False
    """Whether the check has run the model on parts of samples, and compared its outputs."""
    differing: frozenset[str] = frozenset()
    """The paths of the outputs that have differed."""
    why_one_size: str = ""
    """Why the graph is for one batch size only, where it has been tried for any size first."""
    bindings: list[Binding] = field(default_factory=list)
    unrolled: dict[int, Unrolled] = field(default_factory=dict)
    """The pipeline graphs that have been compiled, by their number of micro-batches."""
    written: WrittenArguments = field(default_factory=WrittenArguments)
    """The arguments that the call changes."""
    compiled: CompiledStages | None = None
    """The stages as a backend of ``torch.compile`` has compiled them; None if they run as they
    are."""
    left_out: LabelWatch | None = None
    """Looks for labels that the loss leaves out; None where they need not be looked for."""
    numbers: ModelNumbers | None = None
    """Looks for numbers that the model reads and that have changed; None ahead of the first
    call."""
    loss_numbers: dict[Any, NumberWatch] = field(default_factory=dict)
    """Look for numbers that the loss function reads and that have changed since it was checked, by
    the keys of ``losses``; there is none where it is to be checked in any case."""
    loss_texts: dict[Any, TextsGiven] = field(default_factory=dict)
    """Those of texts in a target, by the same keys."""
    of_model: Batches = field(default_factory=Batches)
    """Says which mini-batches a model that returns its loss is checked with once more."""
    of_loss: Batches = field(default_factory=Batches)
    """Says which mini-batches the loss function is checked with once more."""
    outputs_checked: Mapping[str, Dim] = field(default_factory=dict)
    """How the check has found that outputs are put together, by their paths."""
    goes_by_size: bool = False
    """Whether the model takes some numbers of rows only, so that each size of micro-batches is to
    be checked."""
    sizes_checked: set[int] = field(default_factory=set)
    """The sizes of micro-batches that the model has been checked with."""
    loss_sizes: dict[Any, set[int]] = field(default_factory=dict)
    """Those that the loss function has been checked with, by the keys of ``losses``."""
    is_outdated: bool = False
    """Whether the check has found with a later mini-batch that outputs are put together in another
    way, so that the model is to be compiled anew."""
    losses: dict[Any, FoundLoss] = field(default_factory=dict)
    """What the check has found out about the loss of a step, by the number of micro-batches and the
    structure of the target."""
    steps: dict[Any, Unrolled] = field(default_factory=dict)
    """The step graphs that have been compiled, by the same, and by how the target is read and the
    loss is put together."""

    @property
    def losses_of_parts(self) -> list[FoundLoss]:
        """What is known of the losses of steps of several micro-batches; a step of one puts nothing
        together."""
        return [each for (chunks, *_), each in self.losses.items() if chunks > 1]

    @property
    def all_notes(self) -> list[str]:
        """Remarks of the check, on the loss function and on the model."""
        of_loss = (each.note for each in self.losses_of_parts if each.note)
        return [*dict.fromkeys(of_loss), *self.notes]

    @property
    def most_chunks(self) -> int:
        """The largest number of micro-batches for which there is a graph; 0 if there is none."""
        return max([*self.unrolled, *(chunks for chunks, *_ in self.steps)], default=0)

    @property
    def model_graph(self) -> fx.GraphModule:
        """The graph of the traced model, whose nodes have costs and stages."""
        return self.traced.graph_module

    @property
    def costs(self) -> list[Cost]:
        """The cost of each stage, for one mini-batch of the example's size."""
        return stage_costs(self.stage_graph)

    @property
    def loss_memory(self) -> LossMemory:
        """What the loss saves for its backward, for a mini-batch of the example's size: that of the
        last training step or, before the first one, what is expected. Nothing, if the model returns
        its loss, or if nobody knows."""
        return loss_memory(self.saved_by_loss, self.model_graph.graph)

    @property
    def saved_by_loss(self) -> SavedByLoss | None:
        """What the loss of the last training step has saved, or is expected to save; None if that
        is not known."""
        steps = (step.graph_module for step in reversed(self.steps.values()))
        losses = (module for step in steps for module in step.modules() if isinstance(module, Loss))
        known = self.expected_loss
        expected = known if isinstance(known, SavedByLoss) else self.seen_loss
        found = next((loss.saved for loss in losses if loss.saved is not None), None)
        return found.known_by(expected) if found and expected else found or expected

    @property
    def loss_dim(self) -> Dim:
        """How the losses that the model returns for micro-batches are put together to the loss of
        the mini-batch: by a sum (SUM), with the weights of ``loss_weight`` (WEIGHTED), or by a mean
        over the rows (None)."""
        kinds = [None, SUM, WEIGHTED]
        mark = own_loss(
            self._marked(
                pytree.tree_map(lambda dim: kinds.index(dim) if dim in kinds else 0, dims)
                for dims in self.out_dims
            )
        )
        return kinds[int(mark)] if isinstance(mark, Tensor) and not mark.ndim else None

    @cached_property
    def labels(self) -> list[Label]:
        """The inputs that may be labels of a loss that the model returns, a mean over the rows or
        with weights."""
        loss = self.output_taken_for_loss
        if not isinstance(loss, Tensor) or loss.ndim or self.loss_dim == SUM:
            return []
        inputs = self.stage_graph.graph.find_nodes(op="placeholder")
        dims = enumerate(zip(inputs, self.in_dims, strict=False))  # a seed may come after them
        return [
            Label(place, dim, any(name in node.name for name in ("label", "target")))
            for place, (node, dim) in dims
            if isinstance(dim, int)
        ]

    @property
    def output_dims(self) -> dict[str, int]:
        """The batch dimensions of the tensors in the model's output, by their paths in it."""
        marked = self._marked(
            pytree.tree_map(lambda dim: dim if type(dim) is int else -1, dims)
            for dims in self.out_dims
        )
        found, structure = Structure.of(marked)
        dims = zip(structure.paths(), map(int, found), strict=True)
        return {path: dim for path, dim in dims if dim >= 0}

    @property
    def output_taken_for_loss(self) -> Any:
        """What a training step takes for the loss where there is no ``loss_fn``: a fake tensor, for
        a mini-batch of the example's size, or what else the model returns there."""
        return taken_for_loss(self.model_graph.graph, self.traced.rebuild)

    def _marked(self, numbers: Iterable[Any]) -> Any:
        """What the model returns, with numbers, as tensors, in the place of its tensors: one for
        each node that the stage graph returns, or a tuple for a node that gives several."""
        output = self.stage_graph.graph.output_node()
        found = zip(output.all_input_nodes, numbers, strict=True)
        marks = {node: pytree.tree_map(torch.tensor, each) for node, each in found}
        return self.traced.rebuild(fx.map_arg(output.args[0], marks.__getitem__))

    def batch_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The number of rows in the mini-batch of a call; None if no input has a batch
        dimension."""
        return self.batch_of(self.traced.bind(args, kwargs))

    def refresh(self) -> None:
        """Let the graphs read the parameters and buffers that the model has now: they may have been
        replaced since the last call."""
        for binding in self.bindings:
            binding.refresh()
        if self.compiled is not None:
            self.compiled.refresh()

    def settle(self) -> None:
        """Set the attributes of the model that its own call would set."""
        for (module, name), value in self.traced.settled.items():
            vars(module)[name] = value

    def equals(self, other: Mode) -> bool:
        """Whether another mode, compiled after the model has changed, computes the same: then the
        change makes no difference, and this mode can serve."""
        ours = self.in_dims, self.out_dims, self.chunks
        theirs = other.in_dims, other.out_dims, other.chunks
        return ours == theirs and are_alike(self.stage_graph, other.stage_graph)

    def kept_modules(self, model: nn.Module) -> set[nn.Module]:
        """The modules of the model that the stage graph calls as a whole, without having traced
        into them."""
        return set(model.modules()).intersection(self.stage_graph.modules())

    def batch_of(self, values: Sequence[Any]) -> int | None:
        """The number of rows in the mini-batch, from the values of the placeholders."""
        return self.rows or batch_size(values, self.in_dims)

    @cached_property
    def written_inputs(self) -> list[int]:
        """The places, among the inputs of the stage graph, of those to which the model writes."""
        return written_inputs(self.stage_graph.graph)

    @property
    def states(self) -> frozenset[int]:
        """The places, among the nodes that the stage graph returns, of the tensors in arguments
        that the call changes; but not of those that are returned beside these, too."""
        if not self.written.places or self.rows is not None:
            return frozenset()
        marked = self._marked(range(len(self.out_dims)))
        states, others = ({int(mark) for mark in marks} for marks in self.written.states(marked))
        return frozenset(
            place for place in states - others if isinstance(self.out_dims[place], int)
        )

    def values_in_parts(self, values: Sequence[Any], chunks: int) -> list[Any]:
        """The values of the placeholders, with states that the stages have already as they have
        them."""
        return [
            value.cut(dim, chunks) if isinstance(value, Apart) else value
            for value, dim in zip(values, self.in_dims, strict=True)
        ]

    def rebuild(self, output: Any) -> Any:
        """The output of the pipeline graph as the model's own structure."""
        if self.rows is None or self.chunks in (None, 1):
            return self.traced.rebuild(as_tensors(output))
        return joined(
            [
                self.traced.rebuild(
                    pytree.tree_map(
                        lambda leaf, i=i: leaf.values[i] if isinstance(leaf, Parts) else leaf,
                        output,
                    )
                )
                for i in range(self.chunks or 1)
            ]
        )
