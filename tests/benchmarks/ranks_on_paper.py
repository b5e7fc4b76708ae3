"""A 70B decoder on 8, 64 and 512 ranks, on paper: bubble, memory, links and communicators.

    python -m tests.benchmarks.ranks_on_paper

The model is Llama 3 70B (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3), trained
on sequences of 8192 tokens, one in a micro-batch, in bfloat16 with AdamW. The machine is NVIDIA's
DGX H100 (data sheet, 2023): eight GPUs of 80 GB and 989 TFLOP/s each, NVLink of 450 GB/s in each
direction, and a 400 Gbit/s adapter for each GPU. Matrix kernels reach half of the peak, which is
an assumption; the arithmetic is in docs/ranks.rst. Times are those of fxpipe's simulator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fxpipe.runtime.ranks.transport import Channels
from fxpipe.schedule import Edge, Link, Links, Memory, StageCost, named, peaks, simulate
from tests.benchmarks.timing import show

LAYERS, WIDTH, HIDDEN, KEYS, VOCABULARY, TOKENS = 80, 8192, 28672, 1024, 128256, 8192
PEAK, REACHED, MEMORY = 989e12, 0.5, 80e9
NVLINK, NETWORK = Link(5e-6, 450e9), Link(10e-6, 50e9)  # seconds; bytes per second one way
NODE = 8

LAYER = 2 * WIDTH**2 + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN  # weights
HEAD = VOCABULARY * WIDTH  # weights of the embedding, and of the head
# A weight is multiplied and added once for a token; attention is causal.
LAYER_FLOPS = TOKENS * (2 * LAYER + 2 * TOKENS * WIDTH)
HEAD_FLOPS = TOKENS * 2 * HEAD
BOUNDARY = 2 * TOKENS * WIDTH  # bytes of a micro-batch between stages
# What a layer saves for its backward: the inputs of both norms and their outputs, queries, keys,
# values and the attention's result, and the four inner tensors of the feed-forward part.
SAVED = 2 * TOKENS * (6 * WIDTH + 2 * KEYS + 4 * HIDDEN)
STATE = 2 + 4 + 12  # bytes for a weight: itself, its gradient, and AdamW's copy and two moments


@dataclass(frozen=True)
class Plan:
    """``stages`` stages, each on ``split`` GPUs of a node (tensor parallelism), in ``replicas``."""

    stages: int
    microbatches: int
    split: int = 1
    replicas: int = 1
    schedule: str = "1f1b"

    @property
    def name(self) -> str:
        gpus = self.stages * self.split * self.replicas
        return f"{self.stages} stages, {gpus} GPUs, {self.schedule}"


PLANS = (
    Plan(8, 32),
    Plan(64, 256),
    Plan(512, 512),
    Plan(8, 256, split=8, replicas=8),
    Plan(8, 256, split=8, replicas=8, schedule="zb_h1"),
)


def row(plan: Plan) -> list[str]:
    """What the simulator says of a plan."""
    stages, split = plan.stages, plan.split
    layers = LAYERS / stages  # on paper a model can be cut anywhere, and evenly
    speed = PEAK * REACHED * split
    weight_grad = (LAYERS * LAYER_FLOPS + HEAD_FLOPS) / stages / speed
    # Two all-reduces of a micro-batch's activations for a layer, in forward and in backward.
    reduced = layers * 2 * 2 * (split - 1) / split * BOUNDARY / NVLINK.bandwidth
    forward = weight_grad + reduced
    costs = [StageCost(forward, forward, weight_grad)] * stages
    size = BOUNDARY / split  # each GPU of a stage sends its share
    per_node = NODE // split
    between = {
        (a, b): NVLINK if a // per_node == b // per_node else NETWORK
        for a in range(stages)
        for b in (a - 1, a + 1)
        if 0 <= b < stages
    }
    edges = [Edge(i, i + 1, size) for i in range(stages - 1)]
    state = (LAYERS * LAYER + 2 * HEAD) / stages / split
    fixed = state * (STATE - 12 + 12 / plan.replicas)  # moments are sharded over replicas
    kept = Memory([SAVED * layers / split] * stages, fixed, released_by_input=0.0)
    again = Memory(
        [SAVED * layers / split] * stages, fixed, 0.0, plan.microbatches, BOUNDARY / split
    )
    schedule = named(plan.schedule, lanes=stages, microbatches=plan.microbatches)
    found = simulate(schedule, costs, Links(edges, between=between))
    most_held = [fixed + max(peaks(schedule, memory).lanes) for memory in (kept, again)]
    slowest = (NETWORK if stages > per_node else NVLINK).seconds(size)
    own = {(a, b) for a, b in between} | {(stages - 1, a) for a in range(stages - 1)}
    channels = Channels(16, None)
    shared = sum(channels.add(edge) for edge in sorted(own))
    most = max(sum(rank in edge for edge in own - channels.sharing) for rank in range(stages))
    return [
        plan.name,
        str(plan.microbatches),
        f"{found.makespan:.1f} s",
        f"{found.bubble:.1%}",
        f"{fixed / 1e9:.0f}",
        *(f"{held / 1e9:.0f}" for held in most_held),
        f"{forward * 1e3:.1f}",
        f"{slowest * 1e3:.2f}",
        f"{most} ({shared})",
    ]


def main() -> None:
    """Print the table."""
    begun = time.process_time()
    weights = LAYERS * LAYER + 2 * HEAD
    print(f"{weights / 1e9:.2f} G weights; a layer: {LAYER_FLOPS / 1e12:.2f} TFLOP, ", end="")
    print(f"{SAVED / 1e9:.2f} GB saved; between stages: {BOUNDARY / 1e6:.0f} MB a micro-batch")
    columns = ["", "micro-batches", "step", "bubble", "GB of weights", "GB, all kept"]
    columns += ["GB, recomputed", "ms forward", "ms a transfer", "communicators (shared)"]
    show("Llama 3 70B on DGX H100, on paper", columns, [row(plan) for plan in PLANS])
    print(f"{time.process_time() - begun:.0f} s of CPU time")


if __name__ == "__main__":
    main()
