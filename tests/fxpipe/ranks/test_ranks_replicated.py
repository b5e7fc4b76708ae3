"""Replicas of a pipeline of ranks train, on other rows each, as one process does on all of them."""

from __future__ import annotations

import pytest
import torch

from tests.fxpipe.ranks import replicated
from tests.fxpipe.ranks.jobs import Call, made
from tests.fxpipe.ranks.replicated import expected, mean_of_positives, positives
from tests.zoo import Chain, Tied, UNet, mean_loss, same

pytestmark = pytest.mark.one_thread  # as each rank has


def six() -> Chain:
    return Chain(6, {0: (4,), 1: (5,)})


def halves(shape: tuple[int, ...], *rows: int) -> tuple[Call, Call]:
    """A batch, of which the two replicas have so many rows."""
    return tuple(Call((torch.randn(count, *shape),), torch.randn(count)) for count in rows)


def assert_same(found, reference):
    for _, rank in found:
        assert same(rank.losses, reference.losses)
    for number in range(2):
        for what in ("grads", "state"):
            own = [getattr(rank, what) for replica, rank in found if replica == number]
            assert len(own) == 2 and not own[0].keys() & own[1].keys()
            together, whole = own[0] | own[1], getattr(reference, what)
            assert together.keys() == whole.keys()
            assert [name for name in whole if not same(together[name], whole[name])] == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("names", [("dp", "pp"), ("pp", "dp")])
def test_replicas_with_different_rows_train_as_one_process_with_all_rows(pool, names):
    """Seven rows here and five there, all of one weight; the norm of all gradients is clipped."""
    batches = [halves((3, 8, 8), 7, 5) for _ in range(2)]
    options = {"schedule": "1f1b", "how": {"max_grad_norm": 0.1}}
    found = pool.run(replicated.train, UNet, names, batches, **options)
    assert_same(found, expected(UNet, batches, max_norm=0.1))


def test_each_stage_of_a_rank_is_reduced_and_stepped_once(pool):
    batches = [halves((3,), 6, 6) for _ in range(2)]
    options = {"schedule": "interleaved_1f1b", "stages": 4, "how": {}}
    options["partition"] = ["b", "d", "e"]
    found = pool.run(replicated.train, six, ("dp", "pp"), batches, **options)
    assert_same(found, expected(six, batches))


def test_gradients_of_earlier_steps_are_not_summed_over_replicas_again(pool):
    batches = [halves((3,), 6, 3) for _ in range(2)]
    options = {"schedule": "1f1b", "is_accumulated": True}
    found = pool.run(replicated.train, six, ("dp", "pp"), batches, **options)
    assert_same(found, expected(six, batches, is_stepped=False, is_accumulated=True))


def test_a_loss_weight_counts_what_all_replicas_have(pool):
    """One replica has no positive target at all, so that its own loss would be 0 / 0."""
    first, second = halves((3,), 6, 6)
    second.target.clamp_(max=0)
    batches = [(first, second)]
    options = {"loss_fn": mean_of_positives, "loss_weight": positives, "schedule": "1f1b"}
    found = pool.run(replicated.train, six, ("dp", "pp"), batches, **options)
    wanted = {"loss_fn": mean_of_positives, "weigh": positives, "is_stepped": False}
    assert_same(found, expected(six, batches, **wanted))


def test_ranks_that_are_in_different_numbers_of_groups_meet_in_a_new_one(pool):
    call = Call((torch.randn(6, 3),), torch.randn(6))
    first, second, *others = pool.run(replicated.of_two, call)
    assert others == [None, None]
    with replicated.compiled_of(made(replicated.four), 2, mean_loss, call) as pipe:
        expected = [pipe.step(*call.args, target=call.target)]
    assert same(first, expected) and same(second, expected)


def test_the_norm_of_all_gradients_counts_a_tied_weight_once(pool):
    call = Call((torch.randint(11, (6, 4)),), torch.randn(6))
    norm, whole = replicated.clipped(2, Tied, call, 0.1)
    found = pool.run(replicated.clipped, Tied, call, 0.1, ranks=2)
    assert norm > 0.1
    assert all(same(each, norm) for each, _ in found)
    assert same(found[0][1] | found[1][1], whole)


@pytest.mark.parametrize("where", ["a forward", "d backward"])
def test_a_replica_that_fails_ends_the_step_of_all_replicas(pool, where):
    call = Call((torch.randn(6, 3),), torch.randn(6))
    found = pool.run(replicated.failing, where, call)
    failed = f"rank {int(where[0] == 'd')} of replica 1 failed: ValueError: it is broken"
    for said, is_there in found:
        first, again = said
        if "ValueError: it is broken" in first[: len("ValueError: it is broken")]:
            assert is_there
        else:
            assert first.startswith("RankError: ") and "ValueError: it is broken" in first
            assert is_there or failed in first
        assert "start the processes again" in again
