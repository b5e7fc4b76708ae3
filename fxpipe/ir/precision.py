"""Products of float32 in float32, while a model is compared with itself; and whether a GPU computes
them in TF32 otherwise.

A GPU may compute products of float32 numbers in TF32, which has 10 bits in place of 23; PyTorch has
it do so for convolutions by default. The product of two matrices then depends on how many rows they
have in its fourth digit, as other numbers of rows are given to other kernels. A check that allowed
for that would not see an auxiliary loss of one per cent, say. So it runs the model in full
precision, and sees a difference of the sixth digit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

FULL, INHERITED = "ieee", "none"

_BACKENDS: Any = torch.backends
_KINDS: tuple[Any, ...] = (
    *(_BACKENDS, _BACKENDS.cudnn),  # what the others inherit, outermost first
    *(_BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn),
    *(_BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn),
)
"""Each has a setting ``fp32_precision``. One that has not been set reads as the one it inherits.
``mkldnn`` itself is left out, since in PyTorch 2.11 to 2.13 setting it sets all backends."""

_lock, _here = threading.Lock(), threading.local()
_before: list[
    _UsersPrecision
] = []  # what to put back: the same object for each thread that is inside


@dataclass(frozen=True)
class _UsersPrecision:
    """The settings of the user, and the function that puts them back."""

    products_in_tf32: bool
    convolutions_in_tf32: bool
    put_back: Callable[[], None]


@contextmanager
def full_precision() -> Iterator[None]:
    """Within this context products of float32 numbers are computed in float32.

    PyTorch has these settings for the whole process only, so other threads compute in full
    precision, too, until the last thread has left the context. Then everything is set as it was
    when the first one entered.
    """
    _enter(1)
    try:
        yield
    finally:
        _leave(1)


@contextmanager
def users_precision() -> Iterator[None]:
    """Within this context products are computed as the user has set it, also inside
    :func:`full_precision`; but in float32 as long as another thread is inside that."""
    times = _times_entered()
    _leave(times)
    try:
        yield
    finally:
        _enter(times)


def _times_entered() -> int:
    """How many times this thread is inside of :func:`full_precision`."""
    return getattr(_here, "times", 0)


def _enter(times: int) -> None:
    with _lock:
        for _ in range(times):
            _before.append(_before[-1] if _before else _set_to_full())
        _here.times = _times_entered() + times


def _leave(times: int) -> None:
    with _lock:
        for _ in range(times):
            settings = _before.pop()
            if not _before:
                settings.put_back()
        _here.times = _times_entered() - times


def uses_tf32(is_convolution: bool) -> bool:
    """Whether a GPU that has TF32 computes convolutions, or other products, of float32 numbers in
    it, as the user has set it; within :func:`full_precision`, too."""
    with _lock:
        if _before:
            known = _before[-1]
            return known.convolutions_in_tf32 if is_convolution else known.products_in_tf32
        return _is_tf32(_CONVOLUTIONS if is_convolution else _PRODUCTS)


_PRODUCTS, _CONVOLUTIONS = _BACKENDS.cuda.matmul, _BACKENDS.cudnn.conv


def _is_tf32(kind: Any) -> bool:
    return bool(kind.fp32_precision == "tf32")


def _set_to_full() -> _UsersPrecision:
    """Set full precision, and return what was set before."""
    products, convolutions = _is_tf32(_PRODUCTS), _is_tf32(_CONVOLUTIONS)
    older: list[tuple[Any, Any]] = []  # the settings of PyTorch 1; to read one may be refused
    with suppress(RuntimeError):
        older.append((torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()))
    with suppress(RuntimeError):
        older.append((_allow_tf32_in_cudnn, _BACKENDS.cudnn.allow_tf32))
    before = []
    for kind in _KINDS:  # once what is inherited has been unset, each reads as it is set itself
        before.append((kind, kind.fp32_precision))
        kind.fp32_precision = INHERITED
    torch.set_float32_matmul_precision("highest")
    _allow_tf32_in_cudnn(False)
    for kind in _KINDS:
        kind.fp32_precision = FULL

    def put_back() -> None:
        for setter, value in older:
            setter(value)
        for kind, value in reversed(before):
            kind.fp32_precision = value

    return _UsersPrecision(products, convolutions, put_back)


def _allow_tf32_in_cudnn(is_allowed: bool) -> None:
    _BACKENDS.cudnn.allow_tf32 = is_allowed
