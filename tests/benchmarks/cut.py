"""The cut against torchgpipe's balance and against equal parameters, by measured costs.

Run: python -m tests.benchmarks.cut [names of models]

Each node is timed on this machine, forward and backward. torchgpipe's ``balance_cost`` gets these
times, in the model's order. The cut into equal parameters balances the stages' bytes of parameters.
The table shows the time of the slowest stage divided by the lower bound: 1.000 cannot be beaten.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxpipe.meaning.asked import Asked
from fxpipe.meaning.call import meaning_of
from fxpipe.planning.question import sketch
from passes.cost.measured import MeasuredCost
from passes.partition.automatic import Auto, automatic
from passes.partition.cut.dag import Dag, Machine, prices
from passes.partition.cut.solve import solve_in_order
from passes.partition.problem import CutProblem, problem
from tests.benchmarks.nets import AmoebaNet, DenseNet, UNet, resnet, vgg16
from tests.benchmarks.timing import show

STAGES, BUDGET = (2, 4, 8), 4.0

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def on_images(make: Callable[[], nn.Module], size: int, batch: int = 2) -> Callable[[], Call]:
    return lambda: (make(), (torch.randn(batch, 3, size, size),), {})


def hugging_face(name: str, inputs: Callable[[], dict[str, Tensor]], **config: Any):
    """A model of transformers, with random weights."""

    def make() -> Call:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**config)), (), inputs()

    return make


def tokens(*names: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randint(1000, (2, 64)) for name in names or ("input_ids",)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 96, 96)}


MODELS: dict[str, Callable[[], Call]] = {
    "VGG-16": on_images(vgg16, 96),
    "ResNet-50": on_images(lambda: resnet((3, 4, 6, 3)), 96),
    "ResNet-101": on_images(resnet, 96),
    "DenseNet-121": on_images(DenseNet, 96),
    "U-Net (5, 16)": on_images(lambda: UNet(5, 16), 96),
    "AmoebaNet-like (6, 64)": on_images(lambda: AmoebaNet(6, 64), 96),
    "GPT-2": hugging_face(
        "GPT2LMHeadModel", tokens(), vocab_size=5000, n_embd=256, n_head=4, use_cache=False
    ),
    "BERT": hugging_face(
        "BertForMaskedLM",
        tokens(),
        vocab_size=5000,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
    ),
    "T5": hugging_face(
        "T5ForConditionalGeneration",
        tokens("input_ids", "decoder_input_ids"),
        vocab_size=5000,
        d_model=256,
        d_ff=1024,
        use_cache=False,
    ),
    "LLaMA": hugging_face(
        "LlamaForCausalLM",
        tokens(),
        vocab_size=5000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=12,
        num_attention_heads=4,
        use_cache=False,
    ),
    "ViT": hugging_face(
        "ViTForImageClassification",
        pixels,
        image_size=96,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
    ),
    "ConvNeXt": hugging_face("ConvNextForImageClassification", pixels, image_size=96),
    "MobileNet v2": hugging_face("MobileNetV2ForImageClassification", pixels, image_size=96),
    "RegNet": hugging_face("RegNetForImageClassification", pixels),
}


def measured(make: Callable[[], Call]) -> CutProblem:
    model, args, kwargs = make()
    dims = meaning_of(model, args, kwargs, Asked()).in_dims
    gm, values = sketch(model, args, kwargs, dims, "auto")
    return problem(MeasuredCost(tuple(values), budget_s=BUDGET)(gm).graph)


def balanced_by_torchgpipe(dag: Dag, stages: int) -> list[int]:
    from torchgpipe.balance import balance_cost

    lengths = balance_cost([round(t * 1e6) for t in dag.seconds[0]], stages)
    ends = list(accumulate(lengths))
    return [sum(i >= end for end in ends[:-1]) for i in range(dag.size)]


def balanced_by_parameters(found: CutProblem, stages: int) -> tuple[int, ...]:
    by_parameters = problem(found.work[0].graph, "params").dag
    stage = solve_in_order(by_parameters, Machine(stages))
    assert stage is not None
    return stage


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(MODELS)
    rows, over, gains = [], [], []
    for name in names:
        found = measured(MODELS[name])
        dag = replace(found.dag)
        for stages in STAGES:
            machine = Machine(stages)
            _, ours = automatic(found.work[0].graph, machine, Auto())
            times = [
                prices(dag, machine, stage).slowest / ours.bound
                for stage in (
                    ours.stage,
                    balanced_by_torchgpipe(dag, stages),
                    balanced_by_parameters(found, stages),
                )
            ]
            assert times[0] <= min(times) * (1 + 1e-9), "ours is never worse"
            over.append(times[0] - 1)
            gains.append([times[1] / times[0], times[2] / times[0]])
            how = "exact" if ours.is_exact else "bound"
            rows.append([name, str(dag.size), str(stages), how, *(f"{t:.3f}" for t in times)])
            print(*rows[-1], flush=True)
    show(
        "slowest stage over the lower bound, measured costs",
        ["model", "nodes", "stages", "", "fxpipe", "torchgpipe", "parameters"],
        rows,
    )
    worse = np.exp(np.log(np.array(gains)).mean(axis=0)) - 1
    most = np.array(gains).max(axis=0) - 1
    print(f"on the bound in {sum(o < 5e-4 for o in over)} of {len(rows)} cases, at most", end=" ")
    print(f"{max(over):.1%} over it; longer than ours takes the slowest stage")
    for name, average, longest in zip(("torchgpipe", "equal parameters"), worse, most, strict=True):
        print(f"    of {name}: {average:.1%} on average, {longest:.0%} at most")


if __name__ == "__main__":
    main()
