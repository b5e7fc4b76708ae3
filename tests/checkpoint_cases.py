"""Situations in which a function is checkpointed, for ``fxpipe.checkpoint`` and for PyTorch's.

A situation is a function of a ``checkpoint``. It is run with three of them: one that only calls the
function, ``torch.utils.checkpoint`` without reentrance, and ours. What it returns (values,
gradients, notes) is compared, and so are how often functions run and what the forward keeps.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import threading
import warnings
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
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


def rows() -> Iterator[tuple[str, str, Outcome, str, Outcome]]:
    """For each situation: its name; verdict and outcome of PyTorch's, and of ours."""
    for case in CASES:
        plain, theirs, ours = (case.outcome(kind) for kind in ("plain", "torch", "ours"))
        yield case.name, verdict(theirs, plain), theirs, verdict(ours, plain), ours


CASES: list[Case] = []


def case(**options: Any) -> Callable[[Callable[[Checkpoint], Any]], Callable[[Checkpoint], Any]]:
    def add(run: Callable[[Checkpoint], Any]) -> Callable[[Checkpoint], Any]:
        name = (run.__doc__ or run.__name__.replace("_", " ")).strip().rstrip(".")
        CASES.append(Case(name, run, **options))
        return run

    return add


# --------------------------------------------------------------- what is checkpointed, and backward


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


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


# -------------------------------------------------------------------- nested, and beside each other


