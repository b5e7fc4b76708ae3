"""What a model makes anew in each call, and the graph has as a constant, is a new tensor in each
call of the pipeline: the caller may write to it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.ir.printing import format_graph
from fxpipe.trace import trace
from passes import Alias, CopiedConstants

X = torch.randn(9, 4)
KEPT = torch.arange(4)


class WithAnchors(nn.Module):
    """Returns what ``made`` gives beside its result."""

    def __init__(self, made):
        super().__init__()
        self.a, self.b, self.made = nn.Linear(4, 4), nn.Linear(4, 4), made
        self.register_buffer("buffer", torch.arange(4))
        self.held, self.dropout = [torch.arange(4)], nn.Dropout(0.0)  # which gives what it is given

    def forward(self, x):
        made = self.made(self, x)
        return self.b(self.a(x)) + made[0].sum(), made


MADE = {
    "a constant": lambda net, x: [torch.arange(4.0)],
    "the same tensor twice": lambda net, x: [torch.arange(4)] * 2,
    "values": lambda net, x: [torch.tensor([1, 2])],
    "NumPy's": lambda net, x: [torch.from_numpy(np.arange(4))],
    "a view": lambda net, x: [torch.arange(4).view(x.shape[1])],
    "several views": lambda net, x: torch.arange(4).view(x.shape[1]).chunk(2),
    "a module's": lambda net, x: [net.dropout(torch.arange(4.0).view(x.shape[1]))],
    "a checkpoint's": lambda net, x: [
        checkpoint(lambda h: torch.arange(4).view(h.shape[1]), x, use_reentrant=False)
    ],
}
HELD = {
    "a buffer": lambda net, x: [net.buffer],
    "a view of a buffer": lambda net, x: [net.buffer.view(x.shape[1])],
    "an attribute": lambda net, x: [net.held[0]],
    "a global variable": lambda net, x: [KEPT],
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", MADE)
def test_the_caller_may_write_to_what_the_model_makes_in_each_call(way, training, chunks):
    model = WithAnchors(MADE[way])
    options = {"chunks": chunks, "training": training, "tracer": "symbolic"}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        for _ in range(3):
            output, made = pipe(X)
            assert torch.equal(output, torch.cat([model(part)[0] for part in X.chunk(chunks)]))
            for tensor, expected in zip(made, model(X)[1], strict=True):
                assert torch.equal(tensor, expected)
            for tensor in made:
                tensor.detach().mul_(8)


def test_a_loss_may_write_to_it():
    def scaled(output, target):
        y, (anchors,) = output
        return (y * anchors.mul_(2) - target).square().mean()

    model, x, target = WithAnchors(MADE["a constant"]), X[:8], torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=scaled, check=False) as pipe:
        pairs = zip(x.chunk(2), target.chunk(2), strict=True)
        losses = torch.stack([scaled(model(part), own) for part, own in pairs])
        for _ in range(2):
            assert torch.equal(pipe.step(x, target=target), losses.mean())


@pytest.mark.parametrize("way", HELD)
def test_what_the_model_holds_is_returned_itself(way):
    model = WithAnchors(HELD[way])
    with fxpipe.compile(model, ["cpu"] * 2, chunks=1) as pipe:
        (given,) = pipe(X)[1]
        (own,) = model(X)[1]
        assert given.data_ptr() == own.data_ptr()


def test_a_graph_from_the_cache_on_disk_copies_it_too(tmp_path):
    for state in ("kept in the cache", "from the cache"):
        model = WithAnchors(MADE["a constant"])
        with fxpipe.compile(model, ["cpu"] * 2, chunks=3, cache=tmp_path) as pipe:
            pipe(X)[1][0].mul_(8)
            assert torch.equal(pipe(X)[1][0], torch.arange(4.0))
            assert pipe.compilations[0].cache == state


def test_only_what_is_returned_is_copied():
    traced = trace(WithAnchors(MADE["a constant"]), (X,), tracer="symbolic")
    gm = CopiedConstants((X,))(Alias((X,))(traced.graph_module))
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
a = a(x)
b = b(a)
_made_constant0 = self._made_constant0
add = add(b, _made_constant0)
_made_constant1 = self._made_constant1
_made_constant1_anew = clone(_made_constant1)
return (add, [_made_constant1_anew])
""",
    )
