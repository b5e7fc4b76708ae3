"""What a compiled program depends on: printed, and checked at every call."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from tests.zoo import MLP

TWO = ["cpu", "cpu"]
X = torch.randn(4, 12)


class Scaled(MLP):
    def __init__(self):
        super().__init__()
        self.head = nn.Module()
        self.head.scale = 3

    def forward(self, x, *, flag=False):
        x = super().forward(x) * self.head.scale
        return -x if flag else x


def guards(tracer, *args, prepared=lambda model: None, **kwargs):
    model = Scaled()
    prepared(model)
    with fxpipe.compile(model, TWO, tracer=tracer, chunks=2) as pipe:
        pipe(*args, **kwargs)
        return str(pipe.guards)


def test_an_exported_graph_has_the_sizes_of_all_dimensions_but_the_batchs():
    assert guards("export", X) == (
        "compiled for x: float32 [*, 12], train, no autocast, attributes head.scale = 3"
    )


def test_a_symbolic_graph_has_no_sizes_and_an_argument_that_is_no_tensor_is_a_constant():
    said = guards("symbolic", X, flag=True)
    assert said.startswith(
        "compiled for x: any dtype and shape, such as float32 [*, 12], flag = True, train, no "
        "autocast, attributes "
    )
    assert "head.scale = 3" in said


def test_modes_hooks_and_autocast_are_guards():
    def prepared(model):
        model.layers[1].eval()
        model.layers[2].register_forward_hook(lambda *_: None)

    with torch.autocast("cpu", torch.bfloat16):
        said = guards("symbolic", X, prepared=prepared)
    assert "train but for layers.1, hooks on layers.2, autocast to bfloat16" in said


def test_a_graph_for_one_batch_size_says_so():
    class RowByRow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.a(x)
            return self.b(torch.stack([y[i] * 2 for i in range(x.shape[0])]))

    with fxpipe.compile(RowByRow(), TWO, chunks=2) as pipe:
        pipe(torch.randn(6, 3))
        assert str(pipe.guards).startswith("compiled for x: float32 [6, 3], train")


def test_a_call_for_which_they_do_not_hold_is_compiled_anew():
    model = Scaled()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(X)
        before = pipe.guards
        assert before.hold()
        pipe(torch.randn(7, 12))
        assert pipe.guards is before
        model.head.scale = 4
        assert not before.hold()
        torch.testing.assert_close(pipe(X), model(X))
        assert pipe.guards is not before and "head.scale = 4" in str(pipe.guards)
