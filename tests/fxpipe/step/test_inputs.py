"""What a step's inputs may be called, and what is written to them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import fx, nn

import fxpipe
from tests.zoo import mean_loss, same


class Scaled(nn.Module):
    """Its second input has the name that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)


@pytest.mark.parametrize("name", ["scale", "optimizer", "target_0", "seed"])
def test_inputs_of_a_model_may_be_called_like_those_of_a_step(name):
    graph = fx.Graph()
    x, factor = graph.placeholder("x"), graph.placeholder(name)
    y = graph.call_module("drop", (graph.call_module("a", (x,)),))
    graph.output(graph.call_module("b", (graph.call_function(torch.mul, (y, factor)),)))
    model = fx.GraphModule(Scaled(), graph)
    x, factor, target = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, loss_fn=mean_loss) as pipe:
        torch.manual_seed(1)
        loss = pipe.step(x, factor, target=target)
        torch.manual_seed(1)
        torch.testing.assert_close(loss, mean_loss(pipe(x, factor), target).detach())


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": "always"}, {"checkpoint": "except_last", "checkpoint_segments": 2}],
)
def test_deferred_batch_norm_and_written_inputs_come_once(options):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Linear(4, 2))
    reference, x = copy.deepcopy(model), torch.randn(6, 4)
    seen = x.clone()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule="1f1b",
        loss_fn=lambda o, _: o.sum(),
        deferred_batch_norm=True,
        **options,
    ) as pipe:
        pipe.step(seen)
    assert same(seen, torch.relu(x))
    reference(x.clone())
    torch.testing.assert_close(list(model.buffers()), list(reference.buffers()))


@pytest.mark.parametrize("what", ["input", "target"])
def test_an_input_or_a_target_whose_gradient_is_lost_is_told_of_once(what):
    model, encoder = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)

        def step():
            pipe.step(encoder(x), target=y) if what == "input" else pipe.step(x, target=encoder(y))

        with pytest.warns(UserWarning, match=f"{what} that requires a gradient, and computes none"):
            step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step()
    assert encoder.weight.grad is None
