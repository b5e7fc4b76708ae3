from __future__ import annotations

import copy
import re
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler.driver import Compiler
from fxpipe.compiler.options import Options
from fxpipe.ir.graph import STAGE, stage_nodes
from fxpipe.trace.spread import as_on_one_device
from fxpipe.trace.twin import model_of
from passes import PartitionError, default_chain
from tests.zoo import MLP, MODELS, ResNet, gradients


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
        passes=default_chain(),
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


class Weighted(MLP):
    def forward(self, x, *, weight, bias, scale=1.0):
        return super().forward(x) * weight * scale + bias


def test_what_is_given_by_name_finds_its_place_also_the_second_time():
    model, x = Weighted(), torch.randn(8, 12)
    made = compiler(model)
    one, other = torch.randn(8, 1), torch.randn(8, 1)

    def values(**named):
        mode, found, _ = made.ready((x,), named)
        return mode, [id(value) for value in found]

    twice, found = values(weight=one, bias=one)
    assert found == [id(x), id(one), id(one)]
    first, _ = values(weight=one, bias=other)
    assert first is not twice, "a model may ask whether two arguments are one tensor"
    for _ in range(3):
        mode, found = values(weight=one, bias=other)
        assert mode is first and found == [id(x), id(one), id(other)]
        mode, found = values(bias=other, weight=one, scale=1.0)
        assert found == [id(x), id(one), id(other)]
    assert values(weight=one, bias=other, scale=2.0)[0] is not first
    assert values(weight=one, bias=other, scale=1)[0] is not mode


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


class Named(MLP):
    def forward(self, batch, scale=1):
        return super().forward(batch["x"]) * scale


