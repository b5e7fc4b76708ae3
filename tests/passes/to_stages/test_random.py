from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn

import fxpipe
from fxpipe.ir.printing import format_graph
from passes import Alias, Random
from tests.zoo import gradients, loss_of, outputs_of_loop, same

WIDTH = 8


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)]
        )

    def forward(self, x):
        return self.layers(x)


class Attention(Dropout):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        x = self.layers(x)
        return self.attention(x, x, x, need_weights=False)[0] + x


class Scaled(Dropout):
    def forward(self, x):
        x = self.layers(x)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5) + x


class Recurrent(Dropout):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.lstm(self.layers(x))[0]


class Drawn(Dropout):
    def forward(self, x):
        x = self.layers[:2](x)
        x = x * torch.rand_like(x)
        x = self.layers[2:](x)
        return x * torch.empty_like(x).bernoulli_(0.5)


def test_an_input_of_the_models_may_be_called_seed():
    class Named(Dropout):
        def forward(self, x, seed):
            return self.layers(x) + seed

    model, x = Named(), torch.ones(4, WIDTH)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        pipe(x, x)
        assert [node.target for node in pipe.model_graph.graph.find_nodes(op="placeholder")] == [
            "x",
            "seed",
            "seed_1",
        ]
        model.eval()
        assert same(pipe(x, x), torch.cat(outputs_of_loop(model, (x, x), 2)))


MODELS = [Dropout, Attention, Scaled, Recurrent, Drawn]


def test_what_draws_is_given_the_seed_and_a_number_of_its_own():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

        def forward(self, x):
            return F.dropout(self.drop(self.a(x)), 0.1)

    model, x = Model(), torch.ones(2, 3)
    gm = Random()(Alias((x,))(fx.symbolic_trace(model)))
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
seed: input = None
a = a(x)
drop = drop_seeded(seed, a)
dropout = dropout_seeded(seed, drop, p=0.1, training=True, inplace=False)
return dropout
""",
    )
    assert [gm.drop_seeded.index, gm.dropout_seeded.index] == [0, 1]
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert same(gm(x), expected), "without a seed it is the model"
    assert same(gm(x, 7), gm(x, 7)) and not same(gm(x, 7), gm(x, 8))


def test_what_draws_nothing_is_left_alone():
    model = Dropout().eval()
    x = torch.ones(2, WIDTH)
    gm = Random()(Alias((x,))(fx.symbolic_trace(model)))
    assert format_graph(gm) == format_graph(fx.symbolic_trace(model))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_decides_everything_whatever_the_lanes_and_the_checkpoint_mode(kind):
    model, x = kind(), torch.randn(6, 5, WIDTH)
    seen = []
    for checkpoint in ("never", "except_last", "always", "always"):
        with fxpipe.compile(model, ["cpu"] * 3, chunks=3, checkpoint=checkpoint) as pipe:
            pipe.prepare(x)
            # Whoever watches the caller's operations gets the pipeline inline.
            watched = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
            for how in (nullcontext(), watched):
                model.zero_grad()
                torch.manual_seed(5)
                with how:
                    output = pipe(x)
                loss_of(output).backward()
                seen.append((output.detach(), gradients(model)))
            names = {thread.name for thread in threading.enumerate()}
            assert any(name.startswith("fxpipe-lane-0") for name in names), "it ran there"
    assert all(same(seen[0], other) for other in seen[1:])
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3) as pipe:
        torch.manual_seed(6)
        assert not same(pipe(x).detach(), seen[0][0])
        assert not same(pipe(x), pipe(x)), "every call draws anew"


def test_micro_batches_and_layers_get_masks_of_their_own():
    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x):
            return self.a(x), self.b(x)

    with fxpipe.compile(Ones(), ["cpu"] * 2, chunks=2) as pipe:
        a, b = pipe(torch.ones(2, 1000))
    masks = [*a, *b]
    for i, one in enumerate(masks):
        assert 400 < (one == 0).sum() < 600
        for other in masks[:i]:
            assert 350 < (one == other).sum() < 650, "independent"


def test_lanes_stay_parallel(monkeypatch):
    monkeypatch.setattr("fxpipe.runtime.lanes.cores", lambda: 2)
    meeting = threading.Barrier(2, timeout=30)
    counts = {"a": 0, "b": 0}

    def meet(x, name):
        if not isinstance(x, torch._subclasses.FakeTensor) and threading.current_thread().name != (
            "MainThread"
        ):
            counts[name] += 1
            if counts[name] == (2 if name == "a" else 1):
                meeting.wait()  # the second micro-batch in one stage, the first in the other
        return x

    globals()["meet"] = meet

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            x = self.drop(_meet(self.a(x), "a"))
            return _meet(self.drop(self.b(x)), "b")

    with fxpipe.compile(Model(), ["cpu"] * 2, chunks=3, partition=["b"]) as pipe:
        pipe(torch.ones(6, 4))
    assert counts == {"a": 3, "b": 3}


def _meet(x, name):
    return globals()["meet"](x, name)


fx.wrap("_meet")
