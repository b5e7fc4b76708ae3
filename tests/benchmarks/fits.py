"""What is chosen for models under limits of memory, from just the weights to everything.

    python -m tests.benchmarks.fits [--models gpt2 unet ...] [--devices 2 4 8] [--limits 10]
        [--chunks 4 8] [--exhaustive] [--csv FILE]
    python -m tests.benchmarks.fits --measure [--models ...] [--devices ...] [--limits ...]
        [--csv FILE]

Each model, in its real size and on "meta", is planned with ``checkpoint="auto"`` for A100s that may
take so much: the lowest limit is an even part of parameters, gradients, the two states of Adam and
buffers; the highest is what the fastest plan needs that keeps all activations. The schedule is
1F1B, with so many micro-batches for each device as ``--chunks`` says, of which the fastest number
counts.

"over free" is how much longer the step takes than without a limit, by prediction. With
``--exhaustive`` all modes of all stages are also planned, each with a cut of its own, which is done
for two devices only: "over best" is how much longer the chosen step takes than the best of these,
and "(none)" says that none of them fits either.

With ``--measure`` models of the same structure, in sizes with which they run on a CPU
(``tests.benchmarks.predictions``), are compiled with ``memory=`` and ``checkpoint="auto"`` for
devices of the simulated accelerator, and a step with Adam is measured there: "full" is the part of
the limit that the fullest device takes, as predicted and as measured, and "off by" the prediction
of memory and of time over the measurement. The limits go from an even part of parameters, gradients
and states to what the step is predicted to need that keeps all activations.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxpipe
from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.tensors import tensor_bytes
from fxpipe.ir.text import human_bytes, human_time
from fxpipe.planning.question import CostedModel, CostSettings, PlanQuestion, costed
from fxpipe.planning.result import Plan
from fxpipe.runtime.ambient import compiling
from passes.common.modes import AUTO, MODES
from passes.cost.analytic import ADAM
from tests.accelerator import sim
from tests.benchmarks import predictions
from tests.benchmarks.models import Made, gpt2, llama_1b, mixtral, t5, unet, vit_l16

ROWS = 64


MODELS: dict[str, Callable[[int], Made]] = {
    made.__name__: made for made in (gpt2, llama_1b, vit_l16, unet, t5, mixtral)
}


@dataclass(frozen=True)
class Case:
    """A model with costs, on so many devices."""

    prices: CostedModel
    devices: int
    chunks: tuple[int, ...]

    def plan(self, limit: float | None, checkpoint: Any = AUTO) -> Plan | None:
        """The fastest plan under a limit of memory; None if none fits."""
        found: list[Plan] = []
        spec = DeviceSpec.of("a100").with_memory(limit)
        for chunks in self.chunks:
            question = PlanQuestion(
                self.prices,
                "auto",
                (spec,) * self.devices,
                "1f1b",
                None,
                chunks * self.devices,
                checkpoint,
            )
            with suppress(fxpipe.DoesNotFit):
                found.append(question.answer())
        return min(found, key=lambda plan: plan.seconds, default=None)

    def best_of_all(self, limit: float) -> float:
        """The seconds of the fastest plan, of those with any modes; inf if none fits."""
        every = itertools.product(MODES, repeat=self.devices)
        plans = [self.plan(limit, modes) for modes in every]
        return min((plan.seconds for plan in plans if plan), default=math.inf)

    def just_the_weights(self) -> float:
        """An even part of what all stages keep whatever the schedule."""
        free = self.plan(None, "never")
        assert free is not None
        return sum(stage.state_bytes for stage in free.stages) / self.devices


def priced(name: str) -> CostedModel:
    """A model with costs on A100s."""
    with torch.device("meta"):
        model, inputs = MODELS[name](ROWS)
        inputs = {key: value.to("meta") for key, value in inputs.items()}
    with compiling():
        found, _ = costed(
            model.train(),
            ((), inputs),
            CostSettings("analytic", DeviceSpec.of("a100"), ADAM),
            in_dims=None,
            tracer="auto",
            chunks=None,
            chain=fxpipe.default_chain(),
        )
    return found


def rows_of(name: str, case: Case, limits: int, is_exhaustive: bool) -> Iterator[list[str]]:
    """The rows of the table for a model on so many devices."""
    free = case.plan(None)
    assert free is not None
    low, high = case.just_the_weights(), max(free.memory)
    for i in range(limits):
        limit = low + (high - low) * i / max(1, limits - 1)
        begin = time.process_time()
        plan = case.plan(limit)
        took = time.process_time() - begin
        row = [name, str(case.devices), human_bytes(round(limit))]
        if plan is None:
            row += ["does not fit", "", "", "", ""]
        else:
            modes = plan.checkpoint
            row += [
                modes if isinstance(modes, str) else " ".join(modes),
                str(plan.chunks),
                human_time(plan.seconds),
                f"{plan.seconds / free.seconds - 1:+.1%}",
                f"{max(plan.memory) / limit:.0%}",
            ]
        row.append(f"{took:.1f} s")
        if is_exhaustive:
            best = case.best_of_all(limit) if case.devices == 2 else math.nan
            if math.isinf(best):
                row.append("(none)")
            else:
                row.append(
                    "" if math.isnan(best) or not plan else f"{plan.seconds / best - 1:+.2%}"
                )
        yield row


SMALL = {"llama_1b": "llama", "vit_l16": "vit"}  # models of other names in their small sizes


def measured_rows(name: str, devices: int, limits: int, chunks: int) -> Iterator[list[str]]:
    """The rows of the table of measured steps, of a model on so many simulated devices."""

    def compared(**options: Any) -> predictions.Prediction:
        torch.manual_seed(0)
        model, inputs = predictions.MODELS[SMALL.get(name, name)]()
        options |= {"schedule": "1f1b", "chunks": min(chunks, predictions.rows_of(inputs))}
        return predictions.compared(model, inputs, devices, optimizer="adam", **options)

    torch.manual_seed(0)
    model, _ = predictions.MODELS[SMALL.get(name, name)]()
    low = (2 + ADAM) * tensor_bytes([*model.parameters()]) / devices
    try:
        free = compared(checkpoint="never")
    except NotImplementedError as error:  # the device lacks an operator that the model uses
        yield [name, str(devices), f"does not run here: {error}"]
        return
    high = max(free.predicted)
    for i in range(limits):
        limit = low + (high - low) * i / max(1, limits - 1)
        row = [name, str(devices), human_bytes(round(limit))]
        try:
            found = compared(checkpoint="auto", memory=limit)
        except fxpipe.DoesNotFit:
            yield [*row, "does not fit"]
            continue
        off = max(found.memory_off, key=abs), found.predicted_s / found.measured_s - 1
        yield [
            *row,
            found.modes,
            human_time(found.measured_s),
            f"{found.measured_s / free.measured_s - 1:+.1%}",
            f"{max(found.predicted) / limit:.0%}",
            f"{max(found.measured) / limit:.0%}",
            *(f"{each:+.1%}" for each in off),
        ]


PLANNED = "model", "devices", "limit", "checkpoint", "chunks", "step", "over free", "full"
MEASURED = (
    *("model", "devices", "limit", "checkpoint", "step", "over free"),
    *("full, predicted", "full, measured", "memory off by", "time off by"),
)


def show(columns: Sequence[str], rows: Iterable[list[str]], path: Path | None) -> None:
    """Print a table, each row as soon as it is there, and write it to a file if one is given."""
    console, table, every = Console(width=150), Table(*columns), []
    for row in rows:
        table.add_row(*row)
        console.print(*row, style="dim")
        every.append(row)
    console.print(table)
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([columns, *every])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--limits", type=int, default=10)
    parser.add_argument("--chunks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--exhaustive", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    cases = itertools.product(given.models, given.devices)
    if given.measure:
        sim.load()
        rows = (row for each in cases for row in measured_rows(*each, given.limits, 4 * each[1]))
        show(MEASURED, rows, given.csv)
        return
    price, chunks = lru_cache(1)(priced), tuple(given.chunks)
    columns = [*PLANNED, "CPU time", *["over best"] * given.exhaustive]
    every = ((name, Case(price(name), devices, chunks)) for name, devices in cases)
    rows = (row for each in every for row in rows_of(*each, given.limits, given.exhaustive))
    show(columns, rows, given.csv)


if __name__ == "__main__":
    main()
