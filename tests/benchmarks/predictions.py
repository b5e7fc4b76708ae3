"""The memory and the time of a step that are predicted for real models, beside what a step takes.

    python -m tests.benchmarks.predictions [--models gpt2 unet ...] [--schedules gpipe 1f1b ...]
        [--checkpoints never always ...] [--devices 2] [--chunks 1 4 16] [--csv FILE]

Each model has its published structure, and sizes with which it runs on a CPU. It is cut for devices
of the simulated accelerator, whose memory is counted by tensors' storages as a caching allocator
counts them (``tests/accelerator/sim``), device by device; what the CPU's kernels need inside is not
counted there. It is on the first of these devices when it is compiled, since some operators save
other tensors on a CPU: a dropout its mask as floats. Two steps with Adam are taken, of which the
second one counts:

``predicted``
    What ``pipe.timeline()`` says after the first step, for each device.
``measured``
    The most bytes of all tensors that were alive at one time of the step.
``off by``
    The prediction over the measurement. The last lines have the largest of each model.
``time``
    The makespan in virtual time, predicted from the times of actions as they were measured there,
    beside that of the step: the clocks do not depend on the machine.

With ``--chunks 1 4 16`` there is one more table for each model, of the work of a step on the CPU
with so many micro-batches: the seconds that are estimated for all stages together, from what
operators compute and move, and the CPU time that a step has taken, the least of some. An estimate
is for another machine than this one; what it has to get right is how the work grows with the
micro-batches.
"""

from __future__ import annotations

import argparse
import csv
import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.devices import ACCELERATOR
from fxpipe.ir.text import human_bytes, human_time
from fxpipe.schedule import NAMES
from passes.common.modes import MODES
from tests.accelerator import sim
from tests.accelerator.clocks import Speed, begin, makespan, virtual_time
from tests.benchmarks.nets import UNet, resnet

ROWS, LENGTH, VOCABULARY = 16, 64, 512
STEPS = 5  # steps of which the CPU time is taken
SPEED = Speed.of(ACCELERATOR)  # for which the compiler takes devices whose names it does not know

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": LENGTH,
}

Made = tuple[nn.Module, dict[str, Any]]


def ids(length: int = LENGTH) -> Tensor:
    """Numbers of tokens."""
    return torch.randint(3, VOCABULARY, (ROWS, length))


def images(side: int) -> Tensor:
    """Pictures of three colours."""
    return torch.randn(ROWS, 3, side, side)


def of_transformers(name: str, **sizes: Any) -> nn.Module:
    """A model of transformers, by the name of its class."""
    import transformers

    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**sizes))
    return model


def gpt2() -> Made:
    sizes = {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": LENGTH, "use_cache": False}
    model = of_transformers("GPT2LMHeadModel", vocab_size=VOCABULARY, **sizes)
    return model, {"input_ids": ids()}


def bert() -> Made:
    return of_transformers("BertForMaskedLM", **TEXT), {"input_ids": ids()}


def llama() -> Made:
    sizes = TEXT | {"num_key_value_heads": 2, "use_cache": False}
    return of_transformers("LlamaForCausalLM", **sizes), {"input_ids": ids()}


def mixtral() -> Made:
    sizes = TEXT | {"num_key_value_heads": 2, "num_local_experts": 4, "use_cache": False}
    return of_transformers("MixtralForCausalLM", **sizes), {"input_ids": ids()}


def t5() -> Made:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4}
    model = of_transformers(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, use_cache=False, **sizes
    )
    return model, {"input_ids": ids(), "decoder_input_ids": ids()}


