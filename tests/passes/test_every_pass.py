"""The invariant: after every pass the graph module runs, and computes what the model computes."""

from __future__ import annotations

import pytest
import torch

from passes import default_chain
from passes.chain import Level
from tests.zoo import MODELS, Chain, Tied, gradients, loop, loss_of, same, steps

WHERE_ASKED_FOR = ("batch_norm", "outputs", "all_microbatches")

CASES = {
    "chain": (lambda: Chain(4, {0: (3,)}), lambda n: (torch.randn(n, 3),), ["b", "c", "d"]),
    "three users": (
        lambda: Chain(5, {0: (1, 2, 4)}),
        lambda n: (torch.randn(n, 3),),
        ["b", "c", "e"],
    ),
    "tied": (Tied, lambda n: (torch.randint(11, (n, 5)),), ["other", "head"]),
    "mlp": (*MODELS["mlp"], ["layers.1", "layers.3"]),
    "resnet": (*MODELS["resnet"], ["layers.0.conv2", "layers.1", "layers.2.relu"]),
    "unet": (*MODELS["unet"], ["down.0", "down.1", "up.0"]),
    "transformer": (*MODELS["transformer"], ["blocks.1", "blocks.2.mlp"]),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_models_after_every_pass(name, checkpoint):
    make, inputs, starts = CASES[name]
    model, x = make(), inputs(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    seen = []
    for step, gm in steps(model, x, starts, chunks=3, checkpoint=checkpoint):
        gm.graph.lint()
        seen.append(step)
        chunks = 3 if "microbatch" in seen else 1
        model.load_state_dict(before)
        expected = loop(model, x, chunks)
        model.load_state_dict(before)
        model.zero_grad()
        output = gm(*x)
        loss_of(output).backward()
        assert same(output.detach(), expected[0]), f"outputs after {step}"
        assert same(gradients(model), expected[1]), f"gradients after {step}"
    run = [entry.name for entry in default_chain().entries if entry.target != Level.STEP]
    assert seen == [name for name in run if name not in WHERE_ASKED_FOR]
