"""A model without what is random, or by its nature that of a micro-batch, while it is checked.

Dropout draws other masks for parts than for the whole, and a batch norm in train mode normalises a
part by its own statistics. Both are known, and say nothing of all else in the model, which is what
the check looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import BatchNorm, TorchDispatchMode

aten = torch.ops.aten


def batch_norms(model: nn.Module) -> list[str]:
    """The names of the modules that normalise by the statistics of the micro-batch."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.training
    ]


_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def dropouts(model: nn.Module) -> list[str]:
    """The names of the modules that leave out values at random."""
    return [
        name
        for name, module in model.named_modules()
        if module.training
        and (
            (isinstance(module, _DROPOUTS) and module.p)
            or (isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout)
        )
    ]


@contextmanager
def still(model: nn.Module) -> Iterator[Still]:
    """Batch norms go by fixed statistics, and what draws random numbers gives fixed ones.

    Yields what says whether a batch norm that is no module has been met (in graphs that Dynamo has
    captured, all of them are functions), and whether random numbers would have been drawn.

    Attributes that it sets on modules are put back by ``fxpipe.trace.untouched`` around it.
    """
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.training:
            if module.running_mean is None:
                vars(module)["forward"] = _identity
            else:
                vars(module)["training"] = False
        elif isinstance(module, nn.RNNBase) and module.dropout:
            vars(module)["dropout"] = 0.0
    with Still() as mode:  # type: ignore[no-untyped-call]
        yield mode


def _identity(x: Tensor) -> Tensor:
    return x * 1


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In place of a draw, the same value everywhere; dropout leaves all as it is; and a batch norm
    in train mode goes by its running statistics, or by none if it keeps none."""

    met_batch_norm = False
    met_random_numbers = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _BATCH_NORMS:
            args = self._by_fixed_statistics(args)
        instead = _INSTEAD.get(func.overloadpacket)
        if instead is not None:
            self.met_random_numbers = True
            return instead(func, args, kwargs)
        return func(*args, **kwargs)

    def _by_fixed_statistics(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, weight, bias, mean, var, training, *rest = args
        if not training:
            return args
        self.met_batch_norm = True
        if mean is None or var is None:
            mean, var = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
        return (x, weight, bias, mean, var, False, *rest)


_BATCH_NORMS = aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm
"""Operators with the same first six arguments: x, weight, bias, mean, variance, training."""


def _filled(value: float, like: Callable[..., Any]) -> Callable[..., Any]:
    """A draw of a new tensor: one of the same shape, full of a value."""

    def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = {k: v for k, v in kwargs.items() if k not in ("generator", "p")}
        return like(*args[:1], **own).fill_(value)

    return draw


def _in_place(value: float) -> Callable[..., Any]:
    def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].fill_(value)

    return draw


def _undropped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    aten.rand: _filled(0.5, torch.empty),
    aten.randn: _filled(0.0, torch.empty),
    aten.rand_like: _filled(0.5, torch.empty_like),
    aten.randn_like: _filled(0.0, torch.empty_like),
    aten.uniform_: _in_place(0.5),
    aten.normal_: _in_place(0.0),
    aten.exponential_: _in_place(1.0),
    aten.bernoulli_: _in_place(1.0),
    aten.native_dropout: _undropped,
}
