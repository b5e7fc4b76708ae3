"""Each rank shows what it runs, and what all ranks send each other."""

from __future__ import annotations

import pytest
import torch

from tests.fxpipe.ranks import jobs
from tests.fxpipe.ranks.jobs import Call
from tests.zoo import Chain

pytestmark = pytest.mark.one_thread  # as each rank has


def four() -> Chain:
    return Chain(4)


def test_ranks_draw_their_own_program_and_that_of_all(pool):
    call = Call((torch.randn(6, 3),), torch.randn(6))
    found = pool.run(jobs.drawn, four, call, chunks=2, schedule="1f1b", partition=["b", "c", "d"])
    pictures = [everything for _, everything, _, _ in found]
    assert len(set(pictures)) == 1 and "rank 3 · stage 3" in pictures[0]
    for rank, (own, _, report, said) in enumerate(found):
        assert f"rank {rank} · stage {rank}" in own and "· stage" in own
        assert own.count("· stage") == 1
        assert "transfers of a step, from rank to rank: 0 to 1: 2, 1 to 0: 2" in report
        assert "there has been no training step yet" in said
