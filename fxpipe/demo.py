"""The demo: a U-Net learns to take noise off photographs, with and without a pipeline."""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn

import fxpipe
from fxpipe.inspect.draw import render_svg

NOISE = 0.15  # the standard deviation of the noise; pixels are between 0 and 1


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al., 2015) that estimates the noise in an image.

    It takes and returns a tensor of shape rows x 3 x height x width, whose height and width are
    multiples of ``2 ** (depth - 1)``. Convolutions with stride 2 lead down, interpolations lead up,
    and a skip connects the two sides at every level.
    """

    def __init__(self, channels: int = 16, depth: int = 4) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(depth)]
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(
            nn.Conv2d(a + b, a, 3, padding=1) for a, b in itertools.pairwise(widths)
        )
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.first(image))
        skips = []
        for conv in self.down:
            skips.append(x)
            x = F.relu(conv(x))
        for conv in reversed(self.up):
            x = F.interpolate(x, scale_factor=2.0)
            x = F.relu(conv(torch.cat([x, skips.pop()], 1)))
        out: Tensor = self.last(x)
        return out


def photographs() -> list[Tensor]:
    """The two photographs that scikit-learn ships: 3 x height x width, with pixels from 0 to 1."""
    try:
        from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]
    except ImportError:
        raise SystemExit(
            "the demo needs scikit-learn, for its photographs: pip install 'fxpipe[demo]'"
        ) from None
    images = load_sample_images().images
    return [torch.from_numpy(image.copy()).permute(2, 0, 1) / 255 for image in images]


def batches(photos: list[Tensor], count: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches of ``size`` random crops: pairs of the noisy images and the noise in them,
    both of shape size x 3 x 64 x 64."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        crops = []
        for i in range(size):
            photo = photos[i % len(photos)]
            limits = (photo.shape[1] - 64, photo.shape[2] - 64)
            y, x = (int(torch.randint(limit, (), generator=generator)) for limit in limits)
            crops.append(photo[:, y : y + 64, x : x + 64])
        clean = torch.stack(crops)
        noise = NOISE * torch.randn(clean.shape, generator=generator)
        found.append((clean + noise, noise))
    return found


@dataclass
class DemoResult:
    """The results of one training run: the loss on the test batch before and after it, the loss of
    each step, and the duration of all steps in seconds."""

    before: float
    after: float
    losses: list[float]
    seconds: float


def train(
    model: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    test: tuple[Tensor, Tensor],
    devices: tuple[torch.device, torch.device],
    progress: Progress,
    title: str,
) -> DemoResult:
    """Train a model by Adam on the mean squared error.

    ``devices``: the device of the model's inputs, and the device of its outputs.
    """
    source, target = devices
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        noisy, noise = batch
        return F.mse_loss(model(noisy.to(source)), noise.to(target))

    with torch.no_grad():
        before = loss_of(test).item()
    losses = []
    start = time.perf_counter()
    for batch in progress.track(data, description=f"{title:12}"):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    with torch.no_grad():
        after = loss_of(test).item()
    return DemoResult(before, after, losses, seconds)


def run(out: Path, steps: int, console: Console) -> None:
    """Train a U-Net as a pipeline and as a plain module, compare the two, and write a report and
    drawings to the folder ``out``."""
    torch.manual_seed(0)
    photos = photographs()
    data, (test,) = batches(photos, steps, 16, seed=1), batches(photos, 1, 16, seed=2)
    model = UNet()
    twin = copy.deepcopy(model)
    devices = stage_devices()
    home = torch.device(devices[0])
    twin.to(home)
    console.print(
        f"A U-Net on four stages ({', '.join(devices)}), {steps} steps on real photographs"
    )

    pipe = fxpipe.compile(model, devices, chunks=8, example_inputs=(test[0].to(home),))
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        ends = (home, torch.device(devices[-1]))
        piped = train(pipe, data, test, ends, progress, "pipelined")
        plain = train(twin, data, test, (home, home), progress, "unpipelined")

    for name, result in (("pipelined", piped), ("unpipelined", plain)):
        console.print(
            f"{name:12} loss {result.before:.5f} -> {result.after:.5f}   {result.seconds:.1f} s"
        )
    difference = max(abs(a - b) for a, b in zip(piped.losses, plain.losses, strict=True))
    console.print(f"largest difference of the {steps} losses: {difference:.1e}")
    if home.type == "cpu":
        console.print("(on one CPU the four lanes share its cores, so the pipeline is not faster)")
    console.print(pipe.report())

    for level in ("stage", "pipeline"):
        path = out / f"{level}.svg"
        path.write_text(render_svg(pipe.draw(level)))
        console.print(f"wrote {path}")
    page = out / "report.html"
    pipe.report_html(page)
    console.print(f"wrote {page}: report, drawings, passes and code on one page, for a browser")
    pipe.close()


def stage_devices() -> list[str]:
    """The devices of four stages: the accelerators of this machine, evenly, or four times the CPU
    if it has none."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    if kind is None or not count:
        return ["cpu"] * 4
    return [f"{kind.type}:{i * count // 4}" for i in range(4)]
