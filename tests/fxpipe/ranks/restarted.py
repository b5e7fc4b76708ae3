"""A training script for torchrun, which saves a checkpoint after each step and goes on from the
last one. In its first attempt the process of stage 1 is killed in the middle of a step.

    torchrun --nproc-per-node 3 --max-restarts 1 -m tests.fxpipe.ranks.restarted FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from tests.fxpipe.ranks.checkpoints import FLAT
from tests.zoo import Chain, mean_loss

STEPS, CHUNKS, KILLED_IN = 3, 3, 2


def batches() -> list[tuple[Tensor, Tensor]]:
    """The batches of all steps."""
    torch.manual_seed(4)
    return [(torch.randn(6, 3), torch.randn(6)) for _ in range(STEPS)]


def model() -> Chain:
    """The model, with the same parameters in every process and attempt."""
    torch.manual_seed(5)
    return Chain(3)


def train(folder: Path) -> None:
    """Train from the last checkpoint in the folder, and write each loss there."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net, calls, now = model(), [0], [0]

    def kill(*_: Any) -> None:
        calls[0] += 1
        if attempt == 0 and now[0] == KILLED_IN and calls[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    net.b.register_forward_hook(kill)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
    how = {"chunks": CHUNKS, "schedule": "1f1b", "partition": ["b", "c"], "loss_fn": mean_loss}
    pipe = fxpipe.compile(net, mesh, example_inputs=batches()[0][:1], **how)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    saved = sorted(folder.glob("step_*/.metadata"))  # it is written when the checkpoint is whole
    if saved:
        state, moments = get_state_dict(pipe, optimizer, options=FLAT)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=saved[-1].parent)
        set_state_dict(
            pipe, optimizer, model_state_dict=state, optim_state_dict=moments, options=FLAT
        )
    for now[0], (x, y) in list(enumerate(batches()))[len(saved) :]:
        calls[0] = 0
        loss = pipe.step(x, target=y, optimizer=optimizer, zero_grad=True)
        state, moments = get_state_dict(pipe, optimizer, options=FLAT)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder / f"step_{now[0]}")
        if dist.get_rank() == 0:
            (folder / f"loss_{now[0]}").write_text(f"{attempt} {loss.item().hex()}")


def main(folder: Path) -> None:
    """Train, and write to the folder how this rank has failed, if it has."""
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    try:
        train(folder)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        (folder / f"error_{attempt}_{rank}").write_text(f"{type(error).__name__}: {error}\n{notes}")
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
