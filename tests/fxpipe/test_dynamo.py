from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.dynamo.inputs import Bound
from tests.zoo import MLP, MODELS, ResNet, Tied, gradients, loop, loss_of, same


@pytest.fixture(autouse=True)
def dynamo_knows_nothing():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, stages=2, chunks=3, dynamic=None, **options):
    backend = fxpipe.backend(devices=["cpu"] * stages, chunks=chunks, **options)
    return torch.compile(model, backend=backend, dynamic=dynamic), backend


def assert_like_the_loop(model, call, inputs, chunks=3):
    expected = loop(copy.deepcopy(model), inputs, chunks)
    model.zero_grad()
    output = call(*inputs)
    loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])


@pytest.mark.one_in(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [*MODELS, "tied"])
def test_outputs_and_gradients_are_those_of_the_loop_in_all_modes_and_batch_sizes(name, dynamic):
    make, inputs = {**MODELS, "tied": (Tied, MODELS["transformer"][1])}[name]
    model = make()
    call, backend = compiled(model, stages=3, dynamic=dynamic)
    # The transformer's sequences have six tokens: two sizes are equal, and have to be told apart.
    for batch in (6, 7):
        for training in (True, False):
            model.train(training)
            assert_like_the_loop(model, call, inputs(batch))
    assert len(backend.pipelines) <= 2  # Dynamo traced again for the mode, not for the size
    assert [len(pipe.stages) for pipe in backend.pipelines] == [3] * len(backend.pipelines)


def test_a_model_keeps_its_names_parameters_and_buffers():
    model, x = ResNet(), torch.randn(4, 3, 8, 8)
    call, backend = compiled(model, partition=["layers.1"])
    parameters, buffers = list(model.parameters()), list(model.buffers())
    call(x)
    (pipe,) = backend.pipelines
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert "layers.0.conv1.weight" in dict(pipe.stages[0].module.named_parameters())
    assert "layers.1.conv1.weight" in dict(pipe.stages[1].module.named_parameters())
    assert model.stem[1].num_batches_tracked == 3  # micro-batches


def test_a_buffer_that_is_moved_stays_the_model_s_own():
    owner, buffer = nn.Module(), torch.ones(3)
    bound = Bound(owner, "mean", buffer)
    moved = owner._buffers["mean"] = buffer.clone()  # as if to another device
    bound.stay()
    assert owner.mean is buffer
    assert buffer.data_ptr() == moved.data_ptr()


def test_a_parameter_that_is_another_object_by_now_is_used():
    model, x = MLP(depth=2), torch.randn(4, 12)
    call, _ = compiled(model)
    call(x)
    model.layers[0].weight = nn.Parameter(torch.randn(12, 12))
    assert_like_the_loop(model, call, (x,))


def test_no_grad_and_autocast_within_a_model_are_one_node_each():
    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                scale = self.a(x).abs().mean(1, keepdim=True)
            y = self.a(x) * scale
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.b(y)
            return self.b(y.float())

    model, x = Regions(), torch.randn(6, 4)
    call, backend = compiled(model)
    assert_like_the_loop(model, call, (x,))
    calls = backend.pipelines[0].model_graph.graph.find_nodes(op="call_module")
    assert [str(node.target) for node in calls] == ["region_0", "region_1"]


def test_arguments_may_be_named_nested_shared_and_numbers():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, *, pair, table, times=2, power=1.0):
            x = self.a(x + pair["left"]) * times * power + table
            return {"y": x, "both": [x[:, :1], pair["left"].sum(1)]}

    model = Many()
    call, backend = compiled(model, in_dims={"table": None}, dynamic=True)
    for times, power in ((2, 1.0), (3, 1.0), (3, 0.5)):
        x, left, table = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 1)[:1]
        kwargs = {"pair": {"left": left}, "table": table, "times": times, "power": power}
        expected, output = model(x, **kwargs), call(x, **kwargs)
        assert same(list(output), list(expected))
        torch.testing.assert_close(output, expected)
    names = [
        str(n.target) for n in backend.pipelines[0].model_graph.graph.find_nodes(op="placeholder")
    ]
    assert names == ["x", "pair_left", "table"]


def test_the_first_batch_may_have_one_row():
    model = MLP()
    call, _ = compiled(model)
    for batch in (1, 5):
        assert_like_the_loop(model, call, (torch.randn(batch, 12),))


def test_dropout_is_drawn_alike_in_two_runs():
    model = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.Linear(12, 12), nn.Dropout(0.5))
    call, _ = compiled(model)
    x, runs = torch.randn(6, 12), []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(call(x))
    assert same(*runs)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


class FixedBatch(nn.Module):
    def forward(self, x):
        return F.relu(x.view(4, 2, 2))


@pytest.mark.parametrize(
    "model, says",
    [
        (Breaks(), r"cannot capture the model in one graph(.|\n)*torch._dynamo.graph_break\(\)"),
        (FixedBatch(), r"constant of its batch size, x \(4, 4\)"),
    ],
)
def test_what_is_not_captured_whole_and_for_any_batch_is_refused(model, says):
    call, _ = compiled(model)
    with pytest.raises(Exception, match=says) as caught:
        call(torch.randn(4, 4))
    assert "BackendError" in str(caught.value)


def test_a_model_with_a_fixed_batch_is_taken_in_one_chunk():
    call, _ = compiled(FixedBatch(), stages=1, chunks=1)
    x = torch.randn(4, 4)
    assert same(call(x), F.relu(x).view(4, 2, 2))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"example_inputs": (1,)}, "example_inputs has no meaning for a backend"),
        ({"schedule": "1f1b"}, "schedule has no meaning for a backend"),
        ({"in_dims": (0,)}, "give a dict from names of arguments to their batch dimensions"),
        ({"chunks": 0}, 'chunks is 0: give "auto", or the number of micro-batches'),
        ({"chunk": 4}, "takes no option 'chunk': did you mean 'chunks'"),
        ({"devices": "cpu"}, "devices is 'cpu': give a list"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        fxpipe.backend(**{"devices": ["cpu"], **options})


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("around", ["module", "in place", "function", "step"])
def test_what_dynamo_compiles_leaves_the_pipelines_in_it_as_they_are(around):
    model, x = MLP(), torch.randn(6, 12)
    expected = loop(copy.deepcopy(model), (x,), 2)[1]
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=lambda y, _: loss_of(y))
    if around == "module":
        loss_of(torch.compile(pipe, backend="eager")(x)).backward()
    elif around == "in place":
        pipe.compile(backend="eager")
        loss_of(pipe(x)).backward()
    elif around == "function":
        torch.compile(lambda x: loss_of(pipe(x)), backend="eager")(x).backward()
    else:
        torch.compile(lambda x: pipe.step(x), backend="eager")(x)
    torch.testing.assert_close(gradients(model), expected)
