"""Options of a checkpoint: contexts for the two runs (selective ones too), early stop, debug."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint_cases.functions import chain
from tests.checkpoint_cases.harness import Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


SAVE_MM = functools.partial(
    pytorch.create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)


@case()
def selective(c: Checkpoint) -> Any:
    """Selective checkpointing: matrix products are kept."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    c(model, x, context_fn=SAVE_MM).sin().sum().backward()
    return x.grad, model[0].weight.grad


@case()
def selective_of_a_function(c: Checkpoint) -> Any:
    """Selective checkpointing of a function of two tensors, by a policy."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        is_mm = op is torch.ops.aten.mm.default
        policy = pytorch.CheckpointPolicy
        return policy.MUST_SAVE if is_mm else policy.PREFER_RECOMPUTE

    contexts = functools.partial(pytorch.create_selective_checkpoint_contexts, policy)
    x, w = leaf(3, 3), leaf(3, 3)
    c(lambda x, w: torch.sigmoid((x @ w) @ w).exp(), x, w, context_fn=contexts).sum().backward()
    return x.grad, w.grad


@case(memory=False)
def selective_nested(c: Checkpoint) -> Any:
    """Selective checkpointing, with a checkpoint within."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    c(lambda x: c(model, x.sin()).cos(), x, context_fn=SAVE_MM).sum().backward()
    return x.grad, model[0].weight.grad


@case(memory=False)
def selective_counts_matrix_products(c: Checkpoint) -> Any:
    """Selective checkpointing computes what it keeps once."""
    ran, x, w = [], leaf(3, 3), leaf(3, 3)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        y = c(lambda x: (x.sin() @ w).exp(), x, context_fn=SAVE_MM)
        forward = len(ran)
        y.sum().backward()
    products = [func is torch.ops.aten.mm.default for func in ran]
    return x.grad, sum(products[:forward]), sum(products[forward:])


@case(memory=False, differs=True)
def selective_backward_twice(c: Checkpoint) -> Any:
    """Selective checkpointing, two backwards."""
    x, w = leaf(3, 3), leaf(3, 3)
    y = c(lambda x: (x.sin() @ w).exp(), x, context_fn=SAVE_MM).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


@case(memory=False)
def contexts_of_ones_own(c: Checkpoint) -> Any:
    """context_fn with two contexts that note when they are entered."""
    seen: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    x = leaf(3)
    c(chain, x, context_fn=lambda: (noted("first"), noted("second"))).sum().backward()
    return x.grad, seen if c.kind != "plain" else ["first", "second"]


@case(memory=False, differs=True)
def a_context_that_swallows_exceptions(c: Checkpoint) -> Any:
    contexts = lambda: (contextlib.suppress(KeyError), contextlib.nullcontext())  # noqa: E731
    return c(lambda x: {}["none"], leaf(3), context_fn=contexts)


@case()
def early_stop_is_switched_off_for_all(c: Checkpoint) -> Any:
    """set_checkpoint_early_stop(False): the second run goes to its end."""
    ends, x = [], leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        ends.append(1)
        return y * 1

    with pytorch.set_checkpoint_early_stop(False):
        y = c(fn, x)
    y.sum().backward()
    return x.grad, len(ends) if c.kind != "plain" else 2


@case()
def debugging(c: Checkpoint) -> Any:
    """debug=True, and nothing differs."""
    x = leaf(3)
    c(chain, x, debug=True).sum().backward()
    return x.grad
