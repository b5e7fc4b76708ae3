"""A model that fits into memory once, but not twice: loaded, and trained one step, under a limit.

::

    python -m tests.benchmarks.big_model
    python -m tests.benchmarks.big_model --layers 2 --limit 3

The model is a Llama of 8 GiB in bfloat16 (20 layers of 4096 features, as those of Llama 2 7B). The
process that compiles and trains it may have 12 GiB of address space (``RLIMIT_AS``), in which its
code, its threads' stacks, and the part of a checkpoint that is being read count as well.

1. Shards of safetensors are written to a temporary folder, with an index, as Hugging Face writes
   them; each is made by itself, so that this process stays small. They need 8 GiB of disk.
2. In a process of its own, under the limit: the model is built on "meta", and compiled there for
   two CPU lanes with ten stages each; the shards are loaded, one tensor at a time; and
   ``pipe.step`` runs one training step with SGD, in the order "looped_bfs". Each stage is stepped
   as soon as its gradients are done, and these are freed then (``zero_grad=True``): all gradients
   together would be another 8 GiB.

Printed are the largest resident set and the largest address space of that process up to the end of
each phase, the CPU seconds of the phase, the loss, and how many of the parameters have moved (a
weight of 1, as norms have it, moves by 0.004 or more, or not at all, in bfloat16). It takes
minutes, needs Linux, and is not run in CI.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

import fxpipe

SHARD = 2**29  # bytes: reading maps a shard twice
ROWS, TOKENS = 4, 8


def config(layers: int) -> Any:
    """A Llama of so many layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        use_cache=False,
        dtype="bfloat16",
    )


def on_meta(layers: int) -> nn.Module:
    """The model, without memory."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config(layers)).bfloat16()
    return model


def write(folder: Path, layers: int) -> int:
    """Write random weights in shards, made one at a time. Returns the number of bytes."""
    torch.manual_seed(0)
    shards: list[dict[str, Tensor]] = [{}]
    total = size = 0
    for name, tensor in on_meta(layers).state_dict().items():
        if size > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    weight_map: dict[str, str] = {}
    # Normal numbers take a minute for each GiB; weights repeat a block of them, which is as good.
    block = torch.empty(2**24, dtype=torch.bfloat16).normal_(std=0.02)
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        made = {
            name: torch.ones(tensor.shape, dtype=tensor.dtype)
            if tensor.ndim == 1
            else block.repeat(-(-tensor.numel() // block.numel()))[: tensor.numel()].view(
                tensor.shape
            )
            for name, tensor in shard.items()
        }
        save_file(made, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def next_token(output: Any, ids: Tensor) -> Tensor:
    """The loss of a language model."""
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Phases:
    """The memory and the time that each phase takes."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._start = time.process_time()

    def done(self, name: str) -> None:
        """Note the end of a phase."""
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
        self.found[name] = {
            "resident_gib": int(sizes["VmHWM"]) / 2**20,
            "address_space_gib": int(sizes["VmPeak"]) / 2**20,
            "cpu_s": time.process_time() - self._start,
        }
        self._start = time.process_time()


def train(folder: Path, layers: int, limit: float) -> dict[str, Any]:
    """Compile, load and train in this process, under a limit of so many GiB."""
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (int(limit * 2**30),) * 2)
    torch.set_num_threads(1)
    phases = Phases()
    model = on_meta(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    phases.done("built on meta")
    ids = torch.randint(32_000, (ROWS, TOKENS))
    pipe = fxpipe.compile(
        model,
        ["cpu"] * 2,
        stages=layers if layers % 2 == 0 else layers + 1,
        chunks=2,
        schedule="looped_bfs",
        loss_fn=next_token,
        example_kwargs={"input_ids": ids},
    )
    phases.done("compiled on meta")
    pipe.load(folder)
    phases.done("loaded")
    pipe.prepare(input_ids=ids)
    phases.done("checked")
    before = [parameter[..., :64].clone() for parameter in model.parameters()]
    loss = pipe.step(input_ids=ids, target=ids, optimizer=optimizer, zero_grad=True)
    phases.done("trained")
    after = [parameter[..., :64] for parameter in model.parameters()]
    moved = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pipe.close()
    return {"loss": loss.item(), "parameters": len(after), "moved": moved, "phases": phases.found}


@click.command()
@click.option("--layers", default=20, show_default=True, help="0.38 GiB each.")
@click.option("--limit", default=12.0, show_default=True, help="GiB of address space; 0: none.")
@click.option("--folder", type=Path, help="Where the checkpoint is, or is to be written and kept.")
@click.option("--one", hidden=True, is_flag=True, help="In this process.")
def main(layers: int, limit: float, folder: Path | None, one: bool) -> None:
    """Load a model that does not fit into memory twice, and train it one step."""
    if one:
        assert folder is not None
        warnings.simplefilter("ignore")
        print(json.dumps(train(folder, layers, limit)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        where = folder or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        if not list(where.glob("*.json")):
            write(where, layers)
        total = sum(path.stat().st_size for path in where.glob("*.safetensors"))
        command = [sys.executable, "-m", "tests.benchmarks.big_model", "--one"]
        options = ["--layers", str(layers), "--limit", str(limit), "--folder", str(where)]
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    parameters = f"{total / 2**30:.2f} GiB of parameters, {limit:g} GiB of address space"
    table = Table(
        *("", "largest resident set", "largest address space", "CPU"),
        title=parameters,
        title_justify="left",
    )
    for name, phase in result["phases"].items():
        sizes = (f"{phase[key]:.2f} GiB" for key in ("resident_gib", "address_space_gib"))
        table.add_row(name, *sizes, f"{phase['cpu_s']:.0f} s")
    Console().print(table)
    print(json.dumps({**result, "bytes": total}))


if __name__ == "__main__":
    main()
