"""The pipeline: a module that runs the programs that the compiler makes of a model."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.compiler.compiled import Mode, Unrolled
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.loss import Target
from fxpipe.compiler.options import Options
from fxpipe.inspect.views import NotYet, Views
from fxpipe.ir._torch import TransformType, transforms
from fxpipe.ir.counts import count
from fxpipe.ir.graph import WRITTEN
from fxpipe.ir.hooks import HOOKS
from fxpipe.ir.progress import report_progress
from fxpipe.meaning.sample import Sample
from fxpipe.planning.estimates import measured
from fxpipe.runtime.ambient import is_intercepted, is_traced
from fxpipe.runtime.clock import Record
from fxpipe.runtime.lanes import Lanes, run_inline
from fxpipe.runtime.optimizer import Stepping
from fxpipe.runtime.random import is_alone
from fxpipe.schedule import Timeline
from fxpipe.trace import untouched

F = TypeVar("F", bound=Callable[..., Any])


def _opaque(function: F) -> F:
    """What Dynamo compiles around a call of it calls it as it is: lanes cannot be captured."""
    why = "a pipeline is compiled already"
    return torch.compiler.disable(function, reason=why)  # type: ignore[no-untyped-call,no-any-return]


class _Bound(functools.partial[Any]):
    """A pipeline's ``forward``: it takes what the model's takes."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].module.forward)


