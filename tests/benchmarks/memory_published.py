"""Predicted memory beside what torchgpipe measured on P40s, for U-Nets (B, C) of five sizes.

Run: python -m tests.benchmarks.memory_published

torchgpipe's benchmark "unet-memory" (version 0.0.5) trains on 32 images of 3 x 192 x 192 with SGD
without momentum: in 32 micro-batches, which go back in reverse order. Its balance is in its
sources. All micro-batches but the last are checkpointed, where it asks for 32 of them. On eight
devices it asks for 128: torchgpipe then keeps the 128th, which there is not, so that all 32 are
checkpointed (``checkpoint_stop`` in its ``gpipe.py``). Published is the sum over all devices of
what PyTorch's allocator had reserved at most (``max_memory_cached``).

Two things are beyond what a model keeps and computes:

* For 3 x 3 convolutions cuDNN takes Winograd's algorithm F(4 x 4, 3 x 3) in its non-fused form,
  which transforms each filter of 9 numbers into 6 x 6 (Lavin and Gray, "Fast algorithms for
  convolutional neural networks", 2016). That takes 4 times the memory of the weights while the
  convolution runs: 3.5 GiB for 5120 channels.
* If a device has no room for that, PyTorch takes an algorithm that needs none. So no device needs
  more than it has.

The last two columns are for the cut that fxpipe finds itself, for devices with 22.4 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import torch
from torch import fx, nn

import fxpipe
from fxpipe import DeviceSpec, Plan, Schedule
from fxpipe.ir.graph import WORKSPACE, stage_nodes
from fxpipe.ir.workspace import NodeWorkspace
from tests.benchmarks.nets import UNet
from tests.benchmarks.timing import show

GIB, BATCH = 2**30, 32
P40 = DeviceSpec.of("p40")
TRANSFORMED = 6 * 6 / (3 * 3)


@dataclass(frozen=True)
class Published:
    """A row of torchgpipe's table. ``balance`` has the number of layers on each device; the model
    of one device without a pipeline, which has no micro-batches, is None. ``checkpoint`` says which
    micro-batches are checkpointed."""

    name: str
    size: tuple[int, int]
    gib: float
    balance: tuple[int, ...] | None
    checkpoint: str = "except_last"


TABLE = [
    Published("baseline", (6, 72), 20.3, None, "never"),
    Published("pipeline-1", (11, 128), 20.5, (505,)),
    Published("pipeline-2", (24, 128), 43.4, (526, 551)),
    Published("pipeline-4", (24, 160), 79.1, (472, 54, 36, 515)),
    Published("pipeline-8", (48, 160), 154.1, (800, 140, 62, 36, 36, 36, 36, 987), "always"),
]


@dataclass(frozen=True)
class Winograd:
    """Model graph with costs → the same, in which 3 x 3 convolutions need room for their
    transformed filters, once for each of ``chunks`` micro-batches."""

    name: ClassVar[str] = "winograd"
    chunks: int

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in stage_nodes(gm.graph):
            module = gm.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3):
                room = round(TRANSFORMED * module.weight.nbytes) * self.chunks
                known: NodeWorkspace = node.meta[WORKSPACE]
                node.meta[WORKSPACE] = replace(
                    known, forward=known.forward + room, backward=known.backward + room
                )
        return gm


def layers(convs: int) -> list[str | None]:
    """The layers of torchgpipe's sequential U-Net, in order: the names that they have in ours, and
    None for a layer that stands for a function."""
    cells = [[f"{path}.{i}" for i in range(4 * convs)] for path in _cells()]
    found: list[str | None] = []
    for path, cell in zip(_cells(), cells, strict=True):
        is_down, is_up = path.startswith("down"), path.startswith("up")
        found += [None, None] * is_up + cell + [None, None] * is_down
    return [*found, "out"]


def _cells() -> list[str]:
    return [*(f"down.{i}" for i in range(5)), "bottom", *(f"up.{i}" for i in range(5))]


def their_cut(row: Published) -> list[str]:
    """The first layer of each stage but the first. Where it is a function, its module follows."""
    names = layers(row.size[0])
    assert sum(row.balance or ()) in (0, len(names))
    starts = list(accumulate(row.balance or ()))[:-1]
    return [next(name for name in names[start:] if name is not None) for start in starts]


def last_first(stages: int) -> Schedule:
    """GPipe as torchgpipe runs it: micro-batches go back in reverse order."""
    forwards = [[f"{s}F{i}" for i in range(BATCH)] for s in range(stages)]
    backwards = [[f"{s}B{i}" for i in reversed(range(BATCH))] for s in range(stages)]
    lanes = (" ".join(f + b) for f, b in zip(forwards, backwards, strict=True))
    return Schedule.from_text("\n".join(lanes), "gpipe, the last first")


def planned(row: Published, cut: list[str] | str, memory: float | None, is_winograd: bool) -> Plan:
    """The plan for a row of the table."""
    with torch.device("meta"):
        model, x = UNet(*row.size), torch.empty(BATCH, 3, 192, 192)
    stages, chunks = len(row.balance or (1,)), BATCH if row.balance else 1
    chain = fxpipe.default_chain()
    return fxpipe.plan(
        model,
        [P40.with_memory(memory)] * stages,
        example_inputs=(x,),
        chunks=chunks,
        partition=cut,
        schedule=last_first(stages) if row.balance else "gpipe",
        checkpoint=row.checkpoint,
        optimizer="sgd",
        passes=chain.after("cost", Winograd(chunks)) if is_winograd else chain,
    )


def main() -> None:
    rows = []
    for row in TABLE:
        cut = their_cut(row) if row.balance else "auto"
        plain, more = (planned(row, cut, None, is_winograd) for is_winograd in (False, True))
        fitting = [
            max(least, min(most, P40.memory or most))
            for least, most in zip(plain.memory, more.memory, strict=True)
        ]
        ours = planned(row, "auto", P40.memory, is_winograd=False)
        rows.append(
            [
                row.name,
                str(row.size),
                f"{row.gib}",
                f"{sum(plain.memory) / GIB:.1f}",
                f"{sum(fitting) / GIB:.1f}",
                f"{sum(fitting) / GIB / row.gib - 1:+.1%}",
                f"{max(fitting) / GIB:.1f}",
                f"{sum(ours.memory) / GIB:.1f}",
                f"{plain.seconds / ours.seconds:.2f}",
            ]
        )
    show(
        "memory in GiB",
        [
            "",
            "U-Net (B, C)",
            "published",
            "predicted",
            "with cuDNN's",
            "off by",
            "largest device",
            "own cut",
            "faster by",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
