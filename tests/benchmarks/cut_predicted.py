"""Predicted speed-ups on eight P40s beside those that torchgpipe measured on them.

Run: python -m tests.benchmarks.cut_predicted

torchgpipe's speed-ups (its benchmarks, version 0.0.5) are over one device without a pipeline for
U-Net and ResNet-101, and over two stages with one micro-batch for AmoebaNet-D. Ours are predictions
by the roofline of a P40's data sheet, with checkpoints in all micro-batches but the last: nothing
is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import fxpipe
from tests.benchmarks.nets import AmoebaNet, UNet, resnet
from tests.benchmarks.timing import show

STAGES, CHUNKS = 8, 32


@dataclass(frozen=True)
class Net:
    make: Callable[[], nn.Module]
    size: int  # of the images
    batch: int
    baseline: tuple[int, int]  # stages and micro-batches of torchgpipe's baseline
    published: float  # torchgpipe's speed-up over it with eight stages
    published_two: float  # and with two


NETS = {
    "U-Net (5, 64)": Net(UNet, 192, 640, (1, 1), 3.105, 1.246),
    "ResNet-101": Net(resnet, 224, 1280, (1, 1), 4.294, 1.414),
    "AmoebaNet-like (18, 256)": Net(AmoebaNet, 224, 1280, (2, 1), 4.966, 1.780),
}


def step(net: Net, stages: int, chunks: int, checkpoint: str = "except_last") -> fxpipe.Plan:
    """The plan for a mini-batch; P40s without limits of memory, to compare like with like."""
    with torch.device("meta"):
        model, x = net.make(), torch.empty(net.batch, 3, net.size, net.size)
    device = fxpipe.DeviceSpec.of("p40").with_memory(None)
    return fxpipe.plan(
        model,
        [device] * stages,
        example_inputs=(x,),
        chunks=chunks,
        checkpoint=checkpoint,
        optimizer_states=0,
    )


def main() -> None:
    rows = []
    for name, net in NETS.items():
        stages, chunks = net.baseline
        mode = "never" if net.baseline == (1, 1) else "always"
        base = step(net, stages, chunks, mode)
        two, eight = step(net, 2, CHUNKS), step(net, STAGES, CHUNKS)
        rows.append(
            [
                name,
                f"{base.seconds / eight.seconds:.2f}",
                f"{net.published:.2f}",
                f"{two.seconds / eight.seconds:.2f}",
                f"{net.published / net.published_two:.2f}",
                f"{eight.bubble:.0%}",
                f"{eight.gap:.1%}",
            ]
        )
    show(
        f"eight stages, {CHUNKS} micro-batches: predicted here, measured by torchgpipe",
        [
            "",
            "over baseline",
            "theirs",
            "over two stages",
            "theirs",
            "bubble",
            "gap",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
