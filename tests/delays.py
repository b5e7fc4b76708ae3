"""Random delays: whatever lane or thread of autograd's is slow, the bits are the same.

::

    python -m tests.delays --seeds 1000

A seed decides which nodes of a program wait for up to 2 ms before they run, in whichever lane, and
which of their backwards, in the thread of autograd's that runs them. So lanes overtake each other
in ways in which they never would by themselves; a missing wait or edge shows as other bits.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.schedule import NAMES
from tests.faults.instrumented import instrumented
from tests.faults.model import Net, own
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
    "hooks": (Net, rows),
}
CALLS = ("calls, checkpoint never", "calls, checkpoint always")
WAYS = (*CALLS, *NAMES)
"""How a model is run: by calls and their backwards, or by steps in the order of a schedule."""


class Delays:
    """Lets a node wait, as a seed says; None: no node waits."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self._met: Counter[tuple[str, int]] = Counter()

    def start(self, seed: int | None) -> None:
        """Use this seed from now on."""
        self.seed = seed
        self._met.clear()

    def __call__(self, place: str, microbatch: int) -> None:
        if self.seed is None:
            return
        self._met[place, microbatch] += 1
        text = f"{self.seed} {place} {microbatch} {self._met[place, microbatch]}"
        number = zlib.crc32(text.encode()) / 2**32
        if number < SHARE:
            time.sleep(LONGEST * number / SHARE)


class Subject:
    """A model that is run in one way."""

    def __init__(self, name: str, way: str) -> None:
        make, inputs_of = MODELS[name]
        torch.manual_seed(0)
        self.model, self.inputs, self.delays = make(), inputs_of(2 * CHUNKS), Delays()
        self.steps = way in NAMES
        checkpoint = ("never", "except_last", "always")[len(name) % 3]  # a mixture of them
        with instrumented(self.delays):
            self.pipe = fxpipe.compile(
                self.model,
                ["cpu"] * LANES,
                chunks=CHUNKS,
                schedule=way if self.steps else "gpipe",
                checkpoint=checkpoint if self.steps else way.rpartition(" ")[2],
                loss_fn=lambda output, _: output.float().square().mean(),
                deferred_batch_norm=True,
            )
            self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
            self._call()
        self.expected = self.run(None)

    def _call(self) -> Tensor:
        inputs = [tensor.clone() for tensor in self.inputs]
        if self.steps:
            return self.pipe.step(*inputs)
        loss = self.pipe(*inputs).float().square().mean()
        loss.backward()
        return loss.detach()

    def run(self, seed: int | None) -> list[Any]:
        """The loss, gradients, parameters and buffers after one call, with delays as the seed
        says."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        torch.manual_seed(1)
        self.delays.start(seed)
        loss = self._call()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [loss, *(g.clone() for g in grads), *map(Tensor.clone, self.model.buffers())]

    def is_the_same(self, seed: int) -> bool:
        """Whether a call with delays has the bits of one without."""
        found = self.run(seed)
        pairs = zip(found, self.expected, strict=True)
        return all(torch.equal(one, other) for one, other in pairs)


def subjects() -> Iterator[tuple[str, Subject]]:
    """All models in all ways, with their names."""
    for name in MODELS:
        for way in WAYS:
            yield f"{name}, {way}", Subject(name, way)


@click.command()
@click.option("--seeds", default=1000, show_default=True, help="How many runs with delays.")
def main(seeds: int) -> None:
    """Run all models in all ways with random delays, and compare their bits."""
    every = len(MODELS) * len(WAYS)
    wrong = done = 0
    for i, (name, subject) in enumerate(subjects()):
        own_seeds = range(i, seeds, every)
        differing = [seed for seed in own_seeds if not subject.is_the_same(seed)]
        subject.pipe.close()
        done, wrong = done + len(own_seeds), wrong + len(differing)
        said = f"other bits with the seeds {differing}" if differing else "the same bits"
        print(f"{name}: {len(own_seeds)} seeds, {said}", flush=True)
    print(f"{done} seeds over {every} models and ways: {wrong} gave other bits")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
