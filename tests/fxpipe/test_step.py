"""A training step gives the gradients of a loop over micro-batches, in its schedule's order."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.flop_counter import FlopCounterMode

import fxpipe
from fxpipe import ops
from fxpipe.graph import STAGE
from fxpipe.schedule import NAMES, Schedule, joined, named
from tests.zoo import MLP, MODELS, Tied, UNet, gradients, loss_of, same, step_of_loop

MODELS = MODELS | {"tied": (Tied, lambda batch: (torch.randint(11, (batch, 4)),))}


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (torch.sin(output).flatten(1).sum(1) * target).mean()


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_loop_in_that_order(name, schedule):
    make, inputs = MODELS[name]
    model, x, target = make(), inputs(7), torch.randn(7)
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=mean_loss) as pipe:
        loss = pipe.step(*x, target=target)
        pipe.prepare(*x)
        order = named(schedule, lanes=2, microbatches=4, stages=len(pipe.stages))
        wanted = step_of_loop(reference, x, target, pipe, order, 4, mean_loss)
        assert same(gradients(model), wanted[1])
        torch.testing.assert_close(loss, wanted[0], rtol=1e-6, atol=1e-6)
        assert len(pipe.losses) == 4 and not loss.requires_grad
        assert same(list(model.buffers()), list(reference.buffers()))


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet"])
def test_loss_and_gradients_are_those_of_the_whole_batch(name, schedule):
    """Of any model but those whose batch norm sees micro-batches. In doubles, as sums in another
    order have other last bits."""
    make, inputs = MODELS[name]
    model, target = make().double(), torch.randn(7, dtype=torch.double)
    x = [t.double() if t.is_floating_point() else t for t in inputs(7)]
    full = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=mean_loss) as pipe:
        loss = pipe.step(*x, target=target)
    wanted = mean_loss(full(*x), target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(gradients(model), gradients(full), rtol=1e-6, atol=1e-12)


class Twice(nn.Module):
    """One value is three outputs, of which the loss may use some; another has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        y, mask = self.b(torch.tanh(self.a(x))), (x > 0).float()
        return {"y": y, "same": (y, y), "masks": [mask, mask]}


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, t: mean_loss(out["y"], t),
        lambda out, t: mean_loss(out["same"][1] * out["masks"][0], t),
        lambda out, t: mean_loss(out["same"][0] * out["y"], t),
    ],
)
def test_a_value_may_be_several_outputs_whether_the_loss_uses_them_or_not(loss_fn):
    model, x, target = Twice(), torch.randn(6, 4), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule="1f1b", loss_fn=loss_fn, partition=["b"]
    ) as pipe:
        pipe.step(x, target=target)
        order = named("1f1b", lanes=2, microbatches=3)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, loss_fn)
    assert same(gradients(model), wanted)


class Widened(nn.Module):
    """The gradient of the batch norm's result is a part of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(torch.cat([x, self.norm(x)], 1)))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_gradients_keep_their_layout_from_stage_to_stage(schedule):
    model, x, target = Widened(), torch.randn(6, 4, 8, 8), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=2,
        partition=["cat"],
        schedule=schedule,
        loss_fn=mean_loss,
        tracer="symbolic",
    ) as pipe:
        pipe.step(x, target=target)
        order = named(schedule, lanes=2, microbatches=2)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 2, mean_loss)
    assert same(gradients(model), wanted)


class Spectrum(nn.Module):
    """What leaves its first and second stage is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)
        self.w = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.view_as_real(torch.fft.fft(self.a(x)) * self.w).sum(-1))


