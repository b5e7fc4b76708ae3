"""The order in which the engine takes what is ready."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fxpipe
from fxpipe.runtime import engine
from fxpipe.runtime.engine import FIRST, first
from tests.zoo import MODELS, loss_of

COMMUNICATION = {"_CopyBackward", "_WaitBackward", "_PortalCopyBackward"}


def waits_in_the_queue(loss: torch.Tensor) -> list[list[str]]:
    """For each copy and wait: what has run between the time it was ready and its turn."""
    nodes, front = {loss.grad_fn: None}, [loss.grad_fn]
    while front:
        for node, _ in front.pop().next_functions:
            if node is not None and node not in nodes:
                nodes[node] = None
                front.append(node)
    missing = Counter(f for node in nodes for f, _ in node.next_functions if f is not None)
    ran: list[str] = []
    ready_at = {loss.grad_fn: 0}
    between: list[list[str]] = []

    def before(node):
        if node.name() in COMMUNICATION:
            between.append(ran[ready_at[node] :])
        ran.append(node.name())

    def after(node):
        for following, _ in node.next_functions:
            missing[following] -= 1
            if not missing[following]:
                ready_at[following] = len(ran)

    for node in nodes:
        node.register_prehook(lambda grads, node=node: before(node))
        node.register_hook(lambda inputs, outputs, node=node: after(node))
    loss.backward()
    return between


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_a_copy_that_is_ready_goes_before_any_computation(name):
    make, inputs = MODELS[name]
    x = inputs(8)
    pipe = fxpipe.compile(make(), ["cpu"] * 4, chunks=4, example_inputs=x)
    for run in (pipe, pipe.graph_module):
        between = waits_in_the_queue(loss_of(run(*x)))
        assert len(between) >= 4, "each micro-batch has a skip connection or several values to copy"
        assert {name for names in between for name in names} <= COMMUNICATION | {
            "torch::autograd::AccumulateGrad"
        }
    pipe.close()


def test_without_it_copies_stand_behind_computation(monkeypatch):
    make, inputs = MODELS["transformer"]
    x = inputs(8)
    pipe = fxpipe.compile(make(), ["cpu"] * 4, chunks=4, example_inputs=x)
    monkeypatch.setattr("fxpipe.runtime.copy.first", lambda tensors: tensors)
    between = waits_in_the_queue(loss_of(pipe.graph_module(*x)))
    assert max(map(len, between)) > 10
    pipe.close()


def test_first_gives_the_tensors_back():
    x = torch.ones(2, requires_grad=True) * 2
    assert first((x,)) == (x,) and x.grad_fn._sequence_nr() == FIRST
    assert first(()) == ()
    plain = torch.ones(1)
    assert engine.first((plain,)) == (plain,), "where nothing is recorded there is nothing to do"