def _depth(depth: int, saves: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        def nested(level: int) -> Callable[[Tensor], Tensor]:
            def fn(x: Tensor) -> Tensor:
                x = x.sin() if saves else x * 1
                y = x.exp() if level == 1 else c(nested(level - 1), x)
                return y.cos() if saves else y * 2

            return fn

        x = leaf(5)
        y = c(nested(depth), x)
        y.sum().backward()
        return y, x.grad

    return run


def _siblings(count: int, way: str) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

        def block(i: int) -> Callable[[Tensor], Tensor]:
            return lambda x: x + model[i](x).tanh().exp()

        def all_of_them(x: Tensor) -> Tensor:
            for i in range(count):
                x = c(block(i), x)
            return x

        x = leaf(3, 4)
        y = c(all_of_them, x) if way == "within one" else all_of_them(x)
        y.sum().backward()
        return y, x.grad, [p.grad for p in model.parameters()]

    return run


CASES += [
    Case(f"depth {d}, {'saving' if s else 'not saving'}", _depth(d, s))
    for d in range(1, 7)
    for s in (True, False)
]
CASES += [
    Case(f"{n} siblings {way}", _siblings(n, way), memory=way == "within one")
    for n in range(1, 13)
    for way in ("in a row", "within one")
]


@case()
def a_tree(c: Checkpoint) -> Any:
    """A tree of checkpoints, three deep, two wide."""

    def node(level: int) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            if level == 0:
                return x.sin().exp()
            return c(node(level - 1), x) * c(node(level - 1), x.cos())

        return fn

    x = leaf(4)
    c(node(3), x).sum().backward()
    return x.grad


@case()
def nested_writes_to_its_input(c: Checkpoint) -> Any:
    """Nested, the inner one writes to its input."""
    x = leaf(4)
    y = c(lambda x: c(lambda h: h.mul_(3) * 2, x * 1), x)
    y.sum().backward()
    return y, x.grad


@case()
def nested_writes_to_its_input_and_more_follows(c: Checkpoint) -> Any:
    """Nested, the inner one writes to its input, and more is saved after it."""
    x = leaf(4)
    y = c(lambda x: c(lambda h: (h.mul_(3) * 2).sin(), x * 1).sin().exp(), x)
    y.sum().backward()
    return y, x.grad


@case()
def written_to_after_a_nested_one(c: Checkpoint) -> Any:
    """The outer one writes to the input of the inner one, after it."""

    def outer(x: Tensor) -> Tensor:
        h = x * 1
        y = c(lambda h: h.exp().sin(), h)
        h.add_(1)
        return y.cos() + h

    x = leaf(4)
    c(outer, x).sum().backward()
    return x.grad


@case()
def a_nested_call_of_a_closure(c: Checkpoint) -> Any:
    """Nested, the inner one has no arguments."""

    def outer(x: Tensor) -> Tensor:
        y = x.sin().exp()
        return y + c(lambda: torch.ones(4))

    x = leaf(4)
    c(outer, x).sum().backward()
    return x.grad


@case()
def one_within_pytorchs(c: Checkpoint) -> Any:
    """Within PyTorch's own checkpoint."""
    x = leaf(4)
    outer = functools.partial(pytorch.checkpoint, use_reentrant=False)
    outer(lambda x: c(lambda x: x.sin().exp(), x.cos()).sin(), x).sum().backward()
    return x.grad


@case()
def pytorchs_within_one(c: Checkpoint) -> Any:
    """Around PyTorch's own checkpoint."""
    x = leaf(4)
    inner = functools.partial(pytorch.checkpoint, use_reentrant=False)
    c(lambda x: inner(lambda x: x.sin().exp(), x.cos()).sin(), x).sum().backward()
    return x.grad


@case()
def within_a_reentrant_one(c: Checkpoint) -> Any:
    """Within PyTorch's reentrant checkpoint."""
    x = leaf(4)
    y = pytorch.checkpoint(lambda x: c(lambda x: x.sin().exp(), x), x, use_reentrant=True)
    y.sum().backward()
    return x.grad


# ------------------------------------------------------------------------------- inputs and outputs

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: Tensor
    b: Tensor | None = None


def _result(c: Checkpoint, fn: Any, wanted: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    out = c(fn, *args, **kwargs)
    leaves = pytree.tree_leaves(vars(out) if isinstance(out, Record) else out)
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    sum(t.sum() for t in tensors).backward()
    return leaves, [w.grad for w in wanted]


@case()
def dict_in_and_out(c: Checkpoint) -> Any:
    a, b = leaf(3), leaf(3)
    fn = lambda d: {"x": d["a"].sin(), "y": [d["b"].exp() * d["a"], None, 3]}  # noqa: E731
    return _result(c, fn, [a, b], {"a": a, "b": b})


@case()
def list_and_None_in(c: Checkpoint) -> Any:
    a, b = leaf(3), leaf(3)
    return _result(c, lambda xs, none: xs[0].sin() * xs[1][0].exp(), [a, b], [a, (b,)], None)


@case()
def named_tuple_in_and_out(c: Checkpoint) -> Any:
    a, b = leaf(3), leaf(3)
    return _result(c, lambda p: Pair(p.a.sin() * p.b, p.b.exp()), [a, b], Pair(a, b))


@case()
def dataclass_in_and_out(c: Checkpoint) -> Any:
    a, b = leaf(3), leaf(3)
    fn = lambda r: Record(r.a.sin() * r.b.exp())  # noqa: E731
    return _result(c, fn, [a, b], Record(a, b))


@case()
def ordered_dict_in(c: Checkpoint) -> Any:
    a = leaf(3)
    return _result(c, lambda d: d["a"].sin().exp(), [a], OrderedDict(a=a))


@case()
def keyword_tensors(c: Checkpoint) -> Any:
    a, b, k = leaf(3), leaf(3), leaf(3)
    fn = lambda a, *, b, more: a.sin() * b.exp() * more["k"].cos()  # noqa: E731
    return _result(c, fn, [a, b, k], a, b=b, more={"k": k})


@case()
def a_list_that_the_function_empties(c: Checkpoint) -> Any:
    """A list is given that the function empties."""
    a, b = leaf(3), leaf(3)
    return _result(c, lambda xs: xs.pop().sin() * xs.pop().exp(), [a, b], [a, b])


@case()
def a_dict_that_the_function_fills(c: Checkpoint) -> Any:
    """A dict is given that the function writes to."""
    a, cache = leaf(3), {}

    def fn(a: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache["h"] = a.sin()
        return cache["h"].exp()

    return _result(c, fn, [a], a, cache), "h" in cache


@case()
def several_outputs_one_is_used(c: Checkpoint) -> Any:
    x = leaf(3)
    y, _ = c(lambda x: (x.sin().exp(), x.cos().exp()), x)
    y.sum().backward()
    return x.grad


@case()
def outputs_backward_one_after_the_other(c: Checkpoint) -> Any:
    x = leaf(3)
    y, z = c(lambda x: (x.sin().exp(), x.cos().exp()), x)
    y.sum().backward()
    first = x.grad.clone()
    z.sum().backward()
    return first, x.grad


@case()
def outputs_within_a_group(c: Checkpoint) -> Any:
    """Two backwards within a GraphExecGroup."""
    x = leaf(3)
    y, z = c(lambda x: (x.sin().exp(), x.cos().exp()), x)
    with pytorch.GraphExecGroup():
        y.sum().backward()
        z.sum().backward()
    return x.grad


@case()
def the_input_is_returned(c: Checkpoint) -> Any:
    x = leaf(3)
    y, same = c(lambda x: (x.sin().exp(), x), x)
    (y + same).sum().backward()
    return x.grad, same is x


@case()
def an_output_is_a_view_of_the_input(c: Checkpoint) -> Any:
    x = leaf(3, 2)
    h = x * 1
    y, v = c(lambda x: (x.sin().exp(), x[0]), h)
    (y.sum() + (v * 2).sum()).backward()
    return x.grad, v._is_view()


@case()
def an_output_without_gradient(c: Checkpoint) -> Any:
    x = leaf(3)
    y, i = c(lambda x: (x.sin().exp(), x.argmax()), x)
    y.sum().backward()
    return x.grad, i, i.requires_grad


@case()
def no_input_needs_a_gradient(c: Checkpoint) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    c(model, torch.randn(2, 3)).sum().backward()
    return [p.grad for p in model.parameters()]


@case()
def nothing_needs_a_gradient(c: Checkpoint) -> Any:
    y = c(lambda x: x.sin().exp(), torch.randn(3))
    return y, y.requires_grad


@case()
def no_tensors_at_all(c: Checkpoint) -> Any:
    return c(lambda a, b: a + b, 1, b=2)


@case()
def integers_in(c: Checkpoint) -> Any:
    e = nn.Embedding(5, 3)
    c(lambda i: e(i).sin().exp(), torch.tensor([0, 2, 2])).sum().backward()
    return e.weight.grad


@case()
def sparse_gradients(c: Checkpoint) -> Any:
    e = nn.Embedding(5, 3, sparse=True)
    c(lambda i: e(i).sin().exp(), torch.tensor([0, 2, 2])).sum().backward()
    return e.weight.grad.coalesce().to_dense(), e.weight.grad.is_sparse


@case()
def a_sparse_parameter(c: Checkpoint) -> Any:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.weight, x).sin().exp()

    x, model = leaf(3, 2), Sparse()
    c(model, x).sum().backward()
    return x.grad, model.weight.grad.to_dense()


@case()
def a_sparse_input(c: Checkpoint) -> Any:
    x, s = leaf(3, 2), torch.eye(3).to_sparse()
    c(lambda s, x: torch.sparse.mm(s, x.sin()).exp(), s, x).sum().backward()
    return x.grad


@case()
def complex_numbers(c: Checkpoint) -> Any:
    x = leaf(4, dtype=torch.complex64)
    c(lambda x: torch.view_as_real(torch.fft.fft(x.sin()).exp()).tanh(), x).sum().backward()
    return x.grad


@case()
def half_precision(c: Checkpoint) -> Any:
    x = leaf(4, dtype=torch.bfloat16)
    c(lambda x: x.sin().float().exp().double(), x).sum().backward()
    return x.grad


@case()
def a_conjugated_view(c: Checkpoint) -> Any:
    x = leaf(4, dtype=torch.complex64)
    c(lambda x: (x.conj().sin() * x).abs(), x).sum().backward()
    return x.grad


@case(memory=False)
def ragged(c: Checkpoint) -> Any:
    """A nested tensor."""
    linear = nn.Linear(3, 3)
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    y = c(lambda n: torch.nested.to_padded_tensor(linear(n).sin(), 0.0), ragged)
    y.sum().backward()
    return linear.weight.grad


@case()
def a_python_attribute_of_an_input(c: Checkpoint) -> Any:
    x = leaf(3)
    x.scale = 3.0
    c(lambda x: x.sin() * x.scale * x.sin(), x).sum().backward()
    return x.grad


@case()
def a_python_attribute_of_a_nested_input(c: Checkpoint) -> Any:
    def outer(x: Tensor) -> Tensor:
        h = x * 1
        h.scale = 3.0
        return c(lambda h: h.sin() * h.scale * h.sin(), h).exp()

    x = leaf(3)
    c(outer, x).sum().backward()
    return x.grad


@case()
def inference_tensors_in(c: Checkpoint) -> Any:
    """An input that was made in inference mode."""
    with torch.inference_mode():
        i = torch.ones(2, 3)
    linear = nn.Linear(3, 3)
    c(lambda i: linear(i + 1).sin(), i).sum().backward()
    return linear.weight.grad


@case()
def a_large_output(c: Checkpoint) -> Any:
    """An output that is expanded."""
    x = leaf(3, 1)
    c(lambda x: x.sin().expand(3, 100).exp(), x).sum().backward()
    return x.grad


# --------------------------------------------------------------------------- modes and their change


@case()
def no_grad(c: Checkpoint) -> Any:
    x = leaf(3)
    with torch.no_grad():
        y = c(lambda x: x.sin().exp(), x)
    return y, y.requires_grad


@case()
def inference_mode(c: Checkpoint) -> Any:
    x = leaf(3)
    with torch.inference_mode():
        y = c(lambda x: x.sin().exp(), x)
    return y.is_inference()


@case()
def enable_grad_within_no_grad(c: Checkpoint) -> Any:
    """Gradients are enabled within the function only."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.sin().exp()

    with torch.no_grad():
        y = c(fn, x)
    y.sum().backward()
    return x.grad


@case()
def autocast_of_the_backward_does_not_count(c: Checkpoint) -> Any:
    """Autocast in the backward only."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    y = c(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = y.sum()
        y.backward(torch.ones_like(y))
    return x.grad, loss


@case()
def autocast_within(c: Checkpoint) -> Any:
    model, x = nn.Linear(3, 3), leaf(2, 3)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).sin()
        return y.float().exp()

    c(fn, x).sum().backward()
    return x.grad, model.weight.grad


def _autocast_cache(enabled: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        model, x = nn.Linear(3, 3), leaf(2, 3)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled):
            y = c(lambda x: model(model(x).sin()), x) + model(x)
        y.float().sum().backward()
        return x.grad, model.weight.grad

    return run


CASES += [Case(f"autocast, cache {on}", _autocast_cache(on)) for on in (True, False)]


@case()
def default_device_of_the_forward(c: Checkpoint) -> Any:
    """The default device of the forward."""
    x = leaf(3)
    with torch.device("cpu"):
        y = c(lambda x: (x * torch.ones(3)).sin().exp(), x)
    with torch.device("meta"):
        torch.autograd.backward(y, torch.ones(3, device="cpu"))
    return x.grad


@case()
def a_function_mode(c: Checkpoint) -> Any:
    """A torch function mode in the forward only."""

    class Cosine(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))

    x = leaf(3)
    with Cosine():
        y = c(lambda x: torch.sin(x).exp(), x)
    y.sum().backward()
    return x.grad


