"""Compiled stages beside the compiled model: how much results differ, and how long steps take.

::

    python -m tests.benchmarks.compiled
    python -m tests.benchmarks.compiled --few --size small
    python -m tests.benchmarks.compiled --models gpt2 --schedules zb_h1 --backend aot_eager

All combinations are many, and each is compiled anew. With ``--few``, every model trains with the
first schedule, every further schedule trains one of the models, and checkpoint modes take turns.

GPT-2, Llama, a U-Net and a ViT train one step of four micro-batches: in a loop over the
micro-batches with ``torch.compile(model)``, as a pipeline on CPU lanes with ``stage_backend``, and
as an uncompiled pipeline, which shows what compiling gains. ``--size`` says how large the models
are: the micro-batches of "toy" take a thread 10 to 20 ms, those of "small" 100 to 400 ms.

Times are CPU seconds of the process, which depend little on what else the machine does: medians of
steps that take turns, with one intra-op thread. "ratio" is the time of the compiled pipeline
divided by that of the compiled model in the loop, where one thread runs all stages, as it runs the
loop; "more" is their difference, for each stage and micro-batch. "in lanes" is the ratio where each
lane has a thread: that two of them compute at the same time, and so share caches and, on many
machines, a core, makes each take more CPU time. "as it is" is the time of the uncompiled pipeline,
in lanes, divided by that of the loop. With checkpoints a stage runs forward twice, which the loop
does not.

A difference is the largest of any gradient, divided by the largest number in that gradient: of the
compiled pipeline from the compiled model in the loop and, as "eager", of that from the uncompiled
model (of ViT it is that of the keys' biases, whose gradients are 0 but for rounding). Dropout is
off, as the two sides draw their masks in different orders. "anew" counts the stages that were
recompiled after the first step, in three steps with smaller batches.
"""

from __future__ import annotations

import copy
import csv
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.runtime.random import alone
from fxpipe.schedule import NAMES
from tests.benchmarks.nets import UNet
from tests.benchmarks.timing import keep_memory, show

CHUNKS, ROWS, VOCABULARY = 4, 12, 1024
Made = tuple[nn.Module, Tensor, Tensor]
COLUMNS = (
    *("model", "schedule", "checkpoint", "difference", "eager", "loop", "pipeline", "ratio"),
    *("more", "in lanes", "as it is", "anew", "refused"),
)


@dataclass(frozen=True)
class Size:
    """How large the models are.

    Args:
        width, heads, layers: of the transformers.
        tokens: how many each row of the language models has.
        pixels: the height and width of the images for the ViT, which it cuts into patches of 8.
        channels, depth, image: of the U-Net, and the height and width of its images.
    """

    width: int
    heads: int
    layers: int
    tokens: int
    pixels: int
    channels: int
    depth: int
    image: int


SIZES = {
    "toy": Size(128, 4, 2, 64, 64, 16, 2, 32),
    "small": Size(768, 12, 4, 32, 48, 48, 4, 64),
}
"""One micro-batch takes one thread of a CPU 10 to 20 ms for "toy", and 100 to 400 ms for "small",
whose transformers have the width of GPT-2 and ViT-B and a third of their layers."""


def gpt2(size: Size) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2 * size.tokens,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = torch.randint(VOCABULARY, (ROWS, size.tokens))
    return GPT2LMHeadModel(config), ids, ids


def llama(size: Size) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        use_cache=False,
    )
    ids = torch.randint(VOCABULARY, (ROWS, size.tokens))
    return LlamaForCausalLM(config), ids, ids


def unet(size: Size) -> Made:
    net = UNet(convs=1, channels=size.channels, depth=size.depth)
    for module in net.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    image = size.image
    return net, torch.randn(ROWS, 3, image, image), torch.randn(ROWS, 1, image, image)


def vit(size: Size) -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        image_size=size.pixels,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return (
        ViTForImageClassification(config),
        torch.randn(ROWS, 3, size.pixels, size.pixels),
        torch.randint(10, (ROWS,)),
    )


MODELS: dict[str, Callable[[Size], Made]] = {"gpt2": gpt2, "llama": llama, "unet": unet, "vit": vit}


def loss_of(output: Any, target: Tensor) -> Tensor:
    result = getattr(output, "logits", output)
    if result.dim() == 4:
        return F.mse_loss(result, target)
    return F.cross_entropy(result.flatten(0, -2), target.flatten())


def loop(model: Callable[[Tensor], Any], x: Tensor, y: Tensor) -> None:
    for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        (loss_of(model(part), target) / CHUNKS).backward()


def taken(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-8)) for a, b in pairs)


def measure(sides: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, float]]:
    """The CPU seconds of each side in each round."""
    found = []
    for _ in range(rounds):
        seconds = {}
        for name, run in sides.items():
            start = time.process_time()
            run()
            seconds[name] = time.process_time() - start
        found.append(seconds)
    return found


Row = tuple[str, str, str]
"""The names of a model, a schedule and a checkpoint mode."""


def few(models: list[str], schedules: list[str], checkpoints: list[str]) -> list[Row]:
    """Rows that have each model, each schedule and each checkpoint mode."""
    pairs = [(model, schedules[0]) for model in models]
    pairs += [(models[i % len(models)], name) for i, name in enumerate(schedules) if i]
    modes = itertools.cycle(checkpoints)
    return sorted(((*pair, next(modes)) for pair in pairs), key=lambda row: models.index(row[0]))


