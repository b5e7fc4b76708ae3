"""Functions of many kinds, each checkpointed and differentiated in many ways."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.checkpoint_cases.harness import Case, Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


class Doubled(torch.autograd.Function):
    """Saves a tensor and keeps an attribute; one result is marked as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        ctx.save_for_backward(x)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x * x * factor, sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * grad * ctx.factor, None


class SetUp(torch.autograd.Function):
    """With ``setup_context``, and a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * grad


class Dirty(torch.autograd.Function):
    """Writes to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(3)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0].sign().abs() * grad * 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4)).unbind(-2)
        return x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


def views(x: Tensor) -> Tensor:
    a, b = x.t().chunk(2)
    return torch.cat([a.sin(), b.exp()]).t().reshape(3, 4)[:, :].unsqueeze(0).squeeze(0).cos()


def writes(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:] = x[:, 1:].sin()
    y.add_(1).relu_()
    return y.exp()


def partly_detached(x: Tensor) -> Tensor:
    return x.sin() * x.detach().exp() + x.cos()


def without_gradient_within(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.exp().mean()
    return (x * scale).tanh()


def of_an_indexed_part(x: Tensor) -> Tensor:
    return x[:, [0, 2]].sin() @ x[:, 1:3].t().exp()


def chain(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


FUNCTIONS: dict[str, Callable[[], Callable[..., Any]]] = {
    "a chain": lambda: lambda x: x.sin().exp().cos(),
    "an MLP": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
    "attention": Attention,
    "a residual block": Residual,
    "views": lambda: views,
    "writes to what it has made": lambda: writes,
    "a detached part": lambda: partly_detached,
    "no_grad within": lambda: without_gradient_within,
    "index_select": lambda: of_an_indexed_part,
    "a custom Function": lambda: lambda x: Doubled.apply(x.sin(), 3.0)[0].exp(),
    "a Function with setup_context": lambda: lambda x: SetUp.apply(x.exp()).exp(),
    "a Function that writes to its input": lambda: lambda x: Dirty.apply(x * 2).exp(),
    "parametrized weights": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4)
    ),
    "a GRU": lambda: Recurrent(),
}


def parameters(fn: Any) -> list[Tensor]:
    return list(fn.parameters()) if isinstance(fn, nn.Module) else []


def by_backward(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    y = c(fn, x)
    y.sum().backward()
    return y, x.grad, [p.grad for p in parameters(fn)]


def by_grad_of_inputs_only(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    return torch.autograd.grad(c(fn, x).sum(), x)


def by_backward_for_some_inputs(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    wanted = parameters(fn)[-1:] or [x]
    c(fn, x).pow(2).sum().backward(inputs=wanted)
    return [p.grad for p in wanted]


def by_two_backwards(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    loss = c(fn, x).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    return first, x.grad


def by_double_backward(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    (grad,) = torch.autograd.grad(c(fn, x).pow(2).sum(), x, create_graph=True)
    return grad, torch.autograd.grad(grad.pow(2).sum(), x)


def in_another_thread(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    loss = c(fn, x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return x.grad


def nested_twice(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    def outer(x: Tensor) -> Tensor:
        return c(lambda x: c(fn, x.sin()).exp(), x).cos()

    y = c(outer, x)
    y.sum().backward()
    return y, x.grad, [p.grad for p in parameters(fn)]


def beside_others(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    y = c(fn, x)
    z = c(fn, y @ y.t() @ x) + c(fn, x)
    z.sum().backward()
    return x.grad, [p.grad for p in parameters(fn)]


def under_bfloat16_autocast(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = c(fn, x)
    y.float().sum().backward()
    return y, x.grad


def without_early_stop(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    y = c(fn, x, early_stop=False)
    y.sum().backward()
    return y, x.grad


def saved_on_the_cpu(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        y = c(fn, x)
    y.sum().backward()
    return y, x.grad


def under_anomaly_detection(c: Checkpoint, fn: Any, x: Tensor) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        y = c(fn, x)
        y.sum().backward()
    return y, x.grad


WAYS: dict[str, Callable[[Checkpoint, Any, Tensor], Any]] = {
    "backward": by_backward,
    "grad of the input": by_grad_of_inputs_only,
    "backward(inputs=...)": by_backward_for_some_inputs,
    "two backwards": by_two_backwards,
    "double backward": by_double_backward,
    "backward in a thread": in_another_thread,
    "nested": nested_twice,
    "beside others": beside_others,
    "autocast": under_bfloat16_autocast,
    "no early stop": without_early_stop,
    "save_on_cpu": saved_on_the_cpu,
    "anomaly": under_anomaly_detection,
}


def _crossed(function: str, way: str) -> Callable[[Checkpoint], Any]:
    return lambda c: WAYS[way](c, FUNCTIONS[function](), leaf(3, 4))


CASES += [Case(f"{f}, {w}", _crossed(f, w)) for f in FUNCTIONS for w in WAYS]