class Cosines(Tensor):
    """Its sine is the cosine."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.cos if func is torch.sin else func
        return super().__torch_function__(func, types, args, kwargs)


@case()
def a_subclass_whose_backward_is_called(c: Checkpoint) -> Any:
    """A subclass with a __torch_function__; backward of the subclass."""
    x = leaf(3)
    c(lambda x: torch.sin(x).exp(), x.as_subclass(Cosines)).sum().backward()
    return x.grad


@case()
def a_subclass_and_a_plain_backward(c: Checkpoint) -> Any:
    """A subclass with a __torch_function__; backward of a plain tensor."""
    x = leaf(3)
    y = c(lambda x: torch.sin(x).exp(), x.as_subclass(Cosines))
    y.as_subclass(Tensor).sum().backward()
    return x.grad


@case(memory=False)
def a_wrapper_subclass(c: Checkpoint) -> Any:
    """A subclass with a __torch_dispatch__."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = leaf(3)
    y = c(lambda t: t.sin().exp(), TwoTensor(x, x * 2))
    y.sum().backward()
    return x.grad


@case(memory=False)
def a_wrapper_subclass_as_parameter(c: Checkpoint) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    linear, x = nn.Linear(3, 3), leaf(2, 3)
    linear.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3) * 2))
    nn.init.ones_(linear.bias)
    c(linear, x).sin().sum().backward()
    return x.grad


