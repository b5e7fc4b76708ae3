"""One step of optimizers, taken in parts: each lane steps the parameters of its stages.

::

    lane 0    ... backward (0,1) ── backward (0,0) ── part (0)
    lane 1    ... backward (1,0) ── part (1)
    caller                                                    ── finish: what no lane has stepped

A lane steps the parameters of its stage as soon as their gradients are done, while other lanes are
still at work. Together these parts compute the same as the optimizer's own step if that treats each
parameter by itself, as optimizers of ``torch.optim`` do. For other optimizers this is not known;
and hooks on a step are to be called once, with all gradients there before and all parameters
stepped after. In these two cases the whole step is taken at the end, by the caller. So it is with a
gradient scaler, which has to see all gradients of an optimizer before it lets the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from fxpipe.ir._torch import infs_found, mark_stepped, step_hooks
from fxpipe.ir.tensors import is_in_parts


class Stepping:
    """One step of some optimizers: :meth:`part` in the lanes, :meth:`finish` after them.

    Args:
        parameters: the model's. An optimizer that holds none of them is right if it holds
            parameters of the loss, and a mistake otherwise; which it is shows only when all
            gradients are there. So if there is such an optimizer, none steps in parts: if it has to
            be refused, no parameter has been stepped.
        zero_grad: whether gradients are set to None as soon as their parameters are stepped, so
            that their memory is free for the gradients of the stages that come next.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], parameters: Iterable[Tensor], zero_grad: bool = False
    ) -> None:
        self._zero_grad = zero_grad
        self._own = own = {id(parameter) for parameter in parameters}
        self._each = [_StepInParts(optimizer) for optimizer in optimizers]
        self._foreign = [_Foreign(each.optimizer) for each in self._each if each.is_foreign(own)]

    def part(self, parameters: Collection[Tensor]) -> None:
        """Step these parameters, by each optimizer that holds some of them and can step in parts.

        Nothing is stepped if there is an optimizer that holds none of the model's parameters.
        """
        if self._foreign:
            return
        for each in self._each:
            each.part(parameters)
        if self._zero_grad:
            for parameter in parameters:
                if any(each.has_stepped(parameter) for each in self._each):
                    parameter.grad = None

    @property
    def count(self) -> int:
        """How many parameters have been stepped so far."""
        return sum(each.count for each in self._each)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, in the order in which they were given."""
        return [each.optimizer for each in self._each]

    @property
    def others(self) -> list[Tensor]:
        """The parameters that the optimizers hold beside those of the model: of a loss function,
        say."""
        held = dict.fromkeys(p for optimizer in self.optimizers for p in _parameters(optimizer))
        return [parameter for parameter in held if id(parameter) not in self._own]

    def unscale(self, scaler: GradScaler) -> None:
        """Divide the gradients of all optimizers by a scaler's scale. The scaler notes whether some
        of them are inf or NaN. No parameter must have been stepped yet.

        Raises ValueError as :meth:`finish` does.
        """
        self._check()
        for optimizer in self.optimizers:
            _unscale(scaler, optimizer)

    def finish(self, scaler: GradScaler | None = None) -> None:
        """Step all parameters that have not been stepped, one optimizer after the other.

        Args:
            scaler: the scaler whose scale :meth:`unscale` has divided the gradients by. It skips
                optimizers with gradients that are inf or NaN, and then updates its scale.

        Raises ValueError, before any parameter is stepped, if an optimizer holds none of the
        model's parameters and none that has got a gradient in this step.
        """
        self._check()
        for each in self._each:
            each.finish(scaler)
        if scaler is not None:
            scaler.update()
        for each in self._each if self._zero_grad else ():
            each.optimizer.zero_grad()

    def _check(self) -> None:
        for foreign in self._foreign:
            foreign.check()


class _Foreign:
    """An optimizer that holds none of the model's parameters, with its gradients before a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._before = [parameter.grad for parameter in _parameters(optimizer)]
        self._versions = [_version(grad) for grad in self._before]

    def check(self) -> None:
        """Raise ValueError unless a parameter that it holds has got a gradient meanwhile."""
        grads = [parameter.grad for parameter in _parameters(self.optimizer)]
        if [_version(grad) for grad in grads] == self._versions and all(
            now is before for now, before in zip(grads, self._before, strict=True)
        ):
            raise ValueError(
                f"the optimizer {type(self.optimizer).__name__} holds none of the model's "
                "parameters, and none that gets a gradient in this step, so that it would train "
                "nothing: make it from pipe.parameters(); gradients have been computed, and no "
                "optimizer has stepped"
            )


