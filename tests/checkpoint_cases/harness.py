"""How a situation is run and compared: without a checkpoint, with PyTorch's, and with ours.

A situation is a function of a ``checkpoint``. It is run with three of them: one that only calls the
function, ``torch.utils.checkpoint`` without reentrance, and ours. What it returns (values,
gradients, notes) is compared, and so are how often functions run and what the forward keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe


class Checkpoint:
    """A ``checkpoint`` that counts the calls of the functions it is given."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0
        self.hooked: set[int] = set()
        self.depth = 0
        self.after: Callable[[], None] = lambda: None  # called after the outermost call

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fn = self.counted(fn)
        self.depth += 1
        try:
            result = self.made(fn, args, kwargs)
        finally:
            self.depth -= 1
        if self.depth == 0:
            self.after()
        return result

    def made(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.kind == "ours":
            return fxpipe.checkpoint(fn, *args, **kwargs)
        if self.kind == "torch":
            return pytorch.checkpoint(fn, *args, use_reentrant=False, **kwargs)
        for option in (
            "context_fn",
            "debug",
            "determinism_check",
            "early_stop",
            "preserve_rng_state",
        ):
            kwargs.pop(option, None)
        return fn(*args, **kwargs)

    def counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def count(*_: Any) -> None:
            self.calls += 1

        if isinstance(fn, nn.Module):
            if id(fn) not in self.hooked:  # once, not at each call
                self.hooked.add(id(fn))
                fn.register_forward_pre_hook(count)
            return fn

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            count()
            return fn(*args, **kwargs)

        return fn if hasattr(fn, "__self__") else run


@dataclasses.dataclass
class Outcome:
    """Of a situation, with one of the three."""

    result: Any
    error: BaseException | None
    calls: int
    kept: int | None  # bytes of what the first outermost call has made and that is still there


@dataclasses.dataclass
class Case:
    """A situation.

    ``memory``: whether what is kept is compared. ``differs``: whether the function does something
    else in its second run, so that nothing is right but to say so.
    """

    name: str
    run: Callable[[Checkpoint], Any]
    memory: bool = True
    differs: bool = False

    def outcome(self, kind: str) -> Outcome:
        torch.manual_seed(0)
        checkpoint = Checkpoint(kind)
        result, error = None, None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = detached(self.run(checkpoint))
            except Exception as e:
                error = e.with_traceback(None)
        kept = self.kept(kind) if self.memory and error is None else None
        return Outcome(result, error, checkpoint.calls, kept)

    def kept(self, kind: str) -> int | None:
        torch.manual_seed(0)
        checkpoint, made, found = Checkpoint(kind), Made(), []

        def measure() -> None:
            found.append(made.bytes())
            raise Measured

        checkpoint.after = measure
        with warnings.catch_warnings(), contextlib.suppress(Measured), made:
            warnings.simplefilter("ignore")
            self.run(checkpoint)
        return found[0] if found else None


class Measured(BaseException):
    """Ends a situation: what is kept has been measured."""


class Made(TorchDispatchMode):
    """The memory of what operators give while this mode is on."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if ref() is not None)


def detached(result: Any) -> Any:
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, result)


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same, bit for bit."""
    ones, structure = pytree.tree_flatten(one)
    others, other_structure = pytree.tree_flatten(other)
    return structure == other_structure and all(map(_equal, ones, others))


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def verdict(outcome: Outcome, reference: Outcome) -> str:
    """``right``, ``wrong``, or the name of the exception."""
    if outcome.error is not None:
        same = type(outcome.error) is type(reference.error)
        return "right" if same else type(outcome.error).__name__
    return (
        "right" if reference.error is None and equal(outcome.result, reference.result) else "wrong"
    )


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


class Cases(list[Case]):
    """The situations of one kind, in the order in which they are written down."""

    def case(
        self, **options: Any
    ) -> Callable[[Callable[[Checkpoint], Any]], Callable[[Checkpoint], Any]]:
        """A decorator that adds a function as a situation, called as its docstring or name says.

        ``options`` are those of :class:`Case`: ``memory`` and ``differs``.
        """

        def add(run: Callable[[Checkpoint], Any]) -> Callable[[Checkpoint], Any]:
            name = (run.__doc__ or run.__name__.replace("_", " ")).strip().rstrip(".")
            self.append(Case(name, run, **options))
            return run

        return add
