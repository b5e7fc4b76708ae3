"""A long run: what a process holds stays flat, over thousands of steps and hundreds of pipelines.

::

    python -m tests.soak --steps 5000 --pipelines 500
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import click
import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxpipe
from fxpipe.ir.heap import resident
from tests.zoo import UNet, images, mean_loss

SAMPLES = 20  # so often what is held is counted
WARM = 4  # of these samples at first are not counted
ENOUGH = 200  # turns; with fewer of them the slope of the memory says nothing


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        memory: the bytes that are resident.
        tensors, threads, files: how many there are.
        graphs: how many programs a pipeline keeps.
    """

    memory: int
    tensors: int
    threads: int
    files: int
    graphs: int

    @staticmethod
    def now(pipe: fxpipe.Pipeline | None = None) -> Held:
        """Count what this process holds now."""
        gc.collect()
        return Held(
            resident(),
            sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
            _threads(),
            len(os.listdir("/proc/self/fd")),
            0 if pipe is None else len(pipe.all_guards),
        )


def _threads(still: int = 10) -> int:
    """How many threads there are, once that has not become fewer in so many looks: those of the
    queues of a DataLoader end a moment after it."""
    found, looks = threading.active_count(), 0
    while looks < still:
        time.sleep(0.01)
        now, looks = threading.active_count(), looks + 1
        if now < found:
            found, looks = now, 0
    return found


def soaked(
    turn: Callable[[int], Any], turns: int, pipe: fxpipe.Pipeline | None = None
) -> list[Held]:
    """What the process holds at regular times while something is done so many times."""
    every = max(1, turns // SAMPLES)
    found = []
    for i in range(turns):
        turn(i)
        if (i + 1) % every == 0:
            found.append(Held.now(pipe))
    return found


def report(what: str, turns: int, found: list[Held], growth: int = 2048) -> bool:
    """Print start, end and slope of what has been held. Returns whether it was flat: no more
    tensors, threads, files or programs at the end than when it was warm, and less than ``growth``
    bytes of memory more for each turn."""
    warm = found[min(WARM, len(found) - 1) :]
    at = numpy.linspace(0, turns, len(found))[-len(warm) :]
    slope = numpy.polyfit(at, [held.memory for held in warm], 1)[0] if len(warm) > 1 else 0.0
    first, last = warm[0], warm[-1]
    pairs = list(zip(astuple(first), astuple(last), strict=True))[1:]
    flat = all(now <= then for then, now in pairs) and (turns < ENOUGH or slope < growth)
    print(
        f"{what}: {turns} turns, from turn {at[0]:.0f} on: "
        f"memory {first.memory / 2**20:.1f} to {last.memory / 2**20:.1f} MiB, "
        f"{slope:+.0f} bytes for each turn; "
        f"tensors {first.tensors} to {last.tensors}, threads {first.threads} to {last.threads}, "
        f"files {first.files} to {last.files}, programs {first.graphs} to {last.graphs}: "
        + ("flat" if flat else "GROWS"),
        flush=True,
    )
    return flat


# ------------------------------------------------------------------------------------------- steps


def unet(turns: int) -> bool:
    """Steps of a U-Net with skips, of which all stages are checkpointed."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    pipe = fxpipe.compile(
        model, ["cpu"] * 3, chunks=4, schedule="1f1b", checkpoint="always", loss_fn=mean_loss
    )

    def turn(_: int) -> None:
        pipe.step(*images(8), target=torch.randn(8), optimizer=optimizer, zero_grad=True)

    with pipe:
        return report("U-Net, checkpointed", turns, soaked(turn, turns, pipe))


def gpt2(turns: int) -> bool:
    """Steps of a GPT-2 on sequences of many lengths."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_positions=64, n_embd=16, n_layer=3, n_head=2)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, schedule="1f1b")

    def turn(i: int) -> None:
        ids = torch.randint(31, (4, 8 + i * 7 % 48))
        pipe.step(input_ids=ids, labels=ids, optimizer=optimizer, zero_grad=True)

    with pipe:
        return report("GPT-2, lengths 8 to 55", turns, soaked(turn, turns, pipe))


# --------------------------------------------------------------------------------------- pipelines


class Small(nn.Module):
    """Two stages and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(torch.tanh(self.b(h))) + h


def pipelines(turns: int) -> bool:
    """Pipelines that are made, called, and dropped without being closed."""

    def turn(i: int) -> None:
        torch.manual_seed(i)
        pipe = fxpipe.compile(Small(), ["cpu"] * 2, chunks=2, checkpoint="always")
        pipe(torch.randn(4, 4)).sum().backward()

    # fx keeps the code of every graph module that there has been, for tracebacks.
    return report("pipelines made and dropped", turns, soaked(turn, turns), growth=128 * 1024)


def workers(turns: int) -> bool:
    """Steps on batches that forked processes load, while lanes run."""
    data = [(torch.randn(4), torch.randn(4)) for _ in range(16)]
    loss_fn = nn.functional.mse_loss
    with fxpipe.compile(Small(), ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        context = "fork"

        def turn(_: int) -> None:
            loader = DataLoader(data, 4, num_workers=2, multiprocessing_context=context)
            for x, y in loader:
                pipe.step(x, target=y)

        return report("epochs with two forked workers", turns, soaked(turn, turns, pipe))


def frozen(turns: int) -> bool:
    """Steps after ``gc.freeze``, which takes what there is out of the garbage collection."""
    with fxpipe.compile(Small(), ["cpu"] * 2, chunks=2, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        gc.freeze()
        try:

            def turn(_: int) -> None:
                pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))

            return report("steps after gc.freeze", turns, soaked(turn, turns, pipe))
        finally:
            gc.unfreeze()


class Deep(nn.Module):
    """A chain of so many operators."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first, self.last, self.depth = nn.Linear(4, 4), nn.Linear(4, 4), depth

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.depth):
            x = x + 1e-4
        return self.last(x)


