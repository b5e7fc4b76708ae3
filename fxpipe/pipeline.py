"""The pipeline: a module that runs the programs that the compiler makes of a model.

::

    Pipeline ─ is a ─ ModelProxy      has the model's parameters, state dict, hooks, attributes
       ├─── has a ─── Runner          compiles for a call, and runs it on the lanes
       └─── has ───── Views           graphs, stages, drawings, predictions and reports
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import graphviz  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn

from fxpipe.compiler.brief import brief
from fxpipe.compiler.compilations import Compilations
from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.guards.program import Guards
from fxpipe.compiler.no_loss import NoLoss
from fxpipe.compiler.options import Options
from fxpipe.compiler.runner import NO_TRACE, Runner
from fxpipe.inspect.explain import Explanation
from fxpipe.inspect.stage import Stage
from fxpipe.inspect.views import Views
from fxpipe.ir._torch import transforms
from fxpipe.ir.counts import count
from fxpipe.ir.graph import written_inputs
from fxpipe.ir.options import note_misnamed, options_of
from fxpipe.ir.printing import format_code
from fxpipe.ir.progress import report_progress
from fxpipe.ir.tensors import tensors_of
from fxpipe.ir.text import kind
from fxpipe.loading.initialise import Init
from fxpipe.loading.load import Source
from fxpipe.planning.estimates import measured
from fxpipe.planning.search import Choice
from fxpipe.proxy import ModelProxy, calling, moved_to
from fxpipe.runtime.apart import all_whole
from fxpipe.runtime.clock import Record
from fxpipe.runtime.ending import call
from fxpipe.runtime.inference import without_backward
from fxpipe.runtime.notes import note_spoilt_backward, writes_to_target_noted
from fxpipe.runtime.optimizer import Stepping
from fxpipe.schedule import Timeline
from fxpipe.trace import bound_arguments, untouched
from passes.common.skips import SkipLayout

F = TypeVar("F", bound=Callable[..., Any])


def _opaque(function: F) -> F:
    """Keep Dynamo from tracing into a function: code that ``torch.compile`` compiles calls it as
    plain Python, since the threads of the lanes cannot be captured in a graph."""
    why = "a pipeline is compiled already"
    return torch.compiler.disable(function, reason=why)  # type: ignore[no-untyped-call,no-any-return]


class _ModelsForward(functools.partial[Any]):
    """A bound ``forward`` whose signature is that of the model's ``forward``."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].module.forward)


