"""What a training step takes without a pipeline, beside which measured trials are shown."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.structure import map_tensors
from fxpipe.meaning.loss import own_loss
from fxpipe.runtime.streams import has_streams


def plain_step(
    model: nn.Module,
    device: torch.device,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    target: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None,
    rounds: int,
) -> float | None:
    """The median seconds of a forward and a backward of the model for the whole mini-batch on one
    device, after one to warm up. None if the device has not enough memory.

    The step is one of a copy of the model. No optimizer takes part, nor does one in the measured
    step of a pipeline.
    """
    try:
        own = copy.deepcopy(model).to(device)
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), inputs)
        wanted = map_tensors(lambda tensor: tensor.to(device), target)

        def step() -> None:
            output = own(*args, **kwargs)
            loss: Tensor = own_loss(output) if loss_fn is None else loss_fn(output, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            own.zero_grad()

        return statistics.median([_seconds(step, device) for _ in range(rounds + 1)][1:])
    except torch.OutOfMemoryError:
        return None


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if has_streams(device):
        torch.accelerator.synchronize(device)
