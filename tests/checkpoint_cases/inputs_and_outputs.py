"""Arguments and results of many kinds: containers, views, sparse, ragged and inference tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.utils.checkpoint as pytorch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.checkpoint_cases.harness import Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


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
