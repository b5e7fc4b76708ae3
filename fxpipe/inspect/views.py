"""What of a pipeline can be looked at: graphs, stages, drawings, predictions, reports."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import graphviz  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from fxpipe.compiler.bindings import stages_of
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.loss import Target
from fxpipe.compiler.options import Options
from fxpipe.inspect.draw import draw_model, draw_pipeline, draw_stages, draw_step, render_svg
from fxpipe.inspect.dump import Changes, Story
from fxpipe.inspect.page import Page
from fxpipe.inspect.report import Report
from fxpipe.ir.cost import Cost
from fxpipe.ir.printing import format_code
from fxpipe.ir.progress import report_progress
from fxpipe.ir.text import human_bytes, human_time
from fxpipe.meaning.sample import Sample
from fxpipe.planning.estimates import estimated_costs, estimated_memory, measured_costs, predicted
from fxpipe.schedule import AUTO, StageCost, Timeline
from passes.common.skips import SkipLayout, skip_layout


@dataclass(frozen=True, repr=False)
class Stage:
    """A part of the model, and where it runs. ``cost`` is an estimate for one mini-batch."""

    index: int
    module: fx.GraphModule
    device: torch.device
    cost: Cost

    def __repr__(self) -> str:
        return (
            f"Stage({self.index} on {self.device}: {len(self.module.graph.nodes)} nodes, "
            f"parameters {human_bytes(self.cost.param_bytes)}, forward "
            f"{human_time(self.cost.forward_s)}, backward {human_time(self.cost.backward_s)})"
        )

    def _repr_svg_(self) -> str | None:
        """The nodes of the stage, drawn, for notebooks."""
        try:
            return render_svg(draw_model(self.module))
        except RuntimeError:  # nothing here lays out drawings
            return None


class NotYet(RuntimeError, AttributeError):
    """What there is to see comes with a call that has not been made.

    To those who ask whether a pipeline has such an attribute, it has not.
    """


class Views:
    """The part of a :class:`fxpipe.Pipeline` that shows it: as of its last call, or its example."""

    module: nn.Module
    _compiler: Compiler
    _shown: tuple[Mode, int] | None  # what has run last, and its micro-batches
    _example: Sample | None
    _step: Unrolled | None
    _measured: Timeline | None

    @property
    def _options(self) -> Options:
        return self._compiler.options

    def _last(self) -> tuple[Mode, int]:
        """What has run last, or would run with the example inputs; and its micro-batches."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------------- graphs

    @property
    def graph_module(self) -> fx.GraphModule:
        """The pipeline graph of the last call (or of the example inputs)."""
        return self._compiler.pipeline(*self._last()).graph_module

    @property
    def step_graph(self) -> fx.GraphModule:
        """The training step of the last call of :meth:`step`."""
        if self._step is None:
            raise NotYet("there has been no training step yet: call step()")
        return self._step.graph_module

    @property
    def stage_graph(self) -> fx.GraphModule:
        """The model, one ``call_module`` a stage."""
        return self._last()[0].stage_graph

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model, its nodes labelled with their stages."""
        return self._last()[0].model_graph

    @property
    def graph(self) -> fx.Graph:
        """That of :attr:`graph_module`."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The pipeline graph as Python, each line with its stage, micro-batch and stream."""
        return format_code(self.graph_module)

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        mode, _ = self._last()
        return [
            Stage(i, module, device, cost)
            for i, (module, device, cost) in enumerate(
                zip(stages_of(mode.stage_graph), self._options.devices, mode.costs, strict=True)
            )
        ]

    @property
    def skip_layout(self) -> SkipLayout:
        """Who sends which value to whom."""
        return skip_layout(self.stage_graph)

    @property
    def chunks(self) -> int:
        """The number of micro-batches of the last call: fewer than asked for where the batch is
        small, or where the model does not take micro-batches as small as they would be."""
        return self._last()[1]

    def draw(
        self, level: str = "pipeline", *, stage: int | None = None, microbatch: int | None = None
    ) -> graphviz.Source:
        """A drawing of the "pipeline", "stage", "model" or "step" graph; ``str`` of it is DOT.

        :func:`fxpipe.inspect.draw.render_svg` makes SVG of it, with Graphviz's ``dot`` or with
        ``graphviz-pure``; notebooks show that.

        Args:
            stage, microbatch: draw this part of the graph only, and in full: a box a node.
        """
        drawn = self._drawings.get(level)
        if drawn is None:
            raise ValueError(f'level is {level!r}: give "model", "stage", "pipeline" or "step"')
        if stage is None and microbatch is None:
            return drawn()
        if level in ("model", "stage"):
            if microbatch is not None:
                raise ValueError(
                    f'there are no micro-batches at level {level!r}: give "pipeline" or "step"'
                )
            return draw_model(self.model_graph, stage=stage)
        gm = self.graph_module if level == "pipeline" else self._drawn_step
        return draw_model(gm, stage=stage, microbatch=microbatch)

    @property
    def _drawings(self) -> dict[str, Callable[[], graphviz.Source]]:
        names, placement = self._options.names, self._options.placement
        return {
            "model": lambda: draw_model(self.model_graph),
            "stage": lambda: draw_stages(
                self.stage_graph, names, [stage.cost for stage in self.stages]
            ),
            "pipeline": lambda: draw_pipeline(self.graph_module, names),
            "step": lambda: draw_step(self._drawn_step, names, placement),
        }

    @property
    def _drawn_step(self) -> fx.GraphModule:
        """The step graph; if there has been no step, that of a call like the last, not run."""
        if self._step is not None:
            return self.step_graph
        mode, chunks = self._last()
        return self._compiler.step(mode, chunks, Target.of(None, None)).graph_module

    def _repr_html_(self) -> str | None:
        """The stages, drawn, and the report, for notebooks; as text before it is compiled."""
        if self._shown is None and self._example is None:
            return None
        report = f"<pre>{html.escape(self.report())}</pre>"
        try:
            return render_svg(self.draw("stage")) + report
        except RuntimeError:  # nothing here lays out drawings
            return report

    def report(self) -> str:
        """Per stage: time, memory, bytes; the skips, the bubble, and what limits the speed."""
        return str(self._report())

    def report_html(self, path: str | os.PathLike[str]) -> None:
        """Write all there is to see as one page: a single HTML file, which needs no network.

        :meth:`report`, with tables that sort; the stages, the pipeline and the training step
        (measured, if :meth:`measure` has been called), drawn; memory; what each pass changed; and
        the code. What the passes changed is not kept, as that would take memory in every run: the
        model is traced again, cut as it is, which takes about as long as compiling it did.
        """
        report_progress("drawing")
        codes = {f"stage {stage.index}": format_code(stage.module) for stage in self.stages}
        page = Page(
            f"{type(self.module).__name__} on {len(self.stages)} stages",
            self._report(),
            {
                "Stage graph": render_svg(self.draw("stage")),
                "Pipeline graph": render_svg(self.draw("pipeline")),
            },
            self.timeline(),
            self._changes(),
            {"pipeline": self.code, **codes},
        )
        Path(path).write_text(str(page), encoding="utf-8")

    def _changes(self) -> dict[str, Changes]:
        """What each pass has changed: all is compiled once more, cut as it is, and looked at."""
        story, example = Story(), self._last()[0].example
        if example is None:
            return {}
        labels = dict(self._compiler.layout.labels)
        costs = "analytic" if self._options.costs == "measured" else self._options.costs
        options = replace(self._options, observer=story, partition=labels, costs=costs)
        args, kwargs = example.repeated()
        compiler = Compiler(self.module, options)
        mode, _, chunks = compiler.ready(args, kwargs)
        compiler.pipeline(mode, chunks)
        return story.chains

    def _report(self) -> Report:
        mode, chunks = self._last()
        example = mode.example
        return Report(
            self.model_graph,
            self._options.names,
            [stage.cost for stage in self.stages],
            self.skip_layout,
            chunks,
            was_chosen=self._options.chooses_chunks,
            refused_sizes=mode.traced.refused_sizes,
            placement=self._options.placement,
            step=self._predicted,
            rows_given=None if example is None else example.batch,
        )

    # --------------------------------------------------------------------------------- predictions

    def timeline(self) -> Timeline:
        """The training step as predicted: what each lane does, and when.

        From the times of :meth:`measure`, if that has been called, else from estimated costs. The
        memory is estimated: parameters, their gradients, what Adam keeps for them, buffers, and
        activations; of checkpointed micro-batches, those only while they are computed again, and
        else what the stage has received.
        """
        chunks = self.chunks
        if self._measured is not None:
            costs = measured_costs(self._measured, len(self.stages))
            return self._simulated(chunks, costs)
        return self._simulated(chunks, self._estimated(chunks))

    def _predicted(self, chunks: int) -> Timeline | None:
        """The training step of so many micro-batches, as estimated; None if there is none."""
        is_named = isinstance(self._options.schedule, str) and self._options.schedule != AUTO
        if chunks != self.chunks and not is_named:
            return None  # it would be searched for, or is for as many as there are
        try:
            return self._simulated(chunks, self._estimated(chunks))
        except ValueError:  # the schedule cannot run
            return None

    def _estimated(self, chunks: int) -> list[StageCost]:
        costs = [stage.cost for stage in self.stages]
        return estimated_costs(costs, chunks, self._options.checkpoint)

    def _simulated(self, chunks: int, costs: Sequence[StageCost]) -> Timeline:
        schedule = self._options.schedule_for(chunks, [stage.cost for stage in self.stages])
        options, layout = self._options, self.skip_layout
        memory = estimated_memory(
            [stage.module for stage in self.stages],
            [stage.cost for stage in self.stages],
            layout,
            options.placement,
            chunks,
            options.checkpoint,
            options.checkpoint_segments,
        )
        found = predicted(schedule, costs, layout, options.names, memory)
        return replace(found, lanes=tuple(self._lane_names))

    @property
    def _lane_names(self) -> list[str]:
        return [f"lane {i} · {device}" for i, device in enumerate(self._options.lanes)]