def _unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
    """``scaler.unscale_(optimizer)``. Gradients in shards, which are of another class, are unscaled
    by themselves: PyTorch's kernel for a list of gradients does not take both kinds in one list."""
    held = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
    sharded = [parameter for parameter in held if is_in_parts(parameter)]
    others = [parameter for parameter in held if not is_in_parts(parameter)]
    if not sharded or not others:
        scaler.unscale_(optimizer)
        return
    second = GradScaler(next(iter(others)).device.type, init_scale=scaler.get_scale())
    second.scale(torch.ones((), device=others[0].device))  # makes its scale a tensor
    with _without_gradients(sharded):
        second.unscale_(optimizer)
    with _without_gradients(others):
        scaler.unscale_(optimizer)
    noted = infs_found(scaler, optimizer)
    for device, found in infs_found(second, optimizer).items():
        noted[device] = torch.maximum(noted[device], found) if device in noted else found


@contextmanager
def _without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context in which these parameters have no gradients."""
    grads = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in grads:
            parameter.grad = grad


def _version(grad: Tensor | None) -> int | None:
    """How often a gradient has been written to."""
    return None if grad is None else grad._version


class _StepInParts:
    """The step of one optimizer, in parts where its parameters can be stepped one by one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._in_parts = _has_plain_step(optimizer)
        self._entries_before = len(optimizer.state)
        self._done: set[int] = set()

    def is_foreign(self, own: Collection[int]) -> bool:
        """Whether an optimizer that can step in parts holds parameters, but none with these ids.

        False for an optimizer of another kind: it may hold copies of the parameters that it trains.
        """
        held = _parameters(self.optimizer) if self._in_parts else []
        return bool(held) and not any(id(parameter) in own for parameter in held)

    def part(self, parameters: Collection[Tensor]) -> None:
        if self._in_parts:
            own = {id(parameter) for parameter in parameters}
            self._step(lambda parameter: id(parameter) in own)

    @property
    def count(self) -> int:
        return len(self._done)

    def has_stepped(self, parameter: Tensor) -> bool:
        return id(parameter) in self._done

    def finish(self, scaler: GradScaler | None) -> None:
        if scaler is not None:
            scaler.step(self.optimizer)
            return
        if not self._done:
            self.optimizer.step()
            return
        self._step(lambda parameter: id(parameter) not in self._done)
        mark_stepped(self.optimizer)
        state = self.optimizer.state
        if len(state) > self._entries_before:  # new ones are in the order of the lanes: sort them
            for parameter in _parameters(self.optimizer):
                if parameter in state:
                    state[parameter] = state.pop(parameter)

    def _step(self, is_wanted: Callable[[Tensor], bool]) -> None:
        groups = [
            {**group, "params": [p for p in group["params"] if is_wanted(p)]}
            for group in self.optimizer.param_groups
        ]
        groups = [group for group in groups if group["params"]]
        if not groups:
            return
        # Not copy.copy: it calls the methods for pickling, and the parts have to share one state.
        part = object.__new__(type(self.optimizer))
        part.__dict__.update(vars(self.optimizer), param_groups=groups)
        # A learning rate scheduler sets ``step`` on the optimizer, which would step all parameters.
        part.__dict__.pop("step", None)
        with torch.no_grad():
            part.step()
        self._done.update(id(p) for p in _parameters(part))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_plain_step(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step treats each parameter by itself, as those of ``torch.optim`` do,
    and nothing else happens in it, such as hooks."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return False
    own: Any = vars(optimizer).get("step")  # a learning rate scheduler sets a wrapped one
    hooks = step_hooks(optimizer)
    return (own is None or getattr(own, "__wrapped__", None) is kind.step) and not any(hooks)
