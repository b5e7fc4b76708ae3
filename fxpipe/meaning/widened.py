"""A model, or a loss, that computes in single precision at least.

In bfloat16 a number has three digits. The loss of a batch and the mean of the losses of its parts
then differ by as much as a loss that is no mean, and no dtype tells: a loss of float32 may have
been computed in bfloat16. What a loss means does not hang on its precision, so it is found out in
float32, where rounding errors are small beside what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import TorchDispatchMode, pytree, running_backward, schema_of
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.writes import written_by

WIDE = torch.float32
_CAST = torch.ops.aten._to_copy.default


class Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which operators compute in ``WIDE`` what they are to compute in a lower
    precision: they get tensors of ``WIDE`` in place of lower ones, and make none that is lower.
    What they write to keeps its dtype, which their other arguments get, and so does what they
    return a view of, which may be written to later. So does the gradient of a tensor of a lower
    precision (a parameter): autograd takes no other, and casts what has been computed in ``WIDE``.

    ``met`` says whether there was any lower precision.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) or _casts_a_gradient(func):
            return func(*args, **kwargs)
        written = [each for each in written_by(func, args, kwargs) if is_low(each.dtype)]
        self.met |= bool(written)
        kept = set(map(id, written))

        def fitted(value: Any) -> Any:
            if isinstance(value, torch.dtype) and is_low(value) and not written:
                self.met = True
                return WIDE
            if type(value) not in (Tensor, nn.Parameter) or id(value) in kept:
                return value
            if written and value.is_floating_point():
                return value.to(written[0].dtype)
            return self.wide(value)

        args, kwargs = pytree.tree_map(fitted, (args, kwargs))
        return func(*args, **kwargs)

    def wide(self, tensor: Tensor) -> Tensor:
        """The tensor in ``WIDE``, if it is of a lower precision."""
        if not is_low(tensor.dtype):
            return tensor
        self.met = True
        return tensor.to(WIDE)


def _is_view(func: Any) -> bool:
    """Whether an operator returns views of its arguments."""
    schema = schema_of(func)
    aliases = [] if schema is None else [each.alias_info for each in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _casts_a_gradient(func: Any) -> bool:
    """Whether an operator is a cast in a backward. (A checkpoint that runs its forward once more
    there records gradients.)"""
    return func is _CAST and running_backward() != -1 and not torch.is_grad_enabled()


def is_low(dtype: torch.dtype) -> bool:
    """Whether real numbers of this kind are of a lower precision than ``WIDE``."""
    return dtype.is_floating_point and dtype.itemsize < WIDE.itemsize


@contextmanager
def without_autocast() -> Iterator[None]:
    """A context in which autocast is off on all devices, and keeps no parameters that it casts if a
    loss switches it on."""
    with ExitStack() as stack:
        for kind, is_on, _ in Ambient.here().autocast:
            if is_on:
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


@contextmanager
def widened() -> Iterator[Widened]:
    """A context in which operators compute in single precision at least, also under autocast."""
    is_cast = any(is_on for _, is_on, _ in Ambient.here().autocast)
    with without_autocast(), Widened() as mode:
        mode.met = is_cast
        yield mode