class _LikeTheModels:
    """A method with the signature of the model's ``forward``, for libraries that inspect it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, pipe: Pipeline | None, owner: type | None = None) -> Callable[..., Any]:
        return self.function if pipe is None else _ModelsForward(self.function, pipe)


class Pipeline(ModelProxy):
    """A model that runs as a pipeline. Made by :func:`compile`.

    Called like the model, it gives the model's outputs, differentiably. It shares the model's
    parameters, buffers, hooks and submodules, so that its state dict, optimizers, ``train()`` and
    ``eval()`` are the model's; ``module`` is the model itself. The model's other attributes can be
    read and set at the pipeline, too, but for those whose names a pipeline has itself, such as
    ``stages`` or ``chunks``: these are ``pipe.module.stages`` and ``pipe.module.chunks``.
    """

    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    _runner: Runner
    _views: Views

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__(model)
        self._set_up(Runner(Compiler(model, options)))

    def _set_up(self, runner: Runner) -> None:
        self.__dict__.update(_runner=runner, _views=Views(runner), losses=(), grad_norm=None)

    # ------------------------------------------------------------------------------------- running

    @_LikeTheModels
    @_opaque
    @brief
    @call
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these arguments, computed micro-batch by micro-batch. It has no
        backward if the pipeline is compiled with ``training=False``."""
        if not self._runner.options.training:
            return self._inferred(args, kwargs)
        mode, values, unrolled = self._runner.ready(args, kwargs)
        return self._given_back(mode, self._runner.run(unrolled, values), args, kwargs)

    def _inferred(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            mode, values, unrolled = self._runner.ready(args, kwargs)
        trained = itertools.chain(self.parameters(), tensors_of(values))

        def run() -> Any:
            return self._runner.run(unrolled, values)

        stay_apart = not torch.is_grad_enabled() and not transforms()
        output = without_backward(run if stay_apart else lambda: all_whole(run()), trained)
        return self._given_back(mode, output, args, kwargs)

    def _given_back(
        self, mode: Mode, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The output of a program as the model's own structure. The caller's arguments that the
        call changes get their new contents, and are in it."""
        made = mode.rebuild(output)
        if not mode.written:
            return made
        arguments = bound_arguments(self.module, args, kwargs).arguments
        return mode.written.given_back(made, arguments)

    @property
    def generate(self) -> Callable[..., Any]:
        """The model's own ``generate``, by which language models continue a text; it calls this
        pipeline where it would call the model.

        Everything else about it is the model's: arguments, samplers, results, and the cache of keys
        and values. If the pipeline is compiled with ``training=False``, the cache stays on the
        devices of the stages that use it, in the micro-batches' parts. Two programs are compiled,
        one for the prompt and one for the tokens after it, for any length.
        """
        if not hasattr(type(self.module), "generate"):
            raise AttributeError(f"{type(self.module).__name__} has no attribute 'generate'")
        own: Callable[..., Any] = calling(self.module, self._generating).generate

        @functools.wraps(own)
        def generate(*args: Any, **kwargs: Any) -> Any:
            _refuse_an_encoder(self.module, self._runner.options.names)
            return own(*args, **kwargs)

        return generate

    def _generating(self, *args: Any, **kwargs: Any) -> Any:
        """A call by the model's ``generate``.

        Raises RuntimeError if each such call would be compiled.
        """
        output = self(*args, **kwargs)
        number = self._runner.last()[0].written.number
        if number:
            raise RuntimeError(
                f"{number} is a number that each call of {type(self.module).__name__} changes, and "
                "a graph has numbers as constants, so that every token would be compiled: give "
                "generate() another kind of cache, or use_cache=False"
            )
        return output

    @_opaque
    @brief
    @call
    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        zero_grad: bool = False,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        """A training step in the order of the schedule: forward, loss, and backward.

        The gradients of the parameters are added to ``.grad``, micro-batch by micro-batch; the
        inputs get no gradients. The loss of a micro-batch is weighted by its number of rows, so
        that a loss which is a mean over rows is the mean over the mini-batch; with a
        ``loss_weight``, it is weighted by what that gives. Losses that are sums are added up. After
        the step :attr:`losses` has the losses of the micro-batches, and :attr:`grad_norm` the norm
        that the gradients had before they were clipped.

        Args:
            target: the second argument of ``loss_fn``: tensors, in any nesting, with as many rows
                as the batch, which are split into micro-batches. Tensors without dimensions, and
                values that are no tensors, are given to every micro-batch. Without a ``loss_fn``
                it is the argument ``target`` of the model.
            scaler: its scale is multiplied into the gradients. With an ``optimizer`` the step does
                what the usual loop does: ``scaler.unscale_(optimizer)``, clipping,
                ``scaler.step(optimizer)``, which skips an optimizer with a gradient that is inf or
                NaN, and ``scaler.update()``. All gradients have to be there for that, so the
                optimizer steps at the end. Without an ``optimizer`` do all this afterwards.
            optimizer: one optimizer, or several. The parameters of each stage are stepped as soon
                as their gradients are complete, while other stages are still at work; parameters
                that no stage has are stepped at the end. An optimizer of a class that is not in
                ``torch.optim``, or with hooks on its step (which may clip all gradients together,
                say), steps once, at the end. LBFGS is refused: it needs a closure that calls
                this.
            zero_grad: set the gradients of the parameters to None as soon as ``optimizer`` has
                stepped them. With "looped_bfs", whose lanes do all backwards of one stage before
                those of the next, a lane then never holds gradients of more than one of its stages.
                A step that fails sets them to None, too, unless it is one of several that
                ``accumulate``.
            max_grad_norm: clip the gradients by this norm ahead of the optimizer's step, see
                :meth:`clip_grad_norm_`: those of the model, and of all other parameters that the
                optimizer holds (those of a loss function, say). All gradients have to be there for
                that, so the optimizer steps at the end.
            accumulate: the number of steps whose mean the optimizer takes: the gradients of this
                step count 1 / accumulate. Give the optimizer to the last of these steps only, and
                this number to all of them. The loss that is returned is that of this step, whole.

        Returns:
            The loss of the mini-batch, not scaled. The step has run its backward, so that the loss
            has no history: a call of ``loss.backward()`` is not needed, and PyTorch refuses it
            ("element 0 of tensors does not require grad and does not have a grad_fn").

        Raises:
            ValueError: if the loss is no scalar, the target has another number of rows, the
                schedule does not fit the number of micro-batches, or an optimizer holds no
                parameter that gets a gradient.
            TypeError: for a target with arrays that are no tensors.
            RuntimeError: in inference mode and under ``torch.no_grad()``, where there are no
                gradients; for a pipeline without training; and for a hook on a parameter that
                changes a parameter which micro-batches are still to use: give ``optimizer`` in its
                place.
        """
        if not self._runner.options.training:
            raise RuntimeError(
                "this pipeline was compiled with training=False, and has no training step: compile "
                "the model with training=True to train it; pipe(x) gives the outputs"
            )
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a training step needs gradients, which are turned off here: call it outside of "
                "no_grad; pipe(x) gives the outputs without them"
            )
        optimizers = self._optimizers(optimizer, scaler, zero_grad, max_grad_norm)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        accumulate = count("accumulate", accumulate, "the number of steps that are accumulated")
        unrolled, values = self._ready_to_step(self.step, args, kwargs, target)
        last = self._runner.options.devices[-1]
        scale = None if accumulate == 1 else torch.full((), 1 / accumulate, device=last)
        if scaler is not None:
            scale = scaler.scale(torch.ones((), device=last) if scale is None else scale)
        stepping = None
        if optimizers is not None:
            stepping = Stepping(optimizers, self.module.parameters(), zero_grad)
        of_loss = None if self._runner.options.loss_fn is None else target
        with torch.no_grad():  # the forward of each stage switches gradients on itself
            in_parts = stepping if max_grad_norm is None and scaler is None else None
            try:
                with self._runner.hooks_watched(), writes_to_target_noted(of_loss):
                    total, losses = self._runner.run(unrolled, [*values, scale, in_parts])
            except BaseException as error:
                self._after_a_failed_step(error, zero_grad and accumulate == 1, in_parts)
                raise
        if stepping is not None and scaler is not None:
            self._runner.unscale(stepping, scaler)
        norm = None
        if max_grad_norm is not None and stepping is not None:
            norm = self.clip_grad_norm_(max_grad_norm, others=stepping.others)
        if stepping is not None:
            stepping.finish(scaler)
        self.__dict__.update(losses=losses, grad_norm=norm)
        return total  # type: ignore[no-any-return]

    def _ready_to_step(
        self,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
    ) -> tuple[Unrolled, list[Any]]:
        """The program of a step, and its values. ``method`` has been called for it, and gives to
        the model what is no argument of its own, also where that is misspelled."""
        try:
            return self._runner.ready_to_step(args, kwargs, target)
        except TypeError as error:
            note_misnamed(error, self.module.forward, kwargs, options_of(method))
            raise

    def _after_a_failed_step(
        self, error: BaseException, frees: bool, stepping: Stepping | None
    ) -> None:
        """Free the gradients of the micro-batches that were done, which the next step would train
        with, or say in a note that some may be there; and that some parameters have been stepped.
        """
        note_spoilt_backward(error, [stage.module for stage in self.stages])
        if stepping is not None and (stepped := stepping.count):
            error.add_note(
                f"{stepped} parameters have been stepped already, those of stages that were done: "
                "load a checkpoint, or go on with them as they are. Where a failed step is to "
                "leave the parameters alone, call optimizer.step() behind pipe.step, which then is "
                "not given the optimizer"
            )
        having = [p for p in self.module.parameters() if p.grad is not None]
        if frees:
            for parameter in having:
                parameter.grad = None
        elif having:
            error.add_note(
                "micro-batches whose backward was done, if any, have added their gradients to "
                ".grad: set gradients to None, with optimizer.zero_grad(), ahead of the next step"
            )

    def _optimizers(
        self, optimizer: Any, scaler: Any, zero_grad: bool, max_grad_norm: float | None
    ) -> list[Any] | None:
        """The optimizers that a step is given; None if it is given none.

        Raises TypeError or ValueError for arguments of :meth:`step` that do not fit together.
        """
        optimizers = _listed(optimizer)
        if optimizers == []:
            raise ValueError("optimizer is an empty list: give an optimizer, or None for no step")
        self._check_optimizers(optimizers, scaler, zero_grad, max_grad_norm)
        return optimizers

    def _check_optimizers(
        self,
        optimizers: list[Any] | None,
        scaler: Any,
        zero_grad: bool,
        max_grad_norm: float | None,
    ) -> None:
        """Raise TypeError or ValueError for optimizers and other arguments of :meth:`step` that do
        not fit together."""
        _check(scaler, optimizers or ())
        if zero_grad and optimizers is None:
            raise ValueError("zero_grad=True needs an optimizer=, which takes the gradients first")
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm!r}: give the largest norm that the gradients may "
                "have, 0 or more"
            )
        if max_grad_norm is not None and optimizers is None:
            raise ValueError(
                "max_grad_norm needs an optimizer=, which takes the clipped gradients; without one "
                "call pipe.clip_grad_norm_(max_norm) after the step"
            )

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        others: Iterable[Tensor] = (),
    ) -> Tensor:
        """Clip the gradients of all parameters of the model by their norm, as if they were one
        vector; see ``torch.nn.utils.clip_grad_norm_``. Returns the norm that they had.

        ``others``: parameters beside those of the model, such as ``loss_fn.parameters()``, whose
        gradients are part of that vector.
        """
        every = list(dict.fromkeys([*self.parameters(), *others]))
        return nn.utils.clip_grad_norm_(every, max_norm, norm_type, error_if_nonfinite)

    @brief
    def measure(self, *args: Any, target: Any = None, rounds: int = 5, **kwargs: Any) -> Timeline:
        """Run a few training steps, measure what each lane does and when, and return the step whose
        duration is the median. Of a pipeline without training, calls are run in place of steps.

        Gradients, buffers, random states and inputs are put back afterwards, and hooks of modules
        and parameters are not called.

        Args:
            target: as for :meth:`step`.
            rounds: the number of steps to measure, after one step to warm up.
        """
        rounds = count("rounds", rounds, "the number of steps to measure")
        if self._runner.options.training:
            try:
                unrolled, values = self._ready_to_step(self.measure, args, kwargs, target)
            except NoLoss as error:
                error.add_note(
                    "measure() measures a training step; to measure calls, compile the model with "
                    "training=False"
                )
                raise
            values += [None, None]
        elif target is not None:
            raise ValueError(
                "a target is given to a pipeline that was compiled with training=False, of which "
                "calls are measured, and no steps: leave it out"
            )
        else:
            _, values, unrolled = self._runner.ready(args, kwargs)
        written = written_inputs(unrolled.graph_module.graph)
        timelines = []
        for number in range(rounds + 1):  # the first is to warm up
            report_progress(f"step {number} of {rounds}" if number else "warm-up")
            given = [value.clone() if i in written else value for i, value in enumerate(values)]
            record = Record()
            with untouched(self.module), torch.no_grad():
                self._runner.run(unrolled, given, record)
            if number:
                timelines.append(measured("measured", self._views.lane_names, record.marks))
        timelines.sort(key=lambda timeline: timeline.makespan)
        self._views.measured = timelines[len(timelines) // 2]
        is_input = self._runner.options.loss_fn is None  # of a model that returns its loss
        given = tensors_of((args, kwargs, target if is_input else None))
        self._views.measured_sizes = [tuple(tensor.shape) for tensor in given]
        return self._views.measured

    # ------------------------------------------------------------------ compiling, loading, closing

    @brief
    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for calls like this one, without running it."""
        self._runner.ready(args, kwargs)

    def load(
        self,
        checkpoint: Source,
        *,
        strict: bool = True,
        assign: bool = False,
        init: Init | None = None,
    ) -> Any:
        """Load a checkpoint, one tensor at a time, each straight to the device of its stage.

        A model may be built on "meta" (``with torch.device("meta")``), compiled there, and loaded
        by this method: then it is never in memory as a whole, but on the devices of its stages. A
        model that has values may be loaded too. The next call compiles the model again, with the
        same cut, and checks again what the pipeline means.

        Parameters and buffers stay the same objects, so that an optimizer made before is right
        afterwards. For a tensor with several names (tied weights), the checkpoint has to have one
        of the names only. Missing and unexpected names, and tensors of another shape, are reported
        as the model's ``load_state_dict`` reports them; its hooks are run.

        Buffers that their modules do not save (``persistent=False``), and tensors that are plain
        attributes, are in no checkpoint. If they are on "meta", they are initialised as their
        modules do it: by ``_init_weights(module)`` of a module around theirs, as Hugging Face's
        models have it, or by ``reset_parameters()``.

        Args:
            checkpoint: a file of safetensors or of ``torch.save`` (which is read with
                ``weights_only=True``); the index of a sharded checkpoint, as Hugging Face writes
                it; a folder with one of these; or a mapping from names to tensors, such as
                :func:`fxpipe.loading.stored_tensors` with other names.
            strict: whether missing and unexpected names are an error. If not, a missing tensor that
                is on "meta" stays there until it is loaded or materialized.
            assign: whether tensors take the dtypes of the checkpoint; if not, they keep those of
                the model, to which values are converted.
            init: a function that sets the parameters and buffers of one module, as for
                ``nn.Module.apply``. It is called, in place of the methods above, for each module
                with tensors that are on "meta" and not in the checkpoint.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

        Raises:
            RuntimeError: as ``load_state_dict`` does; if the model is on "meta" and has not been
                compiled, so that there are no stages; or if nothing initialises a tensor that is
                on "meta" and in no checkpoint.
        """
        return self._runner.load(checkpoint, strict=strict, assign=assign, init=init)

    def materialize(self, init: Init | None = None) -> None:
        """Initialise all tensors that are on "meta", as in a new model, on the devices of their
        stages.

        Args:
            init: a function that sets the parameters and buffers of one module, as for
                ``nn.Module.apply``. None: ``_init_weights(module)`` of a module around it, as
                Hugging Face's models have it, or ``reset_parameters()``, as modules of PyTorch have
                it. Other initialisation, by the constructor of a model, is not repeated.

        Raises:
            RuntimeError: if nothing initialises one of the tensors (those that have been
                initialised stay so); or if the model has not been compiled, so that there are no
                stages.
        """
        self._runner.materialize(init)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the model, as the model does. If the model is on "meta",
        :meth:`load` does it: ``load_state_dict`` of a module leaves such tensors without values."""
        if self._runner.compiler.homes:
            return self.load(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def recompile(self) -> None:
        """Compile again at the next call, with the same cut into stages.

        Call this after a change that guards do not notice: of what the forward reads by a name that
        it computes, say, or of a part deep within an object that is an attribute of a module.
        """
        self._runner.forget()

    def close(self) -> None:
        """End the threads of the lanes. After this the pipeline cannot be called; the model can."""
        self._runner.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        """Convert the model, by ``to(dtype)``, ``half()`` and the like; stages stay on their
        devices.

        Raises RuntimeError if the conversion would move the model to another device.
        """
        try:
            device = moved_to(self.module, fn)
        except Exception as error:  # the conversion itself fails, as to a device that is not here
            options = self._runner.options
            raise RuntimeError(
                f"a pipeline stays on the devices of its stages ({', '.join(options.names)}), and "
                f"cannot be moved ({error}): compile the model for other devices"
            ) from error
        if device is not None:
            raise RuntimeError(
                f"a pipeline cannot be moved to {device}: its stages are on "
                f"{', '.join(self._runner.options.names)}; compile the model for other devices"
            )
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.recompile()
        return self

    def __prepare_scriptable__(self) -> nn.Module:
        """``torch.jit.script`` calls this method first.

        Raises RuntimeError: a pipeline cannot be compiled to TorchScript."""
        raise RuntimeError(NO_TRACE)

    # ------------------------------------------------------------------- graphs, drawings, reports

    @property
    def graph_module(self) -> fx.GraphModule:
        """The pipeline graph of the last call, or of the example inputs."""
        return self._views.graph_module

    @property
    def step_graph(self) -> fx.GraphModule:
        """The step graph of the last call of :meth:`step`."""
        return self._views.step_graph

    @property
    def stage_graph(self) -> fx.GraphModule:
        """The model as a graph with one ``call_module`` for each stage."""
        return self._views.stage_graph

    @property
    def model_graph(self) -> fx.GraphModule:
        """The traced model; its nodes are labelled with their costs and stages."""
        return self._views.model_graph

    @property
    def graph(self) -> fx.Graph:
        """The ``fx.Graph`` of :attr:`graph_module`."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The pipeline graph as Python, each line with its stage, micro-batch and stream."""
        return format_code(self.graph_module)

    @property
    def stages(self) -> list[Stage]:
        """The stages, in order."""
        return self._views.stages

    @property
    def skip_layout(self) -> SkipLayout:
        """Which values travel from which stage to which, and how."""
        return self._views.skip_layout

    @property
    def chunks(self) -> int:
        """The number of micro-batches of the last call, or of the example inputs.

        There are fewer than asked for where the batch is small, or where the model does not take
        micro-batches as small as they would be.
        """
        return self._views.chunks

    @property
    def guards(self) -> Guards:
        """The guards of the last call's graphs: the conditions under which these serve a call. A
        call for which they do not hold is compiled anew. ``print`` shows them in words, and
        ``guards.failure(x)`` says which of them a call fails, and how."""
        return self._views.guards

    @property
    def all_guards(self) -> list[Guards]:
        """The guards of every program that is kept for later calls, the oldest first: there is one
        for each kind of call that has been compiled."""
        return self._views.all_guards

    @property
    def compilations(self) -> Compilations:
        """Every compilation so far: when it was, why (which guard of each program there was has
        failed), for which calls, and how long it took. ``print`` shows them."""
        return self._runner.compiler.compilations

    @property
    def front_end(self) -> str:
        """What has traced the model for the last call: "symbolic", "export", or "custom"."""
        return self._views.front_end

    def draw(
        self, level: str = "pipeline", *, stage: int | None = None, microbatch: int | None = None
    ) -> graphviz.Source:
        """A drawing of the "pipeline", "stage", "model" or "step" graph; ``str`` of it is DOT. Of a
        pipeline of several ranks also of "rank", the program of this one, and of "ranks", those of
        all with their transfers.

        :func:`fxpipe.inspect.draw.render_svg` makes SVG of it; notebooks show that.

        Args:
            stage, microbatch: draw this part of the graph only, and in full: a box for each node.
        """
        return self._views.draw(level, stage=stage, microbatch=microbatch)

    def report(self) -> str:
        """Per stage: time, memory, bytes; the skips, the bubble, and what limits the speed."""
        return str(self._views.report())

    def explain(self) -> Explanation:
        """The pipeline in plain sentences: where the batch is, what has traced the model and why,
        what is kept whole, where it is cut, what limits the speed and the memory, and which calls
        of :func:`compile` are predicted to help most, and by how much. ``print`` shows it.

        Nothing runs, but the planner is asked for what would help about ten times, and cuts the
        model anew for each number of micro-batches and each placement of stages: of a net of a
        hundred nodes that takes some seconds, and more the wider its graph is. The explanation is
        kept until the pipeline changes, so that a second call takes no time.
        """
        return self._views.explain()

    def report_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one page: a single HTML file, which needs no network.

        The page has :meth:`report`, with tables that sort; drawings of the stages, the pipeline and
        the training step (measured, if :meth:`measure` has been called); memory; what each pass
        changed; and the code. What the passes changed is kept as compressed text while they run,
        unless a graph has more than 2,000 nodes.
        """
        self._views.write_page(path)

    def timeline(self) -> Timeline:
        """The predicted training step: what each lane does and when, in seconds, and the bytes that
        it holds.

        The prediction uses the times of :meth:`measure`, if that has been called, else estimated
        costs. The step of an optimizer takes time in it if :func:`compile` was given
        ``optimizer=``. The memory is always an estimate: parameters, their gradients, the states of
        the optimizer, which is an Adam if none was given, and what its step needs; buffers, and
        activations. A checkpointed micro-batch holds activations only while its forward is computed
        again; until then it holds the inputs of the stage.
        """
        return self._views.timeline()

    def _repr_html_(self) -> str | None:
        """The stages, drawn, and the report, for notebooks; as text before it is compiled."""
        return self._views.html()

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickling: the model and what is needed to compile it again. Graphs are not
        pickled; they are compiled anew after unpickling, with the same cut.

        Raises PicklingError if ``loss_fn`` or another option is a function without a name in a
        module, such as a lambda.
        """
        runner = self._runner
        return {
            "module": self.module,
            "options": runner.options,
            "layout": runner.compiler.layout,
            "example": runner.example,
            "is_closed": runner.is_closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        ModelProxy.__init__(self, state["module"])
        compiler = Compiler(state["module"], state["options"], state["layout"])
        self._set_up(Runner(compiler, state["example"]))
        self._runner.is_closed = state["is_closed"]

    def extra_repr(self) -> str:
        """The devices of the stages; ``repr`` prints them ahead of the model's modules."""
        options = self._runner.options
        said = f"devices=[{', '.join(options.names)}]"
        if isinstance(options.choice, Choice):
            said += f", chosen: {options.choice}"
        if options.stage_backend is not None:
            said += f", stage_backend={options.stage_backend}"
        return said


def _refuse_an_encoder(model: nn.Module, devices: Sequence[str]) -> None:
    """Raise NotImplementedError for a model whose ``generate`` calls an encoder by itself, which
    the devices of a pipeline share."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and len(set(devices)) > 1:
        raise NotImplementedError(
            f"generate() of {type(model).__name__} calls its encoder by itself, whose parameters "
            f"are on {' and '.join(dict.fromkeys(devices))}: such a model generates on one device, "
            "or on CPU lanes"
        )


def _listed(optimizer: Any) -> list[Any] | None:
    if optimizer is None:
        return None
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def _check(scaler: torch.amp.GradScaler | None, optimizers: Sequence[Any]) -> None:
    """Raise TypeError or ValueError for a scaler or optimizers that a step cannot use."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is {kind(scaler)}: give a torch.amp.GradScaler")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is {kind(optimizer)}: give an instance of a torch.optim.Optimizer, or "
                "let an optimizer of another kind step afterwards, by itself"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS computes the loss several times for each of its steps, so that no step of a "
                "pipeline can contain one: leave optimizer= and zero_grad= out, and give LBFGS a "
                "closure that calls step, as optimizer.step(lambda: (optimizer.zero_grad(), "
                "pipe.step(x, target=y))[1])"
            )
