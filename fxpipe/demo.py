"""The demo: a U-Net learns to take noise off photographs, with and without a pipeline."""

from __future__ import annotations

import copy
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fxpipe
from fxpipe.inspect.draw import render_svg
from fxpipe.ir.printing import format_graph

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


def run_on_ranks(out: Path, steps: int, console: Console) -> None:
    """Train the U-Net over the processes that ``torchrun`` has started, a stage in each, and then
    without a pipeline on the first of them, and compare the two. Every rank writes its graph to the
    folder ``out``."""
    device = _join_group()
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    photos = photographs()
    data = batches(photos, steps, 16, seed=1)
    model = UNet().to(device)
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(
        model,
        init_device_mesh(device.type, (count,), mesh_dim_names=("pp",)),
        chunks=8,
        schedule="1f1b",
        loss_fn=F.mse_loss,
        example_inputs=(data[0][0].to(device),),
    )
    optimizer = torch.optim.Adam(pipe.parameters(), lr=2e-3)
    losses = []
    start = time.perf_counter()
    for noisy, noise in data:  # the same on every rank; only the first and the last need the values
        batch = noisy.to(device), noise.to(device)
        loss = pipe.step(batch[0], target=batch[1], optimizer=optimizer, zero_grad=True)
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    (out / f"rank_{rank}.txt").write_text(format_graph(pipe.rank_graph))
    parts: list[Any] = [None] * count
    dist.all_gather_object(parts, {name: value.cpu() for name, value in pipe.state_dict().items()})
    if rank == 0:
        console.print(f"A U-Net on {count} ranks, {steps} steps on real photographs")
        for number, part in enumerate(parts):
            values = sum(value.numel() for value in part.values())
            console.print(f"rank {number} has {len(part)} tensors with {values:,} values")
        console.print(f"pipelined    loss {losses[0]:.5f} -> {losses[-1]:.5f}   {seconds:.1f} s")
        start = time.perf_counter()
        plain = _train_by_microbatches(twin, [(x.to(device), y.to(device)) for x, y in data])
        seconds = time.perf_counter() - start
        console.print(f"unpipelined  loss {plain[0]:.5f} -> {plain[-1]:.5f}   {seconds:.1f} s")
        difference = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        console.print(f"largest difference of the {steps} losses: {difference:.1e}")
        trained = {name: value for part in parts for name, value in part.items()}
        difference = max(
            float((trained[name] - value.cpu()).abs().max())
            for name, value in twin.state_dict().items()
        )
        console.print(f"largest difference of a parameter: {difference:.1e}")
        console.print(f"wrote {out}/rank_0.txt and so on: what each rank runs")
    dist.barrier()
    pipe.close()
    dist.destroy_process_group()


def _join_group() -> torch.device:
    """Join the process group of ``torchrun``, and return the device of this rank: an accelerator if
    there is one for each local rank, else the CPU."""
    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    kind = torch.accelerator.current_accelerator()
    if kind is None or torch.accelerator.device_count() < count:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.accelerator.set_device_index(local)
    device = torch.device(kind.type, local)
    dist.init_process_group(device_id=device)
    return device


def _train_by_microbatches(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train a plain model, with the gradients accumulated over eight micro-batches, which is what a
    pipeline computes. Returns the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for noisy, noise in data:
        optimizer.zero_grad()
        total = torch.zeros((), device=noisy.device)
        for x, y in zip(noisy.chunk(8), noise.chunk(8), strict=True):
            loss = F.mse_loss(model(x), y) / 8
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        losses.append(total.item())
    return losses


def stage_devices() -> list[str]:
    """The devices of four stages: the accelerators of this machine, evenly, or four times the CPU
    if it has none."""
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    if kind is None or not count:
        return ["cpu"] * 4
    return [f"{kind.type}:{i * count // 4}" for i in range(4)]
