"""A plan is what compile would do, without the devices."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe import DeviceSpec
from fxpipe.ir.graph import COST, STAGE, stage_nodes
from fxpipe.ir.text import human_time
from fxpipe.planning.question import CostSettings, costed
from fxpipe.schedule import named
from passes.chain import Entry
from passes.cost.analytic import ADAM
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta
from tests.zoo import MODELS, Chain, ResNet, same


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_how_compile_cuts_and_what_travels(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(8)
    plan = fxpipe.plan(model, [FREE_LINKS] * 3, example_inputs=x, chunks=4)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=4, partition=plan.partition) as pipe:
        pipe.prepare(*x)
        assert pipe.skip_layout == plan.layout
        assert [stage.cost.fixed_bytes for stage in pipe.stages] == [
            stage.state_bytes for stage in plan.stages
        ]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_meta_has_the_same_plan(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(8)
    real = fxpipe.plan(model, ["a100"] * 2, example_inputs=x)
    there, nowhere = on_meta(copy.deepcopy(model), *x)
    meta = fxpipe.plan(there, ["a100"] * 2, example_inputs=nowhere)
    assert meta.stages == real.stages
    assert meta.layout == real.layout


def test_attention_on_meta_is_that_of_a_device():
    """On "meta" torch would have all of its weights in memory, which no device does."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x):
            positions = torch.arange(x.size(1), device=x.device)
            qkv = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            q, k, v = qkv[0], qkv[1], qkv[2]
            mask = positions[:, None] >= positions
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.out(y.transpose(1, 2).flatten(2))

    model, x = Attention(), torch.zeros(8, 32, 64)
    for tracer in ("symbolic", "export"):
        real = fxpipe.plan(model, ["a100"] * 2, example_inputs=(x,), tracer=tracer)
        there, nowhere = on_meta(copy.deepcopy(model), x)
        meta = fxpipe.plan(there, ["a100"] * 2, example_inputs=nowhere, tracer=tracer)
        assert meta.stages == real.stages


