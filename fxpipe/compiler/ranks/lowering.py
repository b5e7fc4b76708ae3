"""From the step graph of all ranks to the program of this one."""

from __future__ import annotations

import hashlib
import operator
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from fxpipe import ops
from fxpipe.compiler.bindings import bindings
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.history import History
from fxpipe.compiler.layout import CutAlike, Layout
from fxpipe.compiler.lowering import Lowering
from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks.world import Ranks
from fxpipe.ir.graph import (
    CARRIED,
    MICROBATCH,
    OF_THE_STEP,
    ORIGIN,
    SEED,
    STAGE,
    VALUE,
    WRITTEN,
    stage_nodes,
    stages_of,
)
from fxpipe.ir.printing import format_graph
from fxpipe.runtime.microbatch import InDim, rows_of_each
from fxpipe.runtime.program import Program, lower
from fxpipe.runtime.ranks.agreement import Agreement
from fxpipe.runtime.ranks.errors import RankError
from fxpipe.runtime.ranks.expected import Sizes
from fxpipe.runtime.ranks.shards import Shards
from fxpipe.runtime.ranks.transport import Edge, GroupTransport, Plan, Planned
from passes import PartitionError, PostEarly, Project, Reduce, Unshard
from passes.chain import Level, ToPipeline
from passes.to_rank.carried import Carried
from passes.to_rank.project import edge_of, transfers_of
from passes.to_rank.reduce import GRADIENTS
from passes.to_rank.unshard import SHARDS
from passes.verify.transfers import verify


@dataclass(frozen=True)
class TracedRows:
    """The batch that a graph was traced with.

    Args:
        input: the index of an input that has a batch dimension.
        dim: that dimension.
        rows: the number of rows there.
        chunks: the number of micro-batches of the graph.
    """

    input: int
    dim: int
    rows: int
    chunks: int

    @staticmethod
    def of(stage_graph: fx.GraphModule, in_dims: Sequence[InDim], chunks: int) -> TracedRows | None:
        """The batch of a stage graph; None if none of its inputs is known to have rows."""
        inputs = stage_graph.graph.find_nodes(op="placeholder")
        inputs = [node for node in inputs if SEED not in node.meta]
        for index, (node, dim) in enumerate(zip(inputs, in_dims, strict=True)):
            value = node.meta.get(VALUE)
            if isinstance(dim, int) and isinstance(value, Tensor) and value.shape[dim]:
                return TracedRows(index, dim, int(value.shape[dim]), chunks)
        return None

    def parts(self, values: Sequence[Any]) -> list[Fraction]:
        """For each micro-batch of a run with these inputs, how many rows it has for each row of the
        batch that was traced."""
        rows = rows_of_each(values[self.input].shape[self.dim], self.chunks)
        return [Fraction(count, self.rows) for count in rows]


@dataclass
class RankProgram:
    """The program of this rank: its graph, and the transfers of each of its edges."""

    graph_module: fx.GraphModule
    program: Program
    plan: Plan
    carried: dict[Edge, list[Carried | None]]
    """What each transfer between any two ranks carries, by edges and in order."""


@dataclass
class RankUnrolled(Unrolled):
    """A graph of all stages, and the programs that this rank runs of it."""

    every_edge: list[Edge] = field(default_factory=list)
    """The edges between all ranks, in the order in which they are connected."""
    digest: str = ""
    """Stands for the graph when ranks compare what they are about to run."""
    needs: dict[str, list[int]] = field(default_factory=dict)
    """The ranks that need the values of each input, by the input's name, in the graph's order."""
    is_reduced: bool = False
    """Whether losses and gradients are summed over replicas."""
    is_sharded: bool = False
    """Whether parameters are gathered that replicas have in shards."""
    traced: TracedRows | None = None
    """The batch that the graph was traced with; None if no input has a batch dimension."""
    programs: dict[bool, RankProgram] = field(default_factory=dict)
    """``programs[True]`` gives the output to every rank, ``programs[False]`` to the last only."""

    def sizes(self, values: Sequence[Any], everywhere: bool) -> dict[Edge, list[Sizes | None]]:
        """The bytes of the tensors and numbers of each transfer in a run with these inputs, by the
        edges of all ranks and in order; None where they are not known."""
        parts = None if self.traced is None else self.traced.parts(values)
        return {
            edge: [None if each is None else each.sizes(parts) for each in transfers]
            for edge, transfers in self.programs[everywhere].carried.items()
        }


