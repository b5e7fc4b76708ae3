from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import fxpipe
import passes
from fxpipe.batch import BatchError
from fxpipe.trace import TraceError
from passes import PartitionError
from tests.zoo import MLP, MODELS, Chain, ResNet, gradients, loop, loss_of, same

X = torch.ones(6, 12)
TWO = ["cpu", "cpu"]


class Outputs(nn.Module):
    """A structure in, a structure out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch, *, scale=1.0, mask=None):
        h = torch.tanh(self.a(batch["x"])) * scale
        if mask is not None:
            h = h * mask
        y = self.b(h)
        return {"y": y, "parts": [h, (y.mean(), None)], "scale": scale, "x": batch["x"]}


def test_any_structure_goes_in_and_comes_out():
    model, x = Outputs(), torch.randn(6, 4)
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        for kwargs in ({}, {"scale": 2.0}, {"mask": torch.ones(6, 4)}):
            expected, actual = model({"x": x}, **kwargs), pipe({"x": x}, **kwargs)
            assert list(actual) == list(expected)
            assert (type(actual), type(actual["parts"])) == (dict, list)
            assert actual["scale"] == expected["scale"]
            assert actual["parts"][1][1] is None
            torch.testing.assert_close(actual["y"], expected["y"])
            torch.testing.assert_close(actual["parts"][0], expected["parts"][0])
            torch.testing.assert_close(actual["parts"][1][0], expected["parts"][1][0])
            assert torch.equal(actual["x"], x)


def test_a_scalar_is_averaged_weighted_by_the_sizes_of_the_micro_batches():
    class Loss(MLP):
        def forward(self, x):
            return super().forward(x).square().mean()

    model, x = Loss(), torch.randn(7, 12)
    with fxpipe.compile(model, TWO, chunks=3) as pipe:  # of 3, 2 and 2
        torch.testing.assert_close(pipe(x), model(x))
        expected = torch.autograd.grad(model(x), list(model.parameters()))
        actual = torch.autograd.grad(pipe(x), list(model.parameters()))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_pipeline_survives(way):
    model, x = ResNet(), torch.randn(6, 3, 8, 8)
    pipe = fxpipe.compile(model, TWO, chunks=3, partition=["layers.1"], checkpoint="always")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    output = pipe(x)
    model.load_state_dict(before)
    if way == "deepcopy":
        twin = copy.deepcopy(pipe)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(pipe))
    else:
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert twin.code == pipe.code
    assert same(twin(x), output)
    assert all(p is not q for p, q in zip(twin.parameters(), pipe.parameters(), strict=True))
    assert all(p is q for p, q in zip(twin.parameters(), twin.module.parameters(), strict=True))
    pipe.close()
    twin.close()


def test_parameters_state_dict_and_modes_are_the_models():
    model = ResNet()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        x = torch.randn(4, 3, 8, 8)
        pipe(x)
        names = [name for name, _ in pipe.named_parameters()]
        assert names == [name for name, _ in model.named_parameters()]
        assert all(p is q for p, q in zip(pipe.parameters(), model.parameters(), strict=True))
        assert list(pipe.state_dict()) == list(model.state_dict())
        pipe.eval()
        assert not model.training and not model.layers[0].bn1.training
        expected = torch.cat([model(part) for part in x.chunk(2)])
        assert same(pipe(x), expected)
        pipe.train()
        assert model.training and pipe.training
        count = model.stem[1].num_batches_tracked.item()
        pipe(x)
        assert model.stem[1].num_batches_tracked == count + 2


def test_an_optimizer_made_before_works_after():
    model, twin = MLP(), MLP()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        for _ in range(3):
            x = torch.randn(6, 12)
            pipe.zero_grad()
            loss_of(pipe(x)).backward()
            loop(twin, (x,), 3)
            for optimizer in optimizers:
                optimizer.step()
            assert same(list(model.parameters()), list(twin.parameters()))


def test_a_state_dict_travels_both_ways_also_when_assigned():
    model, other = (MODELS["transformer"][0]() for _ in range(2))
    tokens = torch.randint(11, (4, 6))
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(tokens)
        for assign in False, True:
            other = MODELS["transformer"][0]()
            pipe.load_state_dict(other.state_dict(), strict=True, assign=assign)
            expected = torch.cat([other(part) for part in tokens.chunk(2)])
            assert same(pipe(tokens), expected)
            fresh = MODELS["transformer"][0]()
            fresh.load_state_dict(pipe.state_dict(), strict=True)


def test_dtypes_may_change_and_devices_may_not():
    model = MODELS["transformer"][0]()
    tokens = torch.randint(11, (4, 6))
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(tokens)
        assert pipe.double()(tokens).dtype == torch.float64
        with pytest.raises(RuntimeError, match="cannot be moved to meta: its stages are on cpu"):
            pipe.to("meta")
        assert pipe(tokens).dtype == torch.float64


def test_a_value_that_a_stage_receives_is_not_written_to():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            s = torch.sigmoid(self.a(x) - 0.5)
            return self.relu(s), self.a(x)

    model, x = InPlace(), torch.randn(4, 4)
    with fxpipe.compile(model, TWO, chunks=2, partition=["relu"]) as pipe:
        outputs = pipe(x)
        actual = torch.autograd.grad(sum(map(loss_of, outputs)), list(model.parameters()))
    model.relu.inplace = False  # the sigmoid's backward needs its output: as it is, eager fails
    expected = model(x)
    torch.testing.assert_close(list(outputs), list(expected))
    torch.testing.assert_close(
        actual, torch.autograd.grad(sum(map(loss_of, expected)), list(model.parameters()))
    )


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_a_model_writes_to_its_input_the_caller_sees(chunks, checkpoint):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 12), nn.Linear(12, 12))
    x = torch.randn(4, 12)
    for history in False, True:
        given, expected = x.clone(), x.clone()
        if history:
            given.requires_grad_()
            expected.requires_grad_()
        with fxpipe.compile(model, TWO, chunks=chunks, checkpoint=checkpoint) as pipe:
            model.zero_grad()
            passed = given * 1 if history else given
            loss_of(pipe(passed)).backward()
            actual = gradients(model)
        model.zero_grad()
        loss_of(model[1:](torch.relu(expected))).backward()
        torch.testing.assert_close(actual, gradients(model))
        assert same(passed.detach(), torch.relu(x))
        if history:
            assert same(given.detach(), x)
            torch.testing.assert_close(given.grad, expected.grad)


def test_the_number_of_micro_batches_is_chosen_and_said():
    with fxpipe.compile(MLP(), TWO) as pipe:
        pipe(X)
        assert pipe.chunks == 6, "four for each stage, but the batch has six rows"
        pipe(torch.ones(20, 12))
        assert pipe.chunks == 8
        assert "8 micro-batches (chosen: give chunks= to change it)" in pipe.report()
    with fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,)) as pipe:
        assert "2 micro-batches, bubble 3" in pipe.report()


def test_own_passes_take_the_place_of_the_default_ones():
    seen = []

    class Count:
        name = "count"

        def __call__(self, gm):
            seen.append(len(gm.graph.nodes))
            return gm

    def with_count(**options):
        return [*passes.default_passes(**options), Count()]

    with fxpipe.compile(MLP(), TWO, passes=with_count, chunks=2) as pipe:
        pipe(X)
        assert seen == [len(pipe.graph.nodes)]


class Branches(MLP):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Averages(MLP):
    def forward(self, x):
        return super().forward(x).mean(0)


class Pairs(nn.Module):
    def forward(self, x, y):
        return x.sin(), y.sin()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: fxpipe.compile(torch.tanh, TWO), TypeError, "takes an nn.Module, got a builtin"),
        (
            lambda: fxpipe.compile(fxpipe.compile(MLP(), TWO), TWO),
            TypeError,
            "takes a model, and MLP is a pipeline already: give its model, pipe.module",
        ),
        (
            lambda: fxpipe.compile(MLP(), TWO, example_inputs=X),
            TypeError,
            r"got a Tensor; write example_inputs=\(x,\)",
        ),
        (
            lambda: fxpipe.compile(Chain(3), ["cpu"] * 4)(X[:, :3]),
            PartitionError,
            "4 stages asked for, but the model can be cut into 3",
        ),
        (
            lambda: fxpipe.compile(MLP(), TWO, partition=["layer.1"])(X),
            PartitionError,
            "partition names 'layer.1'.*did you mean 'layers.1'",
        ),
        (
            lambda: fxpipe.compile(Chain(3), TWO, partition={"a": 0, "b": 1, "c": 0})(X[:, :3]),
            PartitionError,
            "'c' in stage 0 needs 'b' from the later stage 1.*would wait in a circle",
        ),
        (
            lambda: fxpipe.compile(Pairs(), TWO)(X, X[:5]),
            BatchError,
            r"the batch size differs between inputs: 6 in x \(6, 12\), 5 in y \(5, 12\)",
        ),
        (
            lambda: fxpipe.compile(Averages(), TWO)(X),
            BatchError,
            r"output has shape \(12,\) whatever the batch size.*give out_dims",
        ),
        (
            lambda: fxpipe.compile(Branches(), TWO)(X),
            TraceError,
            r"(?s)symbolic: .*if x.sum\(\) > 0.*export: .*depends on the values.*if x.sum\(\) > 0",
        ),
        (lambda: fxpipe.compile(MLP(), TWO)(), TypeError, r"MLP.forward\(\): missing .* 'x'"),
        (
            lambda: fxpipe.compile(MLP(), TWO)(X[:0]),
            TraceError,
            "the example batch is empty",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_what_only_the_model_has_is_said_to_be_there():
    model = MLP()
    model.config = {"hidden": 12}
    pipe = fxpipe.compile(model, TWO)
    assert pipe.layers is model.layers
    with pytest.raises(AttributeError, match=r"no attribute 'config'.*: take pipe.module.config"):
        _ = pipe.config
    with pytest.raises(AttributeError, match=r"no attribute 'confic'$"):
        _ = pipe.confic


def test_a_closed_pipeline_says_so_and_the_model_works_on():
    model = MLP()
    pipe = fxpipe.compile(model, TWO, chunks=2)
    pipe(X)
    pipe.close()
    pipe.close()
    with pytest.raises(RuntimeError, match="this pipeline is closed: compile the model again"):
        pipe(X)
    model(X)


def test_an_empty_batch_after_the_first_gives_an_empty_output():
    with fxpipe.compile(MLP(), TWO, chunks=2) as pipe:
        pipe(X)
        assert pipe(X[:0]).shape == (0, 12)


def test_gradients_accumulate_over_calls():
    model, x = MLP(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        loss_of(pipe(x)).backward()
        once = gradients(model)
        loss_of(pipe(x)).backward()
    torch.testing.assert_close(gradients(model), [g * 2 for g in once])


class Named(MLP):
    """A parameter and a buffer that the graph holds by name."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(12))
        self.register_buffer("shift", torch.zeros(12))

    def forward(self, x):
        return super().forward(x) * self.gain + self.shift


