"""The front door: :func:`compile`, and the :class:`Pipeline` that it gives."""

from __future__ import annotations

import html
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import graphviz  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._C._functorch import TransformType

from fxpipe.compiler import Compiler
from fxpipe.graph import Cost, format_code
from fxpipe.hooks import HOOKS
from fxpipe.inspect.draw import draw_model, draw_pipeline, draw_stages, draw_step, render_svg
from fxpipe.inspect.dump import Changes, Story, dump_of
from fxpipe.inspect.page import Page
from fxpipe.inspect.report import Report
from fxpipe.inspect.text import human_bytes, human_time
from fxpipe.loss import LossFunction, Target
from fxpipe.mode import Example, Mode, Unrolled, stages_of
from fxpipe.options import Options, PassList
from fxpipe.progress import began
from fxpipe.runtime.ambient import is_intercepted, transforms
from fxpipe.runtime.clock import Record
from fxpipe.runtime.lanes import Lanes, run_inline
from fxpipe.runtime.optimizer import Stepping
from fxpipe.schedule import AUTO, Schedule, StageCost, Timeline
from fxpipe.timelines import estimated_costs, estimated_memory, measured, measured_costs, predicted
from fxpipe.trace import CustomTracer, untouched
from passes import default_passes
from passes.costs import Costs
from passes.partition import Spec
from passes.skips import SkipLayout, skip_layout


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


