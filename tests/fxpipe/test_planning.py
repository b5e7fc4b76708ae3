from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import DeviceSpec
from fxpipe.schedule import live, named
from passes.skips import Hop
from tests.benchmarks.memory import Held
from tests.zoo import MODELS, Chain, ResNet, UNet, same

FREE_LINKS = DeviceSpec(link_bytes_per_s=1e30, link_latency_s=0.0)


def on_meta(model, *inputs):
    return model.to("meta"), tuple(t.to("meta") for t in inputs)


class Wide(nn.Module):
    """Two layers that compute little and hold much, then four that are the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, 64)
        self.table = nn.Embedding(10_000, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, tokens):
        x = self.embed(tokens) + self.table(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


TOKENS = torch.zeros(64, 8, dtype=torch.long)
TABLES = 2 * 10_000 * 64 * 4 * 4  # two of them, with gradients and Adam's two states


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


def even(**options):
    """The plan for eight layers that take, and keep, the same."""
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8))
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(512, 32))
    options = {"devices": [FREE_LINKS] * 4, "chunks": 8, **options}
    return fxpipe.plan(model, example_inputs=x, costs={f"{i}": 1.0 for i in range(8)}, **options)


def test_a_schedule_decides_what_is_alive_at_once():
    gpipe, one_f_one_b = even(), even(schedule="1f1b")
    assert one_f_one_b.seconds == pytest.approx(gpipe.seconds) == pytest.approx((8 + 3) / 8 * 2)
    assert one_f_one_b.partition == gpipe.partition
    kept = [stage.activation_bytes for stage in gpipe.stages]
    alive = [4 / 8, 3 / 8, 2 / 8, 1 / 8]
    expected = [size * part for size, part in zip(kept, alive, strict=True)]
    assert [stage.activation_bytes for stage in one_f_one_b.stages] == expected
    assert one_f_one_b.memory == tuple(stage.memory for stage in one_f_one_b.stages)


def test_a_model_that_only_fits_in_another_order_is_planned_in_that():
    short = FREE_LINKS.with_memory(0.7 * even().memory[0])
    with pytest.raises(fxpipe.DoesNotFit):
        even(devices=[short] * 4)
    assert even(devices=[short] * 4, schedule="1f1b").fits
    assert even(devices=[short] * 4, schedule="auto").fits
    tiny = FREE_LINKS.with_memory(0.1 * even().memory[0])
    assert not even(devices=[tiny] * 4, schedule="auto", partition=["2", "4", "6"]).fits


def test_a_device_with_several_stages_holds_all_of_them():
    plan = even(devices=[FREE_LINKS] * 2, schedule="interleaved_1f1b")
    assert [stage.lane for stage in plan.stages] == [0, 1, 0, 1]
    of_one = [
        stage.activation_bytes / count
        for stage, count in zip(plan.stages, live(plan.schedule).stages, strict=True)
    ]
    alive = live(plan.schedule, of_one).lanes
    state = [sum(s.state_bytes for s in plan.stages if s.lane == lane) for lane in (0, 1)]
    assert plan.memory == pytest.approx([a + b for a, b in zip(alive, state, strict=True)])
    assert plan.bubble < even(devices=[FREE_LINKS] * 2).bubble
    assert "1 cpu core" in str(plan)


def test_stages_that_share_a_device_are_given_parts_of_its_memory():
    layers = (nn.Linear(3, 3) for _ in range(16))
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(8, 3))
    # By time stages 0 and 2, which are on the first device, have 14 of the 16 layers.
    times = [1 / 6] * 6 + [1] + [1 / 8] * 8 + [1]
    costs = dict(zip((name for name, _ in model.named_children()), times, strict=True))

    def planned(memory):
        return fxpipe.plan(
            model,
            [FREE_LINKS.with_memory(memory)] * 2,
            example_inputs=x,
            chunks=4,
            costs=costs,
            schedule="interleaved_1f1b",
        )

    roomy = planned(None)
    assert [len(stage.nodes) for stage in roomy.stages] == [6, 1, 8, 1]
    limit = 0.8 * max(roomy.memory)
    assert planned(limit).fits
    with pytest.raises(fxpipe.DoesNotFit, match="device 0 needs"):
        planned(limit / 4)


def test_nothing_travels_between_stages_of_one_device():
    slow = DeviceSpec(link_bytes_per_s=1e3, link_latency_s=1.0)
    options = {"schedule": "interleaved_1f1b", "stages": 2, "partition": ["4"]}
    plan = even(devices=[slow], **options)
    assert [stage.link_s for stage in plan.stages] == [0, 0]
    assert plan.seconds == pytest.approx(8)


def test_the_schedule_that_is_searched_for_is_no_slower():
    known = [even(schedule=name).seconds for name in ("gpipe", "1f1b", "zb_h1")]
    assert even(schedule="auto").seconds <= min(known) * (1 + 1e-9)


class TiedChain(nn.Sequential):
    """Six layers that hold much, of which two, 1 and 3, have the same weight."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        self[3].weight = self[1].weight