def test_tensors_that_are_exchanged_are_seen_at_the_next_call():
    model, x = Named(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        new = {name: p.detach() * 2 for name, p in model.named_parameters()}
        expected = torch.func.functional_call(model, new, (x,))
        torch.testing.assert_close(torch.func.functional_call(pipe, new, (x,)), expected)
        torch.testing.assert_close(pipe(x), model(x))
        model.shift = torch.ones(12)
        model.gain = nn.Parameter(torch.full((12,), 3.0))
        torch.testing.assert_close(pipe(x), model(x))
        pipe(x).sum().backward()
        assert model.gain.grad is not None
        model.layers[0] = nn.Linear(12, 12)
        torch.testing.assert_close(pipe(x), model(x))


def test_what_a_trace_cannot_see_is_seen_after_recompile():
    class Scaled(MLP):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model, x = Scaled(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        model.scale = 2.0
        pipe.recompile()
        torch.testing.assert_close(pipe(x), model(x))


def test_the_first_call_may_be_in_inference_mode():
    model, x = MLP(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        with torch.inference_mode():
            assert same(pipe(x * 1), torch.cat([model(part * 1) for part in x.chunk(2)]))
        loss_of(pipe(x)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_batch_norm_that_two_places_use_stays_in_one_stage():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.norm(self.b(self.norm(self.a(x))))

    model, x = Twice(), torch.randn(8, 4)
    twin = copy.deepcopy(model)
    expected = loop(twin, (x,), 4)
    with pytest.raises(PartitionError, match=r"'norm.*share memory that is written to"):
        fxpipe.compile(model, TWO, partition=["b"])(x)
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])
    assert same(list(model.buffers()), list(twin.buffers()))


def test_gradients_that_a_model_stops_are_stopped():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                target = self.a(x)
            return self.b(x) * target

    model, x = Stops(), torch.randn(4, 4)
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        loss_of(pipe(x)).backward()
    assert model.a.weight.grad is None and model.b.weight.grad is not None


class Box:
    def __init__(self, value):
        self.value = value


class Boxes(MLP):
    def forward(self, x):
        y = super().forward(x)
        return {"box": Box([y, None]), "mean": y.mean()}


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_an_object_with_tensors_is_an_output_like_any_other(tracer):
    model = Boxes()
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        output = pipe(X)
    assert type(output["box"]) is Box and output["box"].value[1] is None
    assert torch.allclose(output["box"].value[0], model(X)["box"].value[0])
    with (
        pytest.raises(BatchError, match=r"dimension 5 of output.box.value\[0\] is"),
        fxpipe.compile(model, TWO, chunks=2, out_dims={"box": 5}, tracer=tracer) as pipe,
    ):
        pipe(X)


def test_a_model_that_needs_values_is_refused_with_the_line():
    class Item(MLP):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    with pytest.raises(TraceError, match=r"(?s)follows from values of tensors.*x.max\(\).item"):
        fxpipe.compile(Item(), TWO)(X)


def test_sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.embed(x))

    model, x = Sparse(), torch.randint(9, (6, 2))
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        loss_of(pipe(x)).backward()
    grad = model.embed.weight.grad
    assert grad.is_sparse
    model.zero_grad()
    loss_of(model(x)).backward()
    torch.testing.assert_close(grad.to_dense(), model.embed.weight.grad.to_dense())


def test_inputs_are_let_go_after_a_call():
    gc.collect()
    gc.disable()
    try:
        with fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,)) as pipe:
            x = torch.randn(4, 12)
            ref = weakref.ref(x)
            with torch.no_grad():
                pipe(x)
            del x
            assert ref() is None
    finally:
        gc.enable()


