"""While a model is checked, it runs without randomness and without statistics of the batch.

Dropout draws other masks for a micro-batch than for the mini-batch, and a batch norm in train mode
normalises a micro-batch by its own statistics. Both make outputs differ in ways that are known, and
that the report names; with both switched off, the check sees every other difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import BatchNorm, TorchDispatchMode

aten = torch.ops.aten


def batch_norms(model: nn.Module) -> list[str]:
    """The names of the batch norms in train mode, which normalise by statistics of the batch."""
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
    """The names of the modules that apply dropout: those in train mode whose rate is not zero."""
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
    """Inside the ``with`` block batch norms use fixed statistics, and functions that draw random
    numbers return constants.

    Yields a mode that says whether the model has called a batch norm that is no module (in graphs
    that Dynamo has captured, all of them are functions), and whether it would have drawn random
    numbers.

    Attributes of modules that are set here are put back by ``fxpipe.trace.untouched``, which the
    caller has to enter before.
    """
    mode = Still()  # type: ignore[no-untyped-call]
    told: list[nn.Module] = []  # the instance norms that tell the mode when they are under way
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.training:
            if module.running_mean is None:
                vars(module)["forward"] = _identity
            else:
                vars(module)["training"] = False
        elif isinstance(module, nn.RNNBase) and module.dropout:
            vars(module)["dropout"] = 0.0
        elif isinstance(module, _INSTANCE_NORMS) and "forward" not in vars(module):
            told.append(module)
            vars(module)["forward"] = partial(_by_row, mode, module.forward)
    try:
        with mode:
            yield mode
    finally:
        for module in told:
            del vars(module)["forward"]


def _identity(x: Tensor) -> Tensor:
    """The forward of a batch norm without statistics: a new tensor, as from the real one."""
    return x * 1


_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d


def _by_row(mode: Still, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an instance norm. PyTorch computes it as a batch norm whose channels are those
    of all rows, so that the operator alone does not tell that each row is normalised by itself."""
    before, mode.is_by_row = mode.is_by_row, True
    try:
        return forward(*args, **kwargs)
    finally:
        mode.is_by_row = before


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that replaces operators: a random tensor has the same value everywhere,
    dropout keeps all values, and a batch norm in train mode uses its running statistics, or mean 0
    and variance 1 if it keeps none."""

    met_norm = False
    """Whether a norm has been replaced: a batch norm in train mode, or an instance norm."""
    met_batch_norm = False
    """Whether a batch norm in train mode has been replaced."""
    is_by_row = False
    """Whether the module of an instance norm is under way."""
    met_random_numbers = False
    """Whether an operator that draws random numbers has been replaced."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _BATCH_NORMS:
            args = self._by_fixed_statistics(args)
        elif func.overloadpacket in _BATCH_NORM_BACKWARDS:
            func, args = _back_by_fixed_statistics(func, args)
        instead = _INSTEAD.get(func.overloadpacket)
        if instead is not None:
            self.met_random_numbers = True
            return instead(func, args, kwargs)
        return func(*args, **kwargs)

    def _by_fixed_statistics(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, weight, bias, mean, var, training, *rest = args
        if not training:
            return args
        self.met_norm = True
        self.met_batch_norm |= not self.is_by_row
        if mean is None or var is None:
            mean, var = _unit(x)
        return (x, weight, bias, mean, var, False, *rest)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean 0 and variance 1 for each channel."""
    return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])


def _back_by_fixed_statistics(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The operator and the arguments for the backward of a batch norm that has been replaced.

    Autograd asks for the backward in train mode, whose kernels read the batch's statistics. But the
    forward has given none, and a kernel would read past the end of an empty tensor.
    """
    if func.overloadpacket is aten.native_batch_norm_backward:
        grad, x, weight, mean, var, of_batch, deviation, training, epsilon, wanted = args
    else:
        x, grad, weight, mean, var, of_batch, deviation, epsilon, *_ = args
        training, wanted = True, [True] * 3
    if not training or of_batch is None or of_batch.numel():
        return func, args
    if mean is None or var is None:
        mean, var = _unit(x)
    instead = grad, x, weight, mean, var, of_batch, deviation, False, epsilon, wanted
    return aten.native_batch_norm_backward.default, instead


_BATCH_NORMS = aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm
"""Operators with the same first six arguments: x, weight, bias, mean, variance, training."""
_BATCH_NORM_BACKWARDS = (
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm_backward,
    aten.miopen_batch_norm_backward,
)
"""Their backwards; the last two have no argument ``training``, and exist for train mode only."""


def _filled(value: float, like: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of an operator that returns a random tensor: ``like`` makes a tensor of the
    same shape, which is filled with ``value``."""

    def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = {k: v for k, v in kwargs.items() if k not in ("generator", "p")}
        return like(*args[:1], **options).fill_(value)

    return draw


def _in_place(value: float) -> Callable[..., Any]:
    """The replacement of an operator that fills a tensor with random numbers: it fills it with
    ``value``."""

    def draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].fill_(value)

    return draw


def _integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    low, high, size = args if len(args) > 2 else (0, *args)
    own = {k: v for k, v in kwargs.items() if k != "generator"}
    return torch.full(size, (low + high) // 2, **{"dtype": torch.long, **own})


def _integers_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like, *bounds = args
    low, high = bounds if len(bounds) > 1 else (0, *bounds)
    return torch.full_like(like, (low + high) // 2, **kwargs)


def _turned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of a random order the reverse one, in which rows that change places show."""
    own = {k: v for k, v in kwargs.items() if k != "generator"}
    return torch.arange(args[0] - 1, -1, -1, **own)


def _heads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    probabilities = args[0] if len(args) < 2 else torch.full_like(args[0], args[1])
    return probabilities.round()


def _any_integer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].fill_(args[1] if len(args) > 2 else 0)  # from, to; or none, or only to


def _means(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(isinstance(each, Tensor) for each in args[:2]):
        return func(*args, **kwargs)
    mean, spread = args[:2]
    return mean + 0.0 * spread


def _likeliest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place of samples from probabilities the likeliest ones, all different if there are as
    many; of equally likely ones the last."""
    probabilities, count = args[:2]
    last_first = probabilities.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = probabilities.shape[-1] - 1 - last_first
    places = torch.arange(count, device=order.device) % order.shape[-1]
    return order.index_select(-1, places)


def _undropped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The replacement of dropout: the output equals the input, and the mask keeps all values."""
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
    aten.bernoulli: _heads,
    aten.log_normal_: _in_place(1.0),
    aten.cauchy_: _in_place(0.0),
    aten.geometric_: _in_place(1.0),
    aten.native_dropout: _undropped,
    aten.random_: _any_integer,
    aten.normal: _means,
    aten.randint: _integers,
    aten.randint_like: _integers_like,
    aten.randperm: _turned,
    aten.multinomial: _likeliest,
    aten.poisson: lambda func, args, kwargs: args[0].round(),
    aten.binomial: lambda func, args, kwargs: (args[0] * args[1]).round(),
}
