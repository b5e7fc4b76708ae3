"""A rank that is killed ends the others, and torchrun starts all again from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.fxpipe.ranks.restarted import CHUNKS, KILLED_IN, STEPS, batches, model
from tests.zoo import mean_loss

pytestmark = pytest.mark.one_thread  # as each rank has


def test_training_goes_on_from_the_last_checkpoint_with_the_same_losses(tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    command += ["--max-restarts", "1", "-m", "tests.fxpipe.ranks.restarted", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Otherwise torchrun keeps its store, in which gloo finds the addresses of ended processes.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            loss = mean_loss(net(part), target)
            loss.backward(torch.full_like(loss, 1 / CHUNKS))
            total = total + loss.detach() * (1 / CHUNKS)
        optimizer.step()
        attempt = int(number >= KILLED_IN)
        assert (tmp_path / f"loss_{number}").read_text() == f"{attempt} {total.item().hex()}"
    assert number == STEPS - 1

    said = {rank: (tmp_path / f"error_0_{rank}").read_text() for rank in (0, 2)}
    for text in said.values():
        assert text.startswith("RankError: ") and "lost rank 1" in text
    assert "stage 2, micro-batch" in said[2]
