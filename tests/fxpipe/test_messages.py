"""What a user is told where a model cannot work: what stands in the way, where, and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fxpipe
from fxpipe.ir.errors import Unsupported
from fxpipe.meaning.errors import BatchError
from fxpipe.trace import TraceError
from passes import PartitionError
from tests.zoo import MLP, Chain, gradients, same

BATCH = torch.ones(6, 12)


def x(batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3)


def message(model: nn.Module, kind: type[Exception], *args, stages: int = 2, **kwargs) -> str:
    check = kind is not TraceError  # which is asked ahead of the trace, and may refuse it as well
    with pytest.raises(kind) as error:
        fxpipe.compile(model, ["cpu"] * stages, chunks=2, check=check).prepare(*args, **kwargs)
    return str(error.value)


class Halves(nn.Module):
    """Goes on until a value says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        y = self.a(x)
        while y.norm() > 1:
            y = y / 2
        return y


def test_control_flow_by_values():
    said = message(Halves(), TraceError, x())
    assert "no front end can trace Halves" in said
    assert "export: which way it goes depends on the values of tensors" in said
    assert said.count("test_messages.py") == 2 and said.count("while y.norm() > 1:") == 2
    assert "Change the model at the lines named" in said


def test_an_output_that_is_not_computed_yet():
    class Later(Halves):
        def forward(self, x):
            return {"parts": (f(self.a(x)) for f in (torch.relu, torch.tanh))}

    said = message(Later(), TraceError, x())
    assert said.startswith("Later returns a generator at output.parts: what is in it is computed")
    assert said.endswith("return a list or a tuple of it")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_rows_of_several_lengths(layout):
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    said = message(MLP(3), Unsupported, rows)
    assert "the input x is a nested tensor" in said and "torch.nested.to_padded_tensor(x" in said


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, adjacency):
        return self.b(torch.sparse.mm(adjacency, self.a(x).t()).t())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_sparse_inputs(checkpoint):
    model, graph = Neighbours(), torch.eye(3).roll(1, 0)
    said = message(model, TraceError, x(), graph.to_sparse_csr())
    assert "the input adjacency is of layout torch.sparse_csr" in said
    assert said.endswith(
        "give it dense, by adjacency.to_dense(), or, where all micro-batches share it, as "
        "adjacency.to_sparse_coo()"
    )
    rows, sparse = x(), graph.to_sparse_coo()
    model(rows, sparse).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        pipe(rows, sparse).sum().backward()
    torch.testing.assert_close(gradients(model), expected)


def test_a_sparse_input_or_target_is_not_cut():
    model, rows = Neighbours(), x(3)
    sparse = torch.eye(3).to_sparse()
    said = message(model, Unsupported, rows, sparse)
    assert said.startswith(
        "the input adjacency (3, 3) is a sparse tensor, which cannot be cut into micro-batches: "
        "give it dense, by adjacency.to_dense(), or give its indices and values as tensors"
    )
    assert said.endswith("if all micro-batches share it, give None for it in in_dims")
    with (
        fxpipe.compile(MLP(3), ["cpu"] * 2, chunks=2, loss_fn=nn.MSELoss()) as pipe,
        pytest.raises(ValueError, match=r"layout torch.sparse_coo, .*: give it dense, by target"),
    ):
        pipe.step(rows, target=sparse)


def test_a_lazy_model_that_has_not_run():
    for lazy in nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False):
        said = message(nn.Sequential(nn.Identity(), lazy), Unsupported, x())
        assert said.startswith("Sequential has parameters without a shape, 1.") and (
            said.endswith("run it once, so that its lazy modules make theirs")
        )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_is_a_part_of_a_model_and_not_one():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    said = message(scripted, TraceError, x())
    assert "Sequential is compiled to TorchScript" in said and "compile the nn.Module" in said
    model, rows = nn.Sequential(nn.Linear(3, 3), scripted, nn.Linear(3, 3)), x()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        torch.testing.assert_close(pipe(rows), model(rows))
    counts = nn.Sequential(nn.Linear(6, 6), torch.jit.script(nn.BatchNorm1d(6)), nn.Linear(6, 6))
    said = message(counts, TraceError, torch.randn(4, 6))
    assert said.endswith("what torch.jit.script has made of a module, give the module itself.")


