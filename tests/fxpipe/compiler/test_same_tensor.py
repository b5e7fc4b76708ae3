"""A model that asks whether two of its arguments are one tensor is answered as without fxpipe."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.structure import Structure
from tests.zoo import gradients, same

TWO = ["cpu", "cpu"]


class Attends(nn.Module):
    """Takes another way where the keys are the queries, as attentions often do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, query, key=None, value=None):
        if key is query:
            return self.b(self.a(query))
        rest = 0 if key is None else key * (2 if value is key else 3)
        return self.b(self.a(query) + rest)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_one_tensor_for_two_arguments_is_one_within_the_model(tracer):
    torch.manual_seed(0)
    model = Attends()
    loop = copy.deepcopy(model)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        for call in [(x, x), (x, y), (x, x), (x, y, y), (x, y, x), (x, x, x), (x, x)]:
            parts = []
            for i in range(2):
                cut = {id(t): t.chunk(2)[i] for t in call}
                parts.append(loop(*(cut[id(t)] for t in call)))
            assert same(pipe(*call), torch.cat(parts))
        assert len(pipe.compilations) == 5, "one for each way in which arguments are one"


def test_a_step_too():
    torch.manual_seed(0)
    model = Attends()
    loop = copy.deepcopy(model)
    x, target = torch.randn(6, 8), torch.randn(6, 8)
    loss = nn.MSELoss()
    with fxpipe.compile(model, TWO, chunks=2, loss_fn=loss) as pipe:
        pipe.step(x, x, target=target)
    for part, wanted in reversed([*zip(x.chunk(2), target.chunk(2), strict=True)]):
        (loss(loop(part, part), wanted) / 2).backward()
    for one, other in zip(gradients(model), gradients(loop), strict=True):
        torch.testing.assert_close(one, other)


def test_the_guard_says_it():
    x = torch.randn(6, 8)
    with fxpipe.compile(Attends(), TWO, chunks=2, example_inputs=(x, x)) as pipe:
        assert pipe.guards.failure(x, x) == ""
        said = pipe.guards.failure(x, x.clone())
        assert said == "arguments: other ones of query, key are one and the same tensor"


def test_a_structure_keeps_which_tensors_are_one():
    x, y = torch.zeros(1), torch.ones(1)
    tensors, structure = Structure.of({"a": x, "b": [y, x]})
    assert [id(t) for t in tensors] == [id(x), id(y), id(x)]
    filled = structure.fill([torch.zeros(2) for _ in tensors])
    assert filled["a"] is filled["b"][1] and filled["a"] is not filled["b"][0]
    assert structure.paths() == [".a", ".b[0]", ".b[1]"]
