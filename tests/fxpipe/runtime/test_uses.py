"""The gradients of all uses of a parameter in one call of a module are summed by themselves."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fxpipe.runtime.uses import uses_summed


class Uses(nn.Module):
    """Uses its parameter with a factor, and again with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, first: float, second: float) -> Tensor:
        return self.weight * first + self.weight * second


BIG = 2.0**24  # a float of 32 bits that has no neighbour at a distance of 1


def gradient(summed: bool) -> Tensor | None:
    """The gradient after one backward through two calls."""
    module = Uses()
    outputs = []
    for factors in (-BIG, 1.0), (1.0, BIG):
        with uses_summed(module) if summed else nullcontext():
            outputs.append(module(*factors))
    sum(reversed(outputs)).backward()
    return module.weight.grad


def test_the_gradients_of_each_call_are_summed_first():
    each = torch.tensor([BIG, 1.0]).sum(), torch.tensor([1.0, -BIG]).sum()
    assert gradient(summed=True) == sum(each) == 1
    assert gradient(summed=False) != 1, "or else it needs no views"


def test_a_module_has_views_that_are_parameters_for_the_time_of_a_call():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    own = list(module.named_parameters())
    with pytest.raises(KeyError), uses_summed(module):
        views = dict(module.named_parameters())
        assert list(views) == [name for name, _ in own], "what is shared is shared still"
        assert all(type(view) is nn.Parameter and not view.is_leaf for view in views.values())
        assert all(each.is_leaf for each in copy.deepcopy(module).parameters())
        raise KeyError
    for (name, view), (other, parameter) in zip(module.named_parameters(), own, strict=True):
        assert name == other and view is parameter


def test_recurrent_modules_use_the_views_too():
    module = nn.LSTM(2, 2)
    own = list(module._flat_weights)
    with uses_summed(module):
        assert not any(weight.is_leaf for weight in module._flat_weights)
        module(torch.randn(3, 1, 2))[0].sum().backward()
    assert all(a is b for a, b in zip(module._flat_weights, own, strict=True))
    assert all(parameter.grad is not None for parameter in own)


def test_gradients_may_be_sparse():
    module = nn.Embedding(5, 2, sparse=True)
    with uses_summed(module):
        y = module(torch.tensor([1])) + module(torch.tensor([2]))
    y.sum().backward()
    assert module.weight.grad is not None and module.weight.grad.is_sparse


def test_what_is_not_used_gets_no_gradient():
    module = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    with uses_summed(module):
        module[0](torch.ones(1, 2)).sum().backward()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]


def test_gradients_have_gradients():
    module = nn.Linear(2, 1)
    with uses_summed(module):
        y = module(torch.ones(1, 2)) ** 3
    (gradient,) = torch.autograd.grad(y, module.weight, create_graph=True)
    gradient.sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize("around", [torch.no_grad(), torch.autocast("cpu", torch.bfloat16)])
def test_there_are_none_without_gradients_and_under_autocast(around):
    module = nn.Linear(2, 2)
    with around, uses_summed(module) as views:
        assert module.weight.is_leaf and views.of(module.weight) is module.weight


def test_there_are_none_of_frozen_parameters_nor_of_what_is_no_leaf():
    module = nn.Linear(2, 2).requires_grad_(False)
    derived = nn.Linear(2, 2).weight * 2
    with uses_summed(module) as views:
        assert module.weight.is_leaf
        assert views.of(derived) is derived


def test_what_is_written_is_written_to_the_parameter():
    module = nn.Linear(2, 2, bias=False)
    parameter = module.weight
    with uses_summed(module), torch.no_grad():
        module.weight.zero_()
    assert module.weight is parameter and not parameter.any()
    with uses_summed(module):
        module.weight.data = torch.ones(2, 2)
    assert module.weight is parameter and parameter.all()


def test_what_the_module_puts_in_the_place_of_a_parameter_stays():
    module, other = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
    with uses_summed(module):
        module.weight = other
    assert module.weight is other


def test_a_view_that_is_a_result_is_no_parameter():
    module = nn.Linear(2, 2)
    with uses_summed(module) as views:
        result = views.as_result(module.weight)
    assert type(result) is Tensor and not result.is_leaf
    assert views.as_result(module.weight) is module.weight
