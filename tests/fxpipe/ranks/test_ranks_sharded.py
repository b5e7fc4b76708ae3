"""Replicas whose parameters are in shards train as one process does that has all rows."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from fxpipe.schedule import Schedule
from tests.fxpipe.ranks import sharded
from tests.fxpipe.ranks.checkpoints import FLAT, resume
from tests.fxpipe.ranks.jobs import Call, made
from tests.fxpipe.ranks.replicated import CHUNKS, expected
from tests.fxpipe.ranks.sharded import Blocks
from tests.zoo import same

pytestmark = pytest.mark.one_thread  # as each rank has


def batches(*rows: int) -> list[tuple[Call, Call]]:
    """Two batches, of which the two replicas have so many rows."""
    return [
        tuple(Call((torch.randn(count, 3),), torch.randn(count)) for count in rows)
        for _ in range(2)
    ]


def assert_same(found, reference, calls):
    for _, rank, names in found:
        assert same(rank.losses, reference.losses)
        assert names and all(name.startswith("blocks.") for name in names)
    for number in range(2):
        for what in ("grads", "state"):
            own = [getattr(rank, what) for replica, rank, _ in found if replica == number]
            assert len(own) == 2 and not own[0].keys() & own[1].keys()
            together, whole = own[0] | own[1], getattr(reference, what)
            assert together.keys() == whole.keys()
            assert [name for name in whole if not same(together[name], whole[name])] == []
    model = made(Blocks)
    model.load_state_dict(reference.state)
    for replica, rank, _ in found:
        (x,) = calls[-1][replica].args
        assert same(rank.output, torch.cat([model(part) for part in x.tensor_split(CHUNKS)]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_replicas_with_shards_train_as_one_process_with_all_rows(pool, schedule):
    """Seven rows here and five there, and five features, which do not divide by two. The sum of two
    replicas' gradients has the same bits in any order."""
    calls = batches(7, 5)
    found = pool.run(sharded.train, calls, {}, schedule=schedule)
    assert_same(found, expected(Blocks, calls), calls)


RECOMPUTED_AHEAD = """
    0F0 0F1 0R1 0F2 0R0 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "schedule", ["1f1b", Schedule.from_text(RECOMPUTED_AHEAD)], ids=["1f1b", "own"]
)
def test_where_fully_shard_is_told_to_reshard_parameters_are_gathered_for_each_action(
    pool, schedule
):
    calls = batches(6, 6)
    options = {"schedule": schedule, "checkpoint": "except_last"}
    sharding = {"reshard_after_forward": True}
    found = pool.run(sharded.train, calls, {}, sharding=sharding, **options)
    assert_same(found, expected(Blocks, calls), calls)


def test_checkpoints_and_gradients_of_earlier_steps(pool):
    """Two stages on each rank, in two segments, which are run again; gradients add up."""
    calls = batches(6, 6)
    options = {"schedule": "interleaved_1f1b", "stages": 4, "checkpoint": "always"}
    options["partition"] = [f"blocks.{number}.norm" for number in (1, 2, 3)]
    options["checkpoint_segments"] = 2
    found = pool.run(sharded.train, calls, None, is_accumulated=True, **options)
    assert_same(found, expected(Blocks, calls, is_stepped=False, is_accumulated=True), calls)


def test_what_replicas_with_shards_have_saved_is_loaded_by_the_plain_model(pool, tmp_path):
    calls, folder = batches(6, 3), str(tmp_path / "saved")
    found = pool.run(sharded.train, calls, {"zero_grad": True}, written=folder)
    model = made(Blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    resume(model, optimizer, folder, no_dist=True)
    reference = expected(Blocks, calls)
    assert same(dict(model.state_dict()), dict(reference.state))
    assert all(same(rank.losses, reference.losses) for _, rank, _ in found)
    _, moments = get_state_dict(model, optimizer, options=FLAT)
    assert moments["state.blocks.3.linear.weight.exp_avg"].count_nonzero() > 20


def test_gradients_are_unscaled_and_clipped_by_the_norm_of_all_shards(pool):
    """The norm is that of the model up to the order in which squares are summed."""
    calls = batches(7, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    found = pool.run(sharded.train, calls, {"max_grad_norm": 0.1, "scaler": scaler})
    reference = expected(Blocks, calls, max_norm=0.1)
    for _, rank, _ in found:
        torch.testing.assert_close(rank.losses, reference.losses)
        for what in "grads", "state":
            own = getattr(rank, what)
            wanted = {name: getattr(reference, what)[name] for name in own}
            torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)


def test_shards_that_a_pipeline_cannot_gather_for_a_stage_are_refused(pool):
    (call, _), _ = batches(6, 6)
    for said in pool.run(sharded.refusals, call):
        mixed, offloaded, elsewhere, without_replicas, on_meta, whole, shared, lanes = said
        assert "'blocks.0' has been given to fully_shard with the policies" in mixed
        assert "leave out mp_policy= and offload_policy=" in mixed
        assert "leave out mp_policy= and offload_policy=" in offloaded
        assert 'give fully_shard(mesh=mesh["dp"]) the dimension' in elsewhere
        assert "compile for a mesh of two dimensions" in without_replicas
        assert "give the model values first" in on_meta
        assert "is gathered as a whole, and its parameters are in the stages 0 and 1" in whole
        assert "has a weight that several stages share" in shared
        assert "compile it for the ranks of a mesh" in lanes
