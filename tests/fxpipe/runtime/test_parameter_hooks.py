"""Hooks on parameters, whose writes to parameters are noticed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fxpipe.ir._torch import gradient_hooks
from fxpipe.runtime.parameter_hooks import changing_none


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def test_hooks_are_the_users_own_again_afterwards():
    parameter, read = weight(), lambda each: None
    parameter.register_hook(read)
    handle = parameter.register_post_accumulate_grad_hook(read)
    with changing_none({"w": parameter}, calls=2):
        handle.remove()  # as a hook may do that is to be called once
        parameter.sum().backward()
    of_gradient, accumulated = gradient_hooks(parameter)
    assert list(of_gradient.values()) == [read] and not accumulated


def test_the_last_call_of_a_hook_may_change_the_parameter():
    parameter, factors = weight(), iter([None, 0.0])

    def hook(p: Tensor) -> None:
        if (factor := next(factors)) is not None:
            p.data.mul_(factor)

    parameter.register_post_accumulate_grad_hook(hook)
    with changing_none({"w": parameter}, calls=2):
        for _ in range(2):
            parameter.sum().backward()
    assert not parameter.any()


@pytest.mark.parametrize("order", [["other", "one"], ["one", "other"]])
def test_the_last_call_may_change_another_parameter_only_after_that_ones_last_call(order):
    """Several parameters may be stepped together, by the hook of the last of them."""
    parameters = {"one": weight(), "other": weight()}
    calls: list[Tensor] = []

    def hook(p: Tensor) -> None:
        calls.append(p)
        if p is parameters["one"] and len(calls) > 2:
            parameters["other"].data.zero_()

    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(hook)
    is_last = order[-1] == "one"
    with (
        changing_none(parameters, calls=2),
        nullcontext() if is_last else pytest.raises(RuntimeError, match="changes 'other'"),
    ):
        for name in order * 2:
            parameters[name].sum().backward()
    assert bool(parameters["other"].any()) != is_last


def test_a_hook_that_is_called_once_more_after_such_a_change_is_refused():
    """The parameter is used in several stages, say, and this was not its last use."""
    parameter, calls = weight(), []

    def hook(p: Tensor) -> None:
        calls.append(p)
        if len(calls) == 2:
            p.data.zero_()

    parameter.register_post_accumulate_grad_hook(hook)
    with changing_none({"w": parameter}, calls=2):
        for _ in range(2):
            parameter.sum().backward()
        with pytest.raises(RuntimeError, match="a hook on the parameter 'w' has changed it"):
            parameter.sum().backward()
    assert len(calls) == 2


def test_a_write_by_compiled_code_is_noticed_afterwards():
    parameter = weight()

    def hook(p: Tensor) -> None:  # compiled code writes by no operator, and counts its writes
        p.detach().numpy()[:] = 0
        torch.autograd.graph.increment_version(p)

    parameter.register_post_accumulate_grad_hook(hook)
    with (
        changing_none({"w": parameter}, calls=2),
        pytest.raises(RuntimeError, match="a hook on the parameter 'w' has changed it"),
    ):
        parameter.sum().backward()


def test_an_error_in_a_hook_stays_what_it_is():
    parameter = weight()
    parameter.register_post_accumulate_grad_hook(lambda p: p.no_such_attribute)
    with (
        changing_none({"w": parameter}, calls=2),
        pytest.raises(AttributeError, match="no_such_attribute"),
    ):
        parameter.sum().backward()
