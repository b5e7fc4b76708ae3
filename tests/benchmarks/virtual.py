"""Steps of real programs in virtual time, beside what is predicted and what no step can beat.

    python -m tests.benchmarks.virtual [--nets unet gpt2] [--devices 2 4] [--schedules 1f1b]
        [--folder FOLDER]

On the simulated accelerator the program runs as it would on devices, with its threads, streams and
hand-overs; each operator is charged to its stream with the time that a device would take (see
``tests/accelerator/sim/clocks.h``). Two tables:

1. Balanced stages: a chain of stages that take one second a row forward and two backward, so that
   the ideal of a schedule is known exactly.
2. Nets. They are small, and so are the devices, which are those of an H100 node with all rates (of
   arithmetic, memory and links) divided by ``SMALLER``; operators cost the host nothing. Beside the
   time of a step stand three others. One is what the simulator predicts from the times of the
   stages, as they were measured in virtual time, and from the same links. The second is its
   prediction for links that take no time, which is the schedule's ideal for this cut. The third is
   the work of all stages divided by the number of devices.

The first table takes a minute on two cores. The second compiles each net anew for each row: the
default, two nets with 2 and 4 devices, takes about ten minutes, everything (``--nets all --devices
2 4 8``) more than an hour. ``--folder``: where the timelines of the last row are drawn, as it ran
and as it is predicted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
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
from tests.accelerator.times import CHUNKS, Product, step_takes
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


def balanced() -> Table:
    """The chain of equal stages, by schedule, place of the batch and seconds of a copy."""
    table = Table(title="Four balanced stages, 8 micro-batches; seconds of virtual time")
    for column in ("", "ideal", "a step", "over"):
        table.add_column(column, justify="right" if column else "left")

    def row(what: str, ideal: float, took: float) -> None:
        table.add_row(what, f"{ideal:.1f}", f"{took:.1f}", f"{took / ideal - 1:.1%}")

    ideal = (CHUNKS + 4 - 1) * 3.0
    for schedule in ("gpipe", "1f1b"):
        for where in ("sim:0", "cpu"):
            row(
                f"{schedule}, batch on {where}, copies free",
                ideal,
                step_takes(schedule, where=where),
            )
    row("1f1b, two lanes", (CHUNKS + 1) * 3.0, step_takes("1f1b", lanes=2))
    row("1f1b, a mask that all stages take", ideal, step_takes("1f1b", masked=True))
    again = CHUNKS + 3 + 3.0 * CHUNKS + 6
    row("gpipe, checkpoints", again, step_takes("gpipe", checkpoint="always"))
    row("pipe(x), backward()", ideal, step_takes("gpipe", run="backward"))
    row("the same, checkpoints", again, step_takes("gpipe", run="backward", checkpoint="always"))
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        for copy_s in (0.0, 0.2):
            order = named(schedule, lanes=4, microbatches=CHUNKS)
            links = Links([Edge(i, i + 1, 1.0, 1.0) for i in range(3)], Link(copy_s))
            # No gradient of the batch is wanted, so the first stage's backward has one half only.
            costs = [StageCost(1.0, 0.0, 1.0)] + [StageCost(1.0, 1.0, 1.0)] * 3
            took = step_takes(schedule, copy_s=copy_s, kind=Product)
            row(
                f"{schedule} of products, a copy takes {copy_s}",
                simulate(order, costs, links).makespan,
                took,
            )
    return table


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
    "resnet101": (resnet, images(64)),
    "amoebanet": (lambda: AmoebaNet(6, 64), images(64)),
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


def measured(net: str, devices: int, schedule: str) -> Row:
    """Compile a net for devices, and take the time of its second step."""
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
            costs="analytic",
            check=False,
        ) as pipe,
    ):
        target = torch.zeros(chunks, device=names[-1])
        pipe.step(*x, target=target)
        for name in names:
            torch.accelerator.synchronize(torch.device(name))
        begin(SPEED)
        pipe.step(*x, target=target)
        took = makespan()
        ran = pipe.measure(*x, target=target, rounds=1)
        stages = len(pipe.stages)
        costs = measured_costs(ran, stages)
        order = named(schedule, lanes=devices, microbatches=chunks, stages=stages)
        edges, once = traffic(pipe.skip_layout, chunks)
        order = joined(order, [(edge.source, edge.target) for edge in edges])
        link = Link(SPEED.link_latency_s, SPEED.link_bytes_per_s)
        predicted = simulate(order, costs, Links(edges, link, once=once))
        ideal = simulate(order, costs, Links(edges)).makespan
        predicted = replace(predicted, lanes=ran.lanes)
    work = sum(span.seconds for span in ran.spans)
    return Row(net, devices, schedule, took, predicted, ideal, work / devices, ran)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="*", default=["unet", "gpt2"])
    parser.add_argument("--devices", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="*", default=list(NAMES))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    sim.load()
    console = Console(width=120)
    started = time.perf_counter()
    console.print(balanced())
    table = Table(title="Nets; milliseconds of virtual time")
    for column in ("net", "devices", "schedule", "a step", "predicted", "ideal", "work/devices"):
        table.add_column(column, justify="left" if column in ("net", "schedule") else "right")
    for column in ("over predicted", "over ideal"):
        table.add_column(column, justify="right")
    row = None
    for net in NETS if given.nets == ["all"] else given.nets:
        for devices in given.devices:
            for schedule in given.schedules:
                row = measured(net, devices, schedule)
                table.add_row(*row.cells())
                console.print(*row.cells(), style="dim")
    console.print(table)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if given.folder is not None and row is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        (given.folder / "virtual.svg").write_text(row.measured.draw())
        (given.folder / "predicted.svg").write_text(row.predicted.draw())


if __name__ == "__main__":
    main()