@case()
def a_dispatch_mode(c: Checkpoint) -> Any:
    """A dispatch mode around forward and backward, which counts operators."""
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = leaf(3)
    with Seen():
        c(lambda x: x.sin().exp(), x).sum().backward()
    return x.grad, torch.ops.aten.sin.default in seen


# ------------------------------------------------------------------------------- hooks on all kinds


def _hooks(pack: Any, unpack: Any, inside: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, pack, unpack)
        model, x = nn.Linear(4, 4), leaf(3, 4)

        def fn(x: Tensor) -> Tensor:
            with hooks() if inside else contextlib.nullcontext():
                return model(x.sin()).exp()

        with contextlib.nullcontext() if inside else hooks():
            y = c(fn, x)
        y.sum().backward()
        return y, x.grad, model.weight.grad

    return run


STORE: list[Tensor] = []
PACKED: dict[str, tuple[Any, Any]] = {
    "a list": (lambda t: [t], lambda packed: packed[0]),
    "a copy": (lambda t: t.clone(), lambda packed: packed),
    "a number": (lambda t: STORE.append(t) or len(STORE) - 1, lambda number: STORE[number]),
    "double": (lambda t: t.double(), lambda packed: packed.float()),
}
CASES += [
    Case(f"saved tensors packed to {name}, {'inside' if i else 'outside'}", _hooks(*pair, i))
    for name, pair in PACKED.items()
    for i in (False, True)
]


@case()
def packed_to_bfloat16(c: Checkpoint) -> Any:
    """Saved tensors packed to bfloat16 outside: the forward."""
    x = leaf(50)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        y = c(lambda x: x.sin().exp(), x)
    return y


@case()
def packed_to_bfloat16_nested(c: Checkpoint) -> Any:
    """Saved tensors packed to bfloat16 outside, nested: the forward."""
    x = leaf(50)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        y = c(lambda x: c(lambda x: x.sin().exp(), x.cos()).sin(), x)
    return y


@case()
def saved_tensors_hooks_are_disabled(c: Checkpoint) -> Any:
    x = leaf(3)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        return c(lambda x: x.sin().exp(), x)


@case()
def a_hook_on_the_input(c: Checkpoint) -> Any:
    seen, x = [], leaf(3)
    x.register_hook(lambda g: seen.append(1) or g * 2)
    c(lambda x: x.sin().exp(), x).sum().backward()
    return x.grad, seen


