"""Values, relations and names of functions as JSON, and back."""

from __future__ import annotations

import json
import math
import os

import pytest
import sympy
import torch
from torch import nn

from fxpipe.compiler.disk.data import packed, packed_tensor, unpacked, unpacked_tensor
from fxpipe.compiler.disk.errors import NotKept, Unusable
from fxpipe.compiler.disk.graphs import packed_graph, unpacked_graph
from fxpipe.compiler.disk.relations import packed_sizes, unpacked_sizes
from fxpipe.compiler.disk.targets import function_of, method, name_of
from fxpipe.ir.printing import format_graph
from fxpipe.trace import trace
from fxpipe.trace.sizes import Condition, Sizes


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, -1.5, math.inf, -math.inf, 1e-300, 1 + 2j, "x", ..., torch.float16),
        *(slice(1, None, 2), range(3), (1, (2, "a")), [1, [2.5]], {"a": (1,), 2: None}),
        *(torch.Size([1, 2]), torch.device("cpu"), torch.strided, torch.channels_last),
        frozenset({1, 2}),
    ],
    ids=repr,
)
def test_a_value_comes_back_as_it_was(value):
    back = unpacked(through_json(packed(value)))
    assert type(back) is type(value) and back == value


def test_a_number_that_is_none_comes_back():
    assert math.isnan(unpacked(through_json(packed(math.nan))))


@pytest.mark.parametrize("value", [object(), torch.zeros(1), print, nn.Linear, {1: object()}])
def test_other_values_are_refused(value):
    with pytest.raises(NotKept, match="which a file cannot hold"):
        packed(value)


@pytest.mark.parametrize(
    "data", [{"eval": "1"}, {"dtype": "load"}, {"a": 1, "b": 2}, {"float": "1"}, {"tuple": 1}]
)
def test_other_data_are_refused(data):
    with pytest.raises(Unusable, match="no known kind"):
        unpacked(data)


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(6).view(2, 3), torch.randn(3).bfloat16(), torch.tensor(True)),
        *(torch.randn(2, 3).t(), torch.empty(0, 2), torch.randn(2, dtype=torch.complex64)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_a_tensor_comes_back_with_its_bits(tensor):
    back = unpacked_tensor(through_json(packed_tensor(tensor)))
    assert back.dtype == tensor.dtype and torch.equal(back, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
    ],
    ids=["with gradient", "meta", "sparse"],
)
def test_a_tensor_of_another_kind_is_refused(tensor):
    with pytest.raises(NotKept, match="constant tensor"):
        packed_tensor(tensor)


class Divided(nn.Module):
    """A model whose trace has conditions with divisions that round."""

    def forward(self, x):
        _, n, m = x.shape
        if (n // 2) % 3 == 0 and n * m > 20 and m != 2 * n + 1:
            return x.reshape(-1, n * m // 2, 2)
        return x


def test_conditions_on_sizes_come_back():
    traced = trace(
        nn.Sequential(Divided()),
        (torch.randn(4, 12, 6),),
        tracer="export",
        batch_dims=[0],
        any_size=True,
    )
    sizes = traced.sizes
    back = unpacked_sizes(through_json(packed_sizes(sizes)))
    assert any("//" in str(each.relation) for each in sizes.conditions)
    assert list(map(str, back.conditions)) == list(map(str, sizes.conditions))
    assert [each.where for each in back.conditions] == [each.where for each in sizes.conditions]
    assert back.free.keys() == sizes.free.keys() and back.fixed == sizes.fixed
    for n in range(2, 40):
        for m in range(2, 9):
            ours, theirs = (each.broken([(4, n, m)], (1, 2)) for each in (back, sizes))
            assert str(ours) == str(theirs)


def test_a_condition_with_another_function_is_refused():
    x = sympy.Symbol("s0", integer=True)
    sizes = Sizes({x: (0, 1)}, frozenset(), (Condition(sympy.Eq(sympy.sin(x), 0)),), {}, {x: x})
    with pytest.raises(NotKept, match="has sin"):
        packed_sizes(sizes)
    data = packed_sizes(Sizes({x: (0, 1)}, frozenset(), (Condition(x >= 2),), {}, {x: x}))
    data["conditions"][0][0][0] = "lambdify"
    with pytest.raises(Unusable, match="lambdify"):
        unpacked_sizes(data)


@pytest.mark.parametrize(
    "function",
    [
        *(torch.relu, torch.add, torch.einsum, nn.functional.relu, nn.functional.max_pool2d),
        *(torch.linalg.norm, torch.fft.rfft, math.sqrt, torch.ops.aten.addmm.default),
    ],
)
def test_functions_that_compute_come_back_by_their_names(function):
    assert function_of(through_json(name_of(function, (), {})), (), {}) is function


@pytest.mark.parametrize(
    "function",
    [eval, os.system, torch.load, torch.from_file, torch.compile, torch.ops.aten.from_file.default],
    ids=lambda function: getattr(function, "__name__", str(function)),
)
def test_other_functions_have_no_name(function):
    with pytest.raises(NotKept, match="its graph calls"):
        name_of(function, (), {})


@pytest.mark.parametrize(
    "name",
    [
        *(["function", "builtins.eval"], ["function", "operator.call"], ["own", "os:system"]),
        *(["function", "operator.attrgetter"], ["op", "aten", "__class__", "mro"]),
        *(["op", "aten", "from_file", "default"], ["op", "torchvision", "nms", "default"], ["x"]),
    ],
    ids=str,
)
def test_a_name_of_anything_else_is_refused(name):
    with pytest.raises(Unusable, match="it calls"):
        function_of(name, (), {})


def test_attributes_and_methods_lead_to_nothing_but_tensors():
    assert function_of(["function", "getattr"], (None, "shape"), {}) is getattr
    for name in "__class__", "__globals__", "grad_fn", "func_globals":
        with pytest.raises(Unusable):
            function_of(["function", "getattr"], (None, name), {})
    assert method("view") == "view"
    for name in "__getattribute__", "__reduce__", "apply_", "register_hook", "numpy", "format":
        with pytest.raises(Unusable, match="calls a method"):
            method(name)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x, scale=2.0):
        y = self.layers(x + self.shift) * scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return {"y": y[:, None].expand(-1, 2, -1).reshape(x.shape[0], -1), "x": x[..., 1:]}


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_graph_comes_back_with_the_tensors_of_the_model(tracer):
    model = Plain()
    traced = trace(model, (torch.randn(4, 4),), tracer=tracer, batch_dims=[0])
    gm = traced.graph_module
    data = through_json(packed_graph(gm, model, {}))
    back = unpacked_graph(data, model, {}, on_the_model=tracer == "symbolic")
    assert format_graph(back) == format_graph(gm) and back.code == gm.code
    assert [n.stack_trace for n in back.graph.nodes] == [n.stack_trace for n in gm.graph.nodes]
    for (name, ours), (other, theirs) in zip(
        back.named_parameters(), gm.named_parameters(), strict=True
    ):
        assert name == other and ours is theirs
    x = torch.randn(3, 4)
    outputs = [traced.rebuild(each(x)) for each in (gm, back)]
    assert all(torch.equal(outputs[0][key], outputs[1][key]) for key in ("x", "y"))
    assert not any("constant" in name for name in vars(model))
