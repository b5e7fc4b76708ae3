"""Autograd runs the backwards of the gates in the order that the verifier takes for granted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpipe import ops

CPU = "cpu/compute", "cpu/copy"


class Noted(torch.autograd.Function):
    """Notes when its backward runs."""

    @staticmethod
    def forward(ctx, x, name, order):
        ctx.name, ctx.order = name, order
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.order.append(ctx.name)
        return grad, None, None


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def backward(*values: Tensor) -> None:
    sum(value.sum() for value in values).backward()


def test_what_lies_behind_a_fork_waits_for_what_lies_behind_the_join():
    order: list[str] = []
    x, y = leaf(), leaf()
    y = Noted.apply(y, "ahead of the join", order)  # made first, so that autograd would run it last
    x = Noted.apply(x, "behind the fork", order)
    (x,), phony = ops.fork((x,))
    (y,) = ops.join((y,), phony)
    y = Noted.apply(y, "the stage of the join", order)
    backward(y, x)
    assert order.index("the stage of the join") < order.index("behind the fork")


def test_a_gate_lets_no_gradient_through_before_all_have_come():
    order: list[str] = []
    a, b = (Noted.apply(leaf(), f"before {name}", order) for name in "ab")
    a, b = ops.wait((a, b), *CPU)
    a, b = (Noted.apply(x, f"after {name}", order) for x, name in ((a, "a"), (b, "b")))
    backward(a, b)
    assert {*order[:2]} == {"after a", "after b"}


def test_a_recompute_comes_before_the_wait_that_is_ahead_of_it_and_before_its_stage():
    order: list[str] = []

    class StageSummary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            order.append("run")
            return torch.exp(x)

    x = leaf()
    x = Noted.apply(x, "the stage's input", order)
    y, handle = ops.checkpoint(StageSummary(), x)
    y = Noted.apply(y, "the wait", order)
    (y,) = ops.recompute((y,), handle)
    backward(y)
    assert order == ["run", "run", "the wait", "the stage's input"]


def test_a_portals_gradient_goes_from_its_opening_over_its_copy_to_its_source():
    order: list[str] = []
    x = Noted.apply(leaf(), "source", order)
    portal = ops.portal_copy(ops.portal_blue(x), "cpu/copy", "cpu/copy")
    y = Noted.apply(ops.portal_orange(portal), "consumer", order)
    backward(y)
    assert order == ["consumer", "source"]


def test_of_two_backwards_that_are_ready_the_one_that_was_made_last_runs_first():
    order: list[str] = []
    first, second = (Noted.apply(leaf(), name, order) for name in ("first", "second"))
    both = torch.stack((first, second))
    backward(both)
    assert order == ["second", "first"]