@case()
def a_hook_on_a_tensor_within(c: Checkpoint) -> Any:
    seen, x = [], leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: seen.append(1) or g * 2)
        return y.exp()

    c(fn, x).sum().backward()
    return x.grad, seen


@case()
def a_hook_that_the_function_registers_on_its_input(c: Checkpoint) -> Any:
    """The function registers a hook on its input."""
    seen, x = [], leaf(3)

    def fn(h: Tensor) -> Tensor:
        h.register_hook(lambda g: seen.append(1) or g * 2)
        return h.sin().exp()

    c(fn, x * 1).sum().backward()
    return x.grad, seen


@case()
def a_hook_after_accumulation(c: Checkpoint) -> Any:
    seen, linear = [], nn.Linear(3, 3)
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    c(lambda x: linear(x).sin(), leaf(2, 3)).sum().backward()
    return linear.weight.grad, seen


@case()
def an_optimizer_within_the_backward(c: Checkpoint) -> Any:
    """A hook steps each parameter as soon as its gradient is there."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)

    def step(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    c(model[:2], x).sin().sum().backward()
    return x.grad, list(model.parameters())


@case()
def a_forward_hook_of_a_module(c: Checkpoint) -> Any:
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    linear.register_forward_hook(lambda m, args, out: out * 2)
    c(linear, x).sin().sum().backward()
    return x.grad, linear.weight.grad


@case()
def a_backward_hook_of_a_module(c: Checkpoint) -> Any:
    seen, linear, x = [], nn.Linear(3, 3), leaf(2, 3)
    linear.register_full_backward_hook(lambda m, gi, go: seen.append(1))
    c(nn.Sequential(linear, nn.Tanh()), x).sum().backward()
    return x.grad, seen


@case()
def retain_grad_within(c: Checkpoint) -> Any:
    kept, x = [], leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.retain_grad()
        kept.append(y)
        return y.exp()

    c(fn, x).sum().backward()
    return x.grad, kept[0].grad


@case()
def a_multi_grad_hook(c: Checkpoint) -> Any:
    seen, a, b = [], leaf(3), leaf(3)
    torch.autograd.graph.register_multi_grad_hook([a, b], lambda grads: seen.append(len(grads)))
    c(lambda a, b: a.sin() * b.exp(), a, b).sum().backward()
    return a.grad, b.grad, seen


# ----------------------------------------------------------------------------------- random numbers


@case()
def two_dropouts_in_a_row(c: Checkpoint) -> Any:
    x = leaf(20)
    fn = lambda x: F.dropout(x.sin(), 0.5).exp()  # noqa: E731
    c(fn, c(fn, x)).sum().backward()
    return x.grad, torch.rand(2)


@case()
def dropout_nested(c: Checkpoint) -> Any:
    x = leaf(20)
    inner = lambda x: F.dropout(x.sin(), 0.5).exp()  # noqa: E731
    c(lambda x: F.dropout(c(inner, F.dropout(x).cos()), 0.3).sin(), x).sum().backward()
    return x.grad, torch.rand(2)


@case()
def random_numbers_between(c: Checkpoint) -> Any:
    x = leaf(20)
    y = c(lambda x: F.dropout(x.sin(), 0.5).exp(), x)
    between = torch.rand(3)
    y.sum().backward()
    return x.grad, between, torch.rand(3)


@case()
def a_generator_is_given(c: Checkpoint) -> Any:
    """A generator among the arguments."""
    x, g = leaf(4), torch.Generator().manual_seed(7)
    fn = lambda x, g: (x * torch.rand(4, generator=g)).sin().exp()  # noqa: E731
    c(fn, x, g).sum().backward()
    return x.grad, torch.rand(2, generator=g)


@case()
def noise_in_an_operator(c: Checkpoint) -> Any:
    """rrelu, which saves its noise before it draws it."""
    x = leaf(500)
    c(lambda x: F.rrelu(x, training=True), x).sum().backward()
    return x.grad


@case(differs=True)
def random_state_not_kept(c: Checkpoint) -> Any:
    """preserve_rng_state=False: a second draw."""
    x = leaf(4)
    y = c(lambda x: x * torch.rand(4), x, preserve_rng_state=False)
    y.sum().backward()
    return torch.rand(2).shape


# --------------------------------------------------------------------------- functions with a state


@case()
def batch_norm_in_evaluation(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).eval(), leaf(5, 3)
    c(model, x).sin().sum().backward()
    return x.grad, list(model.buffers())


@case()
def batch_norm_in_training(c: Checkpoint) -> Any:
    """Batch norm in training: its statistics, too."""
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), leaf(5, 3)
    c(model, x).sin().sum().backward()
    return x.grad, list(model.buffers())


@case()
def shared_parameters(c: Checkpoint) -> Any:
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    c(nn.Sequential(linear, nn.Tanh(), linear), x).sum().backward()
    return x.grad, linear.weight.grad


@case()
def parameters_of_a_closure(c: Checkpoint) -> Any:
    w, x = leaf(3, 3), leaf(2, 3)
    c(lambda x: (x @ w).sin() @ w.t(), x).sum().backward()
    return x.grad, w.grad


@case()
def a_bound_method(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    c(model.forward, x).sum().backward()
    return x.grad, model[0].weight.grad


@case()
def a_partial(c: Checkpoint) -> Any:
    model, x = nn.Linear(3, 3), leaf(2, 3)
    c(functools.partial(lambda m, x: m(x).sin().exp(), model), x).sum().backward()
    return x.grad, model.weight.grad


@case()
def functional_call(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    lent = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    call = lambda x: torch.func.functional_call(model, lent, (x,))  # noqa: E731
    c(call, x).sum().backward()
    return x.grad, [p.grad for p in lent.values()]


@case(memory=False)
def lent_parameters(c: Checkpoint) -> Any:
    """functional_call of a module that checkpoints a part of it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return c(self.inner, x)

    model, x = Around(), leaf(2, 3)
    lent = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, lent, (x,)).sum().backward()
    return x.grad, [p.grad for p in lent.values()]


