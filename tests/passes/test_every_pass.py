"""The invariant: after every pass the graph module runs, and computes what the model computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxpipe.runtime.compiled.stage import CompiledStages, StageBackend
from fxpipe.schedule import named
from passes import default_chain
from passes.chain import Level, ToStep
from tests.zoo import MODELS, Chain, Tied, gradients, loop, loss_of, parts, same, steps

WHERE_ASKED_FOR = ("batch_norm", "outputs", "all_microbatches", "compiled")


class WritesToItsInput(nn.Module):
    """For pass "inputs"."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x.mul_(2)
        return self.b(self.a(torch.tanh(x)))


class MakesTensors(nn.Module):
    """For passes "rows" (a weight that is computed for all rows alike) and "devices" (a tensor that
    is made where the input is)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.weight = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.rand(3))

    def forward(self, x):
        scale = torch.exp(self.weight) + torch.arange(3, device=x.device)
        return self.b(self.a(x) * scale) * scale


CASES = {
    "chain": (lambda: Chain(4, {0: (3,)}), lambda n: (torch.randn(n, 3),), ["b", "c", "d"]),
    "three users": (
        lambda: Chain(5, {0: (1, 2, 4)}),
        lambda n: (torch.randn(n, 3),),
        ["b", "c", "e"],
    ),
    "tied": (Tied, lambda n: (torch.randint(11, (n, 5)),), ["other", "head"]),
    "writes to its input": (WritesToItsInput, lambda n: (torch.randn(n, 3),), ["b"]),
    "makes tensors": (MakesTensors, lambda n: (torch.randn(n, 3),), ["b"]),
    "mlp": (*MODELS["mlp"], ["layers.1", "layers.3"]),
    "resnet": (*MODELS["resnet"], ["layers.0.conv2", "layers.1", "layers.2.relu"]),
    "unet": (*MODELS["unet"], ["down.0", "down.1", "up.0"]),
    "transformer": (*MODELS["transformer"], ["blocks.1", "blocks.2.mlp"]),
}


def copies(tensors):
    return tuple(tensor.clone() for tensor in tensors)


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_buffers_and_inputs_are_the_models_after_every_pass(name, checkpoint):
    make, inputs, starts = CASES[name]
    model, x = make(), inputs(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    for step, gm in steps(model, copies(x), starts, chunks=3, checkpoint=checkpoint):
        gm.graph.lint()
        seen.append(step)
        chunks = 3 if "microbatch" in seen else 1
        theirs, ours = copies(x), copies(x)
        model.load_state_dict(before)
        output, grads = loop(model, theirs, chunks)
        expected = [output, grads, copies(model.buffers()), theirs]
        model.load_state_dict(before)
        model.zero_grad()
        output = gm(*ours)
        loss_of(output).backward()
        found = [output.detach(), gradients(model), copies(model.buffers()), ours]
        for what, one, other in zip(
            ("outputs", "gradients", "buffers", "inputs"), found, expected, strict=True
        ):
            assert same(one, other), f"{what} after {step}"
    run = [entry.name for entry in default_chain().entries if entry.target != Level.STEP]
    assert seen == [name for name in run if name not in WHERE_ASKED_FOR]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_with_deferred_batch_norm_running_statistics_are_those_of_the_whole_batch(checkpoint):
    make, inputs, starts = CASES["resnet"]
    model, x = make(), inputs(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model(*x)
    first_norm = model.stem[1]  # what others see depends on how the batch is normalised before
    wanted = copies(first_norm.buffers())
    seen = []
    for step, gm in steps(
        model, x, starts, chunks=3, checkpoint=checkpoint, deferred_batch_norm=True
    ):
        seen.append(step)
        model.load_state_dict(before)
        expected = loop(model, x, 3 if "microbatch" in seen else 1)
        model.load_state_dict(before)
        model.zero_grad()
        output = gm(*x)
        loss_of(output).backward()
        assert same([output.detach(), gradients(model)], list(expected)), f"after {step}"
        torch.testing.assert_close(copies(first_norm.buffers()), wanted)
    assert seen[0] == "batch_norm"


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_stages_that_a_backend_compiles_compute_what_the_model_does(name, checkpoint):
    make, inputs, starts = CASES[name]
    model, x = make(), inputs(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    compiled = CompiledStages(StageBackend("eager"))
    for step, gm in steps(
        model, copies(x), starts, chunks=3, checkpoint=checkpoint, compiled=compiled
    ):
        seen.append(step)
        if "compiled" not in seen:
            continue
        model.load_state_dict(before)
        expected = loop(model, copies(x), 3)
        model.load_state_dict(before)
        model.zero_grad()
        output = gm(*copies(x))
        loss_of(output).backward()
        assert same([output.detach(), gradients(model)], list(expected)), f"after {step}"
    assert "compiled" in seen


class Loss(nn.Module):
    def forward(self, output, target):
        return loss_of(output)


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_the_step_graph_gives_the_loss_and_the_gradients_of_the_loop(name, checkpoint, schedule):
    make, inputs, starts = CASES[name]
    model, x, stages = make(), inputs(5), len(starts) + 1
    before = {k: v.clone() for k, v in model.state_dict().items()}
    stage_graph = next(
        gm for step, gm in steps(model, copies(x), starts, chunks=3) if step == "devices"
    )
    context = ToStep(
        loss=Loss(),
        schedule=named(schedule, lanes=stages, microbatches=3),
        devices=("cpu",) * stages,
        in_dims=(0,) * len(x),
        checkpoint=checkpoint,
        summed=True,
    )
    gm = stage_graph
    for rewrite in default_chain().passes(context):
        gm = rewrite(gm)
    gm.graph.lint()
    losses, theirs, ours = [], copies(x), copies(x)
    for part in zip(*(parts(tensor, 3) for tensor in theirs), strict=True):
        losses.append(loss_of(model(*part)))
        losses[-1].backward()  # as all these schedules do: first micro-batch first
    expected = [sum(losses).detach(), gradients(model), copies(model.buffers()), theirs]
    model.load_state_dict(before)
    model.zero_grad()
    total, _ = gm(*ours)
    assert same([total, gradients(model), copies(model.buffers()), ours], expected)
