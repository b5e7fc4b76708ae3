"""Replanned: what the planner predicts for a model that has been compiled, as it is and with other
options. The model is not traced again.

::

    model graph as it was cut ─┬─ as it is: this cut, these modes ── plan
                               ├─ schedule="zb_h1" ───────────────── plan
                               └─ chunks=16: costs anew ──────────── plan
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.compiler.compiled import Mode
from fxpipe.compiler.fitting import question_of
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.options import Options
from fxpipe.ir.graph import SEED, STAGE, VALUE, stage_nodes
from fxpipe.ir.tensors import tensors_of
from fxpipe.planning.lanes import CutModel
from fxpipe.planning.limits import reachable_memory
from fxpipe.planning.question import PlanQuestion, copied
from fxpipe.planning.result import Plan
from fxpipe.runtime.microbatch import rows_of_each
from fxpipe.trace.spread import as_on_one_device
from passes.chain import ToStages, run


@dataclass(frozen=True)
class Replanned:
    """A compiled model, for which the planner is asked again.

    Args:
        options, layout: those of the compilation.
        mode: the model as it is compiled for a kind of call.
        chunks: the number of micro-batches of a call.
    """

    options: Options
    layout: Layout
    mode: Mode
    chunks: int
    _priced: dict[int, fx.GraphModule] = field(default_factory=dict)
    """Graphs with the costs for numbers of micro-batches."""
    _cuts: dict[Hashable, CutModel] = field(default_factory=dict)
    """The cuts that have been made: schedules that place stages alike have one."""

    @property
    def memory(self) -> tuple[float | None, ...]:
        """The bytes that are to be had on each lane; None: no limit that is known."""
        return self.options.memory or reachable_memory(self.options.lanes)

    @property
    def rows(self) -> int | None:
        """The rows of a mini-batch; None if there is no batch."""
        return self.mode.rows or self.mode.example.batch

    @property
    def stages(self) -> dict[str, int]:
        """The stage of each node of the model graph."""
        graph = self._at(self.chunks).graph
        return {node.name: node.meta[STAGE] for node in stage_nodes(graph)}

    def asked(self, memory: tuple[float | None, ...]) -> PlanQuestion:
        """The question which plan there is with the options of the compilation, on lanes with so
        much memory."""
        context = ToStages(
            (),
            (),
            chunks=self.chunks,
            optimizer_states=self.options.optimizer_states,
            optimizer_update=self.options.optimizer_update,
            training=self.options.training,
        )
        gm = self._at(self.chunks)
        loss = self.mode.saved_by_loss
        asked = question_of(self.options, memory, gm, context, self.chunks, loss=loss)
        prices = replace(asked.prices, cuts=self._cuts)
        return replace(
            asked,
            checkpoint=self.layout.modes,
            checkpoint_segments=self.layout.segments,
            prices=prices,
        )

    def as_it_is(self) -> Plan:
        """What is predicted for the cut and the modes that the model has, whether they fit or
        not."""
        asked = self.asked((None,) * len(self.options.lanes))
        return self._answer(replace(asked, partition=self.stages))

    def without_links(self) -> Plan:
        """What is predicted as it is, if nothing took time to travel between devices."""
        asked = self.asked((None,) * len(self.options.lanes))
        specs = tuple(
            replace(spec, link_latency_s=0.0, link_bytes_per_s=float("inf")) for spec in asked.specs
        )
        return self._answer(replace(asked, specs=specs, partition=self.stages))

    def without_checkpoints(self) -> Plan:
        """What is predicted with this cut, if all activations were kept, whether they fit or
        not."""
        asked = self.asked((None,) * len(self.options.lanes))
        return self._answer(replace(asked, checkpoint="never", partition=self.stages))

    def alone(self) -> Plan:
        """What is predicted for the model without a pipeline: on the device of the first lane, with
        the mini-batch in one piece and all activations kept, whether they fit or not.

        Raises ValueError if the graph is not for a mini-batch in one piece.
        """
        if not self.takes(1):
            raise ValueError("the graph is for other numbers of rows than those of the mini-batch")
        asked = self.asked((None,) * len(self.options.lanes))
        asked = replace(
            asked,
            prices=replace(asked.prices, known={1: self._at(1)}, cuts={}),
            partition=dict.fromkeys(self.stages, 0),
            schedule="gpipe",
            stages=None,
            chunks=1,
            checkpoint="never",
            checkpoint_segments=None,
        )
        names = None if asked.names is None else asked.names[:1]
        return self._answer(replace(asked, specs=asked.specs[:1], names=names))

    def with_options(self, **changed: Any) -> Plan:
        """What is predicted with some options changed: "chunks", "schedule", "stages",
        "checkpoint", "checkpoint_segments" or "partition".

        A cut that the user has given, and modes and segments that the compiler has not chosen,
        stay.

        Raises:
            ValueError: if there is no such schedule, or the model does not take micro-batches of
                this size, or no cut fits (:class:`fxpipe.DoesNotFit`).
        """
        chunks = changed.get("chunks", self.chunks)
        asked = replace(
            self.asked(self.memory),
            checkpoint=self.options.checkpoint,
            checkpoint_segments=self.options.checkpoint_segments,
        )
        cut = asked.partition if asked.is_automatic else self.stages
        prices = replace(asked.prices, known={chunks: self._at(chunks)})
        return self._answer(replace(asked, **{"partition": cut, "prices": prices, **changed}))

    def takes(self, chunks: int) -> bool:
        """Whether a mini-batch can be cut into so many micro-batches."""
        if chunks == self.chunks:
            return True
        if self.mode.chunks is not None or self.rows is None or chunks > self.rows:
            return False  # the graph is for one size of micro-batches
        return not self.mode.traced.refused_sizes & {*rows_of_each(self.rows, chunks)}

    def _at(self, chunks: int) -> fx.GraphModule:
        if not self._priced:
            self._priced[self.chunks] = self.mode.as_cut
        if chunks not in self._priced:
            self._priced[chunks] = self._costs_for(chunks)
        return self._priced[chunks]

    def _costs_for(self, chunks: int) -> fx.GraphModule:
        """A copy of the graph with costs for another number of micro-batches, which are known
        (:attr:`Options.knows_other_sizes`)."""
        options, chain = self.options, self.options.passes
        gm = copied(self._priced[self.chunks])
        for parameter in gm.graph.find_nodes(op="get_attr"):
            for share in parameter.users:  # pass "shared" reads the parameter by a node of its own
                if VALUE not in parameter.meta and share.target is ops.share:
                    parameter.meta[VALUE] = share.meta[VALUE]
            if VALUE not in parameter.meta:  # a module, which is called with what is shared
                parameter.meta[VALUE] = gm.get_submodule(str(parameter.target))
        values, dims = self._inputs(gm)
        context = ToStages(
            inputs=values,
            in_dims=dims,
            chunks=chunks,
            costs=options.costs,
            optimizer_states=options.optimizer_states,
            spec=options.specs[0],
            training=options.training,
        )
        with self._as_traced(gm):
            return run(chain.passes(context, since="rows", until="shared"), gm)

    def _answer(self, asked: PlanQuestion) -> Plan:
        """The answer to a question. Passes run nodes at the borders of stages once more."""
        with self._as_traced(self._at(self.chunks)):
            return asked.answer()

    def _as_traced(self, gm: fx.GraphModule) -> AbstractContextManager[None]:
        """A context in which the parameters of a graph, which are with their stages by now, are
        taken for where the graph's values are: where the model was when it was traced."""
        inputs = (node.meta.get(VALUE) for node in gm.graph.find_nodes(op="placeholder"))
        device = next((tensor.device for each in inputs for tensor in tensors_of(each)), None)
        return nullcontext() if device is None else as_on_one_device(gm, device)

    def _inputs(self, gm: fx.GraphModule) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
        """A value for each placeholder, and its batch dimension; the seed has neither."""
        mode = self.mode
        given = zip(mode.traced.bind(*mode.example.repeated()), mode.in_dims, strict=True)
        pairs = [
            (None, None) if SEED in node.meta else next(given)
            for node in gm.graph.find_nodes(op="placeholder")
        ]
        return (
            tuple(value for value, _ in pairs),
            tuple(dim if isinstance(dim, int) else None for _, dim in pairs),
        )