@case()
def lazy_modules(c: Checkpoint) -> Any:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(2))
    x = leaf(4, 5)
    c(model, x).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


@case(memory=False)
def a_copy_of_the_model(c: Checkpoint) -> Any:
    """A deep copy of a model that has been checkpointed."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), leaf(4, 3)
    c(model, x).sum().backward()
    twin = copy.deepcopy(model)
    c(twin, x).sum().backward()
    return x.grad, [p.grad for p in twin.parameters()]


@case()
def a_counter_of_calls(c: Checkpoint) -> Any:
    """The function counts its calls and does not compute with that."""
    count, x = [0], leaf(3)

    def fn(x: Tensor) -> Tensor:
        count[0] += 1
        return x.sin().exp()

    c(fn, x).sum().backward()
    return x.grad


@case()
def a_cache_that_the_second_run_finds(c: Checkpoint) -> Any:
    """The function keeps a constant at its first call."""
    kept, x = {}, leaf(3)

    def fn(x: Tensor) -> Tensor:
        if "table" not in kept:
            kept["table"] = torch.arange(3.0)
        return (x * kept["table"]).sin().exp()

    c(fn, x).sum().backward()
    return x.grad


@case(differs=True)
def a_parameter_is_changed_before_the_backward(c: Checkpoint) -> Any:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    y = c(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    y.sum().backward()
    return x.grad


@case()
def an_input_is_changed_before_the_backward(c: Checkpoint) -> Any:
    x = leaf(3)
    h = x * 1
    y = c(lambda h: h.sin().exp(), h)
    h.add_(1)
    y.sum().backward()
    return x.grad


@case()
def a_saved_tensor_is_written_to(c: Checkpoint) -> Any:
    """The function writes to a tensor that is saved."""

    def fn(x: Tensor) -> Tensor:
        y = x * 1
        z = y.sin()
        y.add_(1)
        return z.exp()

    x = leaf(3)
    c(fn, x, early_stop=False).sum().backward()
    return x.grad


# ------------------------------------------------------------------------------------------- errors


@case()
def an_exception_in_the_forward(c: Checkpoint) -> Any:
    def fn(x: Tensor) -> Tensor:
        x.sin().exp()
        raise KeyError("no such thing")

    return c(fn, leaf(3))


def _second(second: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        runs, x = [], leaf(3)

        def fn(x: Tensor) -> Tensor:
            runs.append(1)
            return torch.exp(torch.sin(x)) if len(runs) == 1 else second(x)

        c(fn, x, **options).sum().backward()
        return x.grad

    return run


def _raise(x: Tensor) -> Tensor:
    raise LookupError("the second time")


SECONDS: dict[str, Callable[[Tensor], Tensor]] = {
    "saves less": lambda x: torch.sin(x),
    "saves nothing": lambda x: x * 1,
    "has another shape": lambda x: torch.exp(torch.sin(x[:1])),
    "has another dtype": lambda x: torch.exp(torch.sin(x.double())),
    "is on another device": lambda x: torch.exp(torch.sin(x.to("meta"))),
    "raises": _raise,
}
CASES += [Case(f"the second run {k}", _second(f), differs=True) for k, f in SECONDS.items()]
CASES += [
    Case(f"the second run {k}, {name}", _second(f, **options), differs=True, memory=False)
    for k, f in SECONDS.items()
    for name, options in (
        ("no early stop", {"early_stop": False}),
        ("determinism_check none", {"determinism_check": "none"}),
    )
    if not (k == "is on another device" and name == "determinism_check none")
]


@case(differs=True, memory=False)
def the_second_run_saves_more(c: Checkpoint) -> Any:
    return _second(lambda x: x.sin().exp().cos(), early_stop=False)(c)


@case(differs=True, memory=False)
def an_unknown_determinism_check(c: Checkpoint) -> Any:
    return c(lambda x: x.sin(), leaf(3), determinism_check="strict")


@case()
def again_after_an_exception_in_the_backward(c: Checkpoint) -> Any:
    x, fail = leaf(3), [True]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if fail.pop():
                raise ArithmeticError("this time")
            return grad

    y = c(lambda x: Fails.apply(x.sin()).exp(), x)
    with contextlib.suppress(ArithmeticError):
        y.sum().backward(retain_graph=True)
    fail.append(False)
    y.sum().backward()
    return x.grad


@case()
def a_function_that_catches_exceptions(c: Checkpoint) -> Any:
    """The function catches all exceptions, also that which stops its second run."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        try:
            return x.sin().exp().cos()
        except Exception:
            return x

    c(fn, x).sum().backward()
    return x.grad