def whisper() -> Made:
    sizes = {"d_model": 128, "encoder_layers": 3, "decoder_layers": 3, "num_mel_bins": 32}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 512}
    sizes |= {"decoder_ffn_dim": 512, "max_source_positions": 64, "max_target_positions": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = of_transformers(
        "WhisperForConditionalGeneration",
        vocab_size=VOCABULARY,
        use_cache=False,
        **sizes,
        **tokens,
    )
    return model, {"input_features": torch.randn(ROWS, 32, 128), "decoder_input_ids": ids()}


def vit() -> Made:
    names = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
    sizes = {name: TEXT[name] for name in names}
    model = of_transformers("ViTForImageClassification", image_size=64, patch_size=8, **sizes)
    return model, {"pixel_values": images(64)}


def swin() -> Made:
    sizes = {"embed_dim": 32, "depths": [2, 2, 2], "num_heads": [2, 4, 8], "window_size": 4}
    model = of_transformers("SwinForImageClassification", image_size=64, patch_size=2, **sizes)
    return model, {"pixel_values": images(64)}


def resnet101() -> Made:
    return resnet(), {"input": images(32)}


def unet() -> Made:
    return UNet(2, 16, 4), {"x": images(64)}


def densenet() -> Made:
    from monai.networks.nets import DenseNet

    sizes = {"init_features": 64, "growth_rate": 32, "block_config": (4, 8, 8)}
    return DenseNet(2, 3, 10, **sizes), {"x": images(64)}


class Clicks(nn.Module):
    """Eight tables of embeddings, of which a batch looks up few rows, and a small network."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(200_000, 16, sparse=sparse) for _ in range(8))
        self.top = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        logits: Tensor = self.top(torch.cat(found, 1))
        return logits


def clicks() -> Made:
    return Clicks(), {"ids": torch.randint(200_000, (16 * ROWS, 8))}


def diffusion() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=2,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": images(32), "timestep": torch.randint(1000, (ROWS,))}


MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        *(gpt2, bert, llama, t5, vit, resnet101, unet),
        *(mixtral, whisper, swin, densenet, diffusion, clicks),
    )
}


@dataclass(frozen=True)
class Prediction:
    """What has been predicted for a step, and what was measured: bytes of each device, and
    seconds. ``modes``: which micro-batches stages keep, in words."""

    predicted: tuple[float, ...]
    measured: tuple[int, ...]
    predicted_s: float
    measured_s: float
    modes: str = ""

    @property
    def memory_off(self) -> list[float]:
        """By how much the prediction is above the measurement, device by device."""
        return [a / b - 1 for a, b in zip(self.predicted, self.measured, strict=True)]


def loss_of(output: Any, _: Any) -> Tensor:
    """Some loss of the model's logits, or of its sample."""
    for name in ("logits", "sample"):
        output = getattr(output, name, output)
    loss: Tensor = output.float().square().mean()
    return loss


def rows_of(inputs: dict[str, Any]) -> int:
    """How many rows a mini-batch has."""
    return len(next(iter(inputs.values())))


def compared(model: nn.Module, inputs: dict[str, Any], lanes: int, **options: Any) -> Prediction:
    """Take a step on so many devices, and compare it with its prediction."""
    gc.collect()
    torch.accelerator.empty_cache()  # or pieces of an earlier model's sizes are given out
    names = [f"sim:{i}" for i in range(lanes)]
    devices = [torch.device(name) for name in names]
    options = {"loss_fn": loss_of, "costs": "analytic", "optimizer": "adam", **options}
    target = torch.zeros(rows_of(inputs))  # with which devices of known memory are given a loss
    options = {"chunks": 4 * lanes, "example_target": target, **options}
    with (
        virtual_time(SPEED),
        fxpipe.compile(model.train().to(names[0]), names, check="warn", **options) as pipe,
    ):
        optimizer = torch.optim.Adam(pipe.parameters())
        ran = pipe.measure(**inputs, target=target, rounds=1)
        for number in range(2):
            for device in devices:
                torch.accelerator.synchronize(device)
                if number:
                    gc.collect()
                    torch.accelerator.empty_cache()
                    torch.accelerator.reset_peak_memory_stats(device)
            begin(SPEED)
            pipe.step(**inputs, target=target, optimizer=optimizer)
            took = makespan()
        timeline = pipe.timeline()
        said = re.search(r"not kept \(checkpoint\): (.*)", pipe.report())
        peaks = [
            torch.accelerator.memory_stats(device)["allocated_bytes.all.peak"] for device in devices
        ]
    assert ran.makespan
    modes = said[1] if said else "never"
    return Prediction(tuple(timeline.peak_memory), tuple(peaks), timeline.makespan, took, modes)


def work(model: nn.Module, inputs: dict[str, Any], lanes: int, chunks: int) -> tuple[float, float]:
    """The seconds of all stages together that are predicted for a step on the CPU, and the least
    CPU time of some steps."""
    names, target, taken = ["cpu"] * lanes, torch.zeros(rows_of(inputs)), []
    options: dict[str, Any] = {"chunks": chunks, "loss_fn": loss_of, "check": "warn"}
    with fxpipe.compile(model.train(), names, example_kwargs=inputs, **options) as pipe:
        predicted = sum(pipe.timeline().busy)
        for _ in range(STEPS):
            pipe.zero_grad()
            before = time.process_time()
            pipe.step(**inputs, target=target)
            taken.append(time.process_time() - before)
    return predicted, min(taken)


def show_work(console: Console, names: list[str], lanes: int, numbers: list[int]) -> None:
    """Print the table of the work of a step, for each number of micro-batches."""
    table = Table("model", "micro-batches", "predicted", "measured")
    for name in names:
        for chunks in numbers:
            torch.manual_seed(0)
            seconds = work(*MODELS[name](), lanes, chunks)
            table.add_row(name, str(chunks), *map(human_time, seconds))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=list(NAMES))
    parser.add_argument("--checkpoints", nargs="+", default=list(MODES))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--chunks", type=int, nargs="*", default=[])
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    sim.load()
    columns = ["model", "schedule", "checkpoint", "device", "predicted", "measured", "off by"]
    columns += ["time off by"]
    console, every = Console(width=130), []
    table, worst = Table(*columns), dict[str, float]()
    for name in given.models:
        for schedule in given.schedules:
            for checkpoint in given.checkpoints:
                torch.manual_seed(0)
                try:
                    found = compared(
                        *MODELS[name](), given.devices, schedule=schedule, checkpoint=checkpoint
                    )
                except (ImportError, NotImplementedError) as error:
                    # A library is missing, or the device lacks an operator that the model uses.
                    console.print(f"{name} does not run here: {error}")
                    continue
                time_off = f"{found.predicted_s / found.measured_s - 1:+.1%}"
                for device, off in enumerate(found.memory_off):
                    sizes = found.predicted[device], found.measured[device]
                    shown = [human_bytes(round(size)) for size in sizes]
                    row = [name, schedule, checkpoint, str(device), *shown, f"{off:+.1%}", time_off]
                    table.add_row(*row)
                    console.print(*row, style="dim")
                    every.append(row)
                    worst[name] = max(worst.get(name, 0.0), off, key=abs)
    console.print(table)
    for name, off in worst.items():
        console.print(f"{name}: {off:+.1%} at most")
    if given.chunks:
        show_work(console, given.models, given.devices, given.chunks)
    if given.csv:
        with given.csv.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *every])


if __name__ == "__main__":
    main()