def test_gradients_of_complex_values_go_back_too():
    model, x, target = Spectrum(), torch.randn(4, 4), torch.randn(4)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        chunks=2,
        schedule="1f1b",
        partition=["mul", "view_as_real"],
        loss_fn=mean_loss,
    ) as pipe:
        pipe.step(x, target=target)
    order = named("1f1b", lanes=3, microbatches=2)
    _, wanted = step_of_loop(reference, (x,), target, pipe, order, 2, mean_loss)
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_an_output_of_an_earlier_stage_waits_for_the_loss(schedule):
    class DeadEnd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.dead = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            self.dead(x)  # whose stage has nothing to do with that of b
            return self.b(self.a(x))

    model, x, target = DeadEnd(), torch.randn(6, 4), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        chunks=3,
        partition={"a": 0, "b": 1, "dead": 2},
        schedule=schedule,
        loss_fn=mean_loss,
    ) as pipe:
        pipe.step(x, target=target)
        order = named(schedule, lanes=3, microbatches=3, stages=3)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, mean_loss)
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", ["resnet", "unet", "transformer"])
def test_checkpoints_change_nothing(name, schedule, checkpoint):
    make, inputs = MODELS[name]
    first, x, target = make(), inputs(6), torch.randn(6)
    results = []
    for mode, segments in (("never", 1), (checkpoint, 1), (checkpoint, 3)):
        model = copy.deepcopy(first)
        with fxpipe.compile(
            model,
            ["cpu"] * 2,
            chunks=3,
            schedule=schedule,
            checkpoint=mode,
            checkpoint_segments=segments,
            loss_fn=mean_loss,
        ) as pipe:
            loss = pipe.step(*x, target=target)
        results.append([loss, gradients(model), list(model.buffers())])
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_where_only_some_micro_batches_are_in_segments_the_order_is_the_schedules():
    order = Schedule.from_text("""
        0F0 0F1 0F2 0I2 0I0 0I1 0W2 0W0 0W1
        1F0 1F1 1F2 1B2 1B0 1B1
    """)
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule=order,
        checkpoint="except_last",
        checkpoint_segments=2,
        loss_fn=mean_loss,
    ) as pipe:
        pipe.step(x, target=target)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, mean_loss)
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize(
    "make, inputs",
    [
        (lambda: MLP(depth=9), MODELS["mlp"][1]),
        (lambda: UNet(depth=4), MODELS["unet"][1]),  # whose skips pass by up to six stages
    ],
)
def test_four_lanes_up_to_eight_stages_and_any_batch(make, inputs, schedule):
    model = make()
    with fxpipe.compile(model, ["cpu"] * 4, chunks=8, schedule=schedule, loss_fn=mean_loss) as pipe:
        for batch in (16, 5, 1):
            x, target = inputs(batch), torch.randn(batch)
            model.zero_grad()
            pipe.step(*x, target=target)
            pipe.prepare(*x)
            order = named(schedule, lanes=4, microbatches=min(8, batch), stages=len(pipe.stages))
            reference = copy.deepcopy(model)
            wanted = step_of_loop(reference, x, target, pipe, order, 8, mean_loss)
            assert same(gradients(model), wanted[1])


@pytest.mark.parametrize(
    "schedule",
    [
        "dualpipe_v",  # which takes twice as many micro-batches as there are lanes
        Schedule.from_text("""
            0F0 0F1 0F2 3F0 3F1 3I0 3F2 3W0 3I1 3W1 3B2 0B0 0B1 0B2
            1F0 2F0 1F1 2F1 1F2 2F2 2B0 2B1 1B0 2I2 1B1 1B2 2W2
        """),
    ],
    ids=["dualpipe_v", "a schedule"],
)
def test_a_smaller_batch_goes_in_the_order_of_its_micro_batches_in_a_whole_one(schedule):
    """The last one of an epoch, say."""
    model, chunks = MLP(), 4 if schedule == "dualpipe_v" else 3
    whole = named(schedule, lanes=2, microbatches=4) if chunks == 4 else schedule
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=chunks, schedule=schedule, loss_fn=mean_loss
    ) as pipe:
        for batch in (6, 2, 1):
            x, target = torch.randn(batch, 12), torch.randn(batch)
            model.zero_grad()
            pipe.step(x, target=target)
            reference, order = copy.deepcopy(model), whole.first(min(batch, chunks))
            _, wanted = step_of_loop(reference, (x,), target, pipe, order, chunks, mean_loss)
            assert same(gradients(model), wanted)


def test_a_schedule_of_ones_own_says_how_many_micro_batches_there_are():
    order = Schedule.from_text("0F0 0F1 0F2 0B0 0B1 0B2 \n 1F0 1F1 1F2 1B0 1B1 1B2")
    with fxpipe.compile(MLP(), ["cpu"] * 2, schedule=order, loss_fn=mean_loss) as pipe:
        pipe.step(torch.randn(8, 12), target=torch.randn(8))
        assert len(pipe.losses) == 3


