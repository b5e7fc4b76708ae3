"""What stands for a call counts as that call does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxpipe.ir.load import Counting, Load
from fxpipe.ir.stand_in import Output, StandIn
from fxpipe.ir.tensors import memory_of

OUTPUT = Output((2, 3), torch.float32, requires_grad=True)
AHEAD = Load(flops=100, bytes=1000, operators=10)
BACK = Load(flops=200, bytes=2000, operators=20)
X, GRADIENT = torch.ones(4), torch.ones(2, 3)


def counted(run):
    load = Load()
    with Counting(load):
        result = run()
    return result, load


def amounts(load):
    return load.flops, load.bytes, load.operators


def test_its_work_is_counted_forward_and_backward():
    x, weight = torch.ones(4, requires_grad=True), torch.ones(5, requires_grad=True)
    (y,), ahead = counted(lambda: StandIn([OUTPUT], AHEAD, BACK).call([x, weight]))
    assert amounts(ahead) == (100, 1000, 10)
    assert (y.shape, y.dtype) == ((2, 3), torch.float32)
    found, back = counted(lambda: torch.autograd.grad(y, [x, weight], GRADIENT))
    assert amounts(back) == (200, 2000, 20)
    assert [gradient.shape for gradient in found] == [(4,), (5,)]


def test_of_its_work_that_of_products_is_told_apart():
    rest, products = Load(), Load(flops=90, bytes=600, operators=3)
    with Counting(Load(), rest):
        StandIn([OUTPUT], AHEAD, BACK, products).call([X])
    assert amounts(rest) == (10, 400, 7)


@pytest.mark.parametrize("memory", [10, 1000])
def test_it_needs_as_much_memory_as_the_call_and_not_less_than_its_outputs(memory):
    _, load = counted(lambda: StandIn([OUTPUT], replace(AHEAD, memory=memory), BACK).call([X]))
    assert load.memory == max(memory, 2 * 3 * 4)


def test_it_saves_what_the_call_saves():
    x, weight, saved = torch.ones(4, requires_grad=True), torch.ones(5, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks:
        (y,) = StandIn([OUTPUT], AHEAD, BACK, Load(), 70, (1,), (0,)).call([x, weight])
    inside, *others = saved
    assert inside.nbytes == 70
    assert [memory_of(tensor) for tensor in others] == [memory_of(weight), memory_of(y)]


def test_an_output_without_a_gradient_has_none_nor_has_an_input_that_wants_none():
    x, frozen = torch.ones(4, requires_grad=True), torch.ones(5)
    outputs = [OUTPUT, replace(OUTPUT, requires_grad=False)]
    y, z = StandIn(outputs, AHEAD, BACK).call([x, frozen])
    assert (y.requires_grad, z.requires_grad) == (True, False)
    _, back = counted(lambda: torch.autograd.grad(y, x, GRADIENT))
    assert back.memory == x.nbytes
