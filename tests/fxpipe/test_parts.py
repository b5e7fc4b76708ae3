"""``checkpoint="always 1/2"``: the first half of a stage is run again, and the rest keeps its
activations. Nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import ops
from fxpipe.schedule import NAMES
from tests.zoo import MODELS, gradients, loop, loss_of, mean_loss, same


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["always 1/2", ["always 3/4", "always 1/3", "never"]])
@pytest.mark.parametrize("name", MODELS)
def test_calls_give_the_bits_of_the_loop(name, mode):
    make, inputs = MODELS[name]
    model, x = make(), inputs(7)
    own, reference = copy.deepcopy(model), copy.deepcopy(model)
    expected = loop(reference, x, 3)
    with fxpipe.compile(own, ["cpu"] * 3, chunks=3, checkpoint=mode) as pipe:
        output = pipe(*x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(own), expected[1])
    assert same(list(own.buffers()), list(reference.buffers()))


def stepped(name, schedule, checkpoint, **options):
    """The losses of two steps, the gradients and the buffers."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x, target = make(), inputs(8), torch.randn(8)
    options = {"chunks": 4, "loss_fn": mean_loss, **options}
    with fxpipe.compile(
        model, ["cpu"] * 2, schedule=schedule, checkpoint=checkpoint, **options
    ) as pipe:
        losses = [pipe.step(*x, target=target) for _ in range(2)]
    return losses, gradients(model), list(model.buffers())


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("mode", ["always 1/2", "always 3/4"])
def test_steps_of_any_schedule_give_the_bits_of_those_that_keep_all(schedule, mode):
    assert same(stepped("unet", schedule, "never"), stepped("unet", schedule, mode))


def layers(count):
    return nn.Sequential(*(each for _ in range(count) for each in (nn.Linear(64, 64), nn.Tanh())))


def test_the_first_segments_of_a_stage_are_checkpointed_and_the_others_called():
    with fxpipe.compile(
        layers(4), ["cpu"] * 2, chunks=2, checkpoint=["always 1/2", "never"], partition=["4"]
    ) as pipe:
        pipe(torch.randn(4, 64)).sum().backward()
        graph = pipe.graph_module.graph
        own = [node for node in graph.nodes if node.meta.get("microbatch") == 0]
        again = [str(n.args[0].target) for n in own if n.target is ops.checkpoint]
        kept = [str(n.target) for n in own if n.op == "call_module"]
    assert again == ["stage_0_segments.segment_0"]
    assert kept == ["stage_0_segments.segment_1", "stage_1"]


def held_by(mode):
    """The bytes that two stages of sixteen layers hold at most, by prediction."""
    options = {"chunks": 4, "loss_fn": nn.functional.mse_loss, "example_inputs": (X,)}
    with fxpipe.compile(layers(16), ["cpu"] * 2, checkpoint=mode, **options) as pipe:
        return max(pipe.timeline().peak_memory)


X = torch.randn(4096, 64)


def test_the_more_is_run_again_the_less_memory_is_predicted():
    modes = ["never", *(f"always {part}" for part in ("1/4", "1/2", "3/4")), "always"]
    held = [held_by(mode) for mode in modes]
    assert sorted(held, reverse=True) == held
    assert held[0] > held[2] > held[4]


def test_the_report_names_the_part():
    with fxpipe.compile(layers(4), ["cpu"] * 2, checkpoint=["always 1/2", "never"]) as pipe:
        pipe(torch.randn(4, 64))
        assert "activations that are not kept (checkpoint): always 1/2, never" in pipe.report()
