"""Gradients are scaled and clipped on ranks as they are in one process, bit by bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.fxpipe.ranks.jobs import Call, clipped, scaled
from tests.zoo import Chain, same

pytestmark = pytest.mark.one_thread  # as each rank has


def calls() -> list[Call]:
    return [Call((torch.randn(7, 3),), torch.randn(7)) for _ in range(4)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layer", ["a", "d"])
def test_a_gradient_that_is_inf_on_one_rank_skips_the_step_on_all_and_scales_stay_equal(
    pool, layer
):
    """The third of four stages has no parameters, so that its rank has no optimizer."""
    batches = calls()
    found = pool.run(scaled, layer, batches, None)
    after, parameters = scaled(4, layer, batches, None)
    assert [state["scale"] for *_, state in after] == [8.0, 4.0, 4.0, 8.0]
    losses = [loss for loss, *_ in after]
    assert all(same([loss for loss, *_ in rank], losses) for rank, _ in found)
    assert all([s for *_, s in rank] == [s for *_, s in after] for rank, _ in found)
    assert same({n: p for _, own in found for n, p in own.items()}, parameters)


def test_gradients_are_unscaled_on_all_ranks_before_they_are_clipped(pool):
    batches = calls()
    found = pool.run(scaled, "a", batches, 0.1, ranks=2)
    after, parameters = scaled(2, "a", batches, 0.1)
    norms = [norm for _, norm, _ in after]
    assert norms[0] > 0.1 and not norms[1].isfinite()
    for rank, _ in found:
        torch.testing.assert_close(
            [norm for _, norm, _ in rank], norms, rtol=0, atol=0, equal_nan=True
        )
    assert same({n: p for _, own in found for n, p in own.items()}, parameters)


def test_a_parameter_of_the_loss_is_clipped_by_the_norm_of_all_ranks(pool):
    call = Call((torch.randn(6, 3),), torch.randn(6))
    make = partial(Chain, 4)
    norm, scale, state = clipped(2, make, call)
    (first, last) = pool.run(clipped, make, call, ranks=2)
    assert same([first[0], last[0], last[1]], [norm, norm, scale])
    assert same({**first[2], **last[2]}, state)
