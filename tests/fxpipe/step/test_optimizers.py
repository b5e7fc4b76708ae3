"""Optimizers within a step, the scaler of its gradients, and schedulers of learning rates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxpipe
from tests.fxpipe.step.compiled import compiled
from tests.zoo import MLP, Tied, gradients, mean_loss, same


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


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_with_an_optimizer_and_a_scaler_a_step_is_that_of_the_usual_loop(max_norm):
    """In the second of four steps a gradient is inf: the optimizer is skipped, and the scale falls;
    it grows again after two steps without."""
    overflows = []
    model, reference = MLP(), MLP()
    reference.load_state_dict(model.state_dict())
    for each in model, reference:
        first = next(each.parameters())
        first.register_hook(lambda grad: grad * float("inf") if overflows else grad)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    scales = []
    how = {"chunks": 3, "schedule": "1f1b", "loss_fn": mean_loss}
    with fxpipe.compile(model, ["cpu"] * 2, **how) as pipe:
        for number in range(4):
            overflows[:] = [True] * (number == 1)
            x, target = torch.randn(6, 12), torch.randn(6)
            given = {"optimizer": optimizers[0], "scaler": scalers[0], "max_grad_norm": max_norm}
            loss = pipe.step(x, target=target, zero_grad=True, **given)

            scaler, total = scalers[1], torch.zeros(())
            for part, wanted in zip(x.chunk(3), target.chunk(3), strict=True):
                value = mean_loss(reference(part), wanted)
                scaler.scale(value * (2 / 6)).backward()
                total = total + value.detach() * (2 / 6)
            scaler.unscale_(optimizers[1])
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
            scaler.step(optimizers[1])
            scaler.update()
            optimizers[1].zero_grad()

            assert same(loss, total)
            assert same(list(model.parameters()), list(reference.parameters()))
            assert scalers[0].state_dict() == scalers[1].state_dict()
            scales.append(scalers[0].get_scale())
    assert scales == [8.0, 4.0, 4.0, 8.0]
    assert same(*(o.state_dict()["state"][0]["step"] for o in optimizers))


def test_a_scaler_that_is_not_enabled_changes_nothing():
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, target = torch.randn(6, 12), torch.randn(6)
    for each, given in (
        (model, {"optimizer": optimizer, "scaler": scaler}),
        (twin, {"optimizer": other}),
    ):
        with fxpipe.compile(each, ["cpu"] * 2, chunks=2, loss_fn=mean_loss) as pipe:
            pipe.step(x, target=target, **given)
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.covering(1)
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


def test_what_is_advised_for_lbfgs_works():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    twin, x, y = copy.deepcopy(model), torch.randn(8, 6), torch.randn(8, 5)
    loss_fn = nn.functional.mse_loss
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, loss_fn=loss_fn) as pipe:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        optimizer.step(lambda: (optimizer.zero_grad(), pipe.step(x, target=y))[1])
    other = torch.optim.LBFGS(twin.parameters(), max_iter=3)

    def closure():
        other.zero_grad()
        loss = loss_fn(twin(x), y)
        loss.backward()
        return loss

    other.step(closure)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_what_an_optimizer_cannot_do_stage_by_stage_is_refused():
    x, target = torch.randn(4, 12), torch.randn(4)
    with compiled() as pipe:
        parameters = list(pipe.parameters())
        with pytest.raises(ValueError, match=r"give LBFGS a closure that calls step, as optimizer"):
            pipe.step(x, target=target, optimizer=torch.optim.LBFGS(parameters))
        with pytest.raises(TypeError, match=r"optimizer is a str: give an instance"):
            pipe.step(x, target=target, optimizer="adam")
        with pytest.raises(TypeError, match=r"scaler is an int: give a torch.amp.GradScaler"):
            pipe.step(x, target=target, scaler=1024)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_may_go_as_soon_as_they_are_stepped(kind):
    first, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    results = []
    for zero_grad in (True, False):
        model = copy.deepcopy(first)
        optimizer = kind(model.parameters(), lr=0.1)
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=3, schedule="looped_bfs", stages=4, loss_fn=mean_loss
        ) as pipe:
            for _ in range(2):
                pipe.step(x, target=target, optimizer=optimizer, zero_grad=zero_grad)
                assert all((p.grad is None) == zero_grad for p in model.parameters())
                optimizer.zero_grad()
        results.append(list(model.parameters()))
    assert same(*results)


def test_then_a_lane_holds_gradients_of_one_stage_at_a_time():
    model = MLP()
    names = {id(p): name for name, p in model.named_parameters()}
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: seen.append({names[id(p)] for p in model.parameters() if p.grad is not None})
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxpipe.compile(
        model, ["cpu"], chunks=3, schedule="looped_bfs", stages=4, loss_fn=mean_loss
    ) as pipe:
        x, target = torch.randn(6, 12), torch.randn(6)
        pipe.step(x, target=target, optimizer=optimizer, zero_grad=True)
        own = [{names[id(p)] for p in stage.module.parameters()} for stage in pipe.stages]
    assert all(any(held <= stage for stage in own) for held in seen)
    assert {name for held in seen for name in held} == set(names.values())


def test_an_optimizer_that_steps_at_the_end_lets_gradients_go_then():
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = []
    optimizer.register_step_pre_hook(
        lambda *_: held.append(all(p.grad is not None for p in model.parameters()))
    )
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, loss_fn=mean_loss) as pipe:
        pipe.step(torch.randn(6, 12), target=torch.randn(6), optimizer=optimizer, zero_grad=True)
    assert held == [True]
    assert all(p.grad is None for p in model.parameters())


def test_gradients_that_no_optimizer_takes_are_not_thrown_away():
    with compiled() as pipe, pytest.raises(ValueError, match="zero_grad=True needs an optimizer="):
        pipe.step(torch.randn(8, 12), target=torch.randn(8), zero_grad=True)


class OneMemory(nn.Module):
    """The first layer and the last one have one memory; ``how`` says by what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        if how == "data":
            self.a.weight.data = self.d.weight.data
        elif how == "view":
            self.a.weight = nn.Parameter(self.d.weight.detach().t())
        self.others = [self.d.weight.data] if how == "list" else []
        if how == "buffer":
            self.register_buffer("other", self.d.weight.data[:3])

    def forward(self, x):
        x = torch.tanh(self.a(x))
        if hasattr(self, "other"):
            x = x[:, :3] @ self.other
        for other in self.others:
            x = x @ other
        return self.d(torch.tanh(self.c(torch.tanh(self.b(x)))))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("how", ["data", "view", "list", "buffer"])
def test_a_parameter_is_stepped_once_no_stage_reads_its_memory_any_more(how, schedule):
    model, reference = OneMemory(how), OneMemory(how)
    reference.load_state_dict(model.state_dict())  # a deep copy would have a memory for each
    x, target = torch.randn(8, 6), torch.randn(8)
    steps = [torch.optim.SGD(each.parameters(), lr=5.0) for each in (model, reference)]
    options = {"chunks": 4, "partition": ["c"], "schedule": schedule, "loss_fn": mean_loss}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        for _ in range(2):
            pipe.step(x, target=target, optimizer=steps[0], zero_grad=True)
            for part, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
                (mean_loss(reference(part), wanted) / 4).backward()
            steps[1].step()
            steps[1].zero_grad()
            assert same([*model.parameters()], [*reference.parameters()])
