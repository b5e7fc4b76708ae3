"""An optimizer that steps stage by stage does what its own step does after the backward."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fxpipe
from fxpipe.runtime.optimizer import Stepping
from tests.zoo import MLP, same


def trained(make, within, *, steps=3, loss_fn=None, prepare=lambda *_: None):
    """A model after some steps, the optimizer's taken within the pipeline's or after them."""
    torch.manual_seed(0)
    model, loss_fn = MLP(), copy.deepcopy(loss_fn) or (lambda out, _: out.square().mean())
    own = [*model.parameters(), *(loss_fn.parameters() if isinstance(loss_fn, nn.Module) else ())]
    optimizer = make(own)
    prepare(model, optimizer)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3, schedule="1f1b", loss_fn=loss_fn) as pipe:
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.step(torch.randn(6, 12), optimizer=optimizer if within else None)
            if not within:
                optimizer.step()
    return [p.detach() for p in own], optimizer


def state_of(optimizer):
    """What its state dict has, in order."""
    state = optimizer.state_dict()
    return [(i, list(own.items())) for i, own in state["state"].items()], state["param_groups"]


@pytest.mark.parametrize("make", [functools.partial(SGD, lr=0.1, momentum=0.9), AdamW])
def test_parameters_and_state_are_those_of_a_step_afterwards(make):
    (found, ours), (wanted, theirs) = trained(make, True), trained(make, False)
    assert same(found, wanted)
    assert same(state_of(ours), state_of(theirs)), "also in their order"


def test_hooks_see_all_gradients_before_and_all_parameters_after_once_a_step():
    def clip_and_log(model, optimizer):
        seen = []
        optimizer.seen = seen

        def before(own, args, kwargs):
            assert own is optimizer and not kwargs
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            seen.append(("before", norm, sum(p.sum() for p in model.parameters()).detach()))

        def after(own, *_):
            assert own is optimizer
            seen.append(("after", sum(p.sum() for p in model.parameters()).detach()))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    make = functools.partial(SGD, lr=0.1)
    (found, ours), (wanted, theirs) = (
        trained(make, within, prepare=clip_and_log) for within in (True, False)
    )
    assert same(found, wanted)
    assert same(ours.seen, theirs.seen) and len(ours.seen) == 6


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_hooks_on_all_optimizers_fire_once_a_step(register):
    called = []
    handle = register(lambda own, *_: called.append(own))
    try:
        _, optimizer = trained(SGD, True)
    finally:
        handle.remove()
    assert called == [optimizer] * 3


class Normalized(SGD):
    """Looks at all gradients together, and keeps count."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in gradients]).norm()
        for grad in gradients:
            grad /= norm * self.steps
        return super().step(closure)


def test_one_of_a_users_own_steps_as_it_is():
    (found, ours), (wanted, theirs) = trained(Normalized, True), trained(Normalized, False)
    assert same(found, wanted) and ours.steps == theirs.steps == 3


def test_a_step_that_has_been_wrapped_is_called_as_it_is():
    def wrap(_, optimizer):
        step, optimizer.calls = optimizer.step, []
        optimizer.step = lambda: (optimizer.calls.append(1), step())

    (found, ours), (wanted, _) = (trained(SGD, w, prepare=wrap) for w in (True, False))
    assert same(found, wanted) and ours.calls == [1, 1, 1]


def test_what_no_stage_has_is_stepped_too():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, output, _):
            return (output.square() * self.weight).mean()

    def group_of_its_own(_, optimizer):
        *own, last = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = own
        optimizer.add_param_group({"params": [last], "lr": 0.5})

    loss_fn = Weighted()
    (found, _), (wanted, _) = (
        trained(Adam, within, loss_fn=loss_fn, prepare=group_of_its_own) for within in (True, False)
    )
    assert same(found, wanted) and not same(found[-1], torch.ones(12))


def test_groups_are_what_they_are_when_the_step_comes():
    def freeze(_, optimizer):
        optimizer.register_state_dict_post_hook(lambda own, state: state | {"mine": 1})
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
        optimizer.param_groups[0]["weight_decay"] = 0.3

    (found, ours), (wanted, theirs) = (trained(Adam, w, prepare=freeze) for w in (True, False))
    assert same(found, wanted) and ours.state_dict()["mine"] == 1
    assert same(state_of(ours), state_of(theirs))


def test_a_part_is_stepped_at_once_and_the_rest_at_the_end():
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    for p in (a, b, c):
        p.grad = torch.ones(2)
    stepping = Stepping([SGD([a, b], lr=1.0)], [a, b])
    stepping.part([a, c])
    assert same([a.tolist(), b.tolist(), c.tolist()], [[-1, -1], [0, 0], [0, 0]])
    stepping.finish()
    assert same([a.tolist(), b.tolist(), c.tolist()], [[-1, -1], [-1, -1], [0, 0]])


def test_a_parameter_beside_the_model_is_there_once_whatever_holds_it() -> None:
    own, beside = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [torch.optim.SGD(held, lr=0.1) for held in ([own, beside], [beside])]
    (found,) = Stepping(optimizers, [own]).others
    assert found is beside
