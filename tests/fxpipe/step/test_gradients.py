"""A training step gives the gradients of a loop over micro-batches, in its schedule's order."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.schedule import NAMES, named
from tests.zoo import MLP, MODELS, Tied, gradients, loss_of, mean_loss, same, step_of_loop

ALL = MODELS | {"tied": (Tied, lambda batch: (torch.randint(11, (batch, 4)),))}


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradients_are_those_of_the_loop_in_that_order(name, schedule):
    make, inputs = ALL[name]
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


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", [name for name in ALL if name != "resnet"])
def test_loss_and_gradients_are_those_of_the_whole_batch(name, schedule):
    """Of any model but those whose batch norm sees micro-batches. In doubles, as sums in another
    order have other last bits."""
    make, inputs = ALL[name]
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
