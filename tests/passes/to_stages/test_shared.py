from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

import fxpipe
from fxpipe.ir.graph import VALUE
from fxpipe.ir.printing import format_graph
from passes import Alias, Shared
from tests.zoo import Tied, gradients, loop, loss_of, same


class Recurrent(nn.Module):
    """An LSTM, and a cell that is called at every step."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y, _ = self.lstm(x)
        h = y[:, 0]
        for step in range(3):
            h = self.cell(y[:, step], h)
        return self.head(h)


class Directly(nn.Module):
    """A parameter without a module, used in two places."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x) * self.scale) * self.scale


class Scaled(nn.Module):
    """Multiplies by what it is given."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.own(x) * scale


class GivenToModules(nn.Module):
    """A parameter that modules are given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.a, self.b, self.c = Scaled(), Scaled(), Scaled()

    def forward(self, x):
        x = self.a(x, self.scale) + self.scale
        return self.b(self.c(x, self.scale), self.scale)


def whole_modules(model, args, kwargs):
    """A tracer that does not look into modules."""

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    return fx.GraphModule(model, Tracer().trace(model))


MODELS = {
    "tied": (Tied, lambda: torch.randint(11, (7, 5))),
    "recurrent": (Recurrent, lambda: torch.randn(7, 5, 4)),
    "directly": (Directly, lambda: torch.randn(7, 8)),
    "given to modules": (GivenToModules, lambda: torch.randn(7, 8)),
}


def text(model, x):
    gm = Shared()(Alias((x,))(fx.symbolic_trace(model)))
    gm.graph.lint()
    return gm, format_graph(gm)


def test_uses_of_one_parameter_become_uses_of_one_value():
    _, graph = text(Tied(), torch.zeros(2, 3, dtype=torch.long))
    assert_expected_inline(
        graph,
        """\
tokens: input
embed_weight = self.embed.weight
embed_weight_shared = share(embed_weight)
embed_module = self.embed
embed = call(embed_module, {'weight': embed_weight_shared}, tokens)
mix_weight = self.mix.weight
mix_weight_shared = share(mix_weight)
mix_bias = self.mix.bias
mix_bias_shared = share(mix_bias)
mix_module = self.mix
mix = call(mix_module, {'weight': mix_weight_shared, 'bias': mix_bias_shared}, embed)
tanh = tanh(mix)
other = other(tanh)
tanh_1 = tanh(other)
mix_1_module = self.mix
mix_1 = call(mix_1_module, {'weight': mix_weight_shared, 'bias': mix_bias_shared}, tanh_1)
head_module = self.head
head = call(head_module, {'weight': embed_weight_shared}, mix_1)
return head
""",
    )


def test_a_parameter_with_one_use_is_left_alone():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)
    _, graph = text(model, x)
    assert graph == format_graph(fx.symbolic_trace(model))


def test_a_parameter_without_a_module_is_shared_too():
    _, graph = text(Directly(), torch.ones(2, 8))
    assert_expected_inline(
        graph,
        """\
x: input
a = a(x)
scale_1 = self.scale
scale_shared = share(scale_1)
mul = mul(a, scale_shared)
b = b(mul)
mul_1 = mul(b, scale_shared)
return mul_1
""",
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_loop_to_the_last_bit(name, stages, checkpoint):
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    own = copy.deepcopy(model)
    expected = loop(model, (x,), 3)
    options = {"tracer": whole_modules} if name == "given to modules" else {}
    with fxpipe.compile(own, ["cpu"] * stages, chunks=3, checkpoint=checkpoint, **options) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(own), expected[1])


def test_a_shared_parameter_lives_with_its_first_user_and_travels_to_other_devices():
    model = Tied()
    pipe = fxpipe.compile(
        model,
        ["cpu", "cpu:0"],
        partition=["head"],
        chunks=2,
        example_inputs=(torch.zeros(2, 3, dtype=torch.long),),
    )
    assert [(h.value, h.source, h.target, h.once) for h in pipe.skip_layout.hops] == [
        ("embed.weight", 0, 1, True),  # not with each micro-batch: pass "tied"
        ("tokens", None, 0, False),
        ("mix_1", 0, 1, False),
    ]


def test_a_module_is_left_as_it_was_and_its_hooks_are_called():
    model, x = Tied(), torch.zeros(4, 3, dtype=torch.long)
    seen = []
    model.mix.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,)) as pipe:
        seen.clear()
        pipe(x)
    assert seen == [nn.Linear] * 4
    assert isinstance(model.mix.weight, nn.Parameter)
    assert list(model.mix._parameters) == ["weight", "bias"]


def test_the_history_of_fake_values_is_forgotten_once_it_is_known():
    """Freed in one piece, that of a hundred thousand nodes would overflow the stack."""
    model, x = Tied(), torch.randint(11, (4, 3))
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,))
    values = [node.meta.get(VALUE) for node in pipe.model_graph.graph.nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert any(tensor.requires_grad for tensor in tensors)
    assert all(tensor.grad_fn is None for tensor in tensors)
