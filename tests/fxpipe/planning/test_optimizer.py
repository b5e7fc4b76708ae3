"""What an optimizer keeps is found by letting one of its kind take a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

import fxpipe
from fxpipe.ir.devices import DeviceSpec
from fxpipe.planning.optimizer import MANY, optimizer_states, optimizer_update
from passes.cost.update import Update
from tests.zoo import Chain


@pytest.mark.parametrize(
    ("given", "expected"),
    [("adamw", 2), ("Adam", 2), ("sgd", 0), ("adagrad", 1), (0.5, 0.5), (3, 3), (None, 7)],
)
def test_optimizers_are_given_by_name_or_by_how_much_they_keep(given, expected):
    assert optimizer_states(given, usual=7) == expected


def test_the_settings_of_an_optimizer_count():
    own = [nn.Parameter(torch.zeros(3))]
    assert optimizer_states(torch.optim.SGD(own, 0.1), 7) == 0
    assert optimizer_states(torch.optim.SGD(own, 0.1, momentum=0.9), 7) == 1
    assert optimizer_states(torch.optim.Adam(own, amsgrad=True), 7) == 3
    groups = [{"params": own}, {"params": [nn.Parameter(torch.zeros(3))], "momentum": 0.5}]
    assert optimizer_states(torch.optim.SGD(groups, 0.1), 7) == 1, "the most of any group"
    assert own[0].grad is None and not own[0].any(), "it has not been stepped"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("adamw", 1), ("Adam", 1), ("sgd", 0), ("adagrad", 2), (0, 0), (0.5, 0.5), (3, 1), (None, 1)],
)
def test_a_step_needs_more_while_it_runs(given, expected):
    assert optimizer_update(given).memory == expected


def test_the_settings_of_an_optimizer_count_for_what_its_step_needs():
    own = [nn.Parameter(torch.zeros(3))]
    assert optimizer_update(torch.optim.SGD(own, 0.1, momentum=0.9)).memory == 0
    decays = torch.optim.Adam(own, weight_decay=0.1)
    free = "gradients with the decay are free ahead of the roots"
    assert optimizer_update(decays).memory == 1, free
    assert optimizer_update(torch.optim.Adam(own, fused=True)).memory == 0
    one_by_one = torch.optim.Adam(own, foreach=False)
    some = "some for one parameter at a time"
    assert optimizer_update(one_by_one).memory <= 3 / MANY, some


def test_the_step_of_an_optimizer_takes_time():
    """A stochastic gradient descent reads gradients and parameters, and writes parameters."""
    update, h100, cpu = optimizer_update("sgd"), DeviceSpec.of("h100"), DeviceSpec.of("cpu")
    assert update == Update(memory=0, bytes=3, operators=1)
    size, count = 2**30, 100
    assert update.seconds(size, count, h100) == 3 * size / h100.bytes_per_s
    assert update.seconds(size, count, cpu) == 3 * size / cpu.bytes_per_s
    few = count * 4
    assert update.seconds(few, count, h100) == h100.launch_s, "all at once"
    assert update.seconds(few, count, cpu) == count * cpu.launch_s, "one by one"
    assert update.seconds(0, 0, h100) == 0
    own = [nn.Parameter(torch.zeros(3))]
    one_by_one = optimizer_update(torch.optim.SGD(own, 0.1, foreach=False))
    assert one_by_one == Update(memory=0, bytes=3, operators=1, is_at_once=False)
    fused = optimizer_update(torch.optim.Adam(own, fused=True))
    assert 7 <= fused.bytes < 9, "reads four tensors for each parameter, and writes three or four"


@pytest.mark.parametrize("given", [None, 2])
def test_an_optimizer_that_nobody_has_named_takes_no_time(given):
    assert optimizer_update(given) == Update(memory=1)


def test_an_optimizer_of_ones_own_is_counted_too():
    class Halves(Optimizer):
        """Keeps one tensor in 16 bits for each parameter, and counts its steps."""

        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = {"step": torch.tensor(1), "kept": [p.detach().bfloat16()]}

    assert optimizer_states(Halves([nn.Parameter(torch.zeros(3))]), 7) == 0.5


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("adm", ValueError, "optimizer is 'adm': give one of 'adadelta', "),
        (-1, ValueError, "optimizer is -1: give how many tensors it keeps, 0 or more"),
        ([1], TypeError, "optimizer is a list: give the name of a class of torch.optim"),
        ("sparseadam", TypeError, "SparseAdam cannot be made and stepped to count what it keeps"),
    ],
)
def test_what_is_no_optimizer_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        optimizer_states(given, 7)


def test_states_of_the_optimizer_are_in_plans_and_reports():
    model, x = Chain(4), torch.zeros(8, 3)
    options = {"example_inputs": (x,), "chunks": 2}
    states = [
        sum(s.state_bytes for s in fxpipe.plan(model, ["h100"] * 2, optimizer=o, **options).stages)
        for o in ("sgd", "adagrad", "adamw")
    ]
    own = sum(p.nbytes for p in model.parameters())
    assert states == [2 * own, 3 * own, 4 * own], "parameters, gradients, and the states"
    with fxpipe.compile(model, ["cpu"] * 2, optimizer="adagrad", **options) as pipe:
        assert sum(stage.cost.fixed_bytes for stage in pipe.stages) == 3 * own
        assert "memory of the lanes (predicted, with the states of adagrad): " in pipe.report()