def measured(
    name: str, size: str, lanes: int, ways: Sequence[tuple[str, str]], backend: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """Train a model in each of the ways: with this schedule, and this checkpoint mode."""
    torch.manual_seed(0)
    model, x, y = MODELS[name](SIZES[size])
    devices = ["cpu"] * lanes
    model.train()
    compiled_model = torch.compile(model, backend=backend)
    loop(model, x, y)
    eager = taken(model)
    loop(compiled_model, x, y)
    expected = taken(model)
    for schedule, checkpoint in ways:
        told = {"chunks": CHUNKS, "schedule": schedule, "checkpoint": checkpoint}
        own, plain = copy.deepcopy(model), copy.deepcopy(model)
        with (
            warnings.catch_warnings(record=True) as said,
            fxpipe.compile(own, devices, loss_fn=loss_of, stage_backend=backend, **told) as pipe,
            fxpipe.compile(plain, devices, loss_fn=loss_of, **told) as as_it_is,
        ):
            warnings.simplefilter("always")
            pipe.step(x, target=y)
            grads = taken(own)
            as_it_is.step(x, target=y)
            sides = {
                "loop": lambda: loop(compiled_model, x, y),
                "lanes": lambda pipe=pipe: pipe.step(x, target=y),
                "pipe": lambda pipe=pipe: in_one_thread(pipe, x, y),
                "as it is": lambda pipe=as_it_is: pipe.step(x, target=y),
            }
            by_rounds = measure(sides, rounds) or [dict.fromkeys(sides, 1.0)]
            stages = len(pipe.stages)
            known = count(pipe)
            for rows in (ROWS - 1, ROWS - 2, ROWS - 3):
                pipe.step(x[:rows], target=y[:rows])
            anew = count(pipe) - known
            report = str(pipe.report())
        yield {
            "model": name,
            "size": size,
            "lanes": lanes,
            "schedule": schedule,
            "checkpoint": checkpoint,
            "stages": stages,
            "difference": difference(grads, expected),
            "eager": difference(expected, eager),
            "loop_ms": statistics.median(each["loop"] * 1e3 for each in by_rounds),
            "pipe_ms": statistics.median(each["pipe"] * 1e3 for each in by_rounds),
            "ratio": statistics.median(each["pipe"] / each["loop"] for each in by_rounds),
            "more_us": statistics.median(each["pipe"] - each["loop"] for each in by_rounds)
            * (1e6 / (stages * CHUNKS)),
            "in_lanes": statistics.median(each["lanes"] / each["loop"] for each in by_rounds),
            "as_it_is": statistics.median(each["as it is"] / each["loop"] for each in by_rounds),
            "anew": anew,
            "refused": [line for line in report.splitlines() if "runs as it is" in line],
            "warnings": sorted({str(each.message) for each in said}),
        }


def in_one_thread(pipe: fxpipe.Pipeline, x: Tensor, y: Tensor) -> None:
    """A step without the lanes' threads: a thread that is alone does not wait for them."""
    with alone():
        pipe.step(x, target=y)


def count(pipe: fxpipe.Pipeline) -> int:
    """How many times a stage has been compiled."""
    return pipe._runner.last()[0].compiled.times


def cells(result: dict[str, Any]) -> list[str]:
    """The row of the table for one result."""
    return [
        *(result["model"], result["schedule"], result["checkpoint"]),
        *(f"{result['difference']:.1e}", f"{result['eager']:.1e}"),
        *(f"{result['loop_ms']:.0f} ms", f"{result['pipe_ms']:.0f} ms"),
        *(f"{result['ratio']:.2f}", f"{result['more_us']:.0f} µs"),
        *(f"{result['in_lanes']:.2f}", f"{result['as_it_is']:.2f}"),
        str(result["anew"]),
        "; ".join(result["refused"]),
    ]


@click.command(help=__doc__)
@click.option("--models", default=",".join(MODELS))
@click.option("--schedules", default=",".join(NAMES))
@click.option("--checkpoints", default="never,except_last,always")
@click.option("--few", "is_few", is_flag=True, help="each of them at least once")
@click.option("--size", default="toy", type=click.Choice(list(SIZES)), help="of the models")
@click.option("--lanes", default=2, help="of the pipeline")
@click.option("--backend", default="inductor")
@click.option("--rounds", default=7, help="steps of each side; 0 for none, differences only")
@click.option("--csv", "file", type=click.File("w"), help="the table is written to this file, too")
def main(
    models: str,
    schedules: str,
    checkpoints: str,
    is_few: bool,
    size: str,
    lanes: int,
    backend: str,
    rounds: int,
    file: TextIO | None,
) -> None:
    torch.set_num_threads(1)
    keep_memory()
    given = [text.split(",") for text in (models, schedules, checkpoints)]
    rows: list[Row] = few(*given) if is_few else [*itertools.product(*given)]
    results = []
    for name, group in itertools.groupby(rows, key=lambda row: row[0]):
        ways = [(schedule, checkpoint) for _, schedule, checkpoint in group]
        for result in measured(name, size, lanes, ways, backend, rounds):
            print(json.dumps(result), flush=True)
            results.append(result)
    table = list(map(cells, results))
    title = f"{size}, {lanes} lanes, {CHUNKS} micro-batches of {ROWS // CHUNKS} rows, {backend}"
    show(title, list(COLUMNS), table)
    if file is not None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *table])


if __name__ == "__main__":
    main()
