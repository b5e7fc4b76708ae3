"""Random delays: whatever lane, rank or thread of autograd's is slow, the bits are the same.

::

    python -m tests.delays --seeds 1000
    python -m tests.delays --seeds 1000 --where ranks
    python -m tests.delays --seeds 1000 --where accelerator

A seed decides which nodes of a program wait for up to 2 ms before they run, in whichever lane, and
which of their backwards, in the thread of autograd's that runs them. So lanes overtake each other
in ways in which they never would by themselves; a missing wait or edge shows as other bits.

Ranks are two processes that talk by gloo, and what they send and receive waits, too. They make
steps only, and refuse a model that writes to its input. The accelerator is the simulated one, with
a device for each lane. Streams that nothing orders are a race there, in whichever order they have
run, so that there must be no races, either.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxpipe
from fxpipe.schedule import NAMES
from tests.faults.instrumented import instrumented
from tests.faults.model import Net, own
from tests.fxpipe.ranks.pool import Pool
from tests.passes.verify.graphs import Normed, Writing, rows, tokens
from tests.zoo import MLP, Chain, ResNet, Tied, Transformer, UNet, images

CHUNKS, LANES = 4, 2
LONGEST = 2e-3  # seconds
SHARE = 0.25  # of the nodes wait


class Seeded(nn.Module):
    """Dropout in each of its stages, and a user's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = own(self.drop(torch.tanh(layer(x))))
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "MLP": (MLP, lambda batch: (torch.randn(batch, 12),)),
    "ResNet": (ResNet, images),
    "U-Net": (UNet, images),
    "transformer": (Transformer, tokens),
    "tied": (Tied, tokens),
    "skips": (lambda: Chain(6, {0: (3, 5), 1: (4,)}), lambda batch: (torch.randn(batch, 3),)),
    "batch norm": (Normed, rows),
    "writing": (Writing, rows),
    "dropout": (Seeded, rows),
    "hooks": (lambda: Net(writes=False), rows),
}
CALLS = ("calls, checkpoint never", "calls, checkpoint always")
WAYS = (*CALLS, *NAMES)
"""How a model is run: by calls and their backwards, or by steps in the order of a schedule."""


def _squares(output: Any, target: Any = None) -> Tensor:
    """The mean of squares of an output, or the sum of those of several."""
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((each.float().square().mean() for each in outputs), torch.tensor(0.0))


class Delays:
    """Lets a node wait, as a seed says; None: no node waits. Each rank has other delays."""

    def __init__(self, rank: int = 0) -> None:
        self.seed: int | None = None
        self._rank = rank
        self._met: Counter[tuple[str, int]] = Counter()

    def start(self, seed: int | None) -> None:
        """Use this seed from now on."""
        self.seed = seed
        self._met.clear()

    def __call__(self, place: str, microbatch: int) -> None:
        if self.seed is None:
            return
        self._met[place, microbatch] += 1
        text = f"{self.seed} {self._rank} {place} {microbatch} {self._met[place, microbatch]}"
        number = zlib.crc32(text.encode()) / 2**32
        if number < SHARE:
            time.sleep(LONGEST * number / SHARE)


class Subject:
    """A model that is run in one way, on devices or on the ranks of a group."""

    def __init__(self, name: str, way: str, where: Any = ("cpu",) * LANES) -> None:
        make, inputs_of = MODELS[name]
        torch.manual_seed(0)
        self.model, self.inputs = make(), inputs_of(2 * CHUNKS)
        self.delays = Delays(dist.get_rank() if isinstance(where, dist.ProcessGroup) else 0)
        self.steps = way in NAMES
        modes = "never", "except_last", "always", "offload", "selective"
        checkpoint = modes[len(name) % len(modes)]  # a mixture of them
        with instrumented(self.delays):
            self.pipe = fxpipe.compile(
                self.model,
                where,
                chunks=CHUNKS,
                schedule=way if self.steps else "gpipe",
                checkpoint=checkpoint if self.steps else way.rpartition(" ")[2],
                loss_fn=_squares,
                deferred_batch_norm=True,
            )
            start = {name: value.clone() for name, value in self.model.state_dict().items()}
            self._call()
        self.start = {name: start[name] for name in self.pipe.state_dict()}
        self.expected = self.run(None)

    def _call(self) -> Tensor:
        inputs = [tensor.clone() for tensor in self.inputs]
        if self.steps:
            return self.pipe.step(*inputs)
        loss = _squares(self.pipe(*inputs))
        loss.backward()
        return loss.detach()

    def run(self, seed: int | None) -> list[Any]:
        """The loss, gradients, parameters and buffers after one call, with delays as the seed
        says."""
        self.pipe.load_state_dict(self.start)
        self.pipe.zero_grad()
        torch.manual_seed(1)
        self.delays.start(seed)
        loss = self._call()
        grads = [p.grad for p in self.pipe.parameters() if p.grad is not None]
        return [loss, *(g.clone() for g in grads), *map(Tensor.clone, self.pipe.buffers())]

    def is_the_same(self, seed: int) -> bool:
        """Whether a call with delays has the bits of one without."""
        found = self.run(seed)
        pairs = zip(found, self.expected, strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


def differing(where: Any, name: str, way: str, seeds: range) -> list[int]:
    """The seeds with which a model gives other bits on devices, or on the ranks of a group."""
    subject = Subject(name, way, where)
    try:
        return [seed for seed in seeds if not subject.is_the_same(seed)]
    finally:
        subject.pipe.close()


def on_ranks(pool: Pool, name: str, way: str, seeds: range) -> list[int]:
    """The seeds with which any of two ranks has other bits."""
    found = pool.run(differing, name, way, seeds, ranks=LANES)
    return sorted({seed for rank in found for seed in rank})


def on_accelerator(name: str, way: str, seeds: range) -> list[int]:
    """The seeds with which a model gives other bits on the simulated accelerator. If there is a
    race with any, all of them."""
    from tests.accelerator import sim  # it is loaded ahead of the first backward of a process

    sim.clear()
    found = differing([f"sim:{lane}" for lane in range(LANES)], name, way, seeds)
    races = sim.races()
    print(*races[:1], sep="\n", end="")
    return list(seeds) if races else found


@click.command()
@click.option("--seeds", default=1000, show_default=True, help="How many runs with delays.")
@click.option(
    "--where",
    type=click.Choice(["lanes", "ranks", "accelerator"]),
    default="lanes",
    show_default=True,
    help="What runs the stages.",
)
def main(seeds: int, where: str) -> None:
    """Run all models in all ways with random delays, and compare their bits."""
    pool = Pool() if where == "ranks" else None
    if where == "accelerator":
        from tests.accelerator import sim

        sim.load()
    ways = NAMES if pool else WAYS
    names = [name for name in MODELS if not pool or name != "writing"]
    every = [(name, way) for name in names for way in ways]
    done = wrong = 0
    for i, (name, way) in enumerate(every):
        own_seeds = range(i, seeds, len(every))
        if pool:
            others = on_ranks(pool, name, way, own_seeds)
        elif where == "accelerator":
            others = on_accelerator(name, way, own_seeds)
        else:
            others = differing(["cpu"] * LANES, name, way, own_seeds)
        done, wrong = done + len(own_seeds), wrong + len(others)
        said = f"other bits with the seeds {others}" if others else "the same bits"
        print(f"{name}, {way}: {len(own_seeds)} seeds, {said}", flush=True)
    if pool:
        pool.close()
    print(f"{done} seeds over {len(every)} models and ways: {wrong} gave other bits")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
