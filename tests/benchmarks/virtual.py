"""Steps of real programs in virtual time, beside what is predicted and what no step can beat.

    python -m tests.benchmarks.virtual [--tables balanced nets memory] [--before CHECKOUT]
        [--nets resnet101 unet gpt2 amoebanet] [--devices 2 4 8] [--schedules 1f1b ...]
        [--folder FOLDER]

On the simulated accelerator the program runs as it would on devices, with its threads, streams and
hand-overs; each operator is charged to its stream with the time that a device would take (see
``tests/accelerator/sim/clocks.h``). Three tables:

``balanced``
    A chain of stages that take one second a row forward and two backward, so that the ideal of a
    schedule is known exactly. With ``--before``, the same chain is also run by the package in
    another checkout of this repository (``git worktree add CHECKOUT COMMIT``), which has to have
    the simulated accelerator with clocks.
``nets``
    Nets. They are small, and so are the devices, which are those of an H100 node with all rates (of
    arithmetic, memory and links) divided by ``SMALLER``; operators cost the host nothing. Beside
    the time of a step stand three others. One is what the simulator predicts from the times of the
    stages, as they were measured in virtual time, and from the same links. The second is its
    prediction for links that take no time, which is the schedule's ideal for this cut. The third is
    the work of all stages divided by the number of devices.
``memory``
    For every schedule and checkpoint mode, the bytes that a step needs on each device by the
    caching allocator of the simulated accelerator, beside those that are predicted. The difference
    is also given in values, which are as large as what a stage sends for a micro-batch. (A stage of
    the net saves eight, on a device with one stage.)

``--folder``: where the tables are written as files of comma-separated values, and the timelines of
the last row of the nets are drawn, as it ran and as it is predicted. On two cores the first table
takes a minute, the third two, and the second, which compiles each net anew for each row, about a
quarter of an hour.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.devices import DeviceSpec
from fxpipe.planning.estimates import measured_costs, traffic
from fxpipe.schedule import (
    NAMES,
    Edge,
    Link,
    Links,
    StageCost,
    Timeline,
    joined,
    named,
    simulate,
)
from tests.accelerator import sim
from tests.accelerator.clocks import Speed, begin, makespan, virtual_time
from tests.accelerator.times import CHUNKS, Product, Stage, step_takes
from tests.benchmarks.nets import AmoebaNet, UNet, resnet

SMALLER = 1000
H100 = DeviceSpec.of("h100")
SPEED = Speed(
    H100.flops_per_s / SMALLER,
    H100.bytes_per_s / SMALLER,
    H100.launch_s,
    0.0,
    H100.link_bytes_per_s / SMALLER,
    H100.link_latency_s,
)


# ------------------------------------------------------------------------------- balanced stages


@dataclass(frozen=True)
class Case:
    """A step of balanced stages: what it is called, how it is run, and what it takes at best."""

    what: str
    options: dict[str, Any]
    ideal: float


def cases() -> list[Case]:
    """By schedule, place of the batch and seconds of a copy."""
    found = []

    def add(what: str, ideal: float | None = None, **options: Any) -> None:
        found.append(Case(what, options, _ideal(**options) if ideal is None else ideal))

    for schedule in ("gpipe", "1f1b"):
        for where in ("sim:0", "cpu"):
            add(f"{schedule}, batch on {where}, copies free", schedule=schedule, where=where)
    add("1f1b, two lanes", schedule="1f1b", lanes=2)
    add("1f1b, a mask that all stages take", schedule="1f1b", masked=True)
    add("gpipe, batch on cpu, copies 0.2", schedule="gpipe", where="cpu", copy_s=0.2)
    add("1f1b, copies 0.2", schedule="1f1b", copy_s=0.2)
    again = CHUNKS + 3 + 3.0 * CHUNKS + 6  # forwards; the last device's; and backwards of the rest
    checkpoints = {"schedule": "gpipe", "checkpoint": "always"}
    add("gpipe, checkpoints", again, **checkpoints)
    add("pipe(x), backward()", schedule="gpipe", run="backward")
    add("pipe(x), backward(), checkpoints", again, run="backward", **checkpoints)
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        for copy_s in (0.0, 0.2):
            what = f"{schedule} of products, copies {copy_s or 'free'}"
            add(what, schedule=schedule, copy_s=copy_s, kind=Product)
    add("1f1b, two lanes on one device", 3.0 * CHUNKS * 2, schedule="1f1b", lanes=2, on=1)
    return found


def _ideal(
    schedule: str, lanes: int = 4, where: str = "", copy_s: float = 0.0, kind: Any = None, **_: Any
) -> float:
    """What the simulator says. A copy from the host comes ahead of the first forward."""
    order = named(schedule, lanes=lanes, microbatches=CHUNKS)
    links = Links([Edge(i, i + 1, 1.0, 1.0) for i in range(lanes - 1)], Link(copy_s))
    costs = [StageCost(1.0, 1.0, 1.0)] * lanes
    if kind is Product:  # no gradient of the batch is wanted
        costs[0] = StageCost(1.0, 0.0, 1.0)
    return simulate(order, costs, links).makespan + (copy_s if where == "cpu" else 0.0)


def balanced(before: Path | None) -> Table:
    """The chain of equal stages; with a checkout, also as the package there runs it."""
    table = Table(title="Balanced stages, 8 micro-batches; seconds of virtual time")
    every = cases()
    earlier = [] if before is None else _in_checkout(before, every)
    for column in ("", "ideal", *(("before",) if earlier else ()), "a step", "over"):
        table.add_column(column, justify="right" if column else "left")
    for i, case in enumerate(every):
        took = step_takes(**case.options)
        over = f"{took / case.ideal - 1:.1%}"
        table.add_row(case.what, f"{case.ideal:.1f}", *earlier[i : i + 1], f"{took:.1f}", over)
    return table


_EARLIER = """
import importlib.util, inspect, json, sys
from tests.accelerator import sim
sim.load()
import fxpipe
compile, known = fxpipe.compile, inspect.signature(fxpipe.compile).parameters
fxpipe.compile = lambda *args, **named: compile(
    *args, **{name: value for name, value in named.items() if name in known}
)
spec = importlib.util.spec_from_file_location("times", sys.argv[1])
times = importlib.util.module_from_spec(spec)
spec.loader.exec_module(times)
for options in json.loads(sys.argv[2]):
    options["kind"] = getattr(times, options["kind"])
    print(f"{times.step_takes(**options):.1f}", flush=True)
