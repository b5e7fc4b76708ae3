"""A rank that ends or hangs ends the others, and torchrun starts all again from the last
checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.fxpipe.ranks.faults import SIZE, ended
from tests.fxpipe.ranks.restarted import TIMEOUT, Fault, expected_losses, losses_in

pytestmark = pytest.mark.one_thread  # as each rank has


@pytest.mark.parametrize(
    "kind, where, microbatch",
    [
        pytest.param("raise", "transfer", 1, marks=pytest.mark.long),
        pytest.param("exit", "backward", 2, marks=pytest.mark.long),
        ("SIGKILL", "forward", 0),
        pytest.param("SIGSTOP", "forward", 1, marks=pytest.mark.long),  # waits for the timeout
    ],
)
def test_a_fault_of_a_rank_ends_all_others_soon_with_an_error_that_names_it(
    kind, where, microbatch
):
    """Then training goes on from the last checkpoint with the same losses.

    python -m tests.fxpipe.ranks.faults prints all kinds, places and micro-batches."""
    found = ended(Fault(kind, where, microbatch), is_restarted=True)
    assert found.blamed == [1, 1, 1], found.said
    assert found.seconds < (2 if kind == "SIGSTOP" else 1) * TIMEOUT.total_seconds()
    assert any(f"stage 1, micro-batch {microbatch}" in text for text in found.said.values())
    assert kind == "raise" or any("of the edge (1, " in text for text in found.said.values())
    assert found.losses == expected_losses(SIZE)


def torchrun(ranks: int, *args: str) -> subprocess.Popen[str]:
    """Start the training script on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--standalone", "--max-restarts", "1", "-m", "tests.fxpipe.ranks.restarted", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Otherwise torchrun keeps its store, in which gloo finds the addresses of ended processes.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    env["FXPIPE_FAULTS_TIMEOUT"] = "60"
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.long  # that it goes on is tested above, where no torchrun starts the ranks again
def test_training_goes_on_from_the_last_checkpoint_with_the_same_losses(tmp_path):
    process = torchrun(2, str(tmp_path), "SIGKILL", "forward", "1")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors

    assert losses_in(tmp_path) == expected_losses(2)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ctrl_c_ends_all_ranks_of_a_step_that_hangs(tmp_path, ranks):
    """Rank 1 hangs in the last step, and the others wait for it, when the user interrupts."""
    process = torchrun(ranks, str(tmp_path), "hang", "forward", "1")
    deadline = time.monotonic() + 120
    while not (tmp_path / "fault").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - started < 29  # torchrun kills what has not ended after 30 s
    for rank in range(ranks):
        assert "KeyboardInterrupt" in (tmp_path / f"error_0_{rank}").read_text()
