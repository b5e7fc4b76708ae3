"""What ranks do in tests of ``torch.distributed.pipelining``, which runs what fxpipe exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import fxpipe
from fxpipe.schedule import named
from passes import Relay
from tests.fxpipe.ranks.jobs import Call, made
from tests.zoo import mean_loss


def train(
    group: dist.ProcessGroup,
    make: Callable[[], nn.Module],
    call: Call,
    schedule: str,
    chunks: int,
    starts: list[str],
    folder: str,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One step of torch's runtime. Returns the losses of the micro-batches, which the last stage's
    rank has, and the gradients of this rank's stages, by their names in the model."""
    model = made(make)
    rank, ranks, stages = dist.get_rank(group), dist.get_world_size(group), len(starts) + 1
    pipe = fxpipe.compile(
        model, ["cpu"] * stages, chunks=chunks, partition=starts, example_inputs=call.args
    )
    modules = list(Relay()(pipe.stage_graph).children())
    order = named(schedule, lanes=ranks, stages=stages, microbatches=chunks)
    path = Path(folder) / f"{rank}.csv"
    order.to_csv(path)
    own = [number for number, lane in enumerate(order.placement) if lane == rank]
    device = torch.device("cpu")
    runtime = _PipelineScheduleRuntime(
        [PipelineStage(modules[number], number, stages, device, group=group) for number in own],
        chunks,
        loss_fn=mean_loss,
    )
    runtime._load_csv(str(path))
    losses: list[Tensor] = []
    given: tuple[Any, ...] = call.args if 0 in own else ()
    target = {"target": call.target} if stages - 1 in own else {}
    runtime.step(*given, **target, losses=losses)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grads = {
        names[id(parameter)]: parameter.grad
        for number in own
        for parameter in modules[number].parameters()
    }
    pipe.close()
    return losses, grads