class _LikeTheModels:
    """A method that has the signature of the model's, for those who look what may be given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, pipe: Pipeline | None, owner: type | None = None) -> Callable[..., Any]:
        return self.function if pipe is None else _Bound(self.function, pipe)


class Pipeline(Views, nn.Module):
    """A model that runs as a pipeline. Made by :func:`compile`.

    Called like the model, it gives the model's outputs, differentiably. It shares the model's
    parameters, buffers, hooks and submodules, so that its state dict, optimizers, ``train()`` and
    ``eval()`` are the model's; ``module`` is the model itself.
    """

    _lanes: Lanes
    losses: tuple[Tensor, ...]
    _closed: bool

    def __init__(self, model: nn.Module, options: Options) -> None:
        super().__init__()
        self._set_up(Compiler(model, options))

    def _set_up(self, compiler: Compiler, example: Sample | None = None) -> None:
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

    # ------------------------------------------------------------------------------------- running

    @_LikeTheModels
    @_opaque
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these arguments, computed micro-batch by micro-batch."""
        mode, values, unrolled = self._ready(args, kwargs)
        return mode.traced.rebuild(self._run(unrolled, values))

    @_opaque
    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A training step in the order of the schedule: forward, loss, and backward.

        The gradients are added to ``.grad``, micro-batch by micro-batch; the inputs get none. Each
        micro-batch counts by its rows, so that a loss which is a mean over rows is that of the
        mini-batch. :attr:`losses` has those of the micro-batches.

        Args:
            target: the second argument of ``loss_fn``: tensors, in any nesting, with as many rows
                as the batch. Those without dimensions, and all else, every micro-batch is given.
                Without a ``loss_fn`` the model's own argument of that name.
            scaler: its scale is multiplied into the gradients; unscale and step with it afterwards.
            optimizer: one, or several, that step each stage's parameters as soon as their gradients
                are done, while other stages are still at work, and what no stage has at the end.
                One that is not of ``torch.optim``, or has hooks on its step (which may clip
                gradients together, say), steps once, at the end. Not LBFGS.

        Returns:
            The loss of the mini-batch, without history and not scaled.

        Raises:
            ValueError: if the loss is no scalar, the target has another number of rows, the
                schedule does not fit the number of micro-batches, an optimizer holds no parameter
                that gets a gradient, or both a scaler and an optimizer are given, whose gradients
                would be scaled.
            TypeError: for a target with arrays that are no tensors.
            RuntimeError: in inference mode and under ``torch.no_grad()``, where there are no
                gradients.
        """
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a training step needs gradients, which are turned off here: call it outside of "
                "no_grad; pipe(x) gives the outputs without them"
            )
        optimizers = _listed(optimizer)
        _check(scaler, optimizers)
        unrolled, values = self._ready_to_step(args, kwargs, target)
        last = self._options.devices[-1]
        scale = None if scaler is None else scaler.scale(torch.ones((), device=last))
        stepping = Stepping(optimizers, self.module.parameters()) if optimizers else None
        with torch.no_grad():  # each forward records for itself
            total, losses = self._run(unrolled, [*values, scale, stepping])
        if stepping is not None:
            stepping.finish()
        self.__dict__["losses"] = losses
        return total  # type: ignore[no-any-return]

    def measure(self, *args: Any, target: Any = None, rounds: int = 5, **kwargs: Any) -> Timeline:
        """What the lanes do in a training step, measured: that of median length of a few steps.

        Gradients, buffers, random states and inputs are afterwards what they were, and hooks of
        modules and parameters are not called.

        Args:
            target: as for :meth:`step`.
            rounds: how many steps, after one to warm up.
        """
        rounds = count("rounds", rounds, "the number of steps to measure")
        unrolled, values = self._ready_to_step(args, kwargs, target)
        inputs = unrolled.graph_module.graph.find_nodes(op="placeholder")
        written = {i for i, node in enumerate(inputs) if WRITTEN in node.meta}
        found = []
        for number in range(rounds + 1):  # the first is to warm up
            report_progress(f"step {number} of {rounds}" if number else "warm-up")
            own = [value.clone() if i in written else value for i, value in enumerate(values)]
            record = Record()
            with untouched(self.module), torch.no_grad():
                self._run(unrolled, [*own, None, None], record)
            if number:
                found.append(measured("measured", self._lane_names, record.marks))
        found.sort(key=lambda timeline: timeline.makespan)
        self.__dict__["_measured"] = found[len(found) // 2]
        return found[len(found) // 2]

    def _ready_to_step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[Unrolled, list[Any]]:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a training step needs gradients: call it outside of inference_mode")
        if target is not None and self._options.loss_fn is None:
            if "target" not in inspect.signature(self.module.forward).parameters:
                raise ValueError("a target is given, but no loss_fn: give compile(loss_fn=...)")
            kwargs, target = {**kwargs, "target": target}, None
        self._check_open()
        try:
            mode, values, chunks = self._compiler.ready(args, kwargs)
        except TypeError as error:
            if target is None and self._options.loss_fn is not None:
                error.add_note("the target is given by its name: step(x, target=y)")
            raise
        wanted = Target.of(target, mode.batch_of(values))
        unrolled = self._compiler.step(mode, chunks, wanted)
        self.__dict__.update(_shown=(mode, chunks), _step=unrolled)
        values += wanted.leaves
        return unrolled, [v.detach() if isinstance(v, Tensor) else v for v in values]

    def _run(self, unrolled: Unrolled, values: list[Any], record: Record | None = None) -> Any:
        in_a_lane = self._lanes.is_one(threading.current_thread())  # a hook may call us again
        if unrolled.lanes is None or in_a_lane or is_intercepted() or is_alone():
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
        mode, values, chunks = self._compiler.ready(args, kwargs)
        self.__dict__["_shown"] = mode, chunks
        return mode, values, self._compiler.pipeline(mode, chunks)

    def _last(self) -> tuple[Mode, int]:
        """What has run last, or would run with the example inputs; and its micro-batches."""
        if self._shown is None and self._example is not None:
            args, kwargs = self._example.repeated()
            self.prepare(*args, **kwargs)
        if self._shown is None:
            raise NotYet(
                "this pipeline is not compiled yet: call it, or give example_inputs to compile()"
            )
        return self._shown

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

    def __getattr__(self, name: str) -> Any:
        """What the model has besides: its configuration, say. Not its methods, which would run the
        model itself, stage by stage on several devices."""
        own = getattr(type(self), name, None)
        if isinstance(own, property):  # there is nothing to see yet: it says so itself
            return own.__get__(self)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            value = getattr(self.__dict__.get("module"), name, error)
            if value is error:
                raise
            if callable(value):
                raise AttributeError(
                    f"{error}, but its model has: take pipe.module.{name}"
                ) from None
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Where the model has it, the model's."""
        model = self.__dict__.get("module")
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if model is not None and not is_own and name in vars(model):
            setattr(model, name, value)
        else:
            super().__setattr__(name, value)

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

        What a trace cannot see has to be told so: that a global variable which the forward reads
        has changed, say, or a part of an object deep within an attribute.
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
            "layout": self._compiler.layout,
            "example": self._shown[0].example if self._shown else self._example,
            "closed": self._closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        compiler = Compiler(state["module"], state["options"], state["layout"])
        self._set_up(compiler, state["example"])
        self.__dict__["_closed"] = state["closed"]

    def extra_repr(self) -> str:
        """What the pipeline is made of, ahead of the model's modules."""
        return f"devices=[{', '.join(self._options.names)}]"


def _listed(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def _check(scaler: torch.amp.GradScaler | None, optimizers: Sequence[Any]) -> None:
    """Whether a step can do with these."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__name__}: give a torch.amp.GradScaler")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}: give one of torch.optim, or call its "
                "step() afterwards"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS needs all gradients at once: call its step() afterwards")
    if scaler is not None and optimizers:
        raise ValueError(
            "a scaler and an optimizer are given: gradients are unscaled after the step, so "
            "call scaler.step(optimizer) then"
        )