def test_a_model_without_values():
    with torch.device("meta"):
        model = Chain(2)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2)
    with pytest.raises(RuntimeError) as error:
        pipe(x())
    said = str(error.value)
    assert 'Chain is on the device "meta", where nothing has values (a.weight and 3 other' in said
    assert "pipe.load(path)" in said and "pipe.materialize()" in said

    said = message(Chain(2), TraceError, x().to("meta"))
    assert said == 'the input x has no values: it is on the device "meta"; give one that has'


def test_a_model_on_several_devices():
    model = Chain(2)
    with FakeTensorMode():  # no accelerator is needed to be on one
        model.b.weight = nn.Parameter(torch.empty(3, 3, device="cuda:0"))
    said = message(model, TraceError, x())
    assert "Chain is on several devices (a.weight on cpu, b.weight on cuda:0) and does not" in said
    assert "move it to one, model.to(device)" in said


def test_a_batch_that_cannot_be_found():
    class Pairs(Chain):
        def forward(self, x, *, table):
            return super().forward(x) + table.view(4, 2, -1)[: len(x)].sum(1)

    said = message(Pairs(2), BatchError, x(4), table=x(8))
    assert "depends on which other rows there are" in said and "give in_dims" in said
    assert "belong together" not in said, "the model takes eight rows of the table, and no two"


def test_an_output_for_pairs_of_rows():
    class Similar(Chain):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "similar": y @ y.t()}

    said = message(Similar(2), BatchError, x())
    assert (
        "dimensions [0, 1] of output.similar, (7, 7) for 7 rows, all depend on the batch size"
        in said
    )
    assert "give out_dims" in said and "chunks=1" in said


def test_nothing_stands_in_the_way_of_a_stage_that_gives_no_tensors():
    class Sizes(Chain):
        def forward(self, x):
            y, twice = self.a(x), x.size(1) * 2
            return self.b(y) * twice

    model = Sizes(2)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=2, partition=["size", "b"]) as pipe:
        pipe(batch := x()).sum().backward()
        ours = gradients(model)
        assert [node.name for node in pipe.stages[1].module.graph.find_nodes(op="call_method")] == [
            "size"
        ]
    model.zero_grad()
    model(batch).sum().backward()
    assert all(torch.allclose(a, b) for a, b in zip(ours, gradients(model), strict=True))


def test_nothing_stands_in_the_way_of_inputs_without_a_batch():
    class Scales(Chain):
        def forward(self, scale):
            return self.a.weight * scale

    model = Scales(2)
    with fxpipe.compile(model, ["cpu"], chunks=2) as pipe:
        assert same(pipe(torch.tensor(2.0)), model.a.weight * 2)


def test_a_pipeline_is_not_traced():
    pipe = fxpipe.compile(MLP(), ["cpu"] * 2, chunks=2)
    data = torch.randn(6, 12)
    with pytest.raises(RuntimeError, match=r"cannot be traced: .* the model itself, pipe.module"):
        torch.export.export(pipe, (data,))
    with pytest.raises(RuntimeError, match=r"cannot be traced: .* the model itself, pipe.module"):
        torch.fx.symbolic_trace(nn.Sequential(pipe))
    with pytest.raises(RuntimeError, match=r"cannot be traced: .* the model itself, pipe.module"):
        torch.jit.trace(pipe, data)


def test_functional_transforms():
    model, data = MLP(), torch.randn(6, 12)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2)
    with pytest.raises(RuntimeError, match=r"call it once before, or give example_inputs"):
        torch.func.vmap(pipe)(torch.randn(3, 6, 12))
    with pytest.raises(RuntimeError, match=r"use torch.autograd.grad or .* pipe.module"):
        torch.func.grad(lambda x: pipe(x).sum())(data)
    pipe(data)
    tangent = torch.randn(6, 12)
    for mine, model_s in zip(
        torch.func.jvp(pipe, (data,), (tangent,)),
        torch.func.jvp(model, (data,), (tangent,)),
        strict=True,
    ):
        torch.testing.assert_close(mine, model_s)


def test_forward_mode_derivatives_are_those_of_the_model_where_no_gradients_are_recorded():
    model, data, tangent = MLP(), torch.randn(6, 12), torch.randn(6, 12)

    def derivative(function):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(data, tangent))).tangent

    for checkpoint in ("never", "always"):
        pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        with torch.no_grad():
            torch.testing.assert_close(derivative(pipe), derivative(model))
        with pytest.raises(RuntimeError, match=r"call it under torch.no_grad\(\)"):
            derivative(pipe)


class Branches(MLP):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Averages(MLP):
    def forward(self, x):
        return super().forward(x).amax(0)