"""


def _in_checkout(checkout: Path, every: list[Case]) -> list[str]:
    """What the cases take with the package of another checkout."""
    times = Path(__file__).parents[1] / "accelerator" / "times.py"
    options = [case.options | {"kind": case.options.get("kind", Stage).__name__} for case in every]
    done = subprocess.run(
        [sys.executable, "-c", _EARLIER, str(times), json.dumps(options)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"not all cases run in {checkout}:\n{done.stdout}{done.stderr}")
    return done.stdout.split()


# ------------------------------------------------------------------------------------------ nets


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 128, "n_head": 4, "n_layer": 12, "vocab_size": 512, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **size))


def images(side: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: (torch.randn(rows, 3, side, side),)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "unet": (lambda: UNet(2, 16, 4), images(64)),
    "gpt2": (gpt2, lambda rows: (torch.randint(512, (rows, 64)),)),
    # A batch norm needs two values of each channel, and the last image has one pixel.
    "resnet101": (resnet, lambda rows: images(32)(2 * rows)),
    "amoebanet": (lambda: AmoebaNet(6, 64), lambda rows: images(32)(2 * rows)),
}


def loss_of(output: object) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
    return logits.float().square().mean()


@dataclass(frozen=True)
class Row:
    """What a step takes, in seconds of virtual time."""

    net: str
    devices: int
    schedule: str
    step: float
    predicted: Timeline  # with links as they are
    ideal: float  # with links that take no time
    bound: float  # work / devices
    measured: Timeline

    def cells(self) -> list[str]:
        predicted = self.predicted.makespan
        times = (self.step, predicted, self.ideal, self.bound)
        ratios = (self.step / each - 1 for each in times[1:3])
        return [
            self.net,
            str(self.devices),
            self.schedule,
            *(f"{1e3 * each:.2f}" for each in times),
            *(f"{each:+.1%}" for each in ratios),
        ]


PROFILES: dict[tuple[str, int], fxpipe.Profile] = {}
"""The estimated costs of the nodes of a net, by the net and the rows of its batch. The estimate
takes a third of the time of a compilation."""


def measured(net: str, devices: int, schedule: str) -> Row:
    """Compile a net for devices, and take the time of a step."""
    make, inputs = NETS[net]
    torch.manual_seed(0)
    chunks = max(8, 2 * devices)
    names = [f"sim:{i}" for i in range(devices)]
    model = make()
    x = tuple(t.to(names[0]) for t in inputs(chunks))
    with (
        virtual_time(SPEED),
        fxpipe.compile(
            model,
            names,
            chunks=chunks,
            schedule=schedule,
            loss_fn=lambda output, _: loss_of(output),
            costs=PROFILES.get((net, chunks), "analytic"),
            check=False,
        ) as pipe,
    ):
        target = torch.zeros(len(x[0]), device=names[-1])
        ran = pipe.measure(*x, target=target, rounds=1)  # caches are filled then
        for name in names:
            torch.accelerator.synchronize(torch.device(name))
        begin(SPEED)
        pipe.step(*x, target=target)
        took = makespan()
        PROFILES.setdefault((net, chunks), fxpipe.Profile.of(pipe.model_graph))
        stages = len(pipe.stages)
        # The first micro-batch has no gradients to add to, so that its backward takes less time.
        costs = measured_costs(ran, stages, mean)
        assert max(span.action.microbatch for span in ran.spans if span.action) == chunks - 1
        order = named(schedule, lanes=devices, microbatches=chunks, stages=stages)
        edges, once = traffic(pipe.skip_layout, chunks)
        order = joined(order, [(edge.source, edge.target) for edge in edges])
        link = Link(SPEED.link_latency_s, SPEED.link_bytes_per_s)
        predicted = simulate(order, costs, Links(edges, link, once=once))
        ideal = simulate(order, costs, Links(edges)).makespan
        predicted = replace(predicted, lanes=ran.lanes)
    work = sum(span.seconds for span in ran.spans)
    return Row(net, devices, schedule, took, predicted, ideal, work / devices, ran)


def nets_table(given: argparse.Namespace, console: Console) -> Table:
    """Nets by number of devices and schedule; draws the last one if there is a folder."""
    table = Table(title="Nets; milliseconds of virtual time")
    for column in ("net", "devices", "schedule", "a step", "predicted", "ideal", "work/devices"):
        table.add_column(column, justify="left" if column in ("net", "schedule") else "right")
    for column in ("over predicted", "over ideal"):
        table.add_column(column, justify="right")
    row = None
    for net in given.nets:
        for devices in given.devices:
            for schedule in given.schedules:
                row = measured(net, devices, schedule)
                table.add_row(*row.cells())
                console.print(*row.cells(), style="dim")
    if given.folder is not None and row is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        (given.folder / "virtual.svg").write_text(row.measured.draw())
        (given.folder / "predicted.svg").write_text(row.predicted.draw())
    return table


# ---------------------------------------------------------------------------------------- memory

ROW = 2**16  # numbers of a row of the chain below, so that sizes are far above what is rounded up
MIB = 2**20
VALUE = 4 * ROW / MIB  # what a stage sends for a micro-batch, in MiB
MODES = ("never", "except_last", "always")


class Layers(nn.Module):
    """Layers that keep what they compute, and whose parameters are few beside that."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def memory_of(schedule: str, checkpoint: str, lanes: int) -> list[list[float]]:
    """By device, in MiB: what is predicted, the most that tensors hold, the most that is not free
    for reuse, and the most that the allocator takes from the device."""
    devices = [f"sim:{i}" for i in range(lanes)]
    chunks, speed = 2 * lanes, Speed(flops_per_s=2**31, link_bytes_per_s=2**31)
    x = torch.randn(chunks, ROW // 64, 64)
    with (
        virtual_time(speed),
        fxpipe.compile(
            Layers(4 * lanes),
            devices,
            chunks=chunks,
            schedule=schedule,
            checkpoint=checkpoint,
            loss_fn=F.mse_loss,
            costs="analytic",
            check=False,
        ) as pipe,
    ):
        target = torch.zeros_like(x)
        optimizer = torch.optim.Adam(pipe.parameters())  # whose states the prediction counts
        for number in range(2):
            for device in map(torch.device, devices):
                torch.accelerator.synchronize(device)
                if number:
                    gc.collect()
                    torch.accelerator.empty_cache()
                    torch.accelerator.reset_peak_memory_stats(device)
            begin(speed)
            pipe.step(x, target=target, optimizer=optimizer)
        predicted = pipe.timeline().peak_memory
        found = []
        for device, bytes in zip(devices, predicted, strict=True):
            statistics = torch.accelerator.memory_stats(device)
            kinds = ("allocated", "active", "reserved")
            peaks = (statistics[f"{kind}_bytes.all.peak"] for kind in kinds)
            found.append([each / MIB for each in (bytes, *peaks)])
    return found


def memory_table(schedules: list[str], lanes: int = 4) -> Table:
    """All schedules and checkpoint modes, by device."""
    table = Table(title=f"{lanes} devices, {2 * lanes} micro-batches; MiB of a step")
    for column in ("schedule", "checkpoint"):
        table.add_column(column)
    for column in ("device", "predicted", "allocated", "active", "reserved", "over", "values"):
        table.add_column(column, justify="right")
    for schedule in schedules:
        for checkpoint in MODES:
            for device, numbers in enumerate(memory_of(schedule, checkpoint, lanes)):
                predicted, allocated, *_ = numbers
                over = f"{allocated / predicted - 1:+.1%}"
                values = f"{(allocated - predicted) / VALUE:+.1f}"
                cells = (f"{number:.2f}" for number in numbers)
                table.add_row(schedule, checkpoint, str(device), *cells, over, values)
    return table


def write(table: Table, path: Path) -> None:
    """Write a table as a file of comma-separated values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column.header for column in table.columns)
        writer.writerows(zip(*(column.cells for column in table.columns), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="*", default=["balanced", "nets", "memory"])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--nets", nargs="*", default=list(NETS))
    parser.add_argument("--devices", nargs="*", type=int, default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="*", default=list(NAMES))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    sim.load()
    console = Console(width=120)
    started = time.perf_counter()
    tables = {
        "balanced": lambda: balanced(given.before),
        "nets": lambda: nets_table(given, console),
        "memory": lambda: memory_table(given.schedules),
    }
    for name, make in tables.items():
        if name in given.tables:
            table = make()
            console.print(table)
            if given.folder is not None:
                write(table, given.folder / f"{name}.csv")
    console.print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
