"""Random numbers within compiled code: an operator draws them, from a seed that is its input.

::

    uncompiled    x ── dropout (draws from the default generator) ── y

    compiled      seed ── draw ─┐
                  x ─────────── mul ── y

So compiled code gives the same numbers for the same seed, in whichever thread it runs, and again
when a checkpoint runs it a second time. A function that draws once gets the same numbers as when it
runs uncompiled (see :class:`fxpipe.runtime.random.Seeded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.runtime.random import derived_seed, seeded


class DrawsOtherwise(RuntimeError):
    """An operator draws random numbers in a way that cannot be given a seed."""


@torch.library.custom_op("fxpipe::draw", mutates_args=())
def draw(
    seed: Tensor,
    index: int,
    number: int,
    kind: str,
    low: float,
    high: float,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A tensor of random numbers.

    Args:
        seed: the micro-batch's, a whole number in a tensor on the CPU.
        index: the number of the function that draws, among those that are given this seed.
        number: how many times that function has drawn before in the same call.
        kind: the method of a tensor that draws: "bernoulli_", "uniform_" or "normal_".
        low, high: the arguments of that method; "bernoulli_" takes ``low`` only.
        size, stride, dtype, device: of the tensor.
    """
    arguments = (low,) if kind == "bernoulli_" else (low, high)
    with seeded(derived_seed(int(seed), index, number), [device]):
        empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
        drawn: Tensor = getattr(empty, kind)(*arguments)
    return drawn


@draw.register_fake
def _like(
    seed: Tensor,
    index: int,
    number: int,
    kind: str,
    low: float,
    high: float,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class Draws(TorchDispatchMode):
    """Within this context operators that draw random numbers are traced as :func:`draw`.

    Raises DrawsOtherwise for an operator that draws and has no rewrite in this module.
    """

    def __init__(self, seed: Tensor, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.index, self.number = seed, index, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        rewritten = _REWRITTEN.get(func)
        if rewritten is None or kwargs.pop("generator", None) is not None:
            raise DrawsOtherwise(f"{func} draws random numbers, and cannot be given a seed")
        return rewritten(self, *args, **kwargs)

    def like(self, tensor: Tensor, kind: str, low: float, high: float = 0.0) -> Tensor:
        """A tensor of random numbers that is laid out like another one."""
        empty = torch.empty_like(tensor)
        drawn: Tensor = draw(
            *(self.seed, self.index, self.number, kind, float(low), float(high)),
            *(empty.size(), empty.stride(), empty.dtype, empty.device),
        )
        self.number += 1
        return drawn


def _in_place(kind: str, *defaults: float) -> Callable[..., Tensor]:
    def rewritten(draws: Draws, tensor: Tensor, *given: float, **named: float) -> Tensor:
        low, high = (*given, *named.values(), *defaults[len(given) + len(named) :], 0.0)[:2]
        return tensor.copy_(draws.like(tensor, kind, low, high))

    return rewritten


def _fused_dropout(
    draws: Draws, tensor: Tensor, p: float, train: bool | None = True
) -> tuple[Tensor, Tensor]:
    if not train:
        return tensor, torch.ones_like(tensor, dtype=torch.bool)
    kept = draws.like(tensor, "bernoulli_", 1 - p)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return tensor * kept * scale, kept.to(torch.bool)


def _new(kind: str, low: float, high: float) -> Callable[..., Tensor]:
    def rewritten(draws: Draws, *args: Any, **kwargs: Any) -> Tensor:
        with_values = isinstance(args[0], Tensor)
        empty = (torch.empty_like if with_values else torch.empty)(args[0], **kwargs)
        return draws.like(empty, kind, low, high)

    return rewritten


_aten = torch.ops.aten
_REWRITTEN: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli_.float: _in_place("bernoulli_", 0.5),
    _aten.uniform_.default: _in_place("uniform_", 0.0, 1.0),
    _aten.normal_.default: _in_place("normal_", 0.0, 1.0),
    _aten.bernoulli.p: lambda draws, tensor, p: draws.like(tensor, "bernoulli_", p),
    _aten.native_dropout.default: _fused_dropout,
    _aten.rand_like.default: _new("uniform_", 0.0, 1.0),
    _aten.randn_like.default: _new("normal_", 0.0, 1.0),
    _aten.rand.default: _new("uniform_", 0.0, 1.0),
    _aten.randn.default: _new("normal_", 0.0, 1.0),
}


def is_traced(value: Any) -> bool:
    """Whether a value is a tensor without values by which a compiler traces (a fake tensor, say):
    it is of a subclass then."""
    return isinstance(value, Tensor) and type(value) is not Tensor


__all__ = ["Draws", "DrawsOtherwise", "draw", "is_traced"]