# ------------------------------------------------------------------------- a backward within others


@case(memory=False)
def a_backward_within_the_function(c: Checkpoint) -> Any:
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(z.sin().exp().sum(), z)
        return x.sin() * g

    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def a_backward_to_the_input_within(c: Checkpoint) -> Any:
    """The function differentiates with respect to its input."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * g

    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def a_backward_with_a_graph_within(c: Checkpoint) -> Any:
    """The function differentiates with create_graph: a gradient penalty."""
    x = leaf(3)

    def fn(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return g.pow(2)

    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def a_checkpoint_in_a_backward(c: Checkpoint) -> Any:
    """A checkpoint is made, and gone back through, in the backward of a Function."""
    x = leaf(3)

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin().exp()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = c(lambda x: x.sin().exp(), x)
                y.backward(grad)
            return x.grad

    Outer.apply(x).sum().backward()
    return x.grad


@case()
def saved_tensors_read_twice(c: Checkpoint) -> Any:
    """A backward that reads its saved tensors twice."""
    x = leaf(3)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return (ctx.saved_tensors[0] + ctx.saved_tensors[0]) * grad

    c(lambda x: Twice.apply(x.sin()), x).sum().backward()
    return x.grad


@case()
def a_saved_tensor_is_looked_at(c: Checkpoint) -> Any:
    """A saved tensor is looked at before the backward."""
    x = leaf(3)
    y = c(lambda x: x.sin().exp(), x)
    seen = y.grad_fn._saved_result
    y.sum().backward()
    return seen, x.grad


@case(memory=False)
def is_grads_batched(c: Checkpoint) -> Any:
    x = leaf(3)
    y = c(lambda x: x.sin().exp(), x)
    return torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)


# ------------------------------------------------------------ transforms, forward mode, compilation


def _chain(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of vmap": lambda f, x: torch.func.vmap(torch.func.vmap(f))(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.exp(),)),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "autograd.functional.hessian": lambda f, x: torch.autograd.functional.hessian(
        lambda x: f(x).sum(), x, vectorize=True
    ),
    "autograd.functional.jvp": lambda f, x: torch.autograd.functional.jvp(f, x, x),
    "autograd.functional.vhp": lambda f, x: torch.autograd.functional.vhp(
        lambda x: f(x).sum(), x, x
    ),
}


def _transformed(transform: Any, module: bool) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        fn = nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) if module else _chain
        return transform(lambda x: c(fn, x), torch.randn(3, 4))

    return run


CASES += [
    Case(f"{name}{' of a module' if m else ''}", _transformed(transform, m), memory=False)
    for name, transform in TRANSFORMS.items()
    for m in (False, True)
    if not (m and name == "vmap of vmap")
]


@case(memory=False)
def backward_through_vmap(c: Checkpoint) -> Any:
    x = leaf(3, 4)
    torch.func.vmap(lambda x: c(_chain, x))(x).sum().backward()
    return x.grad


@case(memory=False)
def vmap_within(c: Checkpoint) -> Any:
    """vmap within the function."""
    x = leaf(3, 4)
    c(lambda x: torch.func.vmap(_chain)(x).exp(), x).sum().backward()
    return x.grad


@case(memory=False)
def a_vmap_rule_within(c: Checkpoint) -> Any:
    """vmap of a custom Function within the function."""
    x = leaf(3, 4)
    c(lambda x: torch.func.vmap(SetUp.apply)(x).exp(), x).sum().backward()
    return x.grad


@case(memory=False)
def grad_within(c: Checkpoint) -> Any:
    """torch.func.grad within the function."""
    x = leaf(3)
    fn = lambda x: torch.func.grad(lambda y: y.sin().sum())(x).exp()  # noqa: E731
    c(fn, x).sum().backward()
    return x.grad


@case(memory=False)
def forward_mode(c: Checkpoint) -> Any:
    x = torch.randn(3)
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(c(_chain, forward_ad.make_dual(x, x.exp()))))


@case(memory=False)
def forward_over_reverse(c: Checkpoint) -> Any:
    x = leaf(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().exp())
        (grad,) = torch.autograd.grad(c(_chain, dual).sum(), dual, create_graph=True)
        return tuple(forward_ad.unpack_dual(grad))


@case(memory=False)
def reverse_after_forward_mode(c: Checkpoint) -> Any:
    x = leaf(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.detach().exp())
        value, tangent = forward_ad.unpack_dual(c(_chain, dual))
    (value.sum() + tangent.sum()).backward()
    return x.grad


def _compiled(fn: Any, **options: Any) -> Callable[[Checkpoint], Any]:
    def run(c: Checkpoint) -> Any:
        torch._dynamo.reset()
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
        checkpoint: Any = {
            "plain": lambda fn, x, **_: fn(x),
            "torch": functools.partial(pytorch.checkpoint, use_reentrant=False),
            "ours": fxpipe.checkpoint,
        }[c.kind]
        whole = torch.compile(
            lambda x: fn(functools.partial(checkpoint, **options), model, x),
            fullgraph=True,
            backend="aot_eager",
        )
        y = whole(x)
        y.sum().backward()
        return y, x.grad, model[0].weight.grad

    return run


SAVE_MM = functools.partial(
    pytorch.create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten.addmm.default],
)
CASES += [
    Case("torch.compile(fullgraph=True)", _compiled(lambda c, m, x: c(m, x.sin()).cos()), False),
    Case("torch.compile, nested", _compiled(lambda c, m, x: c(lambda x: m(m(x)), x).cos()), False),
    Case(
        "torch.compile, selective",
        _compiled(lambda c, m, x: c(m, x.sin()).cos(), context_fn=SAVE_MM),
        False,
    ),
]


@case(memory=False)
def a_compiled_function_within(c: Checkpoint) -> Any:
    """A compiled module is checkpointed."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(2, 3)
    c(torch.compile(model, backend="aot_eager"), x).exp().sum().backward()
    return x.grad, model[0].weight.grad


