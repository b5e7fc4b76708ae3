"""Tensor-parallel stages train as the tensor-parallel model does by itself, bit by bit."""

from __future__ import annotations

import pytest
import torch

from tests.fxpipe.ranks import parted
from tests.fxpipe.ranks.jobs import Call, made
from tests.fxpipe.ranks.parted import WORDS, Decoders, looped

pytestmark = pytest.mark.one_thread  # as each rank has


def calls(count: int) -> list[Call]:
    return [Call((torch.randint(WORDS, (6, 5)),), torch.randn(6)) for _ in range(count)]


def test_two_stages_of_two_ranks_train_as_the_model_in_parts_and_near_the_plain_model(pool):
    batches = calls(1)
    found = pool.run(parted.train, batches, {})
    assert all(not any(differ.values()) for differ, _, _ in found), [each[0] for each in found]
    model = made(Decoders)
    (batch,) = batches
    loss = looped(model, batch)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set().union(*(own for _, own, _ in found)) == set(grads)
    for _, own, losses in found:
        torch.testing.assert_close(losses, [loss])
        torch.testing.assert_close(own, {name: grads[name] for name in own})


def test_gradients_in_parts_are_clipped_by_the_norm_of_all(pool):
    batches = calls(2)
    model = made(Decoders)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for call in batches:
        optimizer.zero_grad()
        looped(model, call)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert norm > 0.1
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _, own, _ in pool.run(parted.train, batches, {"max_grad_norm": 0.1}):
        wanted = {name: grads[name] for name in own}
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-6)


def test_ranks_with_parts_of_the_same_parameters_drop_the_same_values_out(pool):
    (call,) = calls(1)
    whole = pool.run(parted.dropping, call, "whole", ranks=2)[0]
    assert whole[0] != whole[1]
    for losses in pool.run(parted.dropping, call, "parts"):
        torch.testing.assert_close(losses, whole)
    for (said,) in pool.run(parted.dropping, call, "seeds"):
        assert said.startswith("RankError: the ranks that have parts of the same parameters would")


def test_parts_on_other_ranks_than_the_mesh_says_are_refused(pool):
    (call,) = calls(1)
    for alone, replicas, lanes, measured in pool.run(parted.refusals, call):
        for said in alone, replicas:
            assert said.startswith("ValueError: blocks.0.q.weight is in parts on the ranks [")
            assert 'and "tp" for the parts' in said
        assert "would mix up the collectives of such modules" in lanes
        assert "costs cannot be measured where several ranks have parts" in measured
