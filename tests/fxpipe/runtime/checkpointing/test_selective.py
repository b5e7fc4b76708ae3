"""The results of products are kept for a second run, and nothing else is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.flops import is_product
from fxpipe.runtime.checkpointing.recomputation import CheckpointError
from fxpipe.runtime.checkpointing.selective import keeping_products

attention = nn.functional.scaled_dot_product_attention
a, b = torch.randn(4, 4), torch.randn(4, 4)


class Seen(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def both(function, between=lambda: None, once=True):
    """The results of both runs, and the operators of the second that have been computed."""
    first, second = keeping_products(once)
    with first:
        one = function()
    between()
    with Seen() as seen, second:
        other = function()
    return one, other, list(seen.names)


def test_a_product_is_not_computed_again_and_all_else_is():
    one, other, seen = both(lambda: (a @ b).sigmoid())
    assert torch.equal(one, other) and seen == ["sigmoid"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda: nn.functional.linear(a, b), ["t"]),
        (lambda: torch.bmm(a[None], b[None]), ["unsqueeze", "unsqueeze"]),
        (lambda: nn.functional.conv2d(a[None, None], b[None, None]), ["unsqueeze"] * 4),
        (lambda: attention(a[None, None], b[None, None], b[None, None]), ["unsqueeze"] * 6),
        (lambda: a * b, ["mul"]),
    ],
)
def test_products_are_those_of_matrices_convolutions_and_attention(function, names):
    one, other, seen = both(function)
    assert torch.equal(one, other)
    assert [name for name in seen if name != "view"] == names


def test_an_attention_with_dropout_draws_random_numbers_and_is_no_product():
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert is_product(call, (a, a, a), {}) and is_product(call, (a, a, a, 0.0), {})
    assert not is_product(call, (a, a, a, 0.1), {})
    assert not is_product(call, (a, a, a), {"dropout_p": 0.1})


def test_what_writes_to_its_arguments_is_no_product():
    assert not is_product(torch.ops.aten.mm.out, (a, b), {"out": a})
    assert not is_product(torch.ops.aten.relu_.default, (a,), {})


def test_a_result_that_is_written_to_is_computed_again():
    one, other, seen = both(lambda: (a @ b).relu_())
    assert torch.equal(one, other) and seen == ["mm", "relu_"]


def through_data():
    product = a @ b
    product.data.mul_(2)
    return product.sigmoid()


def in_a_part():
    one, other = (a @ b).unsafe_chunk(2)
    return one.sigmoid_() + other


@pytest.mark.parametrize("function", [through_data, in_a_part])
def test_a_write_that_the_version_counter_of_the_result_does_not_count_is_noticed(function):
    one, other, seen = both(function)
    assert torch.equal(one, other) and seen[0] == "mm"


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_is_run_again_as_it_was(kind):
    layer, x = kind(4, 4), torch.randn(5, 3, 4)
    one, other, _ = both(lambda: layer(x)[0])
    assert torch.equal(one, other)


def test_a_result_that_is_written_to_between_the_runs_is_computed_again():
    written = []

    def function():
        written.append(a @ b)
        return written[-1].sigmoid()

    one, other, seen = both(function, lambda: written[0].zero_())
    assert torch.equal(one, other) and seen == ["mm", "sigmoid"]


def test_gradients_go_through_a_product_that_is_not_computed_again():
    weight = torch.randn(4, 4, requires_grad=True)
    _, other, _ = both(lambda: (a @ weight).sigmoid())
    other.sum().backward()
    wanted = torch.autograd.grad((a @ weight).sigmoid().sum(), weight)
    assert torch.equal(weight.grad, wanted[0])


def test_the_first_run_keeps_no_autograd_graph():
    weight, first = torch.randn(4, 4, requires_grad=True), keeping_products(True)[0]

    def run() -> weakref.ref[Tensor]:
        saved = (a @ weight).sigmoid()  # which its own backward needs
        return weakref.ref(saved)

    with first:
        graph = run()
    gc.collect()
    assert graph() is None and len(first.results) == 1


def test_a_second_run_takes_the_results_away_if_it_is_the_only_one():
    first, second = keeping_products(True)
    with first:
        a @ b
    with second:
        a @ b
    assert first.results == [None]


def test_the_results_that_several_runs_are_given_keep_no_autograd_graph():
    weight = torch.randn(4, 4, requires_grad=True)
    first, second = keeping_products(False)
    for context in first, second:
        with context:
            assert (a @ weight).requires_grad
    assert [result.value.requires_grad for result in first.results] == [False]


def test_several_runs_may_follow():
    first, second = keeping_products(False)
    with first:
        wanted = a @ b
    for _ in range(2):
        with Seen() as seen, second:
            found = a @ b
        assert torch.equal(found, wanted) and set(seen.names) == {"detach"}


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (
            [lambda: a @ b, lambda: (a @ b, a @ b)],
            "product number 2 of a stage is aten.mm.default in its second run, and there was",
        ),
        (
            [lambda: a @ b, lambda: torch.bmm(a[None], b[None])],
            "is aten.bmm.default in its second run, and it was aten.mm.default in its first",
        ),
    ],
)
def test_runs_with_different_products_are_an_error(runs, message):
    first, second = keeping_products(True)
    with first:
        runs[0]()
    with second, pytest.raises(CheckpointError, match=message):
        runs[1]()
