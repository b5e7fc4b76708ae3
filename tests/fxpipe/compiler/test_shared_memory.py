"""A model that writes to an input is refused inputs and targets that share the input's memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from tests.zoo import same

TWO = ["cpu", "cpu"]


class Shifts(nn.Module):
    """Writes to its first input, and then reads the second one."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 5)
        self.dropout = nn.Dropout(rate)

    def forward(self, x, y):
        x.add_(1)
        return self.b(self.dropout(self.a(x).relu())) + y.sum(1, keepdim=True)


class Normalises(nn.Module):
    """Normalises its input in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        x.sub_(x.mean(1, keepdim=True))
        return self.b(self.a(x).relu())


VIEWS = {
    "all of it": lambda x: x[:],
    "some columns": lambda x: x[:, :3],
    "detached": lambda x: x.detach(),
    "transposed twice": lambda x: x.T.T,
    "every other column": lambda x: x.view(8, 3, 2)[:, :, 0],
    "its bytes": lambda x: x.view(torch.uint8),
}


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_an_input_that_is_a_view_of_one_that_is_written_to_is_refused(view, rate):
    x = torch.rand(8, 6)
    given = x.clone()
    with fxpipe.compile(Shifts(rate), TWO, chunks=4) as pipe:
        with pytest.raises(ValueError, match="writes to its input 'x' in place, and the input 'y'"):
            pipe(x, view(x))
        assert torch.equal(x, given)
        pipe(x, x.clone())  # another memory


def test_the_same_once_it_has_been_compiled_for_inputs_of_their_own():
    x = torch.rand(8, 6)
    with fxpipe.compile(Shifts(), TWO, chunks=4, loss_fn=F.mse_loss) as pipe:
        pipe(x, x.clone())
        with pytest.raises(ValueError, match=r"Give y.clone\(\)"):
            pipe(x, x[:, :3])
        with pytest.raises(ValueError, match=r"Give y.clone\(\)"):
            pipe.step(x, x[:, :3], target=torch.zeros(8, 5))


@pytest.mark.parametrize("target", [lambda x: x, lambda x: x[:], lambda x: x.detach()])
def test_a_target_with_the_memory_of_an_input_that_is_written_to_is_refused(target):
    x = torch.rand(8, 6)
    with fxpipe.compile(Normalises(), TWO, chunks=4, loss_fn=F.mse_loss) as pipe:
        with pytest.raises(
            ValueError, match=r"and the target has the same memory: .* target.clone"
        ):
            pipe.step(x, target=target(x))
        pipe.step(x, target=x.clone())


def test_parts_of_one_memory_that_do_not_overlap_are_inputs_like_others():
    torch.manual_seed(0)
    model = Shifts()
    loop = copy.deepcopy(model)
    memory = torch.rand(2, 8, 6)
    other = memory.clone()
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        outputs = pipe(*memory)
        columns = torch.rand(8, 12)
        pipe(columns[:, :6], columns[:, 6:])
    pairs = zip(*(half.chunk(4) for half in other), strict=True)
    assert same(outputs, torch.cat([loop(*pair) for pair in pairs]))
    assert torch.equal(memory, other)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_one_tensor_for_two_arguments_is_written_to(tracer):
    torch.manual_seed(0)
    model = Shifts()
    loop = copy.deepcopy(model)
    x = torch.rand(8, 6)
    other = x.clone()
    with fxpipe.compile(model, TWO, chunks=4, tracer=tracer) as pipe:
        outputs = pipe(x, x)
    assert same(outputs, torch.cat([loop(part, part) for part in other.chunk(4)]))
    assert torch.equal(x, other)


class Remembers(Normalises):
    """Adds what it has been given first."""

    def __init__(self, first):
        super().__init__()
        self.register_buffer("first", first)

    def forward(self, x):
        return super().forward(x) + self.first


def test_an_input_with_the_memory_of_a_buffer_is_refused():
    x = torch.rand(8, 6)
    with fxpipe.compile(Remembers(x[0]), TWO, chunks=4) as pipe:
        with pytest.raises(ValueError, match="and the model's 'first' has the same memory"):
            pipe(x)
        pipe(x.clone())
