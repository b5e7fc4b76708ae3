"""What it costs to compile models of real size, and to train a step of them.

::

    python -m tests.benchmarks.real_models
    python -m tests.benchmarks.real_models --models gpt2,resnet152
    python -m tests.benchmarks.real_models --models linear8 --tracer export

Models have their published sizes and random weights: GPT-2 (124 M parameters), ViT-L/16,
ResNet-152, and Llama 3.2 with 1 B parameters in bfloat16. ``linear8`` is eight linear layers of
4096 x 4096, whose parameters are nearly all of the memory. Each is compiled for two CPU lanes and
four micro-batches of one row, in a process of its own that computes with one thread: in train
mode, then in eval mode, then in train mode again. Then it runs one forward and one backward.
Another process takes the first compilation from the cache on disk, where the first process has left
it (which takes some of the time of the first column).

Llama 3 with 70 B parameters is on "meta" and is not compiled: its row is that of a plan for sixteen
H100 with 1F1B, checkpoints and Adam, for 16 rows of 4096 tokens.

Seconds are CPU seconds of the process, which hardly depend on what else the machine does. Memory is
the largest resident set of the process in that phase, less the resident set ahead of the phase; in
the table it is in units of the model's parameters. A small model with a convolution, norms and
attention is compiled first: what is imported then is not counted, nor what PyTorch keeps of each
operator that has run once, as much for a small model as for a large one. (Linux starts a process's
peak anew when "5" is written to its ``/proc/self/clear_refs``.) The numbers of a model, in GiB, are
printed as JSON as soon as they are there; the table comes at the end.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxpipe
from fxpipe.planning import plan
from tests.benchmarks.models import Made, gpt2, llama_1b, llama_70b, resnet152, vit_l16

ROWS = CHUNKS = 4
LANES = ["cpu"] * 2
TOKENS = 32


def linear8() -> Made:
    layers = [nn.Linear(4096, 4096) for _ in range(8)]
    return nn.Sequential(*layers), {"input": torch.randn(ROWS, 4096)}


def llama_70b_on_meta() -> Made:
    with torch.device("meta"):
        return llama_70b(len(PLANNED_FOR))


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: gpt2(ROWS, TOKENS),
    "vit_l16": lambda: vit_l16(ROWS),
    "resnet152": lambda: resnet152(ROWS),
    "llama_1b": lambda: llama_1b(ROWS, TOKENS, tied=True),
    "linear8": linear8,
    "llama_70b": llama_70b_on_meta,
}
PLANNED = {"llama_70b"}
PLANNED_FOR = ["h100"] * 16


@contextmanager
def phase(result: dict[str, Any], name: str) -> Iterator[None]:
    """Note the CPU seconds, and the memory, that the ``with`` block takes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _resident("VmRSS"), time.process_time()
    yield
    result[f"{name}_s"] = time.process_time() - start
    result[f"{name}_gib"] = _resident("VmHWM") - before


def _resident(field: str) -> float:
    """A resident set of this process, in GiB: ``VmRSS`` is that of now, ``VmHWM`` the largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20


def started(name: str, tracer: str) -> Made:
    """A model in train mode, in a process in which something has been compiled already."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A small model first, so that neither imports are counted, nor what PyTorch keeps of operators.
    for front_end in "symbolic", "export":
        small = nn.Sequential(
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Unflatten(1, (1, 4))),
            *(nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True),),
            *(nn.Flatten(), nn.Linear(4, 4)),
        )
        with fxpipe.compile(small, LANES, tracer=front_end) as pipe:
            pipe(torch.ones(4, 4, 8, 8))
    model, inputs = MODELS[name]()
    return model.train(), inputs


def measured(name: str, tracer: str, cache: str) -> dict[str, Any]:
    """Compile one model and run it once, in this process."""
    model, inputs = started(name, tracer)
    result = _sizes(name, model)
    pipe = fxpipe.compile(model, LANES, chunks=CHUNKS, tracer=tracer, cache=cache)
    with phase(result, "compile"):
        pipe.prepare(**inputs)
    result["nodes"] = len(pipe.model_graph.graph.nodes)
    model.eval()
    with phase(result, "eval"):
        pipe.prepare(**inputs)
    model.train()
    pipe.recompile()
    with phase(result, "again"):
        pipe.prepare(**inputs)
    with phase(result, "step"):
        output = pipe(**inputs)
        getattr(output, "logits", output).float().square().mean().backward()
    pipe.close()
    return result


