"""A training script for torchrun, which saves a checkpoint after each step and goes on from the
last one. In its first attempt the rank of stage 1 has a fault in the middle of the last step.

    torchrun --nproc-per-node 3 --max-restarts 1 -m tests.fxpipe.ranks.restarted FOLDER KIND WHERE N

KIND is what happens (see ``Fault``), WHERE is "forward", "backward" or "transfer", and N the number
of the micro-batch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
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

STEPS, CHUNKS, FAULTY_STEP, FAULTY_RANK = 3, 3, 2, 1
TIMEOUT = timedelta(seconds=float(os.environ.get("FXPIPE_FAULTS_TIMEOUT", "15")))


@dataclass(frozen=True)
class Fault:
    """What happens on a rank. ``kind``: it raises an error, exits, is killed (SIGKILL), is stopped
    (SIGSTOP), or hangs."""

    kind: str
    where: str
    microbatch: int

    def happen(self, folder: Path) -> None:
        """Let it happen, and note when."""
        (folder / "fault").write_text(str(time.time()))
        if self.kind == "raise":
            raise ValueError("it is broken")
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "hang":
            time.sleep(600)
        os.kill(os.getpid(), {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}[self.kind])


def batches() -> list[tuple[Tensor, Tensor]]:
    """The batches of all steps."""
    torch.manual_seed(4)
    return [(torch.randn(6, 3), torch.randn(6)) for _ in range(STEPS)]


def model(stages: int) -> Chain:
    """The model, with the same parameters in every process and attempt."""
    torch.manual_seed(5)
    return Chain(stages)


def losses_of_loop(stages: int) -> list[str]:
    """The loss of each step without a pipeline, in hexadecimal digits: each micro-batch by itself,
    and its gradients added to those before."""
    net = model(stages)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            loss = mean_loss(net(part), target)
            loss.backward(torch.full_like(loss, 1 / CHUNKS))
            total = total + loss.detach() * (1 / CHUNKS)
        optimizer.step()
        losses.append(total.item().hex())
    return losses


def expected_losses(stages: int) -> list[str]:
    """What is in the folder for each step, if training was started again at the step of the fault:
    the number of the attempt, and the loss."""
    return [
        f"{int(step >= FAULTY_STEP)} {loss}" for step, loss in enumerate(losses_of_loop(stages))
    ]


def losses_in(folder: Path) -> list[str]:
    """What the attempts have written to the folder for each step, as far as they have come."""
    paths = (folder / f"loss_{step}" for step in range(STEPS))
    return [path.read_text() for path in paths if path.exists()]


class _Faulty:
    """Counts what happens in a step, and lets the fault happen at its place."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder
        self.is_due, self.count = False, 0
        self.transport: Any = None

    def begin(self, is_due: bool) -> None:
        self.is_due, self.count = is_due, 0

    def place(self, *_: Any) -> None:
        self.count += 1
        if self.is_due and self.count == self.fault.microbatch + 1:
            # A process that ends or stops sends no more, also of what it has sent before. Others
            # would then miss a value of an earlier micro-batch, or not, as it happens.
            self.transport.finish()
            self.fault.happen(self.folder)

    def put(self, net: Chain, pipe: fxpipe.Pipeline) -> None:
        """Put the fault into the layer of stage 1, or into this rank's transport."""
        transport = self.transport = pipe._runner.compiler.transport  # type: ignore[attr-defined]
        if self.fault.where == "forward":
            net.b.register_forward_hook(self.place)
        elif self.fault.where == "backward":
            net.b.register_full_backward_hook(self.place)
        else:
            transmit = transport.transmit

            def faulty(values: Any, edge: tuple[int, int], number: int) -> None:
                if edge == (FAULTY_RANK, FAULTY_RANK + 1):
                    self.place()
                transmit(values, edge, number)

            transport.transmit = faulty


def train(folder: Path, fault: Fault, attempt: int) -> None:
    """Train from the last checkpoint in the folder, and write each loss there."""
    stages = dist.get_world_size()
    net, faulty = model(stages), _Faulty(fault, folder)
    mesh = init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))
    how = {"chunks": CHUNKS, "schedule": "1f1b", "partition": list("bcd"[: stages - 1])}
    pipe = fxpipe.compile(net, mesh, example_inputs=batches()[0][:1], loss_fn=mean_loss, **how)
    faulty.put(net, pipe)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    saved = sorted(folder.glob("step_*/.metadata"))  # it is written when the checkpoint is whole
    if saved:
        state, moments = get_state_dict(pipe, optimizer, options=FLAT)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=saved[-1].parent)
        set_state_dict(
            pipe, optimizer, model_state_dict=state, optim_state_dict=moments, options=FLAT
        )
    for now, (x, y) in list(enumerate(batches()))[len(saved) :]:
        is_due = attempt == 0 and now == FAULTY_STEP and dist.get_rank() == FAULTY_RANK
        faulty.begin(is_due)
        loss = pipe.step(x, target=y, optimizer=optimizer, zero_grad=True)
        state, moments = get_state_dict(pipe, optimizer, options=FLAT)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder / f"step_{now}")
        if dist.get_rank() == 0:
            (folder / f"loss_{now}").write_text(f"{attempt} {loss.item().hex()}")


def main(folder: Path, fault: Fault, attempt: int) -> None:
    """Train, and write to the folder how this rank has failed, if it has."""
    rank = dist.get_rank()
    try:
        train(folder, fault, attempt)
    except BaseException as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        (folder / f"error_{attempt}_{rank}").write_text(f"{type(error).__name__}: {error}\n{notes}")
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=TIMEOUT)
    given = Fault(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    main(Path(sys.argv[1]), given, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