class Experts(nn.Module):
    """Counts tokens as the mixtures of experts of transformers do, by an operator that takes whole
    numbers on accelerators only; and makes a tensor without saying where."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        device = next(self.parameters()).device
        chosen = self.router(x).argmax(-1)
        chosen = chosen.float() if device.type == "cpu" else chosen.int()
        counts = torch.histc(chosen, 4, 0, 3).cumsum(0)
        return self.out(x) * counts.sum() + torch.arange(8)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_a_model_that_asks_what_kind_of_device_it_is_on_has_the_same_plan_on_meta(tracer, default):
    model, x = Experts(), torch.randn(16, 8)
    options = {"chunks": 4, "tracer": tracer}
    real = fxpipe.plan(model, ["a100"] * 2, example_inputs=(x,), **options)
    there, nowhere = on_meta(copy.deepcopy(model), x)
    with torch.device(default):
        meta = fxpipe.plan(there, ["a100"] * 2, example_inputs=nowhere, **options)
    assert meta.stages == real.stages


def costs_of(model, inputs):
    """The cost of each node of a model in four micro-batches, on an A100."""
    settings = CostSettings("analytic", DeviceSpec.of("a100"), ADAM)
    options = {"in_dims": None, "tracer": "auto", "chunks": None, "chain": fxpipe.default_chain()}
    prices, _ = costed(model, ((), inputs), settings, **options)
    return {node.name: node.meta[COST] for node in stage_nodes(prices.with_costs(4).graph)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_is_planned_with_their_products_and_on_meta_alike(dtype):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, use_cache=False)
    ids, plans = torch.zeros(8, 16, dtype=torch.long), {}
    for experts, device in ("grouped_mm", "cpu"), ("grouped_mm", "meta"), ("batched_mm", "meta"):
        model = transformers.MixtralForCausalLM(config).to(dtype).to(device)
        model.set_experts_implementation(experts)
        inputs = {"input_ids": ids.to(device)}
        plans[experts, device] = costs_of(model, inputs)
    real, meta, products = plans.values()
    assert meta == real
    for kind in ("flops", "backward_flops"):
        assert sum(getattr(cost, kind) for cost in meta.values()) == sum(
            getattr(cost, kind) for cost in products.values()
        )


def test_the_model_is_left_as_it_was():
    make, inputs = MODELS["resnet"]
    model = make()
    before = copy.deepcopy(model)
    fxpipe.plan(model, ["p40"] * 2, example_inputs=inputs(4))
    assert same(list(model.state_dict().values()), list(before.state_dict().values()))
    assert all(p.grad is None for p in model.parameters())


def test_the_step_is_the_rounds_of_its_slowest_stage_and_the_rest_is_bubble():
    model, x = on_meta(Chain(4), torch.zeros(8, 3))
    costs = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
    plan = fxpipe.plan(model, [FREE_LINKS] * 4, example_inputs=x, chunks=4, costs=costs)
    assert [stage.seconds for stage in plan.stages] == [1, 1, 1, 1]
    assert plan.seconds == pytest.approx((4 + 4 - 1) / 4)
    assert plan.bubble == pytest.approx(3 / 7)
    assert plan.gap == pytest.approx(0)


def test_a_plan_is_compiled_with_its_schedule():
    model, x = Chain(8), torch.randn(8, 3)
    plan = fxpipe.plan(
        model, [FREE_LINKS] * 2, example_inputs=(x,), chunks=4, schedule="looped_bfs"
    )
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        partition=plan.partition,
        schedule=plan.schedule,
        chunks=plan.chunks,
        loss_fn=lambda output, target: output.sum(),
        example_inputs=(x,),
    ) as pipe:
        assert pipe.skip_layout == plan.layout
        pipe.step(x, target=x)


def test_a_faster_device_gets_more():
    model, x = on_meta(Chain(6), torch.zeros(4096, 3))
    fast = DeviceSpec(
        flops_per_s=1e11, bytes_per_s=2e10, launch_s=1e-6, link_bytes_per_s=1e30, link_latency_s=0
    )
    plan = fxpipe.plan(model, [FREE_LINKS, fast], example_inputs=x, chunks=1)
    assert [len(stage.nodes) for stage in plan.stages] == [2, 4]


def test_it_prints_as_a_table():
    model, x = on_meta(ResNet(), torch.zeros(8, 3, 8, 8))
    plan = fxpipe.plan(model, ["p40"] * 2, example_inputs=x, chunks=4)
    text = str(plan)
    for words in ("stage", "p40", "activations", "memory left", "a step of 4 micro-batches takes"):
        assert words in text
    assert "no other cut that was expected to fit has a faster slowest stage" in text
    assert "links: 0 -> 1 " in text
    busy = sum(plan.timeline.busy)
    alone = f"the stages would take {human_time(busy)}, {busy / plan.seconds:.2f} times as long"
    assert alone in " ".join(text.split())


def test_a_plan_may_be_made_in_inference_mode():
    model = Chain(4)
    with torch.inference_mode():
        plan = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=(torch.zeros(8, 3),))
    assert plan.stages[0].activation_bytes > 0, "it is of training, as ever"


def test_chunks_are_chosen_as_far_as_the_batch_goes():
    model, x = on_meta(Chain(3), torch.zeros(6, 3))
    assert fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x).chunks == 6
    with pytest.raises(ValueError, match="chunks is 0"):
        fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, chunks=0)


def test_a_schedule_of_ones_own_says_how_many_chunks_there_are_as_for_a_pipeline():
    model, x = on_meta(Chain(3), torch.zeros(6, 3))
    few, own = on_meta(Chain(3), torch.zeros(3, 3))[1], named("1f1b", lanes=2, microbatches=5)
    assert fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, schedule=own).chunks == 5
    assert fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=few, schedule=own).chunks == 3
    with pytest.raises(ValueError, match="has 5 micro-batches, and chunks is 6: give the same"):
        fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, schedule=own, chunks=6)


# ------------------------------------------------------------------------------ passes of one's own


@dataclass(frozen=True)
class Doubled:
    """Doubles the cost of some nodes."""

    name: str
    nodes: tuple[str, ...]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            if node.name in self.nodes:
                node.meta[COST] = node.meta[COST] + node.meta[COST]
        return gm


@dataclass(frozen=True)
class Sees:
    """Counts how often it is run, and the stages of what it is given."""

    name: str
    seen: list[int]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.seen.append(len(gm.graph.find_nodes(op="call_module", target="stage_0")))
        return gm


def test_a_plan_runs_passes_of_ones_own_at_the_model_and_the_stage_level():
    model, x = Chain(8), torch.zeros(8, 3)
    before, behind, counting, stages, last = ([] for _ in range(5))
    chain = (
        fxpipe.default_chain()
        .before("alias", Sees("before", before))
        .after("cost", Sees("counting", counting))
        .before("split", Sees("behind", behind))
        .after("split", Sees("stages", stages))
        .after("devices", Sees("last", last))
    )
    own = fxpipe.plan(model, ["p40"] * 2, example_inputs=(x,), passes=chain)
    assert [before, counting, behind, stages, last] == [[0], [0], [0], [1], [1]]
    assert own.partition == fxpipe.plan(model, ["p40"] * 2, example_inputs=(x,)).partition


def test_a_pass_that_changes_costs_changes_the_plan_as_it_changes_the_pipeline():
    model, x = Chain(8), torch.zeros(8, 3)
    usual = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=(x,))
    heavy = Doubled("heavy", usual.stages[0].nodes[:2])
    chain = fxpipe.default_chain().before("partition", heavy)
    plan = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=(x,), passes=chain)
    assert len(plan.stages[0].nodes) < len(usual.stages[0].nodes)
    with fxpipe.compile(model, ["cpu"] * 2, passes=chain, example_inputs=(x,)) as pipe:
        work = pipe.model_graph.graph.nodes
        assert {n.name: n.meta[STAGE] for n in work if STAGE in n.meta} == plan.partition


@pytest.mark.parametrize("name", ["rows", "free", "devices", "tied"])
def test_a_plan_can_do_without_passes_that_the_chain_can_do_without(name):
    model, x = Chain(8), torch.zeros(8, 3)
    chain = fxpipe.default_chain().without(name)
    plan = fxpipe.plan(model, ["p40"] * 2, example_inputs=(x,), passes=chain)
    assert plan.partition == fxpipe.plan(model, ["p40"] * 2, example_inputs=(x,)).partition


def test_passes_that_are_no_chain_are_refused():
    with pytest.raises(TypeError, match="passes is a list: give a chain, such as"):
        fxpipe.plan(Chain(2), ["p40"], example_inputs=(torch.zeros(2, 3),), passes=[])


def test_a_bug_in_a_pass_is_no_reason_to_plan_by_another_front_end():
    """That would hide it: the plan would be of another graph than the pipeline."""

    def wrong(context):
        raise KeyError("a bug")

    chain = fxpipe.default_chain().before("rows", Entry("wrong", wrong, "model", "model", "Fails."))
    with pytest.raises(KeyError, match="a bug"):
        fxpipe.plan(Chain(2), ["p40"], example_inputs=(torch.zeros(2, 3),), passes=chain)
    without_memory = fxpipe.default_chain().before("rows", Exhausts())
    with pytest.raises(torch.OutOfMemoryError) as error:
        fxpipe.plan(Chain(2), ["p40"], example_inputs=(torch.zeros(2, 3),), passes=without_memory)
    assert error.value.__context__ is None, "it was tried once"


class Exhausts:
    """Needs more memory than there is."""

    name = "exhausts"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        raise torch.OutOfMemoryError("there is no more")
