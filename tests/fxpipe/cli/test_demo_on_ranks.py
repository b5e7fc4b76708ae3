"""The demo over processes that torchrun has started."""

from __future__ import annotations

import os
import re
import subprocess
import sys


def test_the_demo_runs_over_the_processes_of_torchrun_with_the_bits_of_one_process(tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "fxpipe", "demo", "--steps", "3", "--out", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "A U-Net on 2 ranks, 3 steps" in done.stdout
    assert len(re.findall(r"largest difference of .*: 0\.0e\+00", done.stdout)) == 2, done.stdout
    first, last = ((tmp_path / f"rank_{i}.txt").read_text() for i in range(2))
    assert "transmit(transport, " in first and "loss(loss_module" not in first
    assert "receive(transport, (0, 1), 0)" in last and "loss_backward" in last
