"""Where costs are measured, the loss is, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fxpipe
from fxpipe.ir.devices import CPU_CORE
from fxpipe.ir.load import Load
from fxpipe.planning import loss_timer
from fxpipe.planning.loss import ExpectedLoss, SavedByLoss
from fxpipe.planning.loss_timer import MeasuredLoss
from tests.fxpipe.planning.test_loss import (
    CLASSES,
    LABELS,
    LOGITS,
    TOKENS,
    Language,
    OneSize,
    compiled,
    cross_entropy,
    seconds_of_loss,
)

SECONDS = {"loss": 0.25, "backward": 0.5}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock by which each call takes as long as it is said to."""

    class Timer:
        def time(self, key, run):
            return run(), SECONDS[key]

    monkeypatch.setattr(loss_timer, "timer_of", lambda device: Timer())


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", [Language, OneSize])
@pytest.mark.parametrize("target", [LABELS, LABELS.to("meta")])
def test_the_loss_of_one_micro_batch_is_measured(model, target):
    seen = []
    note = seen.append  # a list that a loss reaches gets back what it had

    def loss_fn(output, labels):
        if not isinstance(labels, torch._subclasses.FakeTensor):
            note((tuple(output["logits"].shape), tuple(labels.shape)))
        return cross_entropy(output, labels)

    options = {"example_inputs": (TOKENS,), "example_target": target, "tracer": "export"}
    with compiled(model=model(), loss_fn=loss_fn, costs="measured", **options) as pipe:
        found = seconds_of_loss(pipe.timeline())
    assert set(seen) == {((4, 8, CLASSES), (4, 8))}
    assert found == [[pytest.approx(0.25)] * 4, [pytest.approx(0.5)] * 4]


def test_a_plan_by_measured_costs_has_the_measured_loss():
    plan = fxpipe.plan(
        Language(),
        ["a100"] * 2,
        example_inputs=(TOKENS,),
        chunks=4,
        costs="measured",
        loss_fn=cross_entropy,
        example_target=LABELS,
    )
    assert seconds_of_loss(plan.timeline) == [[pytest.approx(0.25)] * 4, [pytest.approx(0.5)] * 4]


def probabilities(output, target):
    rows = output["logits"].mean(-1)
    return F.binary_cross_entropy(rows, target.float() / LABELS.numel())


def classes(output, target):
    return F.nll_loss(output["logits"].flatten(0, 1), target.flatten())


def masked(output, target):
    return output["logits"][target["mask"]].mean()


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [(probabilities, LABELS), (classes, LABELS), (masked, {"mask": LABELS > 5})],
)
def test_every_loss_takes_the_numbers_that_it_is_measured_with(loss_fn, target):
    expected = ExpectedLoss(loss_fn, target, lambda output: {"logits": output})
    graph, cpu = fx.Graph(), torch.device("cpu")
    logits = graph.placeholder("logits")
    logits.meta["val"] = torch.empty(16, 8, CLASSES, device="meta", requires_grad=True)
    graph.output(logits)
    measured = MeasuredLoss(expected, (16, 4), cpu, CPU_CORE)
    known = SavedByLoss(frozenset(), 0, LOGITS, 0, Load(bytes=1000), Load(bytes=1000))
    assert measured(known, graph).slower != (1.0, 1.0)


def test_what_does_not_run_on_such_numbers_has_its_estimated_time():
    def loss_fn(output, target):
        if not isinstance(target, torch._subclasses.FakeTensor):
            raise ValueError("these are no labels")
        return cross_entropy(output, target)

    options = {"example_inputs": (TOKENS,), "loss_fn": loss_fn}
    times = []
    for costs in "measured", "analytic":
        with compiled(costs=costs, **options) as pipe:
            times.append(seconds_of_loss(pipe.timeline()))
    assert times[0] == list(map(pytest.approx, times[1]))
    assert times[0][0][0] > 0


def test_what_is_no_loss_is_left_to_the_step_that_refuses_it():
    pipe = compiled(
        loss_fn=lambda output, target: output["logits"], costs="measured", example_inputs=(TOKENS,)
    )
    with pipe, pytest.raises(ValueError, match="a scalar tensor is needed"):
        pipe.step(TOKENS, target=LABELS)


def test_a_loss_that_takes_long_is_measured_once(monkeypatch):
    monkeypatch.setattr(loss_timer, "BUDGET_S", -1.0)
    calls = []
    note = calls.append  # a list that a loss reaches gets back what it had

    def loss_fn(output, target):
        note(not isinstance(target, torch._subclasses.FakeTensor))
        return cross_entropy(output, target)

    with compiled(loss_fn=loss_fn, costs="measured", example_inputs=(TOKENS,)) as pipe:
        assert seconds_of_loss(pipe.timeline())[0] == [pytest.approx(0.25)] * 4
    assert sum(calls) == 1


def test_random_numbers_that_a_loss_draws_are_put_back():
    def loss_fn(output, target):
        return cross_entropy({"logits": F.dropout(output["logits"])}, target)

    model, state = Language(), torch.get_rng_state()
    compiled(model=model, loss_fn=loss_fn, costs="measured", example_inputs=(TOKENS,)).close()
    assert torch.equal(torch.get_rng_state(), state)
