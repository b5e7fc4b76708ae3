"""Runs of a model for the check, without effect on the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.progress import phase
from fxpipe.ir.structure import leaves, map_tensors
from fxpipe.meaning.asked import Asked
from fxpipe.meaning.backward import differentiable, with_history
from fxpipe.meaning.cut_off import CutOff
from fxpipe.meaning.drawn import UNIFORM
from fxpipe.meaning.drawn_on_the_host import SEED, Met, stilled_host
from fxpipe.meaning.loss import own_loss
from fxpipe.meaning.said import INFER, broadcast
from fxpipe.meaning.stilled import still
from fxpipe.meaning.stirred import Values, in_place_of_zeros, stirred
from fxpipe.runtime.random import HostRandomState, seed_host
from fxpipe.runtime.state import Attribute
from fxpipe.trace import Traced, called, parameters_put_back, untouched
from fxpipe.trace.gradients import without_saved_tensors
from fxpipe.trace.isolation import Since
from fxpipe.trace.patches import tensor_hooks, unwarned


class ModelRuns:
    """Runs a model on samples of its inputs, without effect on the model, and notes what it meets
    (random numbers, batch statistics, the path of the loss).

    Args:
        fill: from tensors to the arguments of a call.
        real: the names of the inputs of real numbers, by their places: they get gradients while
            the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        fill: Callable[[Sequence[Any]], Any],
        real: Mapping[int, str],
        asked: Asked,
    ) -> None:
        self.model, self.fill, self.real, self.asked = model, fill, real, asked
        self.stilled = model.training  # whether the model runs without randomness, see ``still``
        self.stilled_host = False  # whether also without that of Python and NumPy
        self.uniform = UNIFORM[0]  # what stands for random numbers from 0 to 1
        # How the model is run, the first way that it takes: with gradients for the parameters and
        # for these inputs, or without any gradients (None).
        self.modes: list[Mapping[int, str] | None] = [self.real] if self.real else []
        self.modes += [{}, None]
        self.drew = False  # whether a run of the model has drawn random numbers
        self.drew_on_the_host = False  # whether Python or NumPy has drawn them
        self.puts_outside = False  # whether a run has changed global variables, or what is in them
        self.met_norm = False  # whether it has called a norm whose statistics have been replaced
        self.met_batch_norm = False  # whether that was a batch norm that is no module
        # The names of the running statistics of batch norms that the forward itself reads.
        self.statistics_read: dict[str, None] = {}
        self.met_random_numbers = False  # whether a draw (of dropout, say) has been replaced
        self.met_uniform = False  # whether one that may be compared with a rate
        self.said: dict[str, Any] = {}  # what ``out_dims`` says of outputs, by their paths
        self.loss = ""  # the path of the loss among the model's outputs, "" if it has none
        self.returns_loss = asked.returns_loss
        # The names of the buffers, parameters and attributes that the forward changes, once known.
        self.changed: list[str] | None = None
        self._values: Values | None = None  # for parameters of zeros, see ``stirred``
        self._call: Callable[[Any, Any], Any] = partial(called, model)
        self._takes_some = False  # whether the model has taken any tensors so far
        # Called where the model refuses the first tensors: it may end the check by an error.
        self.refused: Callable[[], None] = lambda: None

    def of_graph(self, traced: Traced) -> ModelRuns:
        """Runs of a graph of the model in place of the model itself, in the way in which the model
        has been run. What they meet is noted by itself."""
        found = ModelRuns(self.model, lambda tensors: (tensors, {}), self.real, self.asked)
        found.modes, found._values = self.modes[:1], self._values

        def call(tensors: Any, _: Any) -> Any:
            with phase("graph", quiet=True):
                return traced.rebuild(traced.graph_module.forward(*tensors))

        found._call = call
        return found

    def within(self, context: AbstractContextManager[Any]) -> ModelRuns:
        """Runs of the model in the same way, of which the next one calls it within a context."""
        found, call = copy(self), self._call

        def called_within(args: Any, kwargs: Any) -> Any:
            with context:
                return call(args, kwargs)

        found._call = called_within
        return found

    @property
    def are_stilled(self) -> bool:
        """Whether something has been put in the place of random numbers or batch statistics."""
        return self.met_norm or self.met_random_numbers

    @property
    def has_more_to_still(self) -> bool:
        """Whether runs have drawn random numbers in whose place nothing has been put so far."""
        return self.drew and not (self.stilled and (self.stilled_host or not self.drew_on_the_host))

    def still_more(self) -> bool:
        """If runs have drawn random numbers: have something put in their place in runs from now on.
        Returns whether there is something that has not been."""
        if not self.has_more_to_still:
            return False
        self.stilled, self.stilled_host, self.drew = True, self.drew_on_the_host, False
        return True

    def output_of(self, tensors: Sequence[Tensor], seed: int | None = None) -> Any:
        """The model's output for these tensors, from a run without side effects."""
        output, _ = self.ran(tensors, seed)
        return output

    def ran(self, tensors: Sequence[Tensor], seed: int | None = None) -> tuple[Any, Hashable]:
        """The model's output for these tensors, from a run without side effects, and the autograd
        graph behind it; None in its place if the model runs without gradients only.

        One run with gradients tells both, and takes no more time or memory than a run without, as
        no tensors are saved for a backward.
        """
        mode, *others = self.modes
        failure = None
        for each in (mode, None) if others else (mode,):
            try:
                found = self._ran_in(each, tensors, seed)
            except Exception as error:
                if not is_the_models(error):
                    raise
                failure = error
                continue
            self._takes_some = True
            if each is mode:
                return found
            self.modes = others  # without gradients it runs: the error was about gradients
            return found if others == [None] else self.ran(tensors, seed)
        try:
            if not self._takes_some:
                self.refused()
            assert failure is not None
            raise failure
        finally:
            del failure  # it refers to the frames that have it, and these to tensors

    def _ran_in(
        self, mode: Mapping[int, str] | None, tensors: Sequence[Tensor], seed: int | None
    ) -> tuple[Any, Hashable]:
        if mode is None:
            args, kwargs = self.fill([tensor.clone() for tensor in tensors])
            with torch.no_grad():
                return self._output(args, kwargs, seed), None

        def run() -> tuple[Any, Hashable]:
            given, own = differentiable([tensor.clone() for tensor in tensors], mode)
            then = partial(with_history, list(own.values()))
            found: tuple[Any, Hashable] = self.recorded(given, then, seed)
            return found

        return without_saved_tensors(run)

    def recorded(
        self, tensors: list[Tensor], then: Callable[[list[Any], bool], Any], seed: int | None = None
    ) -> Any:
        """Run the model with gradients, and return ``then([output], is_free)``; ``is_free`` says
        whether its backward may be another function than the derivative of its forward: it has
        registered hooks on tensors, or detached some."""
        args, kwargs = self.fill(tensors)
        cut_off = CutOff()
        with tensor_hooks() as hooks, torch.inference_mode(False), torch.enable_grad():
            return self._output(
                args, kwargs, seed, lambda held: then(held, bool(hooks) or cut_off.found), cut_off
            )

    def _output(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed: int | None,
        then: Callable[[list[Any]], Any] = list.pop,
        watch: AbstractContextManager[Any] | None = None,
    ) -> Any:
        """What ``then`` makes of the model's output. It is given a list with the output in it, the
        only reference to it, so that it can free the output's autograd graph. ``watch``: a context
        in which nothing but the model runs."""

        def call() -> Any:
            with watch or nullcontext():
                held = [self._call(args, kwargs)]
            self._note(held[0])
            return then(held)

        return self._quietly(call, seed)

    def _note(self, output: Any) -> None:
        """Note where the loss is among the outputs, and what ``out_dims`` says of outputs."""
        if self.returns_loss:
            loss = own_loss(output)
            is_one = isinstance(loss, Tensor) and not loss.ndim and loss.is_floating_point()
            paths = (path for path, leaf in leaves(output, "output") if leaf is loss)
            self.loss = next(paths, "") if is_one else ""
        if self.asked.out_dims is not None:
            for path, _, dim in broadcast(self.asked.out_dims, output, "output"):
                if dim is not INFER:
                    self.said[path] = dim

    def _quietly(self, run: Callable[[], Any], seed: int | None = None) -> Any:
        """What a function gives that calls the model, without effect on the model."""
        quiet = still(self.model, self.uniform) if self.stilled else nullcontext()
        host = stilled_host(self.uniform) if self.stilled_host else nullcontext(Met())
        if self._values is None:
            self._values = in_place_of_zeros(self.model)
        with (
            unwarned(),
            stirred(self._values),
            untouched(self.model) as since,
            parameters_put_back(self.model) as written,
        ):
            if seed is not None:
                torch.manual_seed(seed)
                seed_host(seed)
            before = dict(self.model.named_buffers())
            with quiet as stilled, host as met:
                # A function of NumPy that the model has imported by its own name still draws: the
                # same numbers in each run.
                if seed is None and self.stilled_host:
                    seed_host(SEED)
                state = HostRandomState() if self.stilled_host else None
                made = run()
            if stilled is not None:
                self.met_norm |= stilled.met_norm
                self.met_batch_norm |= stilled.met_batch_norm
                self.statistics_read |= dict.fromkeys(stilled.statistics_read)
                met.take(stilled.drawn.met, stilled.drawn.met_uniform)
            self.met_random_numbers |= met.any
            self.met_uniform |= met.uniform
            if seed is None:
                on_the_host = since.drew_on_the_host() if state is None else state.has_changed
                self.drew_on_the_host |= on_the_host
                self.drew |= on_the_host or since.drew_with_torch()
            self.puts_outside |= bool(since.changed_outside() or since.assigned())
            if self.changed is None:
                self.changed = self._changes(since, before, written)
        return made

    def _changes(
        self, since: Since, before: Mapping[str, Tensor], parameters: Mapping[str, Any]
    ) -> list[str]:
        """The names of what the forward has changed on the model."""
        after = dict(self.model.named_buffers())
        changed = set(map(id, since.written()))
        buffers = [n for n, b in after.items() if b is not before.get(n) or id(b) in changed]
        paths = {module: name for name, module in self.model.named_modules()}
        attributes = [f"{paths[m]}.{n}".removeprefix(".") for m, n in since.changed() if m in paths]
        return [*parameters, *buffers, *attributes]

    def in_sequence(self, calls: Sequence[list[Tensor]]) -> tuple[list[Any], dict[str, Tensor]]:
        """What the model gives in several calls, one after the other, and the values of its buffers
        and parameters after the last one. No call undoes what the call before it has changed."""

        def run() -> tuple[list[Any], dict[str, Tensor]]:
            outputs = [self._values_of(tensors) for tensors in calls]
            own = (*self.model.named_parameters(), *self.model.named_buffers())
            return outputs, {n: t.detach().clone() for n, t in own if n in (self.changed or ())}

        found: tuple[list[Any], dict[str, Tensor]] = self._undone(run)
        return found

    def keeping(self, names: Sequence[str], calls: Sequence[list[Tensor]]) -> list[Any]:
        """What the model gives in several calls, one after the other, if each of them finds only
        these of the buffers, parameters and attributes as the call before it has left them, and
        all others as they are now."""
        kept: list[Callable[[], object]] = []

        def run(tensors: list[Tensor]) -> Any:
            for put in kept:
                put()
            output = self._values_of(tensors)
            kept[:] = [self._putting(name) for name in names]
            return output

        return [self._undone(partial(run, tensors)) for tensors in calls]

    def _values_of(self, tensors: list[Tensor]) -> Any:
        """The values of the model's output, from a call whose effects stay."""
        args, kwargs = self.fill(tensors)
        return map_tensors(lambda t: t.detach().clone(), called(self.model, args, kwargs))

    def _undone(self, run: Callable[[], Any]) -> Any:
        """What a function gives that calls the model, whose effects are undone after it."""
        with torch.set_grad_enabled(self.modes[0] is not None):
            return without_saved_tensors(lambda: self._quietly(run))

    def _putting(self, name: str) -> Callable[[], object]:
        """A function that gives a buffer, parameter or attribute the value that it has now."""
        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        tensors = {**module._parameters, **module._buffers}
        value = tensors.get(own)
        if value is None:
            return Attribute(module, own).set
        return partial(_put, module, own, value.detach().clone())


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter or a buffer of a module a value: where it has another shape, in place of
    the tensor that it is."""
    tensor = getattr(module, name)
    if tensor is None or tensor.shape != value.shape:
        setattr(module, name, value)
        return
    with torch.no_grad():
        tensor.copy_(value)


def is_taken(run: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor]) -> bool:
    """Whether the model, or the loss, takes these tensors."""
    try:
        run([tensor.detach().clone() for tensor in tensors])
    except Exception as error:
        if not is_the_models(error):
            raise
        return False
    return True
