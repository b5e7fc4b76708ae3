from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler import Compiler
from fxpipe.graph import STAGE, stage_nodes
from fxpipe.options import Options
from fxpipe.trace.care import on_one_device
from passes import default_passes
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