class Dropouts(nn.Module):
    """A skip over all of it, and random numbers everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        x = first
        for layer in self.layers[1:]:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return x + torch.rand_like(x) * first


class Seeded(nn.Module):
    """A stage graph by itself: the model, but for its random numbers, which come from a seed."""

    def __init__(self, pipe: fxpipe.Pipeline) -> None:
        super().__init__()
        self.stage_graph = pipe.stage_graph
        self.parameters = pipe.module.parameters

    def forward(self, x: Tensor, seed: Tensor) -> Tensor:
        return self.stage_graph(x, int(seed))


@pytest.mark.parametrize("checkpoint, segments", [("never", 1), ("always", 1), ("always", 2)])
@pytest.mark.parametrize("schedule", NAMES)
def test_with_dropout_each_micro_batch_has_its_seed_whatever_the_lanes(
    schedule, checkpoint, segments
):
    torch.manual_seed(3)
    seeds = torch.stack([torch.tensor(seed) for seed in ops.seeds(8)])
    model, x, target = Dropouts(), torch.randn(8, 6), torch.randn(8)
    with fxpipe.compile(
        model,
        ["cpu"] * 4,
        chunks=8,
        schedule=schedule,
        checkpoint=checkpoint,
        checkpoint_segments=segments,
        loss_fn=mean_loss,
    ) as pipe:
        torch.manual_seed(3)
        pipe.step(x, target=target)
        found = gradients(model)
        order = named(schedule, lanes=4, microbatches=8, stages=len(pipe.stages))
        _, wanted = step_of_loop(Seeded(pipe), (x, seeds), target, pipe, order, 8, mean_loss)
    assert same(found, wanted)


@pytest.mark.parametrize("segments", [1, 2])
def test_what_is_checkpointed_defers_its_gradients_too(segments):
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule="zb_h1",
        checkpoint="always",
        checkpoint_segments=segments,
        loss_fn=mean_loss,
    ) as pipe:
        seconds = {s.action: s.seconds for s in pipe.measure(x, target=target).spans if s.action}
        order = joined(named("zb_h1", lanes=2, microbatches=3), [(0, 1)])
        assert set(seconds) == {a for lane in range(2) for a in order.actions(lane)}
        pipe.step(x, target=target)
    found = dict.fromkeys((ops.forward, ops.replay, ops.backward_input, ops.weight_grad), 0)
    for node in pipe.step_graph.graph.nodes:
        if node.meta.get(STAGE) == 1 and node.target in found:
            found[node.target] += 1
            assert node.target is not ops.replay or node.args[1] is True, "in halves"
    assert set(found.values()) == {3 * segments}, "each segment has its own"


class Kernels(nn.Module):
    """Functions of parameters, given by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(4, 4, 3)) for _ in range(2))
        self.bias, self.c = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(F.conv1d(x, self.a, padding=1))
        x = torch.tanh(F.conv1d(weight=self.b, padding=1, bias=self.bias, input=x))
        return F.linear(x, weight=self.c)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_what_defers_its_gradients_takes_its_arguments_by_name_too(tracer):
    model, x, target = Kernels(), torch.randn(6, 4, 4), torch.randn(6)
    reference, order = copy.deepcopy(model), named("zb_h1", lanes=2, microbatches=3)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule="zb_h1", loss_fn=mean_loss, tracer=tracer
    ) as pipe:
        pipe.step(x, target=target)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, mean_loss)
    assert same(gradients(model), wanted)


def test_the_step_graph_alone_gives_the_same():
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(6), torch.randn(6)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3, schedule="1f1b", loss_fn=mean_loss) as pipe:
        loss = pipe.step(*x, target=target)
        wanted = gradients(model)
        model.zero_grad()
        with torch.no_grad():
            again, losses = pipe.step_graph(*x, target)
    assert same(loss, again) and same(gradients(model), wanted)
    assert same(losses, pipe.losses)