@dataclass(frozen=True)
class Agreed:
    """Model graph → the same, cut as rank 0 cuts it.

    Args:
        cut: the pass that rank 0 cuts with.
        agreement: through which rank 0 tells the other ranks.
    """

    name: ClassVar[str] = "partition"
    cut: CutAlike
    agreement: Agreement

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        layout = self.cut.layout
        if layout.labels and layout.known(gm) is None:
            raise PartitionError(
                "this call takes another path through the model than the calls before it, and the "
                "model cannot be cut anew, since its parameters have been given to ranks already: "
                "compile with a partition= that suits all of these calls"
            )
        if self.agreement.rank == 0:
            gm = self.cut(gm)
        ours = {node.name: node.meta.get(STAGE) for node in stage_nodes(gm.graph)}
        labels: dict[str, int]
        own = ours, layout.modes, layout.segments
        labels, layout.modes, layout.segments = self.agreement.ask("cut", own)[0]
        if labels.keys() != ours.keys():
            name = min(labels.keys() ^ ours.keys())
            both = self.agreement.names[0], self.agreement.names[self.agreement.rank]
            here, there = both[:: 1 if name in labels else -1]
            raise RankError(
                f"the model is not the same on all ranks: {here} has a node {name!r} in its graph, "
                f"and {there} has not"
            )
        if self.agreement.rank:
            for node in stage_nodes(gm.graph):
                node.meta[STAGE] = labels[node.name]
            layout.learn(gm)
        return gm


class RankLowering(Lowering):
    """Lowers a graph of all stages to the programs of one rank, once all ranks have the same one.

    Args:
        ranks, agreement, transport, shards: those of the compiler.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        layout: Layout,
        ranks: Ranks,
        agreement: Agreement,
        transport: GroupTransport,
        shards: Shards | None,
    ) -> None:
        super().__init__(model, options, layout)
        self.ranks, self.agreement, self.transport = ranks, agreement, transport
        self.shards = shards

    def pipeline(self, mode: Mode, chunks: int) -> Unrolled:
        """The graph that a call without gradients runs: micro-batches and their stages only. It
        needs no copies or portals, as tensors are transmitted from rank to rank."""
        options = self.options
        context = ToPipeline(
            options.names,
            chunks,
            tuple(mode.in_dims),
            tuple(mode.out_dims),
            training=options.training,
        )
        gm, title = mode.stage_graph, f"ranks of {chunks} micro-batches"
        history = History.observed(self.model, title, gm, options.observer)
        for entry in options.passes.entries:
            if entry.leads_to == Level.PIPELINE and entry.source == Level.STAGE:
                gm = history(entry.make(context), gm)
        return self.programs(mode, gm, chunks, history)

    def programs(self, mode: Mode, gm: fx.GraphModule, chunks: int, history: History) -> Unrolled:
        for node in gm.graph.find_nodes(op="placeholder"):
            if WRITTEN in node.meta:
                raise ValueError(
                    f"the model writes to its input {node.name}, of which every rank has its own "
                    "tensor, so that the ranks would differ: let it write to a copy"
                )
        count = len(gm.graph.find_nodes(op="placeholder"))
        if self.ranks.replicas is not None:
            gm = history(Reduce(), gm)
        is_reduced = len(gm.graph.find_nodes(op="placeholder")) > count
        is_sharded = self.shards is not None and bool(self.shards.stages)
        if self.shards is not None:
            gm = history(Unshard(self.shards.stages, self.shards.brief_stages), gm)
        whole = super().programs(mode, gm, chunks, history)
        self._compare(mode, gm)
        unrolled = RankUnrolled(
            whole.graph_module,
            whole.inline,
            None,
            history,
            is_reduced=is_reduced,
            is_sharded=is_sharded,
            traced=TracedRows.of(mode.stage_graph, mode.in_dims, chunks),
        )
        unrolled.digest = _digest(format_graph(gm))
        for everywhere in (True, False):
            parts = [
                Project(self.options.placement, rank, everywhere)(gm)
                for rank in range(len(self.options.lanes))
            ]
            verify(parts)
            if everywhere:  # the edges of the other program are among these
                every = {edge_of(node)[0] for part in parts for node in transfers_of(part)}
                unrolled.every_edge = sorted(every)
                unrolled.needs = _needs(gm, parts)
                self.transport.connect(unrolled.every_edge)
            shared = frozenset(filter(self.transport.is_shared, unrolled.every_edge))
            own = PostEarly(shared)(parts[self.ranks.rank])
            mode.bindings += bindings(own, self.model)
            program, plan = lower(own), _plan(own, gm)
            unrolled.programs[everywhere] = RankProgram(own, program, plan, _carried(parts))
        if self.shards is not None:
            self.shards.watch(mode.bindings)
        return unrolled

    def _compare(self, mode: Mode, gm: fx.GraphModule) -> None:
        """Compare what this rank has compiled with what every other rank has.

        Raises :class:`RankError`, which says what differs.
        """
        own = self._fingerprint(mode, gm)
        names = self.agreement.names
        for name, other in zip(names, self.agreement.ask("plan", own), strict=True):
            differing = [what for what in own if own[what] != other[what]]
            if differing:
                what = differing[0]
                raise RankError(
                    f"{names[self.agreement.rank]} and {name} have not compiled the same: they "
                    f"differ in their {what} ({own[what]} and {other[what]})"
                )

    def _fingerprint(self, mode: Mode, gm: fx.GraphModule) -> dict[str, str]:
        options, device = self.options, self.ranks.device
        tensors = [
            f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        ]
        stages = "".join(map(format_graph, stages_of(mode.stage_graph)))
        return {
            "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
            "schedules": str(options.schedule),
            "options": f"{options.placement}, {options.checkpoint}, {options.checkpoint_segments}, "
            f"training {options.training}, "
            f"{self.transport.communicators} communicators",
            "parameters and buffers": _digest("\n".join(tensors)),
            "stages": _digest(stages.replace(str(device), device.type)),
            "graphs": _digest(format_graph(gm).replace(str(device), device.type)),
        }


def _plan(own: fx.GraphModule, gm: fx.GraphModule) -> Plan:
    """The transfers of a rank's graph, by their edges; ``gm`` is the graph of all ranks."""
    every = {node.name: (place, node) for place, node in enumerate(gm.graph.nodes)}
    plan: dict[Edge, list[Planned]] = {}
    for transfer in transfers_of(own):
        place, node = every[transfer.meta[ORIGIN]]
        plan.setdefault(edge_of(transfer)[0], []).append(Planned(place, _action(node)))
    return dict(sorted(plan.items()))


