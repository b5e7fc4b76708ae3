"""How often a model is compiled that is called with inputs of forty different shapes.

::

    python -m tests.benchmarks.lengths
    python -m tests.benchmarks.lengths --models nanogpt,unet2d --shapes 10

Language models get sequences of other lengths, Whisper and T5 targets of other lengths as well, and
U-Nets images of other heights and widths. The models are small ones of the published kinds, with
random weights and without dropout, since compiling takes as long for few channels as for many. Each
is compiled for two CPU lanes and two micro-batches, in a process of its own with one intra-op
thread, in eval mode.

Seconds are CPU seconds of all calls, and of the first one. Memory is how much the resident set of
the process grows from the first call to the last, and that for each compilation after the first.
``differs`` is the largest difference from the loop over micro-batches, relative to the largest
value; "0" are equal bits. ``fail`` counts the calls that raised an error; the errors are printed
below the table. The numbers of a model are printed as JSON as soon as they are there; the table
comes at the end.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe

ROWS, CHUNKS, SHAPES = 4, 2, 40
LANES = ["cpu"] * 2
VOCABULARY = 120

Made = tuple[nn.Module, Callable[[int], dict[str, Tensor]]]
"""A model, and a function from the number of a call to its inputs."""


def ids(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length))


class Block(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.attend(self.norm(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.norm_2(x))


class NanoGPT(nn.Module):
    """nanoGPT as Andrej Karpathy has written it, without its loss."""

    def __init__(self, layers: int = 4, width: int = 32, block_size: int = 256) -> None:
        super().__init__()
        self.block_size = block_size
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        assert t <= self.block_size, f"cannot forward {t} tokens, of {self.block_size} at most"
        x = self.tokens(idx) + self.positions(torch.arange(0, t, device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def nanogpt() -> Made:
    return NanoGPT(), lambda i: {"idx": ids(8 + i)}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 4, "n_embd": 32, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=VOCABULARY, use_cache=False, **small)
    return GPT2LMHeadModel(config), lambda i: {"input_ids": ids(8 + i)}


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    def inputs(i: int) -> dict[str, Tensor]:
        mask = torch.ones(ROWS, 8 + i, dtype=torch.long)
        mask[1, 5:] = 0
        return {"input_ids": ids(8 + i), "attention_mask": mask}

    return BertForSequenceClassification(BertConfig(**SMALL)), inputs


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_key_value_heads=2, use_cache=False, **SMALL)
    return LlamaForCausalLM(config), lambda i: {"input_ids": ids(8 + i)}


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False, **small)
    return T5ForConditionalGeneration(config), lambda i: {
        "input_ids": ids(8 + i),
        "decoder_input_ids": ids(6 + i % 7),
    }


class Encoder(nn.Module):
    """nn.TransformerEncoder, with a mask of what is ahead."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layers(x, mask=mask, is_causal=False)


def encoder() -> Made:
    def inputs(i: int) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(3 + i)  # 4 is the number of rows
        return {"x": torch.randn(ROWS, 3 + i, 32), "mask": mask}

    return Encoder(), inputs


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 20}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        max_source_positions=30,
        max_target_positions=100,
        decoder_start_token_id=2,
        use_cache=False,
        **(layers | heads | sizes | tokens),
    )
    return WhisperForConditionalGeneration(config), lambda i: {
        "input_features": torch.randn(ROWS, 20, 60),
        "decoder_input_ids": ids(6 + i),
    }


def pictures(channels: int, step: int) -> Callable[[int], Tensor]:
    """Pictures whose heights and widths are multiples of ``step``; no two calls have one shape."""
    return lambda i: torch.randn(ROWS, channels, step * (2 + i % 7), step * (2 + i // 7))


def unet2d() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
    )
    picture = pictures(3, 8)
    return model, lambda i: {"sample": picture(i), "timestep": torch.randint(99, (ROWS,))}


def monai_unet() -> Made:
    from monai.networks.nets import UNet

    model = UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 16),
        strides=(2, 2),
        num_res_units=1,
    )
    picture = pictures(1, 8)
    return model, lambda i: {"x": picture(i)}