def compile(
    model: nn.Module,
    devices: Sequence[str | torch.device] | None = None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | None = None,
    partition: Spec = "auto",
    costs: Costs = "auto",
    checkpoint: str = "never",
    checkpoint_segments: int = 1,
    schedule: str | Schedule = "gpipe",
    stages: int | None = None,
    loss_fn: LossFunction | None = None,
    in_dims: Any = None,
    out_dims: Any = None,
    deferred_batch_norm: bool = False,
    tracer: str | CustomTracer = "auto",
    passes: PassList | None = None,
    dump: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """The same model, as a pipeline over several devices.

    Args:
        devices: one for each lane; repeats are allowed, and ``["cpu", "cpu"]`` is two lanes on the
            CPU. None: every visible accelerator, or two CPU lanes where there is none. A lane has
            one stage, or as many as ``schedule`` and ``stages`` say.
        example_inputs: arguments of one mini-batch; if these or ``example_kwargs`` are given, the
            pipeline is compiled now, otherwise at its first call.
        chunks: micro-batches per mini-batch. None: four for each stage, as far as the batch goes. A
            model whose graph depends on the size of its batch may get fewer, all of one size.
        partition: "auto"; or the names of the modules or nodes that begin a stage; or a dict from
            names to stages; or a function that takes the model graph and gives one of these; or an
            :class:`Auto`, which says what is to be even, and under which conditions.
        costs: what the automatic cut goes by: "analytic", "measured" (each node is run and timed on
            the first device), a :class:`Profile` or the path of a saved one, or seconds by name of
            node or module. "auto": measured on accelerators if there are example inputs, else
            analytic.
        checkpoint: "never", "always", or "except_last": which micro-batches keep no activations and
            compute them again in the backward.
        checkpoint_segments: a checkpointed stage is cut in so many segments, each of which is run
            again on its own: at no time are there more activations than those of one of them. The
            inputs of all segments are kept. (Where a schedule puts gradients of parameters off, so
            is what these are computed from.)
        schedule: the order of :meth:`Pipeline.step`: one of :data:`fxpipe.schedule.NAMES`; "auto",
            the best that is found for the stages' costs; or a :class:`fxpipe.schedule.Schedule` for
            as many lanes as there are devices.
        stages: how many, if not as many as the schedule takes: one for each device, or two for
            schedules that give each device several ("interleaved_1f1b", "looped_bfs", "zbv",
            "dualpipe_v").
        loss_fn: for :meth:`Pipeline.step`: ``loss_fn(output, target)`` gives a scalar. None: the
            model returns its loss, as its output, the first of a tuple, or under the name "loss".
        in_dims, out_dims: the batch dimension of inputs and outputs, where it cannot be inferred:
            an int or None for all, or nested like the arguments, or the output. An output without
            one (None) is averaged, weighted by the sizes of the micro-batches.
        deferred_batch_norm: update the running statistics of batch norms once for each mini-batch,
            as without a pipeline. Each micro-batch is normalised by its own statistics either way.
        tracer: "auto", "symbolic", "export", or ``(model, args, kwargs) -> fx.GraphModule``.
        passes: in place of :func:`passes.default_passes`: a function that takes the same keyword
            arguments and returns a list of passes.
        dump: a folder, in which ``index.html`` shows what each pass changed: the graph as text, as
            code and, if it is small, drawn, after every pass. None: what ``FXPIPE_DUMP`` in the
            environment says, if anything.

    Returns:
        A module with the model's signature, outputs, parameters and state dict. The parameters are
        the model's own, moved to the devices of their stages.

    Raises:
        ValueError: for arguments that make no sense, saying which would.
        TraceError, BatchError, PartitionError: at compilation, if the model cannot be traced, the
            batch not be found, or the model not be cut.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes an nn.Module, got a {type(model).__name__}")
    has_example = example_inputs is not None or example_kwargs is not None
    options = Options.of(
        devices,
        schedule,
        stages,
        loss_fn=loss_fn,
        chunks=chunks,
        partition=partition,
        costs=costs,
        can_measure=has_example,
        checkpoint=checkpoint,
        checkpoint_segments=checkpoint_segments,
        deferred_batch_norm=deferred_batch_norm,
        in_dims=in_dims,
        out_dims=out_dims,
        tracer=tracer,
        passes=default_passes if passes is None else passes,
        observer=dump_of(dump),
    )
    pipeline = Pipeline(model, options)
    if has_example:
        if example_inputs is not None and not isinstance(example_inputs, tuple):
            raise TypeError(
                f"example_inputs is the tuple of the model's arguments, got a "
                f"{type(example_inputs).__name__}; write example_inputs=(x,) for one"
            )
        pipeline.prepare(*(example_inputs or ()), **(example_kwargs or {}))
    return pipeline


class Pipeline(nn.Module):
    """A model that runs as a pipeline. Made by :func:`compile`.

    Called like the model, it gives the model's outputs, differentiably. It shares the model's
    parameters, buffers, hooks and submodules, so that its state dict, optimizers, ``train()`` and
    ``eval()`` are the model's; ``module`` is the model itself.
    """

    module: nn.Module
    _compiler: Compiler
    _lanes: Lanes
    _shown: tuple[Mode, int] | None  # what has run last, and its micro-batches
    _step: Unrolled | None
    _measured: Timeline | None
    losses: tuple[Tensor, ...]
    _example: Example | None
    _closed: bool

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__()
        self._set_up(Compiler(model, options))

    def _set_up(self, compiler: Compiler, example: Example | None = None) -> None:
        model = compiler.model
        self.__dict__.update(
            module=model,
            # The very same dicts: what is registered at one is registered at both.
            _parameters=model._parameters,
            _buffers=model._buffers,
            _modules=model._modules,
            **{name: vars(model)[name] for name in HOOKS},
            _compiler=compiler,
            _lanes=Lanes(compiler.options.lanes),
            _shown=None,
            _step=None,
            _measured=None,
            losses=(),
            _example=example,
            _closed=False,
        )

    @property
    def _options(self) -> Options:
        return self._compiler.options

    # ------------------------------------------------------------------------------------- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these arguments, computed micro-batch by micro-batch."""
        mode, values, unrolled = self._ready(args, kwargs)
        return mode.traced.rebuild(self._run(unrolled, values))

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A training step in the order of the schedule: forward, loss, and backward.

        The gradients are added to ``.grad``, micro-batch by micro-batch; the inputs get none. Each
        micro-batch counts by its rows, so that a loss which is a mean over rows is that of the
        mini-batch. :attr:`losses` has those of the micro-batches.

        Args:
            target: the second argument of ``loss_fn``: tensors, in any nesting, with as many rows
                as the batch.
            scaler: its scale is multiplied into the gradients; unscale and step with it afterwards.
            optimizer: steps each stage's parameters as soon as their gradients are done, while
                other stages are still at work, and what no stage has at the end. One that is not of
                ``torch.optim``, or has hooks on its step (which may clip gradients together, say),
                steps once, at the end. Not LBFGS.

        Returns:
            The loss of the mini-batch, without history and not scaled.

        Raises:
            ValueError: if the loss is no scalar, the target has another number of rows, the
                schedule does not fit the number of micro-batches, or both a scaler and an optimizer
                are given, whose gradients would be scaled.
            RuntimeError: in inference mode, where there are no gradients.
        """
        if scaler is not None and optimizer is not None:
            raise ValueError(
                "a scaler and an optimizer are given: gradients are unscaled after the step, so "
                "call scaler.step(optimizer) then"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS needs all gradients at once: call its step() afterwards")
        unrolled, values = self._ready_to_step(args, kwargs, target)
        last = self._options.devices[-1]
        scale = None if scaler is None else scaler.scale(torch.ones((), device=last))
        stepping = None if optimizer is None else Stepping(optimizer)
        with torch.no_grad():  # each forward records for itself
            total, losses = self._run(unrolled, [*values, scale, stepping])
        if stepping is not None:
            stepping.finish()
        self.__dict__["losses"] = losses
        return total  # type: ignore[no-any-return]

    def measure(self, *args: Any, target: Any = None, rounds: int = 5, **kwargs: Any) -> Timeline:
        """What the lanes do in a training step, measured: that of median length of a few steps.

        Gradients, buffers and random states are afterwards what they were.
        """
        unrolled, values = self._ready_to_step(args, kwargs, target)
        parameters = list(self.module.parameters())
        before = [p.grad for p in parameters]
        found = []
        try:
            for number in range(rounds + 1):  # the first is to warm up
                began(f"step {number} of {rounds}" if number else "warm-up")
                for p in parameters:
                    p.grad = None
                record = Record()
                with untouched(self.module), torch.no_grad():
                    self._run(unrolled, [*values, None, None], record)
                if number:
                    found.append(measured("measured", self._lane_names, record.marks))
        finally:
            for p, grad in zip(parameters, before, strict=True):
                p.grad = grad
        found.sort(key=lambda timeline: timeline.makespan)
        self.__dict__["_measured"] = found[len(found) // 2]
        return found[len(found) // 2]

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
        except ValueError:  # the schedule takes other numbers
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

    def _ready_to_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Unrolled, list[Any]]:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a training step needs gradients: call it outside of inference_mode")
        if target is not None and self._options.loss_fn is None:
            raise ValueError("a target is given, but no loss_fn: give compile(loss_fn=...)")
        self._check_open()
        mode, values, chunks = self._compiler.ready(args, kwargs)
        wanted = Target.of(target, mode.batch_of(values))
        unrolled = self._compiler.step(mode, chunks, wanted)
        self.__dict__.update(_shown=(mode, chunks), _step=unrolled)
        values += wanted.leaves
        return unrolled, [v.detach() if isinstance(v, Tensor) else v for v in values]

    def _run(self, unrolled: Unrolled, values: list[Any], record: Record | None = None) -> Any:
        in_a_lane = self._lanes.is_one(threading.current_thread())  # a hook may call us again
        if unrolled.lanes is None or in_a_lane or is_intercepted():
            return run_inline(unrolled.inline, values, record)
        return self._lanes.run(unrolled.lanes, values, record)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls like this one, without running it."""
        self._ready(args, kwargs)

    def close(self) -> None:
        """End the lanes' threads. The pipeline cannot be called any more; the model can."""
        self.__dict__["_closed"] = True
        self._lanes.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "this pipeline is closed: compile the model again, or call the model itself"
            )

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any], Unrolled]:
        self._check_open()
        if TransformType.Grad in transforms():
            raise RuntimeError(
                "torch.func.grad, vjp and jacrev cannot go through a pipeline, whose backward "
                "keeps an order of its own: use torch.autograd.grad or "
                "torch.autograd.functional, or the model itself, pipe.module"
            )
        mode, values, chunks = self._compiler.ready(args, kwargs)
        self.__dict__["_shown"] = mode, chunks
        return mode, values, self._compiler.pipeline(mode, chunks)

    # ------------------------------------------------------------------------------------- looking

    def _last(self) -> tuple[Mode, int]:
        """What has run last, or would run with the example inputs; and its micro-batches."""
        if self._shown is None and self._example is not None:
            args, kwargs = self._example.repeated()
            self.prepare(*args, **kwargs)
        if self._shown is None:
            raise RuntimeError(
                "this pipeline is not compiled yet: call it, or give example_inputs to compile()"
            )
        return self._shown

    @property
    def graph_module(self) -> fx.GraphModule:
        """The pipeline graph of the last call (or of the example inputs)."""
        return self._compiler.pipeline(*self._last()).graph_module

    @property
    def step_graph(self) -> fx.GraphModule:
        """The training step of the last call of :meth:`step`."""
        if self._step is None:
            raise RuntimeError("there has been no training step yet: call step()")
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
        """The number of micro-batches of the last call."""
        return self._last()[1]

    def draw(
        self, level: str = "pipeline", *, stage: int | None = None, microbatch: int | None = None
    ) -> graphviz.Source:
        """A drawing of the "pipeline", "stage", "model" or "step" graph; ``str`` of it is DOT.

        :func:`fxpipe.inspect.draw.render_svg` makes SVG of it, with Graphviz's ``dot`` or with
        ``graphviz-pure``; where there is a ``dot`` it also shows itself in notebooks.

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
        began("drawing")
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
        example = self._last()[0].example
        return Report(
            self.model_graph,
            self._options.names,
            [stage.cost for stage in self.stages],
            self.skip_layout,
            self.chunks,
            was_chosen=self._options.chunks is None,
            placement=self._options.placement,
            step=self._predicted,
            rows_given=None if example is None else example.batch,
        )

    # ------------------------------------------------------------------------- like any nn.Module

    @property
    def training(self) -> bool:
        """The model's."""
        return self.module.training if "module" in self.__dict__ else True

    @training.setter
    def training(self, value: bool) -> None:
        if "module" in self.__dict__:
            self.module.training = value

    @property
    def _is_full_backward_hook(self) -> bool | None:
        """The model's, as the backward hooks are."""
        return self.module._is_full_backward_hook if "module" in self.__dict__ else None

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        if "module" in self.__dict__:
            self.module._is_full_backward_hook = value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self.module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        """``to(dtype)``, ``half()`` and the like, on the model. Stages stay on their devices."""
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            device = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device)).device
            if device != tensor.device:
                raise RuntimeError(
                    f"a pipeline cannot be moved to {device}: its stages are on "
                    f"{', '.join(self._options.names)}; compile the model for other devices"
                )
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.recompile()
        return self

    def recompile(self) -> None:
        """Compile again at the next call, cut alike.

        What a trace cannot see has to be told so: that plain attributes which the forward reads
        have changed, say.
        """
        if self._shown is not None:
            self.__dict__["_example"] = self._shown[0].example
        self.__dict__["_shown"] = None
        self._compiler.forget()

    def __getstate__(self) -> dict[str, Any]:
        """The model, and what is needed to compile it again: graphs and threads are made anew."""
        return {
            "module": self.module,
            "options": self._options,
            "labels": self._compiler.layout.labels,
            "example": self._shown[0].example if self._shown else self._example,
            "closed": self._closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        compiler = Compiler(state["module"], state["options"], state["labels"])
        self._set_up(compiler, state["example"])
        self.__dict__["_closed"] = state["closed"]

    def extra_repr(self) -> str:
        """What the pipeline is made of, ahead of the model's modules."""
        return f"devices=[{', '.join(self._options.names)}]"