def test_that_a_constant_makes_it_compile_again_and_again_is_said():
    found = compiler(Named())
    x = torch.randn(4, 12)

    def call(name, **options):
        found.ready(({"x": x, "names": ["the same", name]},), options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(7):
            call(f"picture {i}")
        call("picture 6")
        found.model.eval()
        call("picture 0")  # there is another reason for this one
        found.model.train()
    with pytest.warns(UserWarning) as told:
        call("picture 7")
    assert [str(each.message) for each in told] == [
        "Named has been compiled 8 times, since batch.names[1], which is no tensor, differs "
        "between the calls ('picture 7' in this one). All of these programs are alike, so that the "
        "model seems to make no use of it: leave batch.names out of the call, or give the same in "
        "each call"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("picture 8")
        for i in range(7):
            call("picture 0", scale=i)
    with pytest.warns(UserWarning) as told:
        call("picture 0", scale=7)
    assert [str(each.message) for each in told] == [
        "Named has been compiled 8 times, since scale, which is no tensor, differs between the "
        "calls (7 in this one): leave out what the model does not need, and give numbers as tensors"
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "given, what",
    [
        (lambda x, i: ({"x": x, "name": f"{i}.png"},), "batch.name"),
        (lambda x, i: ({"x": x, "names": x, "name": f"{i}.png"},), "batch.name"),
        (lambda x, i: ({"x": x, "names": ["a.png"] * i},), "batch.names"),
        (lambda x, i: ({"x": x, "names": ["a.png"] * (8 - i)},), "batch.names"),
        (lambda x, i: ({"x": x, "meta": [{"id": i, "size": (i, 3)}]},), "batch.meta"),
        (lambda x, i: ({"x": x, "meta": [i, torch.ones(4)]},), "batch.meta[0]"),
        (lambda x, i: ({"x": x, "meta": [torch.ones(4), [0, i]]},), "batch.meta[1]"),
        (lambda x, i: ({"x": x, "meta": ([0, i], {"y": x})},), "batch.meta[0]"),
        (lambda x, i: ({"x": x}, 1, f"{i}.png"), "path"),
        (lambda x, i: ({"x": x}, 1, ["a.png", i]), "path"),
    ],
)
def test_of_what_is_unused_all_that_can_be_left_out_is_named(given, what):
    class Stored(Named):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, batch, scale=1, path=""):
            return self.dropout(super().forward(batch, scale))

    found = compiler(Stored())
    with pytest.warns(UserWarning) as told:
        for i in range(9):
            found.ready(given(torch.randn(4, 12), i), {})
    assert re.findall("make no use of it: leave (.*) out of", str(told[-1].message)) == [what]


def test_a_list_that_is_shorter_in_each_call_is_told_too():
    class Counted(Named):
        def forward(self, batch, scale=1):
            return super().forward(batch, scale * len(batch["names"]))

    found = compiler(Counted())
    with pytest.warns(UserWarning) as told:
        for i in range(9):
            batch = {"x": torch.randn(4, 12), "names": ["a.png"] * (9 - i), "id": 3}
            found.ready((batch,), {})
    assert [str(each.message) for each in told] == [
        "Counted has been compiled 8 times, since batch.names[2], which is no tensor, differs "
        "between the calls (there is none in this one): leave out what the model does not need, "
        "and give numbers as tensors"
    ]


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


def test_a_placed_model_is_traced_once_more_where_it_is(monkeypatch):
    """Its stages may be on several devices, and then it runs nowhere as it is."""
    model, x, seen = ResNet(), torch.randn(4, 3, 8, 8), []

    @contextmanager
    def watched(given, device):
        seen.append((model_of(given), device))
        with as_on_one_device(given, device):
            yield

    monkeypatch.setattr("fxpipe.compiler.staging.as_on_one_device", watched)
    with fxpipe.compile(model, ["cpu", "cpu:0"], chunks=2) as pipe:
        pipe(x)
        assert not seen
        pipe.eval()
        pipe(x)
    assert seen == [(model, x.device)] * 2, "to be checked, and to be traced"


class RowByRow(nn.Module):
    """Its graph is for one size of the batch: so many rows, so many nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.a(x)
        y = torch.stack([y[i].sin() * 2 for i in range(x.shape[0])])
        return self.b(y), y.t()


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "rows, chunks, taken",
    [(6, 3, 3), (6, 6, 6), (6, 4, 3), (6, None, 6), (5, 3, 1), (1, 2, 1), (10, None, 5)],
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_model_that_goes_by_its_batch_size_has_micro_batches_of_one_size(
    rows, chunks, taken, checkpoint
):
    model, x = RowByRow(), torch.randn(rows, 3)
    reference = copy.deepcopy(model)
    parts = [reference(part) for part in x.chunk(taken)]
    with fxpipe.compile(model, ["cpu"] * 2, chunks=chunks, checkpoint=checkpoint) as pipe:
        one, other = pipe(x)
        assert pipe.chunks == taken, "as many as asked for, or fewer: eight if it is left open"
        torch.testing.assert_close(one, torch.cat([y for y, _ in parts]), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other, torch.cat([y for _, y in parts], dim=1))
        (one.square().sum() + other.sum()).backward()
        for y, z in reversed(parts):
            (y.square().sum() + z.sum()).backward()
        for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_model_may_take_rows_in_pairs_only(is_fixed):
    class Pairs(RowByRow):
        def forward(self, x):
            pairs = range(x.shape[0] // 2) if is_fixed else [...]
            y = torch.cat([self.a(x).view(-1, 2, 3)[i].view(-1, 2, 3) for i in pairs])
            return self.b(y.sum(1))

    model, x = Pairs(), torch.randn(12, 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        expected = torch.cat([model(part) for part in x.chunk(3)])
        torch.testing.assert_close(pipe(x), expected, rtol=1e-6, atol=1e-6)
        assert pipe.chunks == 3


def test_where_it_can_be_traced_and_not_be_cut_the_cut_is_what_is_said():
    with (
        fxpipe.compile(RowByRow(), ["cpu"] * 50, chunks=3) as pipe,
        pytest.raises(PartitionError, match="50 stages asked for"),
    ):
        pipe(torch.randn(6, 3))


def test_it_is_compiled_once_for_each_size_of_the_batch():
    with fxpipe.compile(RowByRow(), ["cpu"] * 2, chunks=2) as pipe:
        graphs = []
        for rows in (4, 6, 4, 6):
            pipe(torch.randn(rows, 3))
            graphs.append(pipe.model_graph)
        assert graphs[0] is graphs[2] is not graphs[1]
        assert graphs[1] is graphs[3]
        assert [list(dict(s.module.named_parameters())) for s in pipe.stages] == [
            ["a.weight", "a.bias"],
            ["b.weight", "b.bias"],
        ]


def test_its_costs_are_those_of_all_micro_batches():
    class Flexible(RowByRow):
        def forward(self, x):
            return self.b(self.a(x))

    class Fixed(RowByRow):
        def forward(self, x):
            rows = sum(1 for _ in range(x.shape[0]))
            return self.b(self.a(x)).view(rows, 3)

    found = []
    for kind, chunks in (Flexible, 4), (Fixed, 3):
        with fxpipe.compile(kind(), ["cpu"] * 2, chunks=4, partition=["b"]) as pipe:
            pipe(torch.randn(6, 3))
            assert pipe.chunks == chunks
            found.append(pipe.stages[0].cost)
    for name in "flops", "backward_flops", "param_bytes", "gradient_bytes", "activation_bytes":
        assert getattr(found[0], name) == getattr(found[1], name) > 0


def test_a_training_step_of_it_is_that_of_the_loop():
    model, x = RowByRow(), torch.randn(6, 3)
    reference = copy.deepcopy(model)

    def loss_fn(output, target):
        return output[0].square().mean()

    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, schedule="1f1b", loss_fn=loss_fn) as pipe:
        loss = pipe.step(x, target=torch.zeros(6))
    expected = sum(loss_fn(reference(part), None) / 3 for part in x.chunk(3))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(mine, theirs)
