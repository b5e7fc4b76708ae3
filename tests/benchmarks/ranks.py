"""A training step on two ranks against two lanes and one thread, all in turns.

    python -m tests.benchmarks.ranks            # the conv net of tests.benchmarks.step
    python -m tests.benchmarks.ranks gpt2       # GPT-2 small, whose head is a weight of its own

Beside it, in the same processes as fxpipe's ranks: torch.distributed.pipelining with 1F1B. Every
lane and rank has one intra-op thread, all pipelines have the same two stages and 8 micro-batches,
and a side does a forward and a backward. The ideal for 1F1B is 16/9 = 1.78 of one thread.

In 1F1B the second rank computes a micro-batch while the first one computes the one ahead of it, and
both then wait until values have crossed, twice for each micro-batch::

    rank 0 | F0 F1 .. B0 F2 .. B1 F3 ..        F2 begins when the gradient of micro-batch 0 is here
    rank 1 | .. F0 B0 .. F1 B1 .. F2 B2

With a forward ahead, which is what ``interleaved_1f1b`` does for one stage a rank, values cross
while both compute, for the memory of one more micro-batch on the first rank::

    rank 0 | F0 F1 F2 B0 F3 B1
    rank 1 | .. F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fxpipe
from tests.benchmarks import step
from tests.benchmarks.lanes import CHUNKS, HALF, net, show_speed_ups
from tests.benchmarks.timing import keep_memory, medians

RANKS, AHEAD = 2, "interleaved_1f1b"


@dataclass(frozen=True)
class Case:
    """A sequence of layers, its batch and loss; ``cut``: where its second stage begins."""

    make: Callable[[], nn.Sequential]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    cut: int
    rounds: int


class _Embedding(nn.Module):
    """The embeddings of GPT-2's tokens and their places."""

    def __init__(self, vocabulary: int, places: int, width: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(places, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))


class _Block(nn.Module):
    """A block of transformers' GPT-2."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        found = self.block(x)
        return found[0] if isinstance(found, tuple) else found


def gpt2() -> nn.Sequential:
    """GPT-2 small: 12 blocks of width 768. The head has as many operations as six blocks."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(attn_pdrop=0, resid_pdrop=0, _attn_implementation="sdpa")
    blocks = [_Block(GPT2Block(config, layer_idx=i)) for i in range(config.n_layer)]
    width = config.n_embd
    head = [nn.LayerNorm(width), nn.Linear(width, config.vocab_size, bias=False)]
    return nn.Sequential(_Embedding(config.vocab_size, config.n_positions, width), *blocks, *head)


def text() -> tuple[Tensor, Tensor]:
    """A row of 32 tokens for each micro-batch, and the tokens to predict."""
    torch.manual_seed(0)
    tokens = torch.randint(50257, (CHUNKS, 33))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


CASES = {
    "net": Case(net, step.batch, step.loss_fn, HALF, step.ROUNDS),
    # 9 blocks of 7.1 M weights on one side; 3 blocks and a head of 38.6 M on the other
    "gpt2": Case(gpt2, text, cross_entropy, 10, 9),
}


def _compiled(case: Case, where: Any, schedule: str = "1f1b") -> fxpipe.Pipeline:
    torch.manual_seed(1)
    return fxpipe.compile(
        case.make(),
        where,
        chunks=CHUNKS,
        schedule=schedule,
        stages=RANKS,
        loss_fn=case.loss_fn,
        partition=[str(case.cut)],
        example_inputs=case.batch()[:1],
    )


def _rank(rank: int, name: str, store: str, orders: Sequence[Connection]) -> None:
    """Do a step of the pipeline that is asked for, until None is."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    keep_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    case = CASES[name]
    x, target = case.batch()
    pipes = {name: _compiled(case, dist.group.WORLD, name) for name in ("1f1b", AHEAD)}
    torch.manual_seed(1)
    layers = list(case.make())
    half = nn.Sequential(*(layers[: case.cut] if rank == 0 else layers[case.cut :]))
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, CHUNKS, loss_fn=case.loss_fn)
    given = ((x,), {}) if rank == 0 else ((), {"target": target})
    sides = {name: partial(pipe.step, x, target=target) for name, pipe in pipes.items()}
    sides["torch"] = lambda: schedule.step(*given[0], **given[1])
    while (asked := orders[rank].recv()) is not None:
        sides[asked]()
        orders[rank].send("done")
    for pipe in pipes.values():
        pipe.close()
    dist.destroy_process_group()


def main(name: str = "net") -> None:
    """Print the table of one case."""
    keep_memory()
    torch.set_num_threads(RANKS)
    case = CASES[name]
    torch.manual_seed(1)
    model, (x, target) = case.make(), case.batch()
    lanes = _compiled(case, ["cpu"] * RANKS)

    def one_thread() -> None:
        torch.set_num_threads(1)
        for part, y in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            (case.loss_fn(model(part), y) / CHUNKS).backward()
        torch.set_num_threads(RANKS)

    pairs = [mp.get_context("spawn").Pipe() for _ in range(RANKS)]

    def ask(what: str) -> Callable[[], None]:
        def side() -> None:
            for here, _ in pairs:
                here.send(what)
            for here, _ in pairs:
                here.recv()

        return side

    with tempfile.TemporaryDirectory() as folder:
        args = (name, f"file://{folder}/store", [there for _, there in pairs])
        ranks = mp.spawn(_rank, args=args, nprocs=RANKS, join=False)
        seconds = medians(
            {
                "one thread": one_thread,
                "fxpipe, two lanes": lambda: lanes.step(x, target=target),
                "fxpipe, two ranks": ask("1f1b"),
                "fxpipe, two ranks, a forward ahead": ask(AHEAD),
                "torch.distributed.pipelining 1F1B": ask("torch"),
            },
            case.rounds,
        )
        for here, _ in pairs:
            here.send(None)
        ranks.join()
    lanes.close()
    show_speed_ups(f"a step of {CHUNKS} micro-batches, {name}", seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
