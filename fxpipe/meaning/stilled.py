"""While a model is checked, it runs without randomness and without statistics of the batch.

Dropout draws other masks for a micro-batch than for the mini-batch, and a batch norm in train mode
normalises a micro-batch by its own statistics. Both make outputs differ in ways that are known, and
that the report names; with both switched off, the check sees every other difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import BatchNorm, InstanceNorm, TorchDispatchMode
from fxpipe.ir.source import is_of_torch, is_ours
from fxpipe.ir.tensors import memory_of, tensors_of
from fxpipe.meaning.drawn import UNIFORM, Drawn

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
def still(model: nn.Module, uniform: float = UNIFORM[0]) -> Iterator[Still]:
    """Inside the ``with`` block batch norms use fixed statistics, and functions that draw random
    numbers return constants; ``uniform`` is that for numbers from 0 to 1.

    Yields a mode that says whether the model has called a batch norm that is no module (in graphs
    that Dynamo has captured, all of them are functions), and whether it would have drawn random
    numbers, and which running statistics of batch norms it reads itself.

    Attributes of modules that are set here are put back by ``fxpipe.trace.untouched``, which the
    caller has to enter before.
    """
    mode = Still(uniform, {memory_of(b): name for name, b in model.named_buffers()})
    told: list[nn.Module] = []  # the instance norms that tell the mode when they are under way
    for module in model.modules():
        if isinstance(module, BatchNorm) and module.training:
            if module.running_mean is None:
                vars(module)["forward"] = _identity
            else:
                vars(module)["training"] = False
                if type(module).forward is BatchNorm.forward:
                    mode.updates(module.running_mean, module.running_var)
        elif isinstance(module, nn.RNNBase) and module.dropout:
            vars(module)["dropout"] = 0.0
        elif isinstance(module, InstanceNorm) and "forward" not in vars(module):
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


def _by_row(mode: Still, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an instance norm. PyTorch computes it as a batch norm whose channels are those
    of all rows, so that the operator alone does not tell that each row is normalised by itself."""
    before, mode.is_by_row = mode.is_by_row, True
    try:
        return forward(*args, **kwargs)
    finally:
        mode.is_by_row = before


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that replaces operators: a random tensor has the same value everywhere and
    dropout keeps all values (:mod:`fxpipe.meaning.drawn`), and a batch norm in train mode uses its
    running statistics, or mean 0 and variance 1 if it keeps none."""

    met_norm = False
    """Whether a norm has been replaced: a batch norm in train mode, or an instance norm."""
    met_batch_norm = False
    """Whether a batch norm in train mode has been replaced."""
    is_by_row = False
    """Whether the module of an instance norm is under way."""

    def __init__(
        self, uniform: float = UNIFORM[0], buffers: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = Drawn(uniform)
        self._buffers = buffers  # the names of the model's, by their memory
        self._updated: set[int] = set()
        self._read: set[int] = set()

    def updates(self, *statistics: Tensor | None) -> None:
        """Note that a batch norm would update these running statistics, if it were not stilled."""
        self._updated.update(memory_of(each) for each in statistics if each is not None)

    @property
    def statistics_read(self) -> list[str]:
        """The running statistics that batch norms would update, and that other operators read."""
        both = self._updated & self._read
        return [name for memory, name in self._buffers.items() if memory in both]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _BATCH_NORMS:
            args = self._by_fixed_statistics(args)
        elif self._buffers and func.overloadpacket not in _WHOLE_NORMS + _BATCH_NORM_BACKWARDS:
            read = {*map(memory_of, tensors_of((args, kwargs)))} & self._buffers.keys()
            if not read <= self._read and not _is_ours():
                self._read |= read
        elif func.overloadpacket in _BATCH_NORM_BACKWARDS:
            func, args = _back_by_fixed_statistics(func, args)
        made = self.drawn.instead(func, args, kwargs)
        if made is NotImplemented and torch.Tag.nondeterministic_seeded in func.tags:
            # In inference mode a mode sees dropout itself, and not what it is made of.
            with self:
                made = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made

    def _by_fixed_statistics(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, weight, bias, mean, var, training, *rest = args
        if not training:
            return args
        self.met_norm = True
        self.met_batch_norm |= not self.is_by_row
        if not self.is_by_row:
            self.updates(mean, var)
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


def _is_ours() -> bool:
    """Whether the operator that is dispatched now is one of fxpipe's own, such as that of a
    checkpoint which keeps a buffer for its second run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        is_of_torch(frame.f_code.co_filename) or frame.f_code.co_name == "__torch_dispatch__"
    ):  # another mode hands on what it has been given
        frame = frame.f_back
    return frame is not None and is_ours(frame.f_code.co_filename)


_WHOLE_NORMS = aten.batch_norm, aten.instance_norm
"""What a mode sees in their place in inference mode."""
_BATCH_NORM_BACKWARDS = (
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm_backward,
    aten.miopen_batch_norm_backward,
)
"""Their backwards; the last two have no argument ``training``, and exist for train mode only."""
