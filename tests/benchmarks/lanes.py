"""Two CPU lanes against one thread, beside torchgpipe. Run: python -m tests.benchmarks.lanes

A balanced conv net in two stages, one intra-op thread a lane, 8 micro-batches, forward only. With
two lanes nine clock cycles do the work of sixteen: the ideal speed-up is 16/9 = 1.78.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fxpipe
from tests.benchmarks.timing import keep_memory, medians, show

CHUNKS, IDEAL = 8, 2 * 8 / 9
HALF = 9  # layers of the net in its first half: the stem, four convolutions and their ReLUs


def net(width: int = 64, depth: int = 8) -> nn.Sequential:
    """Convolutions of equal cost after a small first one, the stem.

    The first convolution of a net has no gradient of its input to compute: were it one of the
    equal ones, the first half would do a twelfth less than the second. The last has no ReLU: the
    loss comes there, and takes about as long.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def torchgpipe(
    model: nn.Sequential, run: Callable[[nn.Module], object]
) -> dict[str, Callable[[], object]]:
    """The same with torchgpipe, by its name, if it is installed."""
    try:
        from torchgpipe import GPipe
    except ImportError:
        print("torchgpipe is not installed (pip install --no-deps torchgpipe==0.0.7)")
        return {}
    halves = [HALF, len(model) - HALF]
    gpipe = GPipe(model, halves, devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint="never")

    def side() -> None:
        torch.set_num_threads(1)  # of its worker threads too
        try:
            run(gpipe)
        finally:
            torch.set_num_threads(2)

    return {"torchgpipe 0.0.7": side}


def show_speed_ups(title: str, seconds: dict[str, float]) -> None:
    """Print how long each side takes, its speed-up over "one thread", and that of the ideal's."""
    base = seconds["one thread"]
    show(
        title,
        ["", "ms", "speed-up", "of the ideal 16/9"],
        [
            [name, f"{s * 1e3:.1f}", f"{base / s:.2f}", f"{base / s / IDEAL:.2f}"]
            for name, s in seconds.items()
        ],
    )


def main() -> None:
    keep_memory()
    torch.set_num_threads(2)
    model, x = net(), torch.randn(CHUNKS * 4, 3, 32, 32)
    pipe = fxpipe.compile(model, ["cpu", "cpu"], chunks=CHUNKS, partition=[str(HALF)])

    def sequential() -> Tensor:
        return torch.cat([model(part) for part in x.chunk(CHUNKS)])

    def one_thread() -> Tensor:
        torch.set_num_threads(1)
        try:
            return sequential()
        finally:
            torch.set_num_threads(2)

    sides = {
        "one thread": one_thread,
        "two intra-op threads": sequential,
        "fxpipe": lambda: pipe(x),
    }
    sides |= torchgpipe(model, lambda gpipe: gpipe(x))
    with torch.no_grad():
        assert torch.equal(pipe(x), one_thread())
        seconds = medians(sides)
    show_speed_ups(f"forward of two stages, {CHUNKS} micro-batches", seconds)
    pipe.close()


if __name__ == "__main__":
    main()