def test_a_number_that_depends_on_the_batch_is_refused():
    class Counts(MLP):
        def forward(self, x):
            return super().forward(x), x.shape[0]

    with pytest.raises(BatchError, match=r"output\[1\] is 6 and depends on the batch size"):
        fxpipe.compile(Counts(), TWO)(X)


@pytest.mark.parametrize("runs", ["model", "pipeline"])
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_other_threads_go_on_while_a_model_is_compiled(tracer, runs):
    model, x, failed, done = MLP(), torch.randn(4, 12), [], threading.Event()
    if runs == "pipeline":
        model = fxpipe.compile(model, TWO, chunks=2)
    expected = model(x)

    def work():
        while not done.is_set():
            try:
                assert same(model(x), expected)
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            inputs = (torch.randn(4, 3, 8, 8),)
            fxpipe.compile(ResNet(), TWO, chunks=2, tracer=tracer, example_inputs=inputs)
    finally:
        done.set()
        thread.join()
    assert failed == []


def test_an_input_may_be_written_to_in_a_later_stage():
    class Late(Chain):
        def forward(self, x, y):
            return super().forward(x) + y.mul_(2)

    model, x, y = Late(3), torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.cat([model(p, q.clone()) for p, q in zip(x.chunk(2), y.chunk(2), strict=True)])
    with fxpipe.compile(model, ["cpu"] * 3, chunks=2, partition=["b", "c"]) as pipe:
        z = y.clone()
        assert same(pipe(x, z), expected)
        assert same(z, y * 2)


def test_every_public_name_is_there():
    assert all(getattr(fxpipe, name) is not None for name in fxpipe.__all__)
    assert set(fxpipe.__all__) == {*fxpipe._HOMES, "skip"}


def test_a_stage_says_what_it_is_in_a_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with fxpipe.compile(
        model, ["cpu"] * 2, partition=["1"], example_inputs=(torch.ones(6, 4),)
    ) as pipe:
        first, second = map(repr, pipe.stages)
    # A node for the input, the layer and the output; 4 * 4 + 4 floats, and 4 * 2 + 2.
    assert first.startswith("Stage(0 on cpu: 3 nodes, parameters 80 B, forward ")
    assert second.startswith("Stage(1 on cpu: 3 nodes, parameters 40 B, forward ")
    assert "\n" not in first + second
