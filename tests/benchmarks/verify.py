"""The verifier's part of the time that compiling takes. Run: python -m tests.benchmarks.verify

A batch is cut into so many micro-batches that the pipeline graph, or the step graph of schedule
1f1b, has about 1,000, 10,000 and 100,000 nodes: these are the graphs that are verified. They are
those of GPT-2 with its 12 layers (narrow ones) on eight stages, and those of a chain of eight
stages with a skip, each of which is one operator, so that there is next to nothing to compile but
the graphs themselves. And a model graph of so many nodes is compiled on four stages, for four
micro-batches. Times are CPU seconds of this process, each taken once: those of the whole
compilation of a call (or of a step behind it, and the step itself), and within it those of pass
"verify" ("verify_step").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import click
import torch
from torch import fx, nn

import fxpipe
from passes import Verify
from tests.benchmarks.compile_time import Synthetic
from tests.zoo import Chain

STAGES = 8
SIZES = (1_000, 10_000, 100_000)


def timed(function: Callable[[], Any]) -> tuple[float, float, int]:
    """CPU seconds of a compilation and of the verifier within it, and the nodes of the largest
    graph that has been verified."""
    seconds, nodes = [0.0], [0]
    plain = Verify.__call__

    def verify(self: Verify, gm: fx.GraphModule) -> fx.GraphModule:
        begin = time.process_time()
        result = plain(self, gm)
        seconds.append(time.process_time() - begin)
        nodes.append(len(gm.graph.nodes))
        return result

    with mock.patch.object(Verify, "__call__", verify):
        begin = time.process_time()
        function()
        whole = time.process_time() - begin
    return whole, sum(seconds), max(nodes)


def chain(chunks: int) -> tuple[tuple[float, float, int], tuple[float, float, int]]:
    """Compile a call of the chain, and then a step, of so many micro-batches; see :func:`timed`."""
    torch.manual_seed(0)
    x = torch.randn(chunks, 3)
    pipe = fxpipe.compile(
        Chain(STAGES, {0: (6,)}),
        ["cpu"] * STAGES,
        chunks=chunks,
        schedule="1f1b",
        checkpoint="except_last",
        partition=list("bcdefgh"),
        loss_fn=nn.functional.mse_loss,
    )
    with pipe:
        return timed(lambda: pipe.prepare(x)), timed(lambda: pipe.step(x, target=x))


def gpt2(chunks: int) -> tuple[tuple[float, float, int], tuple[float, float, int]]:
    """Compile a call of GPT-2, and then a step, of so many micro-batches; see :func:`timed`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=12, n_head=2)
    pipe = fxpipe.compile(
        GPT2LMHeadModel(config),
        ["cpu"] * STAGES,
        chunks=chunks,
        schedule="1f1b",
        checkpoint="except_last",
    )
    ids = torch.randint(31, (chunks, 8))
    with pipe:
        call = timed(lambda: pipe.prepare(input_ids=ids, labels=ids))
        return call, timed(lambda: pipe.step(input_ids=ids, labels=ids))


def of_model(nodes: int) -> tuple[float, float, int]:
    """Compile a call of a model of so many nodes; see :func:`timed`."""
    pipe = fxpipe.compile(Synthetic(nodes), ["cpu"] * 4, chunks=4)
    with pipe:
        whole, verifying, _ = timed(lambda: pipe.prepare(torch.randn(4, 4)))
    return whole, verifying, nodes


@click.command()
@click.option("--largest", default=SIZES[-1], show_default=True, help="Nodes of the last graph.")
def main(largest: int) -> None:
    """Print the table."""
    print("graph                 nodes  compile s  verify s   part  us/node")
    for name, compiled in (("GPT-2", gpt2), ("chain", chain)):
        compiled(2)  # to warm up
        most = max(found[2] / 8 for found in compiled(8))  # nodes for each micro-batch
        for size in (each for each in SIZES if each <= largest):
            call, step = compiled(max(2, round(size / most)))
            show(f"{name}, pipeline", *call)
            show(f"{name}, step", *step)
    for size in (each for each in SIZES if each <= largest):
        show("model", *of_model(size))


def show(name: str, whole: float, verifying: float, nodes: int) -> None:
    """Print a row of the table."""
    part, each = verifying / whole, verifying / nodes * 1e6
    print(
        f"{name:16} {nodes:10} {whole:10.2f} {verifying:9.3f} {part:6.1%} {each:8.1f}", flush=True
    )


if __name__ == "__main__":
    main()
