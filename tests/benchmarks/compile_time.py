"""How compiling grows with the graph. Run: python -m tests.benchmarks.compile_time [sizes]

The time is that of ``compile`` (tracing, check, passes, cut), a training step, and freeing
everything. The models are plain chains, and chains with a skip over every tenth node, of 1,000 to
100,000 nodes; and ResNet-101 on four stages with eight micro-batches. Each runs in a process of its
own, timed in CPU seconds, with the default recursion limit. Exponents are fitted by least squares
of the logarithms.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

import fxpipe
from tests.benchmarks.timing import show
from tests.zoo import ResNet

SIZES = (1_000, 10_000, 30_000, 100_000)
SYNTHETIC = {"skips": 10, "chain": 0}  # how far apart the skips are
RESNET = "ResNet-101"
COLUMNS = ("compile", "a step", "free")


class Synthetic(nn.Module):
    """A chain of so many nodes, every ``apart``-th of which adds what has been made before the last
    such one."""

    def __init__(self, nodes: int, apart: int = 10) -> None:
        super().__init__()
        self.nodes, self.apart, self.weight = nodes, apart, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = skip = x * self.weight
        for i in range(1, self.nodes):
            if self.apart and not i % self.apart:
                x, skip = x + skip, x
            else:
                x = torch.sin(x)
        return x


def one(kind: str, size: int) -> list[float]:
    """CPU seconds to compile, to train a step, and to free; and the most memory, in GiB."""
    torch.set_num_threads(1)
    warm = fxpipe.compile(Synthetic(20), ["cpu"] * 2, example_inputs=(torch.randn(4, 4),))
    warm.close()  # imports are no part of it
    model: nn.Module
    if kind == RESNET:
        model, x, chunks = ResNet(64, (3, 4, 23, 3)), torch.randn(8, 3, 32, 32), 8
    else:
        model, x, chunks = Synthetic(size, SYNTHETIC[kind]), torch.randn(4, 4), 2
    marks = [time.process_time()]
    pipe = fxpipe.compile(model, ["cpu"] * 4, chunks=chunks, example_inputs=(x,))
    marks.append(time.process_time())
    pipe(x).sum().backward()
    marks.append(time.process_time())
    pipe.close()
    del pipe, model
    gc.collect()
    marks.append(time.process_time())
    seconds = [b - a for a, b in pairwise(marks)]
    return [*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]


def apart(kind: str, size: int) -> list[float]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.compile_time", "--one", kind, str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(sizes: tuple[int, ...]) -> None:
    rows, grown = [], []
    for kind in SYNTHETIC:
        found = [apart(kind, size) for size in sizes]
        for size, values in zip(sizes, found, strict=True):
            rows.append([kind, f"{size:,}", *(f"{value:.2f}" for value in values)])
        if len(sizes) > 1:
            seconds = np.maximum(np.array(found)[:, :-1], 0.01)  # the clock's resolution
            exponents = np.polyfit(np.log(sizes), np.log(seconds), 1)[0]
            grown.append([kind, *(f"{exponent:.2f}" for exponent in exponents)])
    rows.append([RESNET, "", *(f"{value:.2f}" for value in apart(RESNET, 0))])
    show("CPU seconds", ["", "nodes", *COLUMNS, "GiB"], rows)
    if grown:
        show("growing with the number of nodes to the power of", ["", *COLUMNS], grown)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]))))
    else:
        main(tuple(map(int, sys.argv[1:])) or SIZES)
