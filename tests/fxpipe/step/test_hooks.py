"""Hooks fire once a micro-batch in a step, and what counts operations counts the model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.flop_counter import FlopCounterMode

import fxpipe
from tests.zoo import MLP


def test_parameter_hooks_fire_once_a_micro_batch():
    model, x, seen = MLP(depth=3), torch.randn(6, 12), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    for schedule in ("1f1b", "zb_h1"):
        seen.clear()
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
        ) as pipe:
            pipe.step(x)
        assert len(seen) == 3 * len(list(model.parameters()))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_hooks_of_modules_and_on_what_they_give_fire_once_a_micro_batch(schedule):
    model, x, seen = MLP(), torch.randn(6, 12), []

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append("forward")
        output.register_hook(lambda grad: seen.append("gradient of the output"))

    layer = model.layers[2]
    layer.register_forward_hook(watch)
    layer.register_full_backward_pre_hook(lambda *_: seen.append("before backward"))
    layer.register_full_backward_hook(lambda *_: seen.append("after backward"))
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
    ) as pipe:
        pipe.step(x)
    assert len(seen) == 12 and all(seen.count(what) == 3 for what in seen)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the first layer
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_hooks_on_all_modules_fire_once_a_micro_batch(schedule):
    model, x, seen = MLP(), torch.randn(6, 12), []
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
    ) as pipe:
        pipe.step(x)
        handle = register_module_full_backward_hook(lambda module, *_: seen.append(module))
        try:
            pipe.step(x)
        finally:
            handle.remove()
    assert [seen.count(layer) for layer in model.layers] == [3] * 5


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_who_counts_operations_counts_those_of_the_model(schedule):
    model, x = MLP(), torch.randn(6, 12)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
    ) as pipe:
        for _ in range(2):  # the check of what a step means runs the model, too
            pipe.step(x)
        with FlopCounterMode(display=False) as found:
            pipe.step(x)
    with FlopCounterMode(display=False) as wanted:
        model(x).sum().backward()
    assert found.get_total_flops() == wanted.get_total_flops()


@pytest.mark.parametrize("later", [False, True])
def test_hooks_on_the_model_itself_are_not_called_which_is_said(later):
    """They would have changed the loss without a word."""
    model, x = MLP(), torch.randn(6, 12)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, loss_fn=lambda o, _: o.sum()) as pipe:
        if later:
            pipe.step(x)
        model.register_forward_hook(lambda module, args, output: 2 * output)
        with pytest.warns(UserWarning, match=r"hooks on MLP itself are not called in pipe\.step"):
            pipe.step(x)