def deep(nodes: int) -> bool:
    """A step of a chain that is deeper than Python may recurse, and its end."""
    before = Held.now()
    begin = time.perf_counter()
    model = Deep(nodes)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, checkpoint="always", loss_fn=nn.functional.mse_loss
    ) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        pipe(torch.randn(4, 4)).sum().backward()
        chain = len(pipe.model_graph.graph.nodes)
    del pipe, model
    left = Held.now().tensors - before.tensors
    print(
        f"a chain of {chain} nodes: compiled, stepped, called and dropped in "
        f"{time.perf_counter() - begin:.1f} s, {left} tensors left",
        flush=True,
    )
    return left <= 0


# -------------------------------------------------------------------------------------------- exit

BEGIN = """
import threading, time, torch, fxpipe
from tests.soak import Small
pipe = fxpipe.compile(Small(), ["cpu"] * 2, chunks=2, loss_fn=torch.nn.functional.mse_loss)
x = torch.randn(4, 4)
"""
EXITS = {
    "before any call": "",
    "after a step": "pipe.step(x, target=x)",
    "after close": "pipe.step(x, target=x); pipe.close()",
    "with a pending backward": "loss = pipe(x).sum()",
    "in the middle of steps of a daemon thread": (
        "pipe.step(x, target=x)\n"
        "def run():\n"
        "    while True: pipe.step(x, target=x)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.3)"
    ),
    "in the middle of a step that raises": (
        "try: pipe.step(x, target=x[:3])\nexcept ValueError: pass"
    ),
    "by sys.exit in a hook of a lane": (
        "import sys\npipe(x)\npipe.module.c.register_forward_hook(lambda *_: sys.exit(0))\npipe(x)"
    ),
}
"""By state: what a program does before its interpreter ends."""


def ends(state: str) -> str | None:
    """Let a program end in a state. Returns what it prints, or how it ends, if that is not well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + EXITS[state]],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return None if done.returncode == 0 and not done.stderr else f"{done.returncode} {done.stderr}"


def exits() -> bool:
    """Let a program end in each state."""
    found = {state: ends(state) for state in EXITS}
    for state, wrong in found.items():
        print(f"exit {state}: {wrong or 'well'}", flush=True)
    return not any(found.values())


@click.command()
@click.option("--steps", default=5000, show_default=True, help="Steps of each model.")
@click.option("--pipelines", "made", default=500, show_default=True, help="Pipelines to be made.")
@click.option("--nodes", default=5000, show_default=True, help="Nodes of the deep chain.")
@click.option("--only", help="Only what has this name, such as unet.")
def main(steps: int, made: int, nodes: int, only: str | None) -> None:
    """Run all of it, and print what is held at the start, at the end, and how it grows."""
    parts: dict[str, Callable[[], bool]] = {
        "unet": lambda: unet(steps),
        "gpt2": lambda: gpt2(steps),
        "frozen": lambda: frozen(steps),
        "pipelines": lambda: pipelines(made),
        "workers": lambda: workers(max(SAMPLES, made // 10)),
        "deep": lambda: deep(nodes),
        "exits": exits,
    }
    raise SystemExit(not all([run() for name, run in parts.items() if only in (None, name)]))


if __name__ == "__main__":
    main()
