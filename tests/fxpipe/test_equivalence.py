"""A pipeline computes, to the last bit, what a plain loop over micro-batches computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import MODELS, gradients, loop, loss_of, same

BATCH = 7  # divided by none of the chunks


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_buffers_are_those_of_the_loop(name, stages, checkpoint):
    make, inputs = MODELS[name]
    model, x = make(), inputs(BATCH)
    for chunks in 1, 2, 3, 8:
        reference = copy.deepcopy(model)
        expected = loop(reference, x, chunks)
        own = copy.deepcopy(model)
        pipe = fxpipe.compile(own, ["cpu"] * stages, chunks=chunks, checkpoint=checkpoint)
        output = pipe(*x)
        loss_of(output).backward()
        assert same(output.detach(), expected[0]), f"outputs, {chunks} chunks"
        assert same(gradients(own), expected[1]), f"gradients, {chunks} chunks"
        assert same(list(own.buffers()), list(reference.buffers())), f"buffers, {chunks} chunks"
        assert pipe.chunks == min(chunks, BATCH)
        pipe.close()


@pytest.mark.parametrize("batch", [1, 2, 5, 16])
def test_one_pipeline_takes_batches_of_any_size(batch):
    make, inputs = MODELS["unet"]
    model = make()
    pipe = fxpipe.compile(model, ["cpu"] * 3, chunks=4, example_inputs=inputs(4))
    x = inputs(batch)
    expected = loop(model, x, 4)
    model.zero_grad()
    output = pipe(*x)
    loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])
    pipe.close()


@pytest.mark.parametrize("name", MODELS)
def test_the_emitted_graph_module_alone_gives_the_same(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(BATCH)
    pipe = fxpipe.compile(model, ["cpu"] * 3, chunks=3, example_inputs=x, checkpoint="except_last")
    reference = copy.deepcopy(model)
    expected = loop(reference, x, 3)
    model.zero_grad()
    output = pipe.graph_module(*x)
    loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])


def test_the_gradient_of_the_input_is_that_of_the_loop():
    make, inputs = MODELS["unet"]
    model, (x,) = make(), inputs(5)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    loop(model, (a,), 2)
    with fxpipe.compile(model, ["cpu"] * 4, chunks=2) as pipe:
        loss_of(pipe(b)).backward()
    assert same(a.grad, b.grad)


def test_several_runs_give_the_same_bits():
    make, inputs = MODELS["resnet"]
    model, x = make().eval(), inputs(8)
    with fxpipe.compile(model, ["cpu"] * 4, chunks=8) as pipe:
        seen = []
        for _ in range(10):
            model.zero_grad()
            loss_of(pipe(*x)).backward()
            seen.append(gradients(model))
    assert all(same(seen[0], other) for other in seen)


def test_without_gradients_nothing_is_recorded():
    make, inputs = MODELS["mlp"]
    model, x = make(), inputs(4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint="always") as pipe:
        with torch.no_grad():
            assert pipe(*x).grad_fn is None
        with torch.inference_mode():
            assert pipe(*x).is_inference()
        assert pipe(*x).requires_grad


class Filters(nn.Module):
    """In the frequencies of a wave; the kernel that goes back looks at the values of the window."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.gain = nn.Conv1d(9, 9, 3, padding=1)

    def forward(self, x):
        z = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        return torch.istft(z * self.gain(z.abs()), 16, 4, window=self.window, length=x.shape[1])


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_operators_that_check_values_are_no_hindrance(tracer):
    model, x = Filters(), torch.randn(4, 64)
    expected = loop(model, (x,), 2)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        torch.testing.assert_close(pipe(x), expected[0])
