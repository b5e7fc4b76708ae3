"""A stage in segments, each checkpointed on its own."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from passes.to_stages.segments import opened, segmented
from tests.zoo import MODELS, gradients, loop, loss_of, parts, same


@pytest.mark.covering(1)
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


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_graph_of_segments_computes_what_that_of_stages_does(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(4)
    with fxpipe.compile(model, ["cpu"] * 2, example_inputs=x) as pipe:
        gm, stage_of = opened(pipe.stage_graph, [3, 3])
        calls = gm.graph.find_nodes(op="call_module")
        assert len(calls) == len(stage_of) > 2 and stage_of == sorted(stage_of)
        torch.manual_seed(0)
        wanted = pipe.stage_graph(*x)
        torch.manual_seed(0)
        assert same(gm(*x), wanted)


def test_a_stage_of_one_segment_stays_whole_beside_one_of_several():
    make, inputs = MODELS["unet"]
    with fxpipe.compile(make(), ["cpu"] * 2, example_inputs=inputs(4)) as pipe:
        _, stage_of = opened(pipe.stage_graph, [1, 3])
    assert stage_of == [0, 1, 1, 1]


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


class Saved:
    """What autograd has been given to keep, by hooks on saved tensors: its bytes, while alive."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = {p.untyped_storage()._cdata for p in model.parameters()}  # alive anyway
        self.memories: dict[int, tuple[weakref.ref[object], int]] = {}
        self.peak = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See also what the hooks of checkpoints see, which are within those of their callers."""
        own, hooks = self, torch.autograd.graph.saved_tensors_hooks

        class Watched(hooks):
            def __init__(self, pack, unpack):
                super().__init__(lambda tensor: (own.pack(tensor), pack(tensor))[1], unpack)

        monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", Watched)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.kept:
            self.memories[storage._cdata] = weakref.ref(storage), storage.nbytes()
        self.peak = max(self.peak, self.alive)
        return tensor.detach()  # a node that keeps its own result would keep itself

    @property
    def alive(self) -> int:
        return sum(size for ref, size in self.memories.values() if ref() is not None)


class Unequal(nn.Module):
    """Layers that keep from 4 to 96 numbers a row."""

    WIDTHS = (8, 64, 4, 96, 16, 16, 48, 8, 80, 4, 32, 8)

    def __init__(self) -> None:
        super().__init__()
        pairs = zip(self.WIDTHS, self.WIDTHS[1:], strict=False)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def expected(stage: fx.GraphModule, count: int, x: Tensor) -> tuple[int, int]:
    """The bytes that a stage in segments keeps of its forward, which all of them have received; and
    the most that are alive in its backward. While a segment is run again, these are what it saves,
    and what it and those ahead of it have received."""
    received, peak = 0, 0
    segments = list(segmented(stage, count).children())
    assert len(segments) == count
    for segment in segments:
        x = x.detach().requires_grad_()
        saved = Saved(segment)
        saved.pack(x)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            y = segment(x)
        peak = max(peak, received + saved.alive)
        received, x = received + x.nbytes, y
    return received, peak


def test_peak_of_saved_bytes_is_that_of_one_segment_and_the_boundaries(monkeypatch):
    model, x = Unequal(), torch.randn(5, 8, requires_grad=True)
    saved, peaks, widest = Saved(model), [], max(model.WIDTHS) * len(x) * x.itemsize
    saved.watch(monkeypatch)
    for count in (1, 2, 3, 4):
        with fxpipe.compile(
            model,
            ["cpu"],
            chunks=1,
            checkpoint="always",
            checkpoint_segments=count,
            loss_fn=lambda out, _: out.sum(),
        ) as pipe:
            pipe.prepare(x)
            saved.peak = 0
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda held: held):
                out = pipe(x)
                forward_peak = saved.peak
            boundaries, peak = expected(pipe.stages[0].module, count, x)
            assert saved.alive == boundaries + out.nbytes, "the output is ours"
            assert forward_peak <= boundaries + 2 * widest, "what a layer takes and gives, besides"
            saved.peak = 0
            out.sum().backward()
            assert saved.peak == peak + out.nbytes
            assert saved.alive == x.nbytes + out.nbytes, "input and output are ours"
            peaks.append(saved.peak)
            del out
            saved.peak = 0
            pipe.step(x)
            assert saved.peak <= peaks[-1], "a step keeps no more"
    assert peaks == sorted(peaks, reverse=True) and peaks[3] < peaks[0] / 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"checkpoint": "always", "checkpoint_segments": 0}, "checkpoint_segments is 0: give"),
        ({"checkpoint_segments": 2}, "checkpoint_segments is 2, but checkpoint is 'never'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], **options)
