from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.compiler import Compiler, _homes, stages_of
from fxpipe.graph import STAGE, stage_nodes
from fxpipe.options import Options
from fxpipe.trace.care import on_one_device
from passes import PartitionError, default_passes
from tests.zoo import MLP, MODELS, ResNet, same


def compiler(model, devices=("cpu", "cpu"), **options):
    told = dict(
        chunks=None,
        partition="auto",
        checkpoint="never",
        checkpoint_segments=1,
        deferred_batch_norm=False,
        in_dims=None,
        out_dims=None,
        tracer="auto",
        passes=default_passes,
    )
    told |= dict(placement=tuple(range(len(devices))), schedule="gpipe", loss_fn=None)
    return Compiler(model, Options(tuple(map(torch.device, devices)), **{**told, **options}))


@pytest.mark.parametrize(
    ("devices", "chunks", "batch", "expected"),
    [
        (1, None, 32, 1),
        (2, None, 32, 8),
        (2, None, 5, 5),
        (2, 3, 32, 3),
        (2, 3, 2, 2),
        (2, 3, 0, 1),
        (2, 3, None, 1),
    ],
)
def test_micro_batches_are_as_many_as_asked_for_and_none_is_empty(devices, chunks, batch, expected):
    options = compiler(MLP(), ["cpu"] * devices, chunks=chunks).options
    assert options.chunks_for(batch) == expected


def test_what_has_been_compiled_is_used_again():
    made = compiler(MLP())
    x = torch.randn(8, 12)
    mode, values, chunks = made.ready((x,), {})
    assert values == [x]
    unrolled = made.pipeline(mode, chunks)
    again, *_ = made.ready((torch.randn(8, 12),), {})
    by_name, *_ = made.ready((), {"x": x})
    assert again is by_name is mode and made.pipeline(mode, chunks) is unrolled
    fewer, _, other_chunks = made.ready((torch.randn(3, 12),), {})
    assert fewer is mode and made.pipeline(mode, other_chunks) is not unrolled


def test_another_training_flag_module_or_dtype_of_autocast_is_another_mode():
    model = MLP()
    made = compiler(model)
    args = ((torch.randn(8, 12),), {})
    first, *_ = made.ready(*args)
    model.layers[2].eval()
    second, *_ = made.ready(*args)
    assert second is not first
    model.layers[2].train()
    assert made.ready(*args)[0] is first
    with torch.autocast("cpu", torch.bfloat16):
        assert made.ready(*args)[0] not in (first, second)
    model.layers[0] = nn.Linear(12, 12)
    assert made.ready(*args)[0] is not first
    made.forget()
    assert made.ready(*args)[0] is not first


def test_train_and_eval_are_cut_alike():
    make, inputs = MODELS["resnet"]
    model = make()
    made = compiler(model, ["cpu"] * 3)

    def cut(mode):
        return {n.name: n.meta[STAGE] for n in stage_nodes(mode.model_graph.graph)}

    train = cut(made.ready(inputs(4), {})[0])
    model.eval()
    assert cut(made.ready(inputs(4), {})[0]) == train
    assert set(train.values()) == {0, 1, 2}


def test_every_parameter_and_buffer_lives_on_the_device_of_its_stage():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.gain, self.unused = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x):
            return self.b(self.norm(self.a(x)) * self.gain) + self.shift

    model = Model()
    pipe = fxpipe.compile(
        model, ["cpu", "cpu"], partition=["norm"], example_inputs=(torch.ones(4, 4),), chunks=2
    )
    homes = _homes(stages_of(pipe.stage_graph), [torch.device("cpu"), torch.device("cuda:0")])
    tensors = (*model.named_parameters(), *model.named_buffers())
    where = {name: str(homes.get(id(tensor))) for name, tensor in tensors}
    assert {name for name, device in where.items() if device == "cpu"} == {"a.weight", "a.bias"}
    assert where["unused.weight"] == where["unused.bias"] == "None", "they stay where they are"
    assert where["gain"] == where["shift"] == where["norm.running_mean"] == "cuda:0"


def test_a_buffer_of_two_devices_is_refused():
    model = MODELS["transformer"][0]()
    with pytest.raises(PartitionError, match="the buffer mask is used by stage 0 on cpu and by"):
        fxpipe.compile(
            model, ["cpu", "meta"], example_inputs=(torch.zeros(2, 6, dtype=torch.long),)
        )


def test_a_placed_model_comes_together_to_be_traced_once_more(monkeypatch):
    """Its stages may be on several devices, and then it runs nowhere as it is."""
    model, x, seen = ResNet(), torch.randn(4, 3, 8, 8), []

    @contextmanager
    def watched(given, device):
        seen.append((given, device))
        with on_one_device(given, device):
            yield

    monkeypatch.setattr("fxpipe.compiler.on_one_device", watched)
    with fxpipe.compile(model, ["cpu", "cpu:0"], chunks=2) as pipe:
        pipe(x)
        assert not seen
        pipe.eval()
        pipe(x)
    assert seen == [(model, x.device)]


@pytest.mark.parametrize("device", ["cpu:0", "meta"])
def test_each_tensor_of_it_has_its_memory_again_afterwards(device):
    """``"cpu:0"`` is another device than ``"cpu"``; ``"meta"`` takes no tensor that has values."""
    model = ResNet()
    own = [*model.parameters(), *model.buffers()]
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in own]
    with suppress(RuntimeError), on_one_device(model, torch.device(device)):
        model.stem[0].weight.data.add_(0)
    for tensor, (pointer, value) in zip(own, before, strict=True):
        assert tensor.data_ptr() == pointer
        assert same(tensor, value)


class Ways(nn.Module):
    """What its nodes are called depends on the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, *more, mask=None, scale=1):
        y = self.a(x)
        for each in more:
            y = y + each
        if mask is not None:
            y = y * mask
        return self.b(y) * scale


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_model_that_goes_another_way_is_cut_at_the_same_parameters(tracer):
    model, x = Ways(), torch.randn(6, 3)
    calls = [
        lambda call: call(x, x, x, mask=x, scale=2),
        lambda call: call(x),
        lambda call: call(x, x),
        lambda call: call(x, mask=x),
    ]
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        modes = []
        for call in calls * 2:
            torch.testing.assert_close(call(pipe), call(model))
            modes.append(pipe.model_graph)
            assert [list(dict(s.module.named_parameters())) for s in pipe.stages] == [
                ["a.weight", "a.bias"],
                ["b.weight", "b.bias"],
            ]
    assert modes[:4] == modes[4:]  # nothing has been compiled twice


def test_names_that_would_move_a_parameter_are_not_gone_by():
    class Swaps(Ways):
        def forward(self, x, swap=False):
            one, other = (self.b, self.a) if swap else (self.a, self.b)
            return F.linear(F.linear(x, one.weight, one.bias), other.weight, other.bias)

    model, x = Swaps(), torch.randn(6, 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for swap in (False, True, False):
            assert same(pipe(x, swap), torch.cat([model(part, swap) for part in x.split(3)]))
            first = "b.weight" if swap else "a.weight"
            assert first in dict(pipe.stages[0].module.named_parameters())