def kept(schedule: str, where: list[int]) -> list[int]:
    """The most micro-batches that are alive at once in each lane of three, counted; ``where`` says
    in which lane a stage is."""
    model = nn.Sequential(*map(Kept, where))
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        chunks=8,
        schedule=schedule,
        stages=len(where),
        partition=[str(i) for i in range(1, len(where))],
        loss_fn=lambda out, _: out.sum(),
    ) as pipe:
        x = torch.randn(16, 4)
        pipe.step(x)
        Kept.clear()
        pipe.step(x)
    return [Kept.most[lane] for lane in range(3)]


def test_a_stage_of_1f1b_keeps_as_many_micro_batches_as_there_are_stages_from_it_on():
    assert kept("1f1b", [0, 1, 2]) == [3, 2, 1]
    assert kept("gpipe", [0, 1, 2]) == [8, 8, 8]


def test_zero_bubble_schedules_keep_no_more_than_the_first_lane_of_1f1b():
    assert max(kept("zb_h1", [0, 1, 2])) <= 3
    # Twice as many stages, half as large each.
    assert max(kept("zbv", [0, 1, 2, 2, 1, 0])) <= 2 * 3


class Kept(nn.Module):
    """Counts the micro-batches whose activations its lane keeps."""

    alive: ClassVar[dict[int, list[weakref.ref[object]]]] = {}
    most: ClassVar[dict[int, int]] = {}
    lock = threading.Lock()

    def __init__(self, lane: int) -> None:
        super().__init__()
        self.lane, self.linear = lane, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(counted(x, self.lane))) * 0.1

    @staticmethod
    def clear() -> None:
        Kept.alive, Kept.most = {}, {}


@fx.wrap
def counted(x: Tensor, lane: int) -> Tensor:
    y = x * 0.5  # which the linear keeps until it has the gradient of its weight
    with Kept.lock:
        mine = Kept.alive.setdefault(lane, [])
        mine.append(weakref.ref(y.untyped_storage()))
        now = sum(ref() is not None for ref in mine)
        Kept.most[lane] = max(Kept.most.get(lane, 0), now)
    return y


# ------------------------------------------------------------------------------------------ losses


class OwnLoss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> object:
        out = self.b(torch.tanh(self.a(x)))
        loss = (out[:, 0] - y).square().mean()
        return {"alone": loss, "first": (loss, out), "named": {"logits": out, "loss": loss}}[
            self.kind
        ]


@pytest.mark.parametrize("kind", ["alone", "first", "named"])
def test_a_model_may_return_its_loss(kind):
    model, x, y = OwnLoss(kind), torch.randn(6, 4), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, schedule="1f1b") as pipe:
        loss = pipe.step(x, y)
    wanted = OwnLoss("alone")
    wanted.load_state_dict(reference.state_dict())
    value = wanted(x, y)
    value.backward()
    torch.testing.assert_close(loss, value.detach())
    torch.testing.assert_close(gradients(model), gradients(wanted))