def planned(name: str, tracer: str) -> dict[str, Any]:
    """Plan the pipeline of one model, in this process."""
    model, inputs = started(name, tracer)
    result = _sizes(name, model)
    with phase(result, "plan"):
        plan(
            model,
            PLANNED_FOR,
            example_kwargs=inputs,
            chunks=len(PLANNED_FOR),
            schedule="1f1b",
            checkpoint="always",
            tracer=tracer,
        )
    return result


def _sizes(name: str, model: nn.Module) -> dict[str, Any]:
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_gib": sum(p.nbytes for p in model.parameters()) / 2**30,
    }


def from_the_cache(name: str, tracer: str, cache: str) -> dict[str, Any]:
    """Compile one model that another process has compiled already."""
    model, inputs = started(name, tracer)
    result: dict[str, Any] = {}
    with fxpipe.compile(model, LANES, chunks=CHUNKS, tracer=tracer, cache=cache) as pipe:
        with phase(result, "cached"):
            pipe.prepare(**inputs)
        result["cache"] = pipe.compilations[0].cache
    return result


def apart(name: str, tracer: str) -> dict[str, Any]:
    """Both, each in a process of its own; or the plan."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.real_models"]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        options = ["--one", name, "--tracer", tracer, "--cache", cache]
        for again in ([],) if name in PLANNED else ([], ["--again"]):
            done = subprocess.run(
                [*command, *options, *again],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                # NumPy's products have threads of their own, which are busy while they wait.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            found |= json.loads(done.stdout.splitlines()[-1])
    return found


def shown_plans(results: list[dict[str, Any]]) -> Table:
    """The numbers of plans, a row for each model."""
    table = Table("", "parameters", "plan", "memory", title="Plans", title_justify="left")
    for result in results:
        table.add_row(
            result["model"],
            f"{result['parameters_gib']:.2f} GiB",
            f"{result['plan_s']:.1f} s",
            f"{result['plan_gib']:.2f} GiB",
        )
    return table


def shown(results: list[dict[str, Any]]) -> Table:
    """The numbers, a row for each model."""
    table = Table(title="CPU seconds, and memory in units of the parameters", title_justify="left")
    phases = "compile", "cached", "eval", "again", "step"
    for column in ("", "parameters", "nodes", *phases, *phases):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        table.add_row(
            result["model"],
            f"{result['parameters_gib']:.2f} GiB",
            f"{result['nodes']:,}",
            *(f"{result[f'{name}_s']:.1f} s" for name in phases),
            *(f"+{result[f'{name}_gib'] / result['parameters_gib']:.2f}" for name in phases),
        )
    return table


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True, help="Names, by commas.")
@click.option("--tracer", default="auto", show_default=True, help="As for fxpipe.compile.")
@click.option("--one", hidden=True, type=click.Choice(list(MODELS)), help="In this process.")
@click.option("--cache", hidden=True, default="", help="The folder of the cache on disk.")
@click.option("--again", hidden=True, is_flag=True, help="From the cache.")
def main(models: str, tracer: str, one: str | None, cache: str, again: bool) -> None:
    """Compile models of real size, and train one step of each."""
    if one is not None:
        if one in PLANNED:
            print(json.dumps(planned(one, tracer)))
        else:
            print(json.dumps((from_the_cache if again else measured)(one, tracer, cache)))
        return
    names = models.split(",")
    for name in names:
        if name not in MODELS:
            raise click.BadParameter(f"no model {name!r}: there are {', '.join(MODELS)}")
    results = []
    for name in names:
        results.append(apart(name, tracer))
        print(json.dumps(results[-1]), flush=True)
    compiled = [result for result in results if result["model"] not in PLANNED]
    plans = [result for result in results if result["model"] in PLANNED]
    if compiled:
        Console(width=120).print(shown(compiled))
    if plans:
        Console(width=120).print(shown_plans(plans))


if __name__ == "__main__":
    main()