MODELS: dict[str, Callable[[], Made]] = {
    "nanogpt": nanogpt,
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "t5": t5,
    "encoder": encoder,
    "whisper": whisper,
    "unet2d": unet2d,
    "monai_unet": monai_unet,
}


def measured(name: str, shapes: int) -> dict[str, Any]:
    """Call one model with inputs of so many shapes, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with fxpipe.compile(small, LANES, tracer="export") as pipe:  # what is imported is not counted
        pipe(torch.ones(4, 4))
    model, make = MODELS[name]()
    model.eval()
    seconds: list[float] = []
    errors: list[str] = []
    compiled, differs, resident = set[int](), 0.0, 0
    with fxpipe.compile(model, LANES, chunks=CHUNKS) as pipe, torch.no_grad():
        for i in range(shapes):
            inputs = make(i)
            start = time.process_time()
            try:
                output = pipe(**inputs)
            except Exception as error:
                errors.append(f"{_shapes(inputs)}: {type(error).__name__}: {error}"[:300])
                continue
            seconds.append(time.process_time() - start)
            compiled |= set(map(id, pipe.all_guards))
            differs = max(differs, _apart(model, inputs, output))
            gc.collect()
            resident = resident or _resident()
        ends = pipe.front_end if pipe.all_guards else ""
    grown = _resident() - resident
    return {
        "model": name,
        "front_end": ends,
        "shapes": shapes,
        "compiled": len(compiled),
        "seconds": sum(seconds),
        "first": seconds[0] if seconds else 0.0,
        "mib": grown / 2**10,
        "mib_each": grown / 2**10 / max(1, len(compiled) - 1),
        "differs": differs,
        "errors": errors,
    }


def _shapes(inputs: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())


def _resident() -> int:
    """The resident set of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _apart(model: nn.Module, inputs: dict[str, Tensor], output: Any) -> float:
    """The largest relative difference of the first output from the loop over micro-batches."""
    rows = ROWS // CHUNKS
    is_shared = {"mask"}
    loop = [
        model(
            **{
                name: t if name in is_shared else t[k * rows : (k + 1) * rows]
                for name, t in inputs.items()
            }
        )
        for k in range(CHUNKS)
    ]
    expected = torch.cat([_first(each) for each in loop])
    return float((_first(output) - expected).abs().max() / expected.abs().max())


def _first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def apart(name: str, shapes: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.lengths"]
    options = ["--one", name, "--shapes", str(shapes)]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shown(results: list[dict[str, Any]]) -> Table:
    """The numbers, a row for each model."""
    table = Table(title="Calls of different shapes", title_justify="left")
    columns = "shapes", "compilations", "CPU s", "first call", "MiB", "MiB each", "differs", "fail"
    for column in ("", "front end", *columns):
        table.add_column(column, justify="right" if column in columns else "left")
    for result in results:
        table.add_row(
            result["model"],
            result["front_end"],
            str(result["shapes"]),
            str(result["compiled"]),
            f"{result['seconds']:.1f}",
            f"{result['first']:.1f}",
            f"{result['mib']:.0f}",
            f"{result['mib_each']:.1f}",
            f"{result['differs']:.0e}" if result["differs"] else "0",
            str(len(result["errors"])),
        )
    return table


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True, help="Names, by commas.")
@click.option("--shapes", default=SHAPES, show_default=True, help="How many, for each model.")
@click.option("--one", hidden=True, type=click.Choice(list(MODELS)), help="In this process.")
def main(models: str, shapes: int, one: str | None) -> None:
    """Call models with inputs of many shapes, and count how often they are compiled."""
    if one is not None:
        print(json.dumps(measured(one, shapes)))
        return
    names = models.split(",")
    for name in names:
        if name not in MODELS:
            raise click.BadParameter(f"no model {name!r}: there are {', '.join(MODELS)}")
    results = []
    for name in names:
        results.append(apart(name, shapes))
        print(json.dumps(results[-1]), flush=True)
    Console(width=120).print(shown(results))
    for result in results:
        for error in result["errors"]:
            print(f"{result['model']}: {error}")


if __name__ == "__main__":
    main()
