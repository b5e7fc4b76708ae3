"""Which skip connections ``torch.distributed.pipelining`` trains:
``python -m tests.models.torch_skips``.

A small model has four stages on four gloo ranks, or eight, two for each rank. Its first stage also
sends a value to the last one, or to the last two. For each schedule a line says whether all
gradients are those of a loop over the micro-batches, or what the ranks say instead. A group whose
ranks wait for each other gives up after half a minute.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

RANKS, CHUNKS, PATIENCE = 4, 8, timedelta(seconds=30)
SCHEDULES = {"ScheduleGPipe": 4, "Schedule1F1B": 4, "ScheduleInterleaved1F1B": 8}
"""The schedules, each with the number of stages that it is given."""


class Skipping(nn.Module):
    """A chain of layers; what the first one gives is added at the end, too, and maybe once more."""

    def __init__(self, stages: int, twice: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(stages))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        skip = torch.tanh(first)
        h = torch.relu(first)
        for i, layer in enumerate(self.layers[1:], 1):
            h = torch.relu(layer(h))
            if self.twice and i == len(self.layers) - 2:
                h = h + skip
        return h + skip


def train(rank: int, folder: Path, name: str, twice: bool) -> None:
    """One rank's step. What came of it is written to a file."""
    from torch.distributed import pipelining

    logging.disable()
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=PATIENCE
    )
    torch.manual_seed(0)
    stages = SCHEDULES[name]
    model, x, y = Skipping(stages, twice), torch.randn(16, 8), torch.randn(16, 8)
    loop = copy.deepcopy(model)
    for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        (F.mse_loss(loop(part), target) / CHUNKS).backward()
    wanted = {name: parameter.grad for name, parameter in loop.named_parameters()}
    begin = {f"layers.{i}": pipelining.SplitPoint.BEGINNING for i in range(1, stages)}
    try:
        pipe = pipelining.pipeline(model, mb_args=(x[:2],), split_spec=begin)
        own = [pipe.build_stage(i, torch.device("cpu")) for i in range(rank, stages, RANKS)]
        schedule = getattr(pipelining, name)(
            own if stages > RANKS else own[0], CHUNKS, loss_fn=F.mse_loss
        )
        given = {"target": y} if rank == RANKS - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **given)
        good = all(
            torch.allclose(parameter.grad, wanted[name], atol=1e-6)
            for stage in own
            for name, parameter in stage.submod.named_parameters()
        )
        said = "trains" if good else "gradients are wrong"
    except Exception as error:
        said = str(error).strip().splitlines()[-1]
    (folder / f"{rank}.txt").write_text(said)
    os._exit(0)  # so that the other ranks lose their connections, and do not wait


def outcome(name: str, twice: bool) -> str:
    """What the ranks say, the most telling answer first."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (Path(folder), name, twice)
        ranks = [context.Process(target=train, args=(rank, *given)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(150)
            process.kill()
        said = [path.read_text() for path in Path(folder).glob("*.txt")]
    if said == ["trains"] * RANKS:
        return "trains"
    answers = {line for line in said if line != "trains"} or {"a rank has given no answer"}
    return min(answers, key=lambda line: ("Connection" in line, "Timed out" in line))


def main() -> None:
    for twice in (False, True):
        for name in SCHEDULES:
            to = "the last two stages" if twice else "the last stage"
            print(f"{name}, a skip to {to}: {outcome(name, twice)}", flush=True)


if __name__ == "__main__":
    main()