@case(memory=False)
def exported(c: Checkpoint) -> Any:
    """torch.export of a module that checkpoints a part of it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return c.made(self.inner, (x,), {}).exp()

    x = torch.randn(2, 3)
    program = torch.export.export(Around(), (x,))
    return program.module()(x), sorted(str(node.target) for node in program.graph.nodes)


@case(memory=False)
def fake_tensors(c: Checkpoint) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
        c(linear, x).sin().sum().backward()
        return tuple(x.grad.shape), tuple(linear.weight.grad.shape)


# ------------------------------------------------------------------------- contexts of the two runs


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
    c(_chain, x, context_fn=lambda: (noted("first"), noted("second"))).sum().backward()
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
    c(_chain, x, debug=True).sum().backward()
    return x.grad


# ------------------------------------------------------------------------------ what is let go when


def _alive(c: Checkpoint, when: str) -> Any:
    refs: list[weakref.ref[Any]] = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp()
        refs.extend(weakref.ref(t.untyped_storage()) for t in (y, z))
        return z.cos()

    x = leaf(1000)
    y = c(fn, x)
    if when == "after the forward":
        return x.sum(), sum(ref() is not None for ref in refs) if c.kind != "plain" else 0
    if when == "after the backward, retained":
        y.sum().backward(retain_graph=True)
    elif when == "after a part of the backward":
        torch.autograd.grad(y.sum(), y, retain_graph=True)
    elif when == "after the graph is dropped":
        y = None
    else:
        y.sum().backward()
    alive = sum(ref() is not None for ref in refs)
    return x.sum(), alive if c.kind != "plain" else 0


CASES += [
    Case(f"alive {when}", functools.partial(_alive, when=when), memory=False)
    for when in (
        "after the forward",
        "after the backward",
        "after the backward, retained",
        "after a part of the backward",
        "after the graph is dropped",
    )
]


@case(memory=False)
def the_function_is_let_go(c: Checkpoint) -> Any:
    """Without the garbage collector, the function is let go when the graph is."""

    class Thing:
        pass

    def checkpointed() -> tuple[Tensor, weakref.ref[Thing]]:
        thing = Thing()
        return c(lambda x: (thing, x.sin().exp())[1], leaf(3)), weakref.ref(thing)

    y, ref = checkpointed()
    gc.collect()
    gc.disable()
    try:
        y = y.sum().detach()
        return ref() is None
    finally:
        gc.enable()


@case(memory=False)
def two_threads_one_graph(c: Checkpoint) -> Any:
    """Two threads go back through one graph at once, nested."""
    x = leaf(50)
    loss = c(lambda x: c(_chain, x.sin()).exp(), x).sum()
    found: dict[int, Tensor] = {}

    def work(i: int) -> None:
        (found[i],) = torch.autograd.grad(loss, x, retain_graph=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    c.calls = 0  # by chance
    return found[0], found[1]
