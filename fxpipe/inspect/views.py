"""Views of a pipeline: its graphs, stages, drawings, predictions and reports."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import graphviz  # type: ignore[import-untyped]
from torch import fx

from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.guards.program import Guards
from fxpipe.compiler.history import History
from fxpipe.compiler.loss import MiniBatch, Target
from fxpipe.compiler.options import Options
from fxpipe.compiler.ranks.lowering import RankUnrolled
from fxpipe.compiler.ranks.runner import RankRunner
from fxpipe.compiler.runner import NotYet, Runner
from fxpipe.inspect.draw import (
    NoLayout,
    draw_model,
    draw_pipeline,
    draw_rank,
    draw_ranks,
    draw_stages,
    draw_step,
    render_svg,
)
from fxpipe.inspect.explain import Explaining, Explanation, not_compiled
from fxpipe.inspect.page import Page
from fxpipe.inspect.report import Report
from fxpipe.inspect.stage import Stage
from fxpipe.ir.graph import stages_of
from fxpipe.ir.printing import format_code
from fxpipe.ir.progress import report_progress
from fxpipe.planning.estimates import (
    estimated_costs,
    measured_costs,
    predicted,
    stage_memory,
    step_links,
    step_memory,
    updates_on,
    with_loss,
    with_moves,
    with_updates,
)
from fxpipe.planning.loss import loss_seconds
from fxpipe.planning.segmented import SegmentedStage
from fxpipe.runtime.lanes import cores
from fxpipe.schedule import AUTO, Timeline
from passes import Project
from passes.common.modes import Modes, is_never, of_stages
from passes.common.segments import Segments, counts, in_words
from passes.common.skips import SkipLayout, skip_layout
from passes.to_rank.project import Crossings

NO_STEP = (
    "there is no step graph, as the model was compiled with training=False: see the graph of level "
    '"pipeline"'
)


@dataclass(frozen=True)
class _Explained:
    """An explanation, with all that it has been made of. It keeps no compiled program alive."""

    explanation: Explanation
    mode: weakref.ref[Mode]
    options: Options
    measured: Timeline | None
    state: tuple[Any, ...]

    def is_of(
        self, mode: Mode, options: Options, measured: Timeline | None, state: tuple[Any, ...]
    ) -> bool:
        """Whether the explanation is still that of a pipeline."""
        is_same = self.mode() is mode and self.options is options and self.measured is measured
        return is_same and self.state == state


class Views:
    """Views of the programs that a runner ran last: their graphs, stages, drawings, predictions and
    reports. Before the first call, a view compiles the programs for the runner's example inputs.

    ``measured``: the training step or the call without one, that :meth:`fxpipe.Pipeline.measure`
    has measured, or None. ``measured_sizes``: those of the tensors among its inputs.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.measured: Timeline | None = None
        self.measured_sizes: list[tuple[int, ...]] = []
        self._explained: _Explained | None = None

    @property
    def _options(self) -> Options:
        return self._runner.options  # which change when something is chosen by prediction

    # -------------------------------------------------------------------------------------- graphs

    @property
    def graph_module(self) -> fx.GraphModule:
        """The pipeline graph of the last call (or of the example inputs)."""
        return self._runner.last_pipeline().graph_module

    @property
    def step_graph(self) -> fx.GraphModule:
        """The step graph of the last call of :meth:`fxpipe.Pipeline.step`.

        Raises NotYet if there has been none.
        """
        return self._last_step.graph_module

    @property
    def _last_step(self) -> Unrolled:
        step = self._runner.last_step()
        if step is None:
            training = self._options.training
            raise NotYet(
                "there has been no training step yet: call step()" if training else NO_STEP
            )
        return step

    @property
    def stage_graph(self) -> fx.GraphModule:
        """The model as a graph with one ``call_module`` for each stage."""
        return self._runner.described()[0].stage_graph

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model, its nodes labelled with their stages."""
        return self._runner.described()[0].model_graph

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        mode, _ = self._runner.described()
        return [
            Stage(i, *each)
            for i, each in enumerate(
                zip(
                    stages_of(mode.stage_graph),
                    self._options.devices,
                    mode.costs,
                    self._options.placement,
                    strict=True,
                )
            )
        ]

    @property
    def skip_layout(self) -> SkipLayout:
        """The values that stages send to each other: which stage sends which value to which stage,
        and with how many bytes."""
        return skip_layout(self.stage_graph)

    @property
    def chunks(self) -> int:
        """The number of micro-batches of the call that is described."""
        return self._runner.described()[1]

    @property
    def guards(self) -> Guards:
        """The guards of the program that served the last call."""
        return self._runner.last()[0].guards

    @property
    def all_guards(self) -> list[Guards]:
        """The guards of every program that is in the cache, the oldest first."""
        return [mode.guards for mode in self._runner.compiler.cache.modes]

    @property
    def front_end(self) -> str:
        """The name of the front end that traced the model for the last call."""
        return self._runner.last()[0].traced.front_end

    def draw(
        self, level: str = "pipeline", *, stage: int | None = None, microbatch: int | None = None
    ) -> graphviz.Source:
        """A drawing of the graph of a level: "model", "stage", "pipeline" or "step"; of several
        ranks also "rank", the program of this one, and "ranks", those of all. With ``stage`` or
        ``microbatch`` only this part of the graph is drawn, node by node.

        Raises ValueError for another level, or for a micro-batch at a level that has none.
        """
        drawn = self._drawings.get(level)
        if drawn is None:
            *levels, last = (f'"{each}"' for each in self._drawings)
            raise ValueError(f"level is {level!r}: give {', '.join(levels)} or {last}")
        if stage is None and microbatch is None:
            return drawn()
        if level in ("model", "stage"):
            if microbatch is not None:
                raise ValueError(
                    f'there are no micro-batches at level {level!r}: give "pipeline" or "step"'
                )
            return draw_model(self.model_graph, stage=stage)
        return draw_model(self._graph_of(level), stage=stage, microbatch=microbatch)

    def _graph_of(self, level: str) -> fx.GraphModule:
        """The graph of a level at which there are micro-batches."""
        return self.graph_module if level == "pipeline" else self._drawn_step

    @property
    def _drawings(self) -> dict[str, Callable[[], graphviz.Source]]:
        names, placement = self._options.names, self._options.placement
        return {
            "model": lambda: draw_model(self.model_graph),
            "stage": lambda: draw_stages(
                self.stage_graph, names, [stage.cost for stage in self.stages], self._contain
            ),
            "pipeline": lambda: draw_pipeline(self.graph_module, names),
            "step": lambda: draw_step(self._drawn_step, names, placement),
        }

    @property
    def _contain(self) -> list[str]:
        """The modules and operators that each stage contains, as text for a line of the report."""
        return [stage.contains for stage in self.stages]

    @property
    def _drawn_step(self) -> fx.GraphModule:
        """The step graph of the last step. If there has been no step, a step graph is compiled for
        the last call's inputs, and not run."""
        if self._runner.last_step() is not None:
            return self.step_graph
        if not self._options.training:
            raise ValueError(NO_STEP)
        mode, chunks = self._runner.described()
        batch = MiniBatch(mode.example.repeated(), [Target.of(None, None)])
        step, _ = self._runner.compiler.step(mode, chunks, batch)
        return step.graph_module

    def html(self) -> str | None:
        """A drawing of the stages, and the report, as HTML. None if there has been no call and no
        example inputs were given, since nothing can be compiled then."""
        if not self._runner.has_a_call:
            return None
        report = f"<pre>{escape(str(self.report()))}</pre>"
        try:
            return render_svg(self.draw("stage")) + report
        except NoLayout:  # no program that lays out drawings is installed
            return report

    def write_page(self, path: str | os.PathLike[str]) -> None:
        """Write the report page: a single HTML file with the report, drawings, memory, what each
        pass changed, and code. Raises NoLayout if no program that lays out drawings is installed.
        """
        report_progress("drawing")
        codes = {f"stage {stage.index}": format_code(stage.module) for stage in self.stages}
        page = Page(
            f"{type(self._runner.compiler.model).__name__} on {len(self.stages)} stages",
            self.report(),
            {
                "Stage graph": render_svg(self.draw("stage")),
                "Pipeline graph": render_svg(self.draw("pipeline")),
            },
            [self.timeline(), *([] if self.measured is None else [self.measured])],
            self.histories,
            {"pipeline": format_code(self.graph_module), **codes},
        )
        Path(path).write_text(str(page), encoding="utf-8")

    @property
    def histories(self) -> list[History]:
        """What every pass has changed in the graphs of the last call and of the last step: one
        history for each chain of passes."""
        mode, _ = self._runner.described()
        step = self._runner.last_step()
        steps = [] if step is None else [step.history]
        return [mode.history, self._runner.last_pipeline().history, *steps]

    def report(self) -> Report:
        """The report on the last call: per stage the time, memory, traffic and idle time, and what
        limits the speed. A call with fewer micro-batches than one before it does not count."""
        mode, chunks = self._runner.reported()
        example = mode.example
        return Report(
            self.model_graph,
            self._options.names,
            [stage.cost for stage in self.stages],
            self._contain,
            self.skip_layout,
            chunks,
            was_chosen=self._options.chooses_chunks,
            choice=self._options.choice,
            refused_sizes=mode.traced.refused_sizes,
            placement=self._options.placement,
            step=self._predicted,
            knows_other_sizes=self._options.knows_other_sizes,
            rows_given=None if example is None else example.batch,
            notes=mode.all_notes,
            memory=self._options.memory or (),
            optimizer=self._options.optimizer,
            unknown_loss=self._unknown_loss(mode),
            training=self._options.training,
            compiled=[] if mode.compiled is None else mode.compiled.lines,
            checkpoints="" if is_never(self._modes) else in_words(self._modes, self._segments),
            chunks_given=None if self._options.chooses_chunks else self._options.chunks,
            aside=self._runner.aside,
        )

    def _unknown_loss(self, mode: Mode) -> str:
        is_limited = any(limit is not None for limit in self._options.memory or ())
        if self._options.loss_fn is None or not is_limited:
            return ""
        return mode.expected_loss if isinstance(mode.expected_loss, str) else ""

    def explain(self) -> Explanation:
        """What the compiler has found and decided, what limits the speed, and what would help. It
        is kept until something of what it says has changed."""
        runner = self._runner
        if not runner.has_a_call:
            return not_compiled(runner.compiler.model, runner.compiler.compilations.refused)
        mode, chunks = runner.reported()
        kept, has_stepped = (self._modes, self._segments), runner.last_step() is not None
        compilations = runner.compiler.compilations
        losses = [(each.dim, each.note) for each in mode.losses_of_parts]
        compiled = len(compilations), len(compilations.lowered), len(compilations.checks)
        state = chunks, kept, has_stepped, mode.saved_by_loss, compiled, losses, runner.aside
        known = self._explained
        if known is None or not known.is_of(mode, self._options, self.measured, state):
            found = Explaining(
                runner.compiler.model,
                self._options,
                runner.compiler.layout,
                mode,
                chunks,
                self.stages,
                measured=self.measured,
                measured_sizes=self.measured_sizes,
                replayed=None if self.measured is None else self.timeline(),
                has_stepped=has_stepped,
                compilations=compilations,
                cores=None if isinstance(runner, RankRunner) else cores(),
                aside=runner.aside,
            )()
            known = _Explained(found, weakref.ref(mode), self._options, self.measured, state)
            self._explained = known
        return known.explanation

    # --------------------------------------------------------------------------------- predictions

    def timeline(self) -> Timeline:
        """The training step, or the call without one, predicted from the costs of nodes, or from
        the times of the stages, if they have been measured; its name says from which."""
        _, chunks = self._runner.reported()
        found = self._simulated(chunks, self.measured)
        source = "" if self.measured is None else " by measured stages"
        return replace(found, name=f"{found.name} (predicted{source})")

    def _predicted(self, chunks: int) -> Timeline | None:
        """The training step for a number of micro-batches, predicted from estimated costs; None if
        the schedule cannot run with so many."""
        is_named = isinstance(self._options.schedule, str) and self._options.schedule != AUTO
        if chunks != self._runner.reported()[1] and not is_named:
            # To search for a schedule would take too long for a report, and a schedule that the
            # user has given action by action is for one number of micro-batches only.
            return None
        try:
            return self._simulated(chunks)
        except ValueError:  # the schedule cannot run
            return None

    def _simulated(self, chunks: int, measured: Timeline | None = None) -> Timeline:
        options, layout = self._options, self.skip_layout
        of_each = [stage.cost for stage in self.stages]
        schedule = options.schedule_for(chunks, of_each, self._modes, self._segments)
        graph = self.model_graph.graph
        kept = stage_memory(of_each, layout, self.stage_graph, training=options.training)
        numbers = counts(self._segments, self._modes, len(kept))
        parts = [
            SegmentedStage.of(stage.module, number) if number > 1 else None
            for stage, number in zip(self.stages, numbers, strict=True)
        ]
        for i, mode in enumerate(of_stages(self._modes, len(kept))):
            if (own := parts[i]) is not None:
                kept[i] = own.memory(kept[i], mode)
        shares = [[1.0] if own is None else own.shares for own in parts]
        costs = (
            estimated_costs(of_each, chunks, self._modes, shares)
            if measured is None
            else measured_costs(measured, len(kept))
        )
        program, _ = self._runner.described()
        if measured is None:
            last = options.specs[options.placement[-1]]
            costs = with_loss(costs, *loss_seconds(program.saved_by_loss, graph, chunks, last))
        loss, updates = program.loss_memory, updates_on(options.specs, options.optimizer_update)
        memory = step_memory(kept, options.placement, chunks, self._modes, loss, updates)
        costs = with_moves(costs, kept, chunks, self._modes)
        devices = [options.specs[lane] for lane in options.placement]
        found = predicted(
            schedule,
            with_updates(costs, kept, devices, options.optimizer_update),
            step_links(layout, chunks, options.specs, list(map(str, options.lanes)), graph),
            memory,
            training=options.training,
        )
        return replace(found, lanes=tuple(self.lane_names))

    @property
    def _modes(self) -> Modes:
        return self._runner.compiler.layout.modes

    @property
    def _segments(self) -> Segments:
        return self._runner.compiler.layout.segments

    @property
    def lane_names(self) -> list[str]:
        """The names of the lanes: their numbers and devices."""
        return [f"lane {i} · {device}" for i, device in enumerate(self._options.lanes)]


class RankViews(Views):
    """Views of the programs that the ranks of a group have run last. Each rank can make them by
    itself."""

    _runner: RankRunner

    def __init__(self, runner: RankRunner) -> None:
        super().__init__(runner)

    @property
    def _drawings(self) -> dict[str, Callable[[], graphviz.Source]]:
        rank, placement = self._runner.compiler.ranks.rank, self._options.placement
        return {
            **super()._drawings,
            "rank": lambda: draw_rank(self._graph_of("rank"), rank),
            "ranks": lambda: draw_ranks(
                [Project(placement, each)(self.step_graph) for each in range(1 + max(placement))]
            ),
        }

    def _graph_of(self, level: str) -> fx.GraphModule:
        if level != "rank":
            return super()._graph_of(level)
        step = self._last_step
        assert isinstance(step, RankUnrolled)
        return step.programs[True].graph_module

    @property
    def _drawn_step(self) -> fx.GraphModule:
        return self.step_graph  # another one would have to be compiled by all ranks together

    def transfers(self) -> dict[tuple[int, int], int]:
        """How many transfers a step has from one rank to another; empty before the first step."""
        if self._runner.last_step() is None:
            return {}
        return Crossings(self.step_graph.graph, self._options.placement, everywhere=True).edges
