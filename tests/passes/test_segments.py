"""A stage in segments, each checkpointed on its own."""

from __future__ import annotations

import copy
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from tests.zoo import MODELS, gradients, loop, loss_of, parts, same


@pytest.mark.parametrize("segments", [2, 3, 100])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_loop(name, segments):
    make, inputs = MODELS[name]
    model, x = make(), inputs(5)
    reference = copy.deepcopy(model)
    expected = loop(reference, x, 3)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, checkpoint="always", checkpoint_segments=segments
    ) as pipe:
        output = pipe(*x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])
    assert same(list(model.buffers()), list(reference.buffers())), "each batch counted once"


class InPlace(nn.Module):
    """What one segment makes, the next may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = torch.sigmoid(self.a(x))
        y = self.b(y * x)
        y[:, 0] *= 3
        return self.c(torch.relu_(y) + x)


def test_what_is_written_to_is_written_to_once():
    model, x = InPlace(), torch.randn(6, 4)
    reference = copy.deepcopy(model)
    outputs = [reference(part.clone()) for part in parts(x, 2)]
    for part in reversed(outputs):
        loss_of(part).backward()
    with fxpipe.compile(
        model, ["cpu"], chunks=2, checkpoint="always", checkpoint_segments=4
    ) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    assert same(output.detach(), torch.cat(outputs).detach())
    assert same(gradients(model), gradients(reference))


class Alive:
    """Results that have been kept for the backward: how many there are, at most."""

    refs: ClassVar[list[weakref.ref[object]]] = []
    most: ClassVar[int] = 0


@fx.wrap
def watched_tanh(x: Tensor) -> Tensor:
    y = torch.tanh(x)
    Alive.refs.append(weakref.ref(y.untyped_storage()))
    Alive.most = max(Alive.most, sum(ref() is not None for ref in Alive.refs))
    return y


class Watched(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return watched_tanh(x)


@pytest.mark.parametrize("segments, most", [(1, 12), (2, 6 + 1), (3, 4 + 2), (4, 3 + 3)])
def test_no_more_is_alive_than_one_segment_and_the_boundaries(segments, most):
    model, x = nn.Sequential(*(Watched() for _ in range(12))), torch.randn(5, requires_grad=True)
    with fxpipe.compile(
        model, ["cpu"], chunks=1, checkpoint="always", checkpoint_segments=segments
    ) as pipe:
        pipe.prepare(x)
        Alive.refs, Alive.most = [], 0
        out = pipe(x)
        assert Alive.most <= segments + 1, "the forward keeps what enters a segment, and no more"
        out.sum().backward()
    assert Alive.most == most + 1, "and the output, which is ours"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"checkpoint": "always", "checkpoint_segments": 0}, "checkpoint_segments is 0: give"),
        ({"checkpoint_segments": 2}, 'checkpoint_segments is 2, but checkpoint is "never"'),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], **options)
