"""A rank has memory for its own stages only; what ranks have saved is loaded by any others."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.fxpipe.ranks import checkpoints
from tests.fxpipe.ranks.checkpoints import FLAT, Net, on_meta, resume, trained
from tests.fxpipe.ranks.jobs import Call, made
from tests.zoo import same

pytestmark = pytest.mark.one_thread  # as each rank has


def calls(count: int) -> list[Call]:
    return [Call((torch.randint(9, (6, 4)),), torch.randn(6)) for _ in range(count)]


def together(parts, what):
    """What all ranks have, by name; a name that several have has one value."""
    whole = {}
    for part in parts:
        for name, value in getattr(part, what).items():
            assert name not in whole or same(whole[name], value)
            whole[name] = value
    return whole


def assert_same(parts, lanes):
    for part in parts:
        assert same(part.losses, lanes.losses)
    for what in ("grads", "state", "optimizer"):
        found, expected = together(parts, what), getattr(lanes, what)
        missing = expected.keys() - found.keys()
        # A pipeline of lanes has the unused parameter in its optimizer, as a rank 0 has.
        assert found.keys() <= expected.keys() and not missing
        assert [name for name in expected if not same(found[name], expected[name])] == []


def test_ranks_save_and_other_ranks_another_schedule_and_the_plain_model_go_on(pool, tmp_path):
    """Four ranks, each with memory for its own part of a model on "meta", train and save; two ranks
    and a plain model load that, with the state of AdamW, and go on, bit by bit."""
    torch.manual_seed(1)
    weights, first = str(tmp_path / "weights.pt"), str(tmp_path / "first")
    model = Net()
    model.scales.saved.normal_()
    torch.save(model.state_dict(), weights)
    batches = calls(3)

    four = pool.run(trained, on_meta, batches[:2], "1f1b", weights=weights, written=first)
    assert_same(four, trained(4, Net, batches[:2], "1f1b", weights=weights))
    assert all(part.left for part in four)
    has_embedding = ["embed.weight" in part.state for part in four]
    assert has_embedding == ["embed.weight" not in part.left for part in four]
    assert sum(has_embedding) == 1

    two = pool.run(trained, on_meta, batches[2:], "zb_h1", read=first, ranks=2)
    assert_same(two, trained(2, Net, batches[2:], "zb_h1", weights=weights, read=first))

    model = made(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    resume(model, optimizer, first, no_dist=True)
    state, flat = get_state_dict(model, optimizer, options=FLAT)
    saved = together(four, "state")
    assert saved.keys() == state.keys()
    assert all(same(saved[name], state[name]) for name in state)
    moments = together(four, "optimizer")
    assert all(same(moments[name], flat[name]) for name in moments)


def test_a_new_model_has_the_same_values_on_any_number_of_ranks(pool):
    (call,) = calls(1)
    four = pool.run(checkpoints.initialised, call)
    two = pool.run(checkpoints.initialised, call, ranks=2)
    whole = {name: value for part in four for name, value in part.items()}
    assert whole.keys() == Net().state_dict().keys()
    assert not torch.equal(whole["c.weight"], whole["d.weight"])  # on two of the four ranks
    assert all(same(whole[name], value) for part in two for name, value in part.items())


def test_a_model_on_meta_is_refused_unless_the_user_says_what_micro_batches_mean(pool):
    (call,) = calls(1)
    said = pool.run(checkpoints.refusals, call)
    for unchecked, unweighted, without_values in said:
        assert "give check=False here" in unchecked
        assert 'give loss_weight="rows" if the loss is a mean' in unweighted
        assert "load a checkpoint with pipe.load(path)" in without_values