def _carried(parts: Sequence[fx.GraphModule]) -> dict[Edge, list[Carried | None]]:
    """What each transfer carries, by edges and in order, in the graphs of all ranks."""
    found: dict[Edge, list[Carried | None]] = {}
    for part in parts:
        for node in part.graph.find_nodes(op="call_function", target=ops.transmit):
            found.setdefault(edge_of(node)[0], []).append(node.meta[CARRIED])
    return dict(sorted(found.items()))


def _action(node: fx.Node) -> str:
    """For messages, the action that a value comes from, with its stage and micro-batch."""
    while node.target in (ops.wait, operator.getitem):
        node = node.all_input_nodes[0]
    keys = {"stage": STAGE, "micro-batch": MICROBATCH}
    at = [f"{what} {node.meta[key]}" for what, key in keys.items() if key in node.meta]
    return f"{node.name} ({', '.join(at)})" if at else node.name


def _needs(gm: fx.GraphModule, parts: Sequence[fx.GraphModule]) -> dict[str, list[int]]:
    """The ranks that need the values of each input of a call, by the input's name, in the order of
    the inputs of a graph of all stages. A rank that weighs losses by numbers of rows needs an
    input's shape only."""
    by_shape = ops.weights, ops.gather

    def has_values(part: fx.GraphModule, name: str) -> bool:
        inputs = part.graph.find_nodes(op="placeholder")
        users = next(list(node.users) for node in inputs if node.name == name)
        scattered = [each for user in users for each in user.users if user.target is ops.scatter]
        direct = any(user.target is not ops.scatter for user in users)
        return direct or any(user.target not in by_shape for user in scattered)

    return {
        node.name: [rank for rank, part in enumerate(parts) if has_values(part, node.name)]
        for node in gm.graph.find_nodes(op="placeholder")
        if node.name not in (GRADIENTS, SHARDS) and OF_THE_STEP not in node.meta
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
