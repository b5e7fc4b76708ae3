"""The sum of the measured costs of a stage's nodes, beside the measured time of the stage.

Run: python -m tests.benchmarks.measured_cost
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxpipe.ir.graph import COST, STAGE, stage_nodes
from fxpipe.ir.tensors import tensors_of
from passes import Alias, Partition, Split
from passes.cost.measured import MeasuredCost
from tests.benchmarks.timing import show
from tests.zoo import ResNet, Transformer, UNet

ROUNDS, BUDGET = 7, 10.0

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "ResNet-18, 8 x 64 x 64": (
        lambda: ResNet(64, (2, 2, 2, 2), 10),
        (torch.randn(8, 3, 64, 64),),
    ),
    "U-Net, 8 x 64 x 64": (lambda: UNet(32, 4), (torch.randn(8, 3, 64, 64),)),
    "transformer, 8 x 128": (
        lambda: Transformer(1000, 128, 4, 128),
        (torch.randint(1000, (8, 128)),),
    ),
}


def fresh(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class StageTimes(fx.Interpreter):
    """Runs a stage graph, each stage with its backward right after it."""

    def __init__(self, stage_graph: fx.GraphModule) -> None:
        super().__init__(stage_graph)
        self.seconds: list[float] = []

    def call_module(self, target, args, kwargs):
        leaves = pytree.tree_map_only(Tensor, fresh, args)
        start = time.perf_counter()
        output = super().call_module(target, leaves, kwargs)
        given = [o for o in tensors_of(output) if o.requires_grad]
        wanted = [
            t
            for t in (*tensors_of(leaves), *self.submodules[target].parameters())
            if t.requires_grad
        ]
        gradients = [torch.ones_like(o) for o in given]
        torch.autograd.grad(given, wanted, gradients, allow_unused=True)
        self.seconds.append(time.perf_counter() - start)
        return pytree.tree_map_only(Tensor, fresh, output)


def stage_seconds(stage_graph: fx.GraphModule, x: tuple[Tensor, ...]) -> list[float]:
    run = StageTimes(stage_graph)
    run.run(*x)
    return run.seconds


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, (make, x) in MODELS.items():
        model = make()
        gm = MeasuredCost(x, budget_s=BUDGET)(Alias(x)(fx.symbolic_trace(model)))
        Partition(2)(gm)
        sums = [0.0, 0.0]
        for node in stage_nodes(gm.graph):
            sums[node.meta[STAGE]] += node.meta[COST].seconds
        split = Split()(gm)
        runs = [stage_seconds(split, x) for _ in range(ROUNDS + 1)][1:]
        for i, total in enumerate(sums):
            measured = sorted(run[i] for run in runs)[ROUNDS // 2]
            rows.append(
                [
                    name,
                    str(i),
                    f"{total * 1e3:.1f}",
                    f"{measured * 1e3:.1f}",
                    f"{total / measured:.3f}",
                ]
            )
    show(
        "measured costs: the sum of the nodes over the stage itself (forward + backward)",
        ["model", "stage", "sum ms", "stage ms", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