WEIGHT = 128 * 128 * 4


def tied(devices=(FREE_LINKS,) * 2, **options):
    costs = {str(i): 1.0 for i in range(6)}
    x = torch.zeros(8, 128)
    return fxpipe.plan(TiedChain(), devices, example_inputs=(x,), chunks=4, costs=costs, **options)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_tied_weight_and_its_gradient_are_on_the_other_device_once(checkpoint):
    apart = tied(partition=["3"], checkpoint=checkpoint)
    own, brought = 4 * WEIGHT, 2 * WEIGHT  # with gradients; what is one's own has Adam's two states
    assert [stage.state_bytes for stage in apart.stages] == [3 * own, 2 * own + brought]
    assert apart.layout.brought == (Hop("1.weight", 0, 1, WEIGHT, once=True),)
    assert [t.bytes for t in apart.timeline.transfers if t.action is None] == [WEIGHT, WEIGHT]
    with fxpipe.compile(
        TiedChain(), ["cpu", "cpu:0"], chunks=4, partition=apart.partition, checkpoint=checkpoint
    ) as pipe:
        pipe.prepare(torch.zeros(8, 128))
        assert pipe.skip_layout == apart.layout
        assert [s.cost.fixed_bytes for s in pipe.stages] == [s.state_bytes for s in apart.stages]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_holds_what_the_plan_says(schedule):
    x = torch.randn(8, 128)
    plan = tied(partition=["3"], schedule=schedule)
    with fxpipe.compile(
        TiedChain(),
        ["cpu", "cpu:0"],
        chunks=4,
        partition=plan.partition,
        schedule=schedule,
        loss_fn=lambda output, target: output.square().mean(),
        example_inputs=(x,),
    ) as pipe:
        held = Held(pipe)
        for stage in pipe.stages:
            held.watch(stage)
        pipe.step(x)
    first, second = (stage.activation_bytes for stage in plan.stages)
    assert held.most[1] == second + WEIGHT, "the replica, once for all micro-batches"
    alive = live(plan.schedule).stages[0] / 4
    assert held.most[0] == first + (1 - alive) * x.nbytes, "its inputs are views of one memory"


def test_a_tied_weight_is_not_brought_to_where_it_is():
    plan = tied(schedule="interleaved_1f1b", partition=["1", "2", "3"])
    assert [stage.lane for stage in plan.stages] == [0, 1, 0, 1]
    assert plan.stages[3].state_bytes == 2 * 4 * WEIGHT, "its own two"
    assert not plan.layout.brought


def test_a_tied_weight_stays_with_both_its_users_where_bringing_it_costs_more():
    assert tied().layout.brought, "three layers each, and the weight is brought"
    slow = DeviceSpec(link_bytes_per_s=WEIGHT / 3, link_latency_s=0.0)  # 3 s there, 3 s back
    assert not tied([slow] * 2).layout.brought, "four layers and two"


def test_a_tied_weight_stays_with_both_its_users_where_there_is_no_room_for_it_twice():
    apart = tied()
    assert apart.layout.brought
    short = FREE_LINKS.with_memory(apart.memory[1] - WEIGHT)
    plan = tied([FREE_LINKS, short])
    assert plan.fits
    assert not plan.layout.brought


def test_links_of_the_devices_take_their_time():
    slow = DeviceSpec(link_bytes_per_s=512 * 32 * 4 / 8, link_latency_s=0.0)  # 1 s a micro-batch
    plan = even(devices=[slow] * 2, chunks=8, partition=["4"])
    # There and back it is what the stages, which take half a second, wait for.
    assert plan.seconds == pytest.approx(0.5 + 8 * 1 + 8 * 1 + 0.5)
    copies = [t for t in plan.timeline.transfers if t.target == 1]
    assert [t.end - t.start for t in copies] == pytest.approx([1.0] * 8)


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


def test_a_schedule_for_something_else_is_refused():
    other = named("1f1b", lanes=4, microbatches=6)
    with pytest.raises(ValueError, match="has 6 micro-batches, and chunks is 8: give the same"):
        even(schedule=other)
    with pytest.raises(ValueError, match="has 4 lanes and 4 stages, and there are 3 devices"):
        even(schedule=other, devices=[FREE_LINKS] * 3)


