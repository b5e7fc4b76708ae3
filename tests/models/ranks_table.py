"""The table of models that train on four ranks: with fxpipe, and with PyTorch's own pipeline.

    python -m tests.models.ranks_table                    # all
    python -m tests.models.ranks_table T5ForConditionalGeneration

The models are those of the zoo that come nearest to the fifteen well-known ones: small, with random
weights and no dropout. Each of four gloo processes compiles the model and does one step of 1F1B
with four micro-batches of two rows. ``torch.distributed.pipelining.pipeline`` gets split points at
even distances in the model's lists of modules, and fxpipe nothing. "trains" means that every
gradient is apart from those of a loop over the micro-batches by 1e-4 of its largest value at most.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.structure import Structure

RANKS, CHUNKS, ROWS = 4, 4, 8
PATIENCE = 300.0  # seconds for one model
MODELS = (
    *("ResNetForImageClassification", "DenseNet121", "SwinForImageClassification"),
    *("ViTForImageClassification", "HighResNet", "UNet 3D", "BasicUNet", "UNet2DModel"),
    *("BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"),
    *("DeiTForImageClassification", "MixtralForCausalLM", "WhisperForConditionalGeneration"),
)


class Plain(nn.Module):
    """A model that takes its inputs by their places, and returns its first floating-point output.
    So it gives PyTorch's pipeline, which has a loss function outside of the model, its best chance.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *values: Any) -> Tensor:
        output = self.model(**dict(zip(self.names, values, strict=True)))
        return next(v for v in _tensors(output) if v.is_floating_point())


def _tensors(output: Any) -> list[Tensor]:
    leaves = Structure.of(output)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean square of an output; the target is there because losses have one."""
    return (output.flatten(1).square().mean(1) - target).mean()


def entry(name: str) -> Any:
    from tests.models.registry import entries

    return entries()[name]


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its inputs, which are the same in every process."""
    torch.manual_seed(0)
    model = entry(name).build()
    torch.manual_seed(1)
    inputs = entry(name).inputs(ROWS)
    labels = inputs.pop("labels", None)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and labels is not None:
        inputs.setdefault("decoder_input_ids", labels)
    return Plain(model, tuple(inputs)), tuple(inputs.values())


TARGET = torch.zeros(ROWS)


def expected(name: str) -> dict[str, Tensor]:
    """The gradients of a loop over the micro-batches."""
    model, inputs = made(name)
    for values in zip(*(value.chunk(CHUNKS) for value in inputs), strict=True):
        (loss_fn(model(*values), TARGET[: ROWS // CHUNKS]) / CHUNKS).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def with_fxpipe(name: str) -> dict[str, Tensor]:
    """The gradients of this rank after a step of fxpipe."""
    model, inputs = made(name)
    options = {"check": "warn", **entry(name).options, "loss_fn": loss_fn, "schedule": "1f1b"}
    with fxpipe.compile(
        model, dist.group.WORLD, chunks=CHUNKS, example_inputs=inputs, **options
    ) as pipe:
        pipe.step(*inputs, target=TARGET)
        return {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}


def split_points(model: nn.Module) -> list[str]:
    """The names of modules at even distances among the innermost elements of lists of modules."""
    lists = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for name, _ in module.named_children()
    ]
    outer = {path for path in lists if any(other.startswith(f"{path}.") for other in lists)}
    found = [path for path in lists if path not in outer]
    return [found[i * len(found) // RANKS] for i in range(1, RANKS)]


def with_torch(name: str) -> dict[str, Tensor]:
    """The gradients of this rank after a step of torch.distributed.pipelining."""
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    model, inputs = made(name)
    spec = {path: SplitPoint.BEGINNING for path in split_points(model)}
    first = tuple(value.chunk(CHUNKS)[0] for value in inputs)
    pipe = pipeline(model, mb_args=first, split_spec=spec)
    rank = dist.get_rank()
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=loss_fn)
    given = {"target": TARGET} if rank == RANKS - 1 else {}
    schedule.step(*(inputs if rank == 0 else ()), **given)
    return {n: p.grad for n, p in stage.submod.named_parameters() if p.grad is not None}


SIDES = {"fxpipe": with_fxpipe, "torch": with_torch}


def _process(rank: int, name: str, side: str, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.stderr = sys.stdout = io.StringIO()  # errors are in the folder
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=PATIENCE),
        )
        torch.save(SIDES[side](name), Path(folder) / f"grads_{rank}")
    except BaseException as error:
        while error.__cause__ is not None:
            error = error.__cause__
        line = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:160]
        said = f"{type(error).__name__}: {text} ({Path(line.filename).name}:{line.lineno})"
        path = Path(folder) / f"said_{rank}"
        path.write_text(said)
        path.rename(Path(folder) / f"error_{rank}")  # whoever finds it finds it whole
        os._exit(1)


def outcome(name: str, side: str) -> str:
    """How a model trains: "trains", or what is wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.ranks_table"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_process, args=(rank, name, side, folder))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        begun = time.monotonic()
        errors: list[Path] = []
        while any(each.is_alive() for each in processes) and time.monotonic() - begun < PATIENCE:
            errors = sorted(Path(folder).glob("error_*"), key=lambda path: path.stat().st_mtime)
            if errors:
                break
            time.sleep(0.1)
        for process in processes:
            process.kill()
            process.join()
        errors = sorted(Path(folder).glob("error_*"), key=lambda path: path.stat().st_mtime)
        if errors:
            return errors[0].read_text()
        found: dict[str, Tensor] = {}
        for rank in range(RANKS):
            path = Path(folder) / f"grads_{rank}"
            if not path.exists():
                return f"hangs: no rank has ended after {PATIENCE:.0f} s"
            found |= torch.load(path)
    return compared(found, expected(name))


def compared(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """Whether gradients are right."""
    missing = [name for name in wanted if name not in found]
    if missing:
        return f"no gradient of {missing[0]} and {len(missing) - 1} more"
    # Where the largest value is rounding noise, it is compared with that of all gradients.
    scale = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        most = max(float(grad.abs().max()), 1e-4 * scale)
        apart = float((found[name] - grad).abs().max()) / most
        if not apart <= 1e-4:
            return f"the gradient of {name} is apart by {apart:.0e}"
    return "trains"


def main(names: tuple[str, ...]) -> None:
    """Print the table, line by line."""
    torch.set_num_threads(1)  # as on the ranks: other kernels are chosen for another number
    print("| model | fxpipe | torch.distributed.pipelining |")
    print("|---|---|---|")
    for name in names:
        print("|", name, "|", outcome(name, "fxpipe"), "|", outcome(name, "torch"), "|", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or MODELS)
