"""What a step refuses, and what it says where something fails."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.schedule import Schedule
from tests.fxpipe.step.compiled import compiled
from tests.zoo import gradients, mean_loss, same


def test_an_array_of_another_library_is_refused_as_a_target():
    with compiled() as pipe, pytest.raises(TypeError, match=r"a numpy.ndarray of shape \(4,\)"):
        pipe.step(torch.randn(4, 12), target={"y": torch.randn(4).numpy()})


@pytest.mark.parametrize(
    "options, call, message",
    [
        (
            {"loss_fn": lambda o, t: o},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            r"the loss of micro-batch 0 is a tensor of shape \(1, 12\): a scalar tensor is needed",
        ),
        (
            {"loss_fn": lambda o, t: 3},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "the loss of micro-batch 0 is an int: a scalar",
        ),
        (
            {"loss_fn": lambda o, t: torch.view_as_complex(o.reshape(-1, 2)).mean()},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "the loss of micro-batch 0 is of torch.complex64: a real number is needed",
        ),
        (
            {"loss_fn": lambda o, t: o.detach().sum()},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "does not depend on any parameter",
        ),
        (
            {},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(5)),
            r"the target has a tensor of shape \(5,\), and the batch has 4 rows",
        ),
        (
            {"loss_fn": None},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "a target is given, but no loss_fn",
        ),
        (
            {},
            lambda p: p.measure(torch.randn(4, 12), target=torch.randn(4), rounds=0),
            "rounds is 0: give the number of steps to measure, 1 or more",
        ),
        (
            {"schedule": Schedule.from_text("0F0 0B0 \n 1B0 1F0"), "chunks": 1},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "deadlock: lane 1 waits",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, call, message):
    with compiled(**options) as pipe, pytest.raises(ValueError, match=message):
        call(pipe)


class Fails(nn.Module):
    """Fails in its third backward."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(Third.apply(self.a(x))))


class Third(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Fails.count += 1
        if Fails.count == 3:
            raise ArithmeticError("the third time")
        return grad


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_a_backward_that_fails_is_said_and_the_next_step_works(schedule):
    model, x, target = Fails(), torch.randn(8, 12), torch.randn(8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=mean_loss) as pipe:
        Fails.count = 100
        pipe.step(x, target=target)
        wanted = gradients(model)
        Fails.count = 0
        with pytest.raises(ArithmeticError, match="the third time") as caught:
            pipe.step(x, target=target)
        assert "stage" in caught.value.__notes__[0] and "micro-batch 2" in caught.value.__notes__[0]
        model.zero_grad()
        Fails.count = 100
        pipe.step(x, target=target)
    assert same(gradients(model), wanted)


def test_where_the_target_has_been_forgotten_the_error_says_so():
    with compiled() as pipe, pytest.raises(TypeError) as caught:
        pipe.step(torch.randn(4, 12))
    assert caught.value.__notes__[0] == (
        "step() was given no target=, so that loss_fn was called with None for it: give step(x, "
        "target=y)"
    )


def test_where_the_target_is_given_without_its_name_the_error_says_so():
    with compiled() as pipe, pytest.raises(TypeError, match="too many positional") as caught:
        pipe.step(torch.randn(4, 12), torch.randn(4))
    assert caught.value.__notes__ == ["the target is given by its name: step(x, target=y)"]


def test_in_inference_mode_there_is_no_step():
    with compiled() as pipe, torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        pipe.step(torch.randn(4, 12), target=torch.randn(4))


def test_without_gradients_there_is_no_step():
    with compiled() as pipe:
        before = gradients(pipe.module)
        with torch.no_grad(), pytest.raises(RuntimeError, match="outside of no_grad"):
            pipe.step(torch.randn(4, 12), target=torch.randn(4))
        assert same(gradients(pipe.module), before), "none"
        with torch.no_grad():  # which leaves the gradients as they are
            pipe.measure(torch.randn(4, 12), target=torch.randn(4), rounds=1)
        assert same(gradients(pipe.module), before)