def test_links_are_summed_hop_by_hop():
    model, x = on_meta(Chain(4, {0: (3,)}), torch.zeros(8, 3))
    plan = fxpipe.plan(
        model, [FREE_LINKS] * 4, example_inputs=x, partition=["b", "c", "d"], chunks=4
    )
    size = 8 * 3 * 4
    assert plan.links == {(0, 1): size, (1, 2): size, (1, 3): size, (2, 3): size}


def test_a_slow_link_moves_the_cut():
    class Narrowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 4)

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    model, x = on_meta(Narrowing(), torch.zeros(64, 64))
    even = {"a": 1.0, "b": 1.0, "c": 1.0}
    slow = DeviceSpec(link_bytes_per_s=64 * 512 * 4 / 5, link_latency_s=0.0)
    plans = [
        fxpipe.plan(model, [device] * 2, example_inputs=x, costs=even, chunks=1)
        for device in (FREE_LINKS, slow)
    ]
    assert [stage.seconds for stage in plans[0].stages] in ([1.0, 2.0], [2.0, 1.0])
    assert max(stage.seconds for stage in plans[1].stages) == pytest.approx(10), (
        "both ways, 5 s each"
    )


def test_a_faster_device_gets_more():
    model, x = on_meta(Chain(6), torch.zeros(4096, 3))
    fast = DeviceSpec(
        flops_per_s=1e11, bytes_per_s=2e10, launch_s=1e-6, link_bytes_per_s=1e30, link_latency_s=0
    )
    plan = fxpipe.plan(model, [FREE_LINKS, fast], example_inputs=x, chunks=1)
    assert [len(stage.nodes) for stage in plan.stages] == [2, 4]


def test_a_model_that_only_fits_with_an_uneven_cut_is_cut_so():
    model, x = on_meta(Wide(), TOKENS)
    roomy = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, chunks=4)
    assert roomy.stages[0].state_bytes >= TABLES
    small, large = FREE_LINKS.with_memory(0.75 * TABLES), FREE_LINKS.with_memory(2 * TABLES)
    plan = fxpipe.plan(model, [small, large], example_inputs=x, chunks=4)
    assert plan.fits
    assert not roomy.stages[0].memory <= 0.75 * TABLES
    assert plan.stages[0].nodes == ("embed",), "one table here, all else there"
    slowest = [max(stage.seconds for stage in p.stages) for p in (roomy, plan)]
    assert slowest[0] < slowest[1], "that is the price"


def test_a_model_that_cannot_fit_is_refused_with_what_is_short_and_what_would_help():
    model, x = on_meta(Wide(), TOKENS)
    short = FREE_LINKS.with_memory(0.4 * TABLES)
    with pytest.raises(fxpipe.DoesNotFit) as error:
        fxpipe.plan(model, [short] * 2, example_inputs=x, chunks=4)
    message = str(error.value)
    assert "device 0 needs " in message
    assert f"and has {0.4 * TABLES:,.0f}, " in message
    assert (
        "; no other schedule, no other chunks, no other checkpoint, no 8 devices would help: give "
        "devices with more memory"
    ) in message, "a table is larger than a device"


