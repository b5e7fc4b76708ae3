"""The runner: for each call it takes the compiled program, compiling it first if there is none, and
runs it on the lanes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.loss import MiniBatch, Target
from fxpipe.compiler.no_loss import refuse_no_loss
from fxpipe.compiler.options import Options
from fxpipe.compiler.shared_memory import refuse_shared_memory
from fxpipe.compiler.shortage import shortage
from fxpipe.ir._torch import TransformType, has_tangent, is_forward_mode, transforms
from fxpipe.ir.log import warn
from fxpipe.ir.options import note_misnamed
from fxpipe.loading.initialise import Init
from fxpipe.loading.load import Homes, Source, load, materialize
from fxpipe.meaning.sample import Sample
from fxpipe.runtime.ambient import is_intercepted, is_traced
from fxpipe.runtime.clock import Record
from fxpipe.runtime.lanes import Lanes, refuse_capture, run_inline
from fxpipe.runtime.microbatch import ListOfRows, Parts
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.parameter_hooks import changing_none, have_hooks
from fxpipe.runtime.random import is_alone

NO_TRACE = (
    "a pipeline cannot be traced: its stages run in threads of their own. Trace the model itself, "
    "pipe.module, or use a graph of the pipeline, such as pipe.model_graph"
)


class NotYet(RuntimeError, AttributeError):
    """A pipeline is asked, before any call, for something that exists only after a call, such as
    its graph.

    It is an AttributeError as well, so that ``hasattr`` says that the pipeline does not have it.
    """


class Runner:
    """Runs the programs that a compiler makes of a model, and remembers which of them ran last.

    Args:
        compiler: compiles the model, once for each kind of call.
        example: the call to compile for if graphs are asked for before the first call.
    """

    calls_are_trained = True
    """Whether ``pipe(x)`` has a backward of its own."""

    def __init__(self, compiler: Compiler, example: Sample | None = None) -> None:
        self.compiler = compiler
        self._example = example
        self._lanes = Lanes(compiler.options.lanes)
        self._last: tuple[Mode, int] | None = None
        self._trained: tuple[Mode, int] | None = None  # the last call in train mode, with gradients
        self._step: Unrolled | None = None
        self._has_told_of_gradients = False
        self.is_closed = False

    @property
    def options(self) -> Options:
        """The options that were given to :func:`fxpipe.compile`."""
        return self.compiler.options

    # ----------------------------------------------------------------------------------- to compile

    def ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Mode, list[Any], Unrolled]:
        """The mode for a call, the values of the graph's inputs, and the pipeline graph to run.

        Raises:
            RuntimeError: if the pipeline is closed, or in a place where it cannot run.
        """
        self._check_open()
        if is_traced((*args, *kwargs.values())):
            raise RuntimeError(NO_TRACE)
        if TransformType.Grad in transforms():
            raise RuntimeError(
                "torch.func.grad, vjp and jacrev cannot go through a pipeline, whose backward "
                "keeps an order of its own: use torch.autograd.grad or "
                "torch.autograd.functional, or the model itself, pipe.module"
            )
        try:
            mode, values, chunks = self.compiler.ready(args, kwargs)
        except TypeError as error:
            note_misnamed(error, self.compiler.model.forward, kwargs)
            raise
        refuse_shared_memory(mode, self.compiler.model, values)
        is_dual = is_forward_mode() and not transforms() and any(map(has_tangent, values))
        if is_dual and torch.is_grad_enabled():
            raise RuntimeError(
                "a forward-mode derivative cannot go through a pipeline that records gradients for "
                "a backward: call it under torch.no_grad(), or use torch.func.jvp"
            )
        self._last = mode, chunks
        if torch.is_grad_enabled() and self.compiler.model.training:
            self._trained = self._last
        unrolled = self.compiler.pipeline(mode, chunks)
        return mode, mode.values_in_parts(values, chunks), unrolled

    def ready_to_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Unrolled, list[Any]]:
        """The step graph for a call with a target, and the values of its inputs, detached.

        Raises:
            RuntimeError: if the pipeline is closed, or in inference mode.
            NoLoss: if there is no ``loss_fn``, and the model returns no loss.
            ValueError: for a target where there is no ``loss_fn`` and the model has no argument
                ``target``.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a training step needs gradients: call it outside of inference_mode")
        if target is not None and self.options.loss_fn is None:
            if "target" not in inspect.signature(self.compiler.model.forward).parameters:
                raise ValueError("a target is given, but no loss_fn: give compile(loss_fn=...)")
            kwargs, target = {**kwargs, "target": target}, None
        self._check_open()
        try:
            mode, values, chunks = self.compiler.ready(args, kwargs, target)
        except TypeError as error:
            if target is None and self.options.loss_fn is not None:
                error.add_note("the target is given by its name: step(x, target=y)")
            raise
        refuse_no_loss(mode, self.options, type(self.compiler.model).__name__)
        rows = None if chunks == 1 else mode.batch_of(values)  # one micro-batch: nothing is cut
        readings = Target.readings(target, rows, mode.rows is not None)
        batch = MiniBatch((args, kwargs), readings, target)
        self._step, wanted = self.compiler.step(mode, chunks, batch)
        leaves = wanted.leaves
        refuse_shared_memory(mode, self.compiler.model, values, leaves)
        self._last = self._trained = mode, chunks
        self._tell_of_lost_gradients("input", values)
        self._tell_of_lost_gradients("target", leaves)
        values += leaves
        return self._step, [
            v.detach() if isinstance(v, Tensor | Parts | ListOfRows) else v for v in values
        ]

    def _tell_of_lost_gradients(self, what: str, values: list[Any]) -> None:
        """Warn, once, of inputs or targets of a step that require gradients: they get none."""
        is_wanted = any(isinstance(value, Tensor) and value.requires_grad for value in values)
        if is_wanted and not self._has_told_of_gradients:
            self._has_told_of_gradients = True
            warn(
                f"pipe.step is given an {what} that requires a gradient, and computes none for it, "
                "so that whatever has computed it is not trained: make that a part of the model; "
                "or call pipe(...) and loss.backward(), which computes gradients of inputs; or, if "
                "it is not to be trained, give the tensor by .detach()"
                if what == "input"
                else "pipe.step is given a target that requires a gradient, and computes none for "
                "it, so that whatever has computed it is not trained: call pipe(...), and compute "
                "the loss of what it returns; or, if it is not to be trained, give the target by "
                ".detach()"
            )

    # -------------------------------------------------------------------------------------- to load

    def load(self, checkpoint: Source, *, strict: bool, assign: bool, init: Init | None) -> Any:
        """Load a checkpoint; see :meth:`fxpipe.Pipeline.load`."""
        with self._given_values() as (model, homes):
            return load(model, checkpoint, homes, strict=strict, assign=assign, init=init)

    def materialize(self, init: Init | None) -> None:
        """Initialise what is on "meta"; see :meth:`fxpipe.Pipeline.materialize`."""
        with self._given_values() as (model, homes):
            materialize(model, homes, init)

    @contextmanager
    def _given_values(self) -> Iterator[tuple[nn.Module, Homes]]:
        """The model, and the devices of its tensors on "meta", which are given values inside the
        ``with`` block. Programs that have been compiled before can still be inspected, but no call
        runs them any more."""
        compiler = self.compiler
        unset = [name for name in compiler.lacking() if name not in compiler.homes]
        if unset and compiler.is_on_meta():
            raise RuntimeError(
                f'{type(compiler.model).__name__} is on "meta" and has no stages yet, so that '
                f"there is no device to load {unset[0]} on: give example_inputs to compile(), or "
                'call pipe.prepare(x) with inputs like those of a call; they may be on "meta"'
            )
        try:
            yield compiler.model, compiler.homes
        finally:
            compiler.notice_values()

    # -------------------------------------------------------------------------------------- to run

    def run(self, unrolled: Unrolled, values: list[Any], record: Record | None = None) -> Any:
        """Run a program on the lanes and return its output.

        It runs inline, in the calling thread, if this is a lane itself, or if what holds for the
        calling thread would not hold in other threads: modes that intercept operators, and the
        exclusive use of the random number generators.

        ``record`` notes what each lane does, and when. A note on an error of a device that has run
        out of memory says what would need less.

        Raises RuntimeError if the model has parameters without values, or while a graph is
        captured on a lane's device.
        """
        if self.compiler.homes:
            raise RuntimeError(_no_values(self.compiler))
        refuse_capture(self.compiler.options.lanes)
        in_a_lane = self._lanes.is_one(threading.current_thread())  # a hook may call the pipeline
        try:
            if unrolled.lanes is None or in_a_lane or is_intercepted() or is_alone():
                return run_inline(unrolled.inline, values, record)
            return self._lanes.run(unrolled.lanes, values, record)
        except torch.OutOfMemoryError as error:
            assert self._last is not None
            with suppress(Exception):  # it is the error of the call that matters
                error.add_note(shortage(self.options, self.compiler.layout, *self._last))
            raise

    def hooks_watched(self) -> AbstractContextManager[None]:
        """A context for the run of a step, in which no hook on a parameter may change a parameter
        that micro-batches are still to use (see :mod:`fxpipe.runtime.parameter_hooks`)."""
        assert self._last is not None
        (mode, chunks), loss_fn = self._last, self.options.loss_fn
        of_loss = [loss_fn] if isinstance(loss_fn, nn.Module) else []
        modules = [module for module, *_ in mode.guards.modules.modules]
        modules += [module for each in of_loss for module in each.modules()]
        if chunks == 1 or not have_hooks(modules):
            return nullcontext()
        named = {n: p for each in of_loss for n, p in each.named_parameters("loss_fn")}
        named |= dict(self.compiler.model.named_parameters())
        return changing_none(named, chunks, calls_are_trained=self.calls_are_trained)

    def unscale(self, stepping: Stepping, scaler: GradScaler) -> None:
        """Divide all gradients by a scaler's scale, ahead of the step of the optimizers."""
        stepping.unscale(scaler)

    def close(self) -> None:
        """End the threads of the lanes. A call of the pipeline raises RuntimeError from now on."""
        self.is_closed = True
        self._lanes.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError(
                "this pipeline is closed: compile the model again, or call the model itself"
            )

    # --------------------------------------------------------------------------- what has run last

    @property
    def has_a_call(self) -> bool:
        """Whether a call has been made, or an example given, so that there are graphs to show."""
        return self._last is not None or self._example is not None

    @property
    def example(self) -> Sample | None:
        """A sample of the inputs of the mode that ran last; before any call, the example given."""
        return self._example if self._last is None else self._last[0].example

    def described(self) -> tuple[Mode, int]:
        """What drawings and graphs are of: the last call. While the model is in train mode it is
        the last one in that mode, with gradients, if there has been one: people evaluate a model
        now and then, go back to training, and ask what a step takes.

        Raises:
            NotYet: as :meth:`last`.
        """
        if self._trained is not None and self.compiler.model.training:
            return self._trained
        return self.last()

    @property
    def aside(self) -> str:
        """What a view has to say that is of an evaluation between training steps; else ""."""
        if self._trained is None or self.described() is self._trained:
            return ""
        return (
            "This is about the last call, in eval mode; once pipe.train() has been called it is "
            "about the training step again."
        )

    def reported(self) -> tuple[Mode, int]:
        """What reports and predictions are about: what is described, with the largest number of
        micro-batches that it has run with. The last mini-batch of an epoch is often too small for
        as many, and nobody asks what limits the speed of that one.

        Raises:
            NotYet: as :meth:`last`.
        """
        mode, chunks = self.described()
        return mode, max(chunks, mode.most_chunks)

    def last(self) -> tuple[Mode, int]:
        """The mode that ran last, and its number of micro-batches. Before any call the example is
        compiled now, and its mode returned.

        Raises:
            NotYet: if there has been no call, and there is no example.
        """
        if self._last is None and self._example is not None:
            args, kwargs = self._example.repeated()
            self.ready(args, kwargs)
        if self._last is None:
            raise NotYet(
                "this pipeline is not compiled yet: call it, or prepare(x) with inputs like those "
                "of a call, or give example_inputs to compile()"
            )
        return self._last

    def last_pipeline(self) -> Unrolled:
        """The pipeline graph of the call that is described, or of the example."""
        return self.compiler.pipeline(*self.described())

    def last_step(self) -> Unrolled | None:
        """The step graph of the last training step; None if there has been none."""
        return self._step

    def forget(self) -> None:
        """Forget all compiled programs: the next call is compiled, with the same cut."""
        self._example, self._last, self._trained = self.example, None, None
        self.compiler.forget()


def _no_values(compiler: Compiler) -> str:
    first, *others = compiler.homes
    more = f" and {len(others)} other tensors" if others else ""
    return (
        f'{type(compiler.model).__name__} is on the device "meta", where nothing has values '
        f"({first}{more}): ahead of this call, load a checkpoint with pipe.load(path), or "
        "initialise the model with pipe.materialize()"
    )
