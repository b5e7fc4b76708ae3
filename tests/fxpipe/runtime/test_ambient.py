"""What PyTorch keeps per thread is set up in another one, and nothing of it in all."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.runtime.ambient import Ambient, without_saved_tensors_hooks
from tests.zoo import MLP, gradients, loss_of, parts, same


def in_a_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def cast_of(linear: nn.Linear) -> object:
    """The node of the cast of its weight, in the graph of a call under autocast."""
    transposed = linear(torch.ones(1, 2)).grad_fn.next_functions[2][0]
    return transposed.next_functions[0][0]


def test_it_is_that_of_the_thread_it_was_taken_in_and_what_was_before_comes_back():
    with torch.autocast("cpu", torch.float16, cache_enabled=False), torch.no_grad():
        ambient = Ambient.here()

    def elsewhere():
        before = Ambient.here()
        with ambient.applied():
            found = Ambient.here()
        return before, found, Ambient.here()

    before, found, after = in_a_thread(elsewhere)
    assert found == ambient and before == after != ambient


def test_a_thread_that_leaves_autocast_leaves_others_the_casts_that_are_kept():
    linear = nn.Linear(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        ambient, first = Ambient.here(), cast_of(linear)

        def elsewhere():
            with ambient.applied():
                return cast_of(linear)

        assert in_a_thread(elsewhere) is first, "one for all"
        assert cast_of(linear) is first


def test_casts_of_a_recomputation_are_not_kept():
    """Or the next forward would see a parameter as it was before the optimizer's step."""
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            y = fxpipe.checkpoint(linear, x)
            assert same(y, linear(x))
        y.sum().backward()
        torch._foreach_add_([p.data for p in linear.parameters()], 1.0)
        with torch.autocast("cpu", torch.bfloat16):
            assert same(linear(x), copy.deepcopy(linear)(x))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_under_autocast_gradients_are_those_of_the_loop_every_time(checkpoint):
    model, x = MLP(), torch.randn(24, 12)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [reference(part) for part in parts(x, 8)]
    loss_of(torch.cat(outputs).float()).backward()
    with fxpipe.compile(model, ["cpu"] * 3, chunks=8, checkpoint=checkpoint) as pipe:
        for _ in range(20):  # whichever lane is done first
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = pipe(x)
            loss_of(output.float()).backward()
            assert same(output, torch.cat(outputs))
            assert same(gradients(model), gradients(reference))


def test_hooks_on_saved_tensors_are_those_that_they_were_afterwards():
    seen = []

    def hooks(name):
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: (seen.append(name), t)[1], lambda t: t
        )

    x = torch.ones(1, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with without_saved_tensors_hooks():
            x.sin()
            assert seen == []
        x.sin()
    with hooks("outer"):
        with without_saved_tensors_hooks(), hooks("within"):
            x.sin()
        x.sin()
    assert seen == ["inner", "within", "outer"]