def deep(memory, **options):
    """The plan for 24 layers that keep much more than their parameters are."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(4096, 32))
    options = {"devices": 2, "chunks": 8, **options}
    device = FREE_LINKS if memory is None else FREE_LINKS.with_memory(memory)
    return fxpipe.plan(model, [device] * options.pop("devices"), example_inputs=x, **options)


@pytest.mark.parametrize(
    ("part", "singles"),
    [
        (0.4, {'schedule="1f1b"', 'checkpoint="except_last"', "3 devices"}),
        (0.1, set()),  # no change alone is enough
        (0.05, set()),
    ],
)
def test_what_would_fit_is_said_and_does(part, singles):
    memory = part * deep(None, devices=1).memory[0]
    with pytest.raises(fxpipe.DoesNotFit) as error:
        deep(memory)
    _, _, said = str(error.value).partition("; it would fit with ")
    ways = re.split(", with | or with ", said)
    assert {way for way in ways if " and " not in way} == singles
    for way in ways:
        parts = [p if "=" in p else f"devices={p.split()[0]}" for p in way.split(" and ")]
        assert deep(memory, **eval(f"dict({','.join(parts)})")).fits
    for one in ({"schedule": "1f1b"}, {"checkpoint": "always"}, {"chunks": 4096}):
        if not singles:
            with pytest.raises(fxpipe.DoesNotFit):
                deep(memory, **one)


def test_checkpoints_take_time_and_save_memory():
    model, x = on_meta(UNet(8, 3), torch.zeros(16, 3, 16, 16))
    kept, again = (
        fxpipe.plan(model, ["p40"] * 2, example_inputs=x, chunks=8, checkpoint=mode)
        for mode in ("never", "always")
    )
    assert sum(s.activation_bytes for s in again.stages) < sum(
        s.activation_bytes for s in kept.stages
    )
    assert sum(s.compute_s for s in again.stages) > sum(s.compute_s for s in kept.stages)


def test_activations_of_one_stage_are_those_of_saved_tensor_hooks():
    make, inputs = MODELS["transformer"]
    model, x = make(), inputs(4)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*x)
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    plan = fxpipe.plan(model, ["p40"], example_inputs=x)
    expected = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert plan.stages[0].activation_bytes == expected


def test_it_prints_as_a_table():
    model, x = on_meta(ResNet(), torch.zeros(8, 3, 8, 8))
    text = str(fxpipe.plan(model, ["p40"] * 2, example_inputs=x, chunks=4))
    for words in ("stage", "p40", "activations", "memory left", "a step of 4 micro-batches takes"):
        assert words in text
    assert "optimal" in text
    assert "links: 0 -> 1 " in text


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "devices is \\[\\]: give a list of DeviceSpec"),
        ("p40", "devices is 'p40': give a list"),
        (["p41"], "no device 'p41' is known"),
        (4, "devices is 4: give a list"),
    ],
)
def test_devices_that_make_no_sense_are_refused(devices, message):
    with pytest.raises(ValueError, match=message):
        fxpipe.plan(Chain(3), devices, example_inputs=(torch.zeros(2, 3),))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"example_inputs": torch.zeros(2, 3)}, TypeError, r"write example_inputs=\(x,\)"),
        ({"model": torch.relu}, TypeError, "plan takes an nn.Module, got a builtin"),
        ({"checkpoint": "now"}, ValueError, "checkpoint is 'now': give 'never', 'except_last'"),
        ({"optimizer_states": -1}, ValueError, "optimizer_states is -1: give a number, 0 or more"),
        ({"optimizer_states": "adam"}, ValueError, "optimizer_states is 'adam': give a number"),
        ({"costs": {1: 1.0}}, ValueError, "costs names 1: give names of nodes or modules, as str"),
        ({"costs": None}, ValueError, 'costs is None: give "analytic", "measured"'),
        ({"costs": {"a": float("nan")}}, ValueError, "costs gives nan for 'a': give seconds, 0"),
        ({"costs": {"a": "1 s"}}, ValueError, "costs gives '1 s' for 'a': give seconds, 0 or"),
        ({"model": nn.Identity()}, ValueError, "but the model computes nothing"),
        ({"schedule": "2f2b"}, ValueError, "schedule is '2f2b': give one of gpipe, 1f1b"),
        ({"devices": ["h100"] * 9}, ValueError, "9 stages asked for, but the model can be cut in"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, message):
    given = {"model": Chain(3), "devices": ["p40"], "example_inputs": (torch.zeros(2, 3),)}
    given |= options
    with pytest.raises(error, match=message):
        fxpipe.plan(given.pop("model"), given.pop("devices"), **given)


def test_a_model_without_values_is_not_measured():
    model, x = on_meta(Chain(3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match='costs="measured" runs the model, which is on "meta"'):
        fxpipe.plan(model, ["p40"], example_inputs=x, costs="measured")


def test_a_plan_may_be_made_in_inference_mode():
    model = Chain(4)
    with torch.inference_mode():
        plan = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=(torch.zeros(8, 3),))
    assert plan.stages[0].activation_bytes > 0, "it is of training, as ever"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s is 0: give a rate above zero"),
        ({"half_flops_per_s": -1}, "half_flops_per_s is -1: give a rate above zero"),
        ({"link_bytes_per_s": "fast"}, "link_bytes_per_s is 'fast': give a rate above zero"),
        ({"launch_s": -1}, "launch_s is -1: give seconds, 0 or more"),
        ({"link_latency_s": float("nan")}, "link_latency_s is nan: give seconds, 0 or more"),
        ({"memory": 0}, "memory is 0: give bytes, above zero, or None for no limit"),
        ({"memory": "16 GiB"}, "memory is '16 GiB': give bytes, above zero, or None"),
    ],
)
def test_a_device_that_cannot_be_is_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        DeviceSpec(**limits)


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