class Pairs(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, y]).softmax(1)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: fxpipe.compile(torch.tanh, ["cpu"] * 2),
            TypeError,
            "takes a model, an nn.Module, and is given a builtin",
        ),
        (
            lambda: fxpipe.compile(fxpipe.compile(MLP(), ["cpu"] * 2), ["cpu"] * 2),
            TypeError,
            "takes a model, and MLP is a pipeline already: give its model, pipe.module",
        ),
        (
            lambda: fxpipe.compile(
                nn.Sequential(fxpipe.compile(MLP(), ["cpu"] * 2), nn.ReLU()), ["cpu"] * 2
            ),
            TypeError,
            "0 of Sequential is a pipeline, which runs its own stages, so that it cannot be a part",
        ),
        (
            lambda: fxpipe.compile(MLP(), ["cpu"] * 2, example_inputs=BATCH),
            TypeError,
            r"is given a Tensor: write example_inputs=\(x,\)",
        ),
        (
            lambda: fxpipe.compile(Chain(3), ["cpu"] * 4)(BATCH[:, :3]),
            PartitionError,
            "4 stages asked for, but the model can be cut into 3",
        ),
        (
            lambda: fxpipe.compile(MLP(), ["cpu"] * 2, partition=["layer.1"])(BATCH),
            PartitionError,
            "partition names 'layer.1'.*did you mean 'layers.1'",
        ),
        (
            lambda: fxpipe.compile(Chain(3), ["cpu"] * 2, partition={"a": 0, "b": 1, "c": 0})(
                BATCH[:, :3]
            ),
            PartitionError,
            "'c' in stage 0 needs 'b' from the later stage 1.*would wait in a circle",
        ),
        (
            lambda: fxpipe.compile(Pairs(), ["cpu"] * 2)(BATCH, BATCH[:5]),
            BatchError,
            r"output has shape \(12, 12\) for 7 rows, and \(8, 12\), \(9, 12\) for 3 and 4 of them",
        ),
        (
            lambda: fxpipe.compile(Averages(), ["cpu"] * 2)(BATCH),
            BatchError,
            r"output has shape \(12,\) whatever the batch size.*where out_dims says",
        ),
        (
            lambda: fxpipe.compile(Branches(), ["cpu"] * 2)(BATCH),
            TraceError,
            r"(?s)symbolic: .*if x.sum\(\) > 0.*export: .*depends on the values.*if x.sum\(\) > 0",
        ),
        (
            lambda: fxpipe.compile(MLP(), ["cpu"] * 2)(),
            TypeError,
            r"MLP.forward\(\): missing .* 'x'",
        ),
        (
            lambda: fxpipe.compile(MLP(), ["cpu"] * 2)(BATCH[:0]),
            TraceError,
            "this mini-batch has no rows, and a model is compiled with the rows of its first call",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_a_model_that_needs_values_is_refused_with_the_line():
    class Item(MLP):
        def forward(self, x):
            return super().forward(x) if x.max().item() > 0 else x

    with pytest.raises(TraceError, match=r"(?s)depends on the values of tensors.*x.max\(\).item"):
        fxpipe.compile(Item(), ["cpu"] * 2)(BATCH)


class Attention(nn.Module):
    """Adds a mask (length, length) to weights of which there are as many rows in a batch."""

    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.last(self.attention(x, x, x, attn_mask=mask)[0])


def test_attempts_that_fail_on_the_way_are_not_printed(capfd):
    # PyTorch logs each failure on fake tensors with its traceback: here the mask is taken for rows
    # at first, which another batch size shows to be wrong.
    model, x, mask = Attention(), torch.randn(6, 6, 8), torch.zeros(6, 6)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="export")
    output = pipe(x, mask)
    expected = torch.cat([model(part, mask) for part in x.chunk(2)])
    assert torch.allclose(output, expected, atol=1e-6)
    assert capfd.readouterr().err == ""


class Recogniser(nn.Module):
    """Computes its own loss from labels, as models of transformers do, in a way that no trace
    takes."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, labels=None):
        y = self.head(self.layer(x))
        if labels is None:
            return y
        return y, sum(y[int(label)].sum() for label in labels)


def test_where_a_model_with_labels_cannot_be_traced_the_loss_may_be_computed_outside():
    pipe = fxpipe.compile(Recogniser(), ["cpu"] * 2, chunks=2)
    x, labels = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    with pytest.raises(fxpipe.TraceError, match="call the pipeline without labels, and compute"):
        pipe(x, labels)
    assert pipe(x).shape == (8, 4)
