"""How compiling grows with the graph. Run: python -m tests.benchmarks.compile_time [sizes]

Whole ``compile`` (trace, check, passes, cut, unrolled, made ready), then a training step and
freeing all of it, for chains with a skip over every tenth node, of 1,000, 10,000 and 100,000 nodes;
each in a process of its own, in CPU seconds. And ResNet-101 on four stages, eight micro-batches.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import subprocess
import sys
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

import fxpipe
from tests.benchmarks.timing import show
from tests.zoo import ResNet

SIZES = (1_000, 10_000, 100_000)
RESNET = 0  # the size that stands for it


class Synthetic(nn.Module):
    """A chain of so many nodes, a tenth of which add what has been nine nodes before."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes, self.weight = nodes, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = skip = x * self.weight
        for i in range(self.nodes - 1):
            if i % 10 == 9:
                x, skip = x + skip, x
            else:
                x = torch.sin(x)
        return x


def one(size: int) -> list[float]:
    """CPU seconds to compile, to train a step, and to free; and the most memory, in GiB."""
    torch.set_num_threads(1)
    warm = fxpipe.compile(Synthetic(20), ["cpu"] * 2, example_inputs=(torch.randn(4, 4),))
    warm.close()  # imports are no part of it
    if size == RESNET:
        model, x, stages, chunks = ResNet(64, (3, 4, 23, 3)), torch.randn(8, 3, 32, 32), 4, 8
    else:
        model, x, stages, chunks = Synthetic(size), torch.randn(4, 4), 4, 2
    marks = [time.process_time()]
    pipe = fxpipe.compile(model, ["cpu"] * stages, chunks=chunks, example_inputs=(x,))
    marks.append(time.process_time())
    pipe(x).sum().backward()
    marks.append(time.process_time())
    pipe.close()
    del pipe, model
    gc.collect()
    marks.append(time.process_time())
    seconds = [b - a for a, b in pairwise(marks)]
    return [*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]


def main(sizes: tuple[int, ...]) -> None:
    rows, compiled = [], {}
    for size in (*sizes, RESNET):
        command = [sys.executable, "-m", "tests.benchmarks.compile_time", "--one", str(size)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        name = "ResNet-101" if size == RESNET else f"{size:,}"
        rows.append([name, *(f"{value:.2f}" for value in found)])
        if size != RESNET:
            compiled[size] = found[0]
    show("CPU seconds", ["nodes", "compile", "a step", "free", "GiB"], rows)
    first, last = min(sizes), max(sizes)
    if first < last:
        exponent = math.log(compiled[last] / compiled[first]) / math.log(last / first)
        print(f"compiling grows with the number of nodes to the power of {exponent:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(int(sys.argv[2]))))
    else:
        main(tuple(map(int, sys.argv[1:])) or SIZES)