def test_a_model_that_returns_its_loss_may_have_an_argument_called_target():
    class Own(MLP):
        def forward(self, x, target=None):
            return mean_loss(super().forward(x), target)

    model, x, target = Own(), torch.randn(6, 12), torch.randn(6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        loss = pipe.step(x, target=target)
        found = gradients(model)
        model.zero_grad()
        assert same(pipe.step(x, target), loss)
    assert same(gradients(model), found)
    torch.testing.assert_close(loss, model(x, target))


def test_a_target_may_be_nested():
    model, x = MLP(), torch.randn(6, 12)
    target = {"y": torch.randn(6, 12), "scale": 2.0, "more": [torch.tensor(3.0)]}

    def loss_fn(out, t):
        return ((out - t["y"]).square() * t["scale"] * t["more"][0]).mean()

    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        loss = pipe.step(x, target=target)
    torch.testing.assert_close(loss, loss_fn(model(x), target).detach())


@dataclass
class Labels:
    y: Tensor
    more: dict[str, object]


@pytest.mark.parametrize("chunks", [2, 6])
def test_a_target_may_be_an_object_that_nobody_has_registered(chunks):
    """Opened like inputs and outputs: in micro-batches of one row, all rows would fit as well."""
    model, x = MLP(), torch.randn(6, 12)

    def loss_fn(out, t):
        rows = t["labels"].more["rows"]
        return ((out - t["labels"].y) * rows[0] * t["scale"]).square().mean()

    with fxpipe.compile(model, ["cpu"] * 2, chunks=chunks, loss_fn=loss_fn) as pipe:
        for scale in (1.0, 2.0):
            labels = Labels(torch.randn(6, 12), {"rows": [torch.randn(6, 1)], "name": "a"})
            target = {"labels": labels, "scale": scale}
            loss = pipe.step(x, target=target)
            torch.testing.assert_close(loss, loss_fn(model(x), target).detach())


def test_an_array_of_another_library_is_refused_as_a_target():
    with compiled() as pipe, pytest.raises(TypeError, match=r"a numpy.ndarray of shape \(4,\)"):
        pipe.step(torch.randn(4, 12), target={"y": torch.randn(4).numpy()})


@fx.wrap
def slow_noise(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)  # so that a lane has the default generator while others are at work
    return x + noise


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(slow_noise(self.a(x)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_loss_draws_random_numbers_as_if_lanes_drew_none(schedule):
    x, drawn = torch.randn(8, 4), []

    def loss_fn(out, _):
        drawn.append(torch.rand(2))
        time.sleep(0.005)
        return (out[:, :2] * drawn[-1]).mean()

    with fxpipe.compile(
        Noisy(), ["cpu"] * 2, chunks=8, schedule=schedule, loss_fn=loss_fn, partition=["b"]
    ) as pipe:
        torch.manual_seed(1)
        ops.seeds(8)
        wanted = [torch.rand(2) for _ in range(8)]
        pipe.prepare(x)
        torch.manual_seed(1)
        pipe.step(x)
    assert same(drawn, wanted)


def test_a_loss_may_run_another_pipeline():
    """Which draws random numbers in lanes of its own: nobody waits for who waits for him."""
    x = torch.randn(8, 4)
    with fxpipe.compile(Noisy(), ["cpu"] * 2, chunks=4, example_inputs=(x,)) as teacher:

        def loss_fn(out, target):
            return (out - teacher(target).detach()).square().mean()

        with fxpipe.compile(Noisy(), ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
            losses = []
            for _ in range(2):
                torch.manual_seed(1)
                losses.append(pipe.step(x, target=x))
    assert same(*losses)


class Scaled(nn.Module):
    """Its second input has the name that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)


@pytest.mark.parametrize("name", ["scale", "optimizer", "target_0", "seed"])
def test_inputs_of_a_model_may_be_called_like_those_of_a_step(name):
    graph = fx.Graph()
    x, factor = graph.placeholder("x"), graph.placeholder(name)
    y = graph.call_module("drop", (graph.call_module("a", (x,)),))
    graph.output(graph.call_module("b", (graph.call_function(torch.mul, (y, factor)),)))
    model = fx.GraphModule(Scaled(), graph)
    x, factor, target = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, loss_fn=mean_loss) as pipe:
        torch.manual_seed(1)
        loss = pipe.step(x, factor, target=target)
        torch.manual_seed(1)
        torch.testing.assert_close(loss, mean_loss(pipe(x, factor), target).detach())


def test_a_scaler_scales_the_gradients_and_not_the_loss():
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    reference = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=mean_loss) as pipe:
        loss = pipe.step(x, target=target, scaler=scaler)
    value = mean_loss(reference(x), target)
    value.backward()
    torch.testing.assert_close(loss, value.detach())
    scaler.unscale_(optimizer)
    torch.testing.assert_close(gradients(model), gradients(reference))
    scaler.step(optimizer)
    scaler.update()


def test_frozen_parameters_and_integer_inputs_get_none():
    make, inputs = MODELS["transformer"]
    model = make()
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    with fxpipe.compile(
        model, ["cpu"] * 3, chunks=2, schedule="zb_h1", loss_fn=lambda o, _: loss_of(o)
    ) as pipe:
        pipe.step(*inputs(4))
    assert model.embed.weight.grad is None and model.head.weight.grad is None
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_parameter_hooks_fire_once_a_micro_batch():
    model, x, seen = MLP(depth=3), torch.randn(6, 12), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    for schedule in ("1f1b", "zb_h1"):
        seen.clear()
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
        ) as pipe:
            pipe.step(x)
        assert len(seen) == 3 * len(list(model.parameters()))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_hooks_of_modules_and_on_what_they_give_fire_once_a_micro_batch(schedule):
    model, x, seen = MLP(), torch.randn(6, 12), []

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append("forward")
        output.register_hook(lambda grad: seen.append("gradient of the output"))

    layer = model.layers[2]
    layer.register_forward_hook(watch)
    layer.register_full_backward_pre_hook(lambda *_: seen.append("before backward"))
    layer.register_full_backward_hook(lambda *_: seen.append("after backward"))
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
    ) as pipe:
        pipe.step(x)
    assert len(seen) == 12 and all(seen.count(what) == 3 for what in seen)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the first layer
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_hooks_on_all_modules_fire_once_a_micro_batch(schedule):
    model, x, seen = MLP(), torch.randn(6, 12), []
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
    ) as pipe:
        pipe.step(x)
        handle = register_module_full_backward_hook(lambda module, *_: seen.append(module))
        try:
            pipe.step(x)
        finally:
            handle.remove()
    assert [seen.count(layer) for layer in model.layers] == [3] * 5


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_who_counts_operations_counts_those_of_the_model(schedule):
    model, x = MLP(), torch.randn(6, 12)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.sum()
    ) as pipe:
        pipe.step(x)
        with FlopCounterMode(display=False) as found:
            pipe.step(x)
    with FlopCounterMode(display=False) as wanted:
        model(x).sum().backward()
    assert found.get_total_flops() == wanted.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": "always"}, {"checkpoint": "except_last", "checkpoint_segments": 2}],
)
def test_deferred_batch_norm_and_written_inputs_come_once(options):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.Linear(4, 2))
    reference, x = copy.deepcopy(model), torch.randn(6, 4)
    seen = x.clone()
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule="1f1b",
        loss_fn=lambda o, _: o.sum(),
        deferred_batch_norm=True,
        **options,
    ) as pipe:
        pipe.step(seen)
    assert same(seen, torch.relu(x))
    reference(x.clone())
    torch.testing.assert_close(list(model.buffers()), list(reference.buffers()))


# ------------------------------------------------------------------------------------------ errors


def compiled(**options):
    told = dict(chunks=4, schedule="1f1b", loss_fn=mean_loss) | options
    return fxpipe.compile(MLP(), ["cpu"] * 2, **told)


@pytest.mark.parametrize(
    "options, call, message",
    [
        (
            {"loss_fn": lambda o, t: o},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            r"the loss of micro-batch 0 is a tensor of shape \(1, 12\): a scalar tensor is needed",
        ),
        (
            {"loss_fn": lambda o, t: 3},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "the loss of micro-batch 0 is a int: a scalar",
        ),
        (
            {"loss_fn": lambda o, t: o.detach().sum()},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "does not depend on any parameter",
        ),
        (
            {},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(5)),
            r"the target has a tensor of shape \(5,\), and the batch has 4 rows",
        ),
        (
            {"loss_fn": None},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "a target is given, but no loss_fn",
        ),
        (
            {},
            lambda p: p.measure(torch.randn(4, 12), target=torch.randn(4), rounds=0),
            "rounds is 0: give the number of steps to measure, 1 or more",
        ),
        (
            {"schedule": Schedule.from_text("0F0 0B0 \n 1B0 1F0"), "chunks": 1},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "deadlock: lane 1 waits",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, call, message):
    with compiled(**options) as pipe, pytest.raises(ValueError, match=message):
        call(pipe)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"schedule": "2f2b"}, "schedule is '2f2b': give one of"),
        ({"schedule": "interleaved_1f1b", "stages": 3}, "as many stages on each lane"),
        ({"schedule": named("1f1b", lanes=3, microbatches=4)}, "has 3 lanes and 3 stages"),
        (
            {"schedule": named("1f1b", lanes=2, microbatches=3)},
            r"has 3 micro-batches, and chunks is 4",
        ),
        (
            {"schedule": "dualpipe_v", "chunks": 3},
            "dualpipe_v on 2 lanes needs 4 micro-batches or more, not 3",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        compiled(**options)


class Fails(nn.Module):
    """Fails in its third backward."""

    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(Third.apply(self.a(x))))


class Third(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Fails.count += 1
        if Fails.count == 3:
            raise ArithmeticError("the third time")
        return grad


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_a_backward_that_fails_is_said_and_the_next_step_works(schedule):
    model, x, target = Fails(), torch.randn(8, 12), torch.randn(8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=mean_loss) as pipe:
        Fails.count = 100
        pipe.step(x, target=target)
        wanted = gradients(model)
        Fails.count = 0
        with pytest.raises(ArithmeticError, match="the third time") as caught:
            pipe.step(x, target=target)
        assert "stage" in caught.value.__notes__[0] and "micro-batch 2" in caught.value.__notes__[0]
        model.zero_grad()
        Fails.count = 100
        pipe.step(x, target=target)
    assert same(gradients(model), wanted)


def test_two_threads_may_step_at_once():
    model, x = MLP(), torch.randn(6, 12)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule="1f1b", loss_fn=lambda o, _: o.sum()
    ) as pipe:
        losses = []
        first = pipe.step(x)
        threads = [threading.Thread(target=lambda: losses.append(pipe.step(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(loss, first) for loss in losses) and len(losses) == 4


def test_where_the_target_has_been_forgotten_the_error_says_so():
    with compiled() as pipe, pytest.raises(TypeError) as caught:
        pipe.step(torch.randn(4, 12))
    assert "step() was given no target=, so that loss_fn was called with None" in (
        caught.value.__notes__
    )


def test_where_the_target_is_given_without_its_name_the_error_says_so():
    with compiled() as pipe, pytest.raises(TypeError, match="too many positional") as caught:
        pipe.step(torch.randn(4, 12), torch.randn(4))
    assert caught.value.__notes__ == ["the target is given by its name: step(x, target=y)"]


def test_in_inference_mode_there_is_no_step():
    with compiled() as pipe, torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        pipe.step(torch.randn(4, 12), target=torch.randn(4))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_may_step_each_stage_as_soon_as_its_gradients_are_done(kind, schedule):
    first = Tied() if schedule == "1f1b" else MLP()
    x = torch.randint(11, (6, 4)) if schedule == "1f1b" else torch.randn(6, 12)
    results = []
    for within in (True, False):
        model = copy.deepcopy(first)
        groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
        optimizer = kind(groups)
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=lambda o, _: o.square().mean()
        ) as pipe:
            for _ in range(3):
                optimizer.zero_grad()
                pipe.step(x, optimizer=optimizer if within else None)
                if not within:
                    optimizer.step()
        results.append(list(model.parameters()))
        assert len(optimizer.state_dict()["param_groups"]) == len(groups)
    assert same(*results)


@pytest.mark.filterwarnings("error:Detected call of .lr_scheduler.step")
def test_a_scheduler_of_the_learning_rate_knows_of_the_steps():
    model, x = MLP(), torch.randn(6, 12)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (model, twin)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule="1f1b", loss_fn=lambda o, _: o.square().mean()
    ) as pipe:
        for _ in range(2):
            pipe.step(x, optimizer=optimizers[0])
            twin(x).square().mean().backward()
            optimizers[1].step()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                scheduler.step()
                optimizer.zero_grad()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_what_an_optimizer_cannot_do_stage_by_stage_is_refused():
    x, target = torch.randn(4, 12), torch.randn(4)
    with compiled() as pipe:
        parameters = list(pipe.parameters())
        with pytest.raises(ValueError, match="LBFGS needs all gradients at once"):
            pipe.step(x, target=target, optimizer=torch.optim.LBFGS(parameters))
        with pytest.raises(ValueError, match="a scaler and an optimizer"):
            pipe.step(
                x,
                target=target,
                optimizer=torch.optim.SGD(parameters),
                scaler=torch.amp.GradScaler("cpu"),
            )
        with pytest.raises(TypeError, match=r"optimizer is a str: give one of torch.optim"):
            pipe.step(x, target=target, optimizer="adam")
        with pytest.raises(TypeError, match=r"scaler is a int: give a torch.amp.GradScaler"):
            pipe.step(x, target=target, scaler=1024)
