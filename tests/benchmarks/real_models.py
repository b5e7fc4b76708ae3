"""What it costs to compile models of real size, and to train a step of them.

::

    python -m tests.benchmarks.real_models
    python -m tests.benchmarks.real_models --models gpt2,resnet152

Models have their published sizes and random weights: GPT-2 (124 M parameters), ViT-L/16,
ResNet-152, and Llama 3.2 with 1 B parameters in bfloat16. Each is compiled for two CPU lanes and
four micro-batches of one row, in a process of its own with one intra-op thread, and then runs one
forward and one backward. Seconds are CPU seconds of the process, which hardly depend on what else
the machine does. Memory is the process's largest resident set, the model itself (column "model")
included. The table is followed by the same numbers as one line of JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fxpipe

ROWS = CHUNKS = 4
LANES = ["cpu"] * 2
TOKENS = 32

Made = tuple[nn.Module, dict[str, Tensor]]


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(config.vocab_size, (ROWS, TOKENS))}


def vit_l16() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(ROWS, 3, 224, 224)}


def resnet152() -> Made:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 8, 36, 3])
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(ROWS, 3, 224, 224)}


def llama_1b() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        use_cache=False,
        dtype="bfloat16",
    )
    ids = torch.randint(config.vocab_size, (ROWS, TOKENS))
    return LlamaForCausalLM(config).bfloat16(), {"input_ids": ids}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "vit_l16": vit_l16,
    "resnet152": resnet152,
    "llama_1b": llama_1b,
}


def peak() -> float:
    """The largest resident set of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(name: str) -> dict[str, Any]:
    """Compile one model and run it once, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # A small model first, so that what is imported when one compiles is not counted.
    with fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LANES) as small:
        small(torch.ones(4, 4))
    model, inputs = MODELS[name]()
    model.train()
    result: dict[str, Any] = {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_gib": peak(),
    }
    start = time.process_time()
    pipe = fxpipe.compile(model, LANES, chunks=CHUNKS, example_kwargs=inputs)
    result |= {
        "nodes": len(pipe.model_graph.graph.nodes),
        "compile_s": time.process_time() - start,
        "compile_gib": peak(),
    }
    start = time.process_time()
    pipe(**inputs).logits.float().square().mean().backward()
    result |= {"step_s": time.process_time() - start, "step_gib": peak()}
    pipe.close()
    return result


def apart(name: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.real_models", "--one", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shown(results: list[dict[str, Any]]) -> Table:
    """The numbers, a row for each model."""
    table = Table(title="CPU seconds, and largest resident sets in GiB", title_justify="left")
    for column in ("", "parameters", "nodes", "compile", "step", "model", "compiled", "trained"):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        table.add_row(
            result["model"],
            f"{result['parameters'] / 1e6:,.0f} M",
            f"{result['nodes']:,}",
            f"{result['compile_s']:.1f} s",
            f"{result['step_s']:.1f} s",
            *(f"{result[key]:.2f}" for key in ("model_gib", "compile_gib", "step_gib")),
        )
    return table


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True, help="Names, by commas.")
@click.option("--one", hidden=True, type=click.Choice(list(MODELS)), help="In this process.")
def main(models: str, one: str | None) -> None:
    """Compile models of real size, and train one step of each."""
    if one is not None:
        print(json.dumps(measured(one)))
        return
    names = models.split(",")
    for name in names:
        if name not in MODELS:
            raise click.BadParameter(f"no model {name!r}: there are {', '.join(MODELS)}")
    results = [apart(name) for name in names]
    Console().print(shown(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
