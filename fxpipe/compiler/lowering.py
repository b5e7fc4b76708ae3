"""Lowering: from the stage graph of a mode to a pipeline graph or step graph, and from there to the
programs that run.

::

    stage graph ─┬─ microbatch ─ ... ─ pipeline graph ─┬─ program of the lanes
                 └─ step ─ ... ─────── step graph ─────┴─ program of the calling thread
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from fxpipe.compiler.bindings import bindings
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.history import History
from fxpipe.compiler.layout import Layout
from fxpipe.compiler.loss import Loss, LossWeight, Target
from fxpipe.compiler.options import Options
from fxpipe.ir.graph import STAGE, stages_of
from fxpipe.ir.progress import phase
from fxpipe.runtime.compiled.stage import as_it_is
from fxpipe.runtime.microbatch import SUM, WEIGHTED, Dim
from fxpipe.runtime.program import lower
from passes.chain import ToPipeline, ToStep


class Lowering:
    """Unrolls the stage graph of a mode over micro-batches, and lowers the resulting graph."""

    def __init__(self, model: nn.Module, options: Options, layout: Layout) -> None:
        self.model = model
        self.options = options
        self.layout = layout

    def pipeline(self, mode: Mode, chunks: int) -> Unrolled:
        """The pipeline graph for ``chunks`` micro-batches, and its programs."""
        options = self.options
        context = ToPipeline(
            devices=options.names,
            chunks=chunks,
            in_dims=tuple(mode.in_dims),
            out_dims=tuple(mode.out_dims),
            checkpoint=self.layout.modes,
            checkpoint_segments=self.layout.segments,
            compiled=mode.compiled,
            loss_weight=self._loss_weight(mode),
            training=options.training,
            apart=frozenset() if options.training else mode.states,
        )
        return self._lowered(mode, f"pipeline of {chunks} micro-batches", context, chunks)

    def step(self, mode: Mode, chunks: int, target: Target, loss_dim: Dim) -> Unrolled:
        """The step graph for ``chunks`` micro-batches, and its programs.

        Args:
            loss_dim: how the losses of micro-batches are put together to the loss of the
                mini-batch.
        """
        options, layout = self.options, self.layout
        context = ToStep(
            loss=Loss(options.loss_fn, mode.traced.rebuild, target.nesting),
            schedule=options.schedule_for(chunks, mode.costs, layout.modes, layout.segments),
            devices=options.names,
            in_dims=tuple(mode.in_dims),
            targets=target.has_batch,
            checkpoint=layout.modes,
            checkpoint_segments=layout.segments,
            summed=loss_dim == SUM,
            loss_weight=self._loss_weight(mode, target) if loss_dim == WEIGHTED else None,
            weighs_inputs=loss_dim == WEIGHTED and options.loss_fn is None,
            compiled=mode.compiled,
        )
        return self._lowered(mode, f"step of {chunks} micro-batches", context, chunks)

    def _lowered(
        self, mode: Mode, title: str, context: ToPipeline | ToStep, chunks: int
    ) -> Unrolled:
        """Run the passes that begin with the stage graph, and lower the resulting graph."""
        gm = mode.stage_graph
        history = History.observed(self.model, title, gm, self.options.observer)
        for rewrite in self.options.passes.passes(context):
            gm = history(rewrite, gm)
        return self.programs(mode, gm, chunks, history)

    def programs(self, mode: Mode, gm: fx.GraphModule, chunks: int, history: History) -> Unrolled:
        """Lower a pipeline or step graph to programs: one that runs inline, in the caller's thread,
        and one that runs in lanes. The tensors of the model are bound to the graph's modules."""
        self._bind(mode, gm)
        # A single micro-batch, or a single lane, has nothing to run in parallel.
        runs_inline = chunks == 1 or len(self.options.lanes) == 1
        with phase("program", quiet=True):
            in_lanes = None if runs_inline else lower(gm, placement=self.options.placement)
            inline = lower(gm)
        return Unrolled(gm, inline, in_lanes, history)

    def _bind(self, mode: Mode, gm: fx.GraphModule) -> None:
        """Bind the tensors of a graph, and of the graph modules that passes have added, to those of
        the model. What a pass has made of a stage, a segment of it, say, reads what the stage
        reads, which may be a replica on the stage's device."""
        stages = stages_of(mode.stage_graph)
        called = gm.graph.find_nodes(op="get_attr") + gm.graph.find_nodes(op="call_module")
        number = {str(node.target): node.meta[STAGE] for node in called if STAGE in node.meta}
        for path, made in gm.named_modules():
            if not isinstance(made, fx.GraphModule) or as_it_is(made) in stages:
                continue
            known = next((own for own in _outer(path) if own in number), None)
            if known is None:
                mode.bindings += bindings(made, self.model)
                continue
            stage, device = stages[number[known]], self.options.devices[number[known]]
            # A graph within a stage, such as the body of an autocast region, is bound by itself.
            mode.bindings += bindings(made, self.model, device, stage if path == known else None)

    def _loss_weight(self, mode: Mode, target: Target | None = None) -> LossWeight | None:
        """The module that computes the weight of a micro-batch's loss, from its target or, where
        the model returns its loss, from its inputs."""
        function = self.options.weighs
        if function is None or isinstance(function, str):
            return None
        if self.options.loss_fn is None or target is None:
            return LossWeight(function, mode.arguments)
        nesting = target.nesting
        return LossWeight(function, lambda leaves: ((nesting.fill(leaves),), {}), of_target=True)


def _outer(path: str) -> Iterator[str]:
    """A path of a module, and those of the modules around it, the outermost first."""
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))
