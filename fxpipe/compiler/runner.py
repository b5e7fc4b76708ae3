"""The runner: compiles for a call what has not been compiled, and runs it on the lanes."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.loss import Target
from fxpipe.compiler.options import Options
from fxpipe.ir._torch import TransformType, transforms
from fxpipe.meaning.sample import Sample
from fxpipe.runtime.ambient import is_intercepted, is_traced
from fxpipe.runtime.clock import Record
from fxpipe.runtime.lanes import Lanes, run_inline
from fxpipe.runtime.random import is_alone


class NotYet(RuntimeError, AttributeError):
    """What is asked for comes with a call that has not been made.

    It is an AttributeError, too: to those who ask whether a pipeline has such an attribute, it has
    not.
    """


class Runner:
    """Runs the programs that a compiler makes of a model, and knows which has run last.

    Args:
        compiler: compiles for each kind of call once.
        example: a call to compile for where something is asked for before the first call.
    """

    def __init__(self, compiler: Compiler, example: Sample | None = None) -> None:
        self.compiler = compiler
        self._example = example
        self._lanes = Lanes(compiler.options.lanes)
        self._last: tuple[Mode, int] | None = None
        self._step: Unrolled | None = None
        self.is_closed = False

    @property
    def options(self) -> Options:
        """What :func:`fxpipe.compile` has been told."""
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
            raise RuntimeError(
                "a pipeline cannot be traced: what runs is on threads of its own; trace the model "
                "itself, pipe.module, or take a graph that there is, such as pipe.model_graph"
            )
        if TransformType.Grad in transforms():
            raise RuntimeError(
                "torch.func.grad, vjp and jacrev cannot go through a pipeline, whose backward "
                "keeps an order of its own: use torch.autograd.grad or "
                "torch.autograd.functional, or the model itself, pipe.module"
            )
        mode, values, chunks = self.compiler.ready(args, kwargs)
        self._last = mode, chunks
        return mode, values, self.compiler.pipeline(mode, chunks)

    def ready_to_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Unrolled, list[Any]]:
        """The step graph for a call with a target, and the values of its inputs.

        Raises:
            RuntimeError: if the pipeline is closed, or in inference mode.
            ValueError: for a target that nobody takes.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a training step needs gradients: call it outside of inference_mode")
        if target is not None and self.options.loss_fn is None:
            if "target" not in inspect.signature(self.compiler.model.forward).parameters:
                raise ValueError("a target is given, but no loss_fn: give compile(loss_fn=...)")
            kwargs, target = {**kwargs, "target": target}, None
        self._check_open()
        try:
            mode, values, chunks = self.compiler.ready(args, kwargs)
        except TypeError as error:
            if target is None and self.options.loss_fn is not None:
                error.add_note("the target is given by its name: step(x, target=y)")
            raise
        wanted = Target.of(target, mode.batch_of(values))
        self._step = self.compiler.step(mode, chunks, wanted)
        self._last = mode, chunks
        values += wanted.leaves
        return self._step, [v.detach() if isinstance(v, Tensor) else v for v in values]

    # -------------------------------------------------------------------------------------- to run

    def run(self, unrolled: Unrolled, values: list[Any], record: Record | None = None) -> Any:
        """Run a program on the lanes, or in this thread where it has to be; gives its output.

        ``record``: takes down what each lane does when.
        """
        in_a_lane = self._lanes.is_one(threading.current_thread())  # a hook may call us again
        if unrolled.lanes is None or in_a_lane or is_intercepted() or is_alone():
            return run_inline(unrolled.inline, values, record)
        return self._lanes.run(unrolled.lanes, values, record)

    def close(self) -> None:
        """End the lanes' threads. Nothing runs from now on."""
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
        """Whether there is a call, made or given as an example, that shows what the pipeline is."""
        return self._last is not None or self._example is not None

    @property
    def example(self) -> Sample | None:
        """The inputs of the mode that has run last, or of the example."""
        return self._example if self._last is None else self._last[0].example

    def last(self) -> tuple[Mode, int]:
        """The mode that has run last, or would run for the example; and its micro-batches.

        Raises:
            NotYet: if there has been no call, and there is no example.
        """
        if self._last is None and self._example is not None:
            args, kwargs = self._example.repeated()
            self.ready(args, kwargs)
        if self._last is None:
            raise NotYet(
                "this pipeline is not compiled yet: call it, or give example_inputs to compile()"
            )
        return self._last

    def last_pipeline(self) -> Unrolled:
        """The pipeline graph of the last call, or of the example."""
        return self.compiler.pipeline(*self.last())

    def last_step(self) -> Unrolled | None:
        """The step graph of the last training step; None if there has been none."""
        return self._step

    def forget(self) -> None:
        """Compile anew at the next call, cut alike."""
        self._example, self._last = self.example, None
        self.compiler.forget()
