"""What one stage and one micro-batch cost over the model itself, on a ResNet-18.

Run: python -m tests.benchmarks.overhead
"""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from tests.benchmarks.timing import medians, show
from tests.zoo import ResNet


def main() -> None:
    torch.set_num_threads(2)
    model = ResNet(width=64, blocks=(2, 2, 2, 2), classes=10).eval()
    pipe = fxpipe.compile(model, ["cpu"], chunks=1)
    rows = []
    for batch, size in ((1, 32), (4, 32), (4, 64)):
        x = torch.randn(batch, 3, size, size)
        assert torch.equal(pipe(x), model(x))

        def train(module: nn.Module, x: torch.Tensor = x) -> None:
            module(x).sum().backward()

        forward = medians({"model": lambda x=x: model(x), "pipe": lambda x=x: pipe(x)}, 31)
        both = medians({"model": lambda f=train: f(model), "pipe": lambda f=train: f(pipe)}, 15)
        for what, seconds in (("forward", forward), ("forward + backward", both)):
            ratio = seconds["pipe"] / seconds["model"]
            milliseconds = [f"{s * 1e3:.2f}" for s in seconds.values()]
            rows.append([f"{batch} x 3 x {size} x {size}", what, *milliseconds, f"{ratio:.3f}"])
    show(
        "ResNet-18, one stage, one micro-batch",
        ["input", "", "model ms", "pipe ms", "pipe / model"],
        rows,
    )
    pipe.close()


if __name__ == "__main__":
    main()
