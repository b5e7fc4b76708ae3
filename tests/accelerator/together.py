"""A model on several devices runs as if it were on one (``fxpipe/trace/spread.py``)."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from fxpipe.ir._torch import FakeTensorMode
from fxpipe.ir.tensors import devices_of
from fxpipe.trace.gradients import history_of
from fxpipe.trace.spread import as_on_one_device, devices_used, is_spread
from tests.zoo import same

HERE, THERE, ELSEWHERE = map(torch.device, ("sim:0", "sim:1", "sim:2"))


def at(tensor):
    """The device that a tensor is on, whatever it says."""
    (device,) = devices_of((tensor,))
    return device


def two():
    """Two layers on two devices."""
    return nn.Sequential(nn.Linear(3, 3).to(HERE), nn.Linear(3, 3).to(THERE))


def test_what_is_computed_with_a_parameter_is_where_the_parameter_is():
    model, x = two(), torch.randn(2, 3, device=HERE)
    with as_on_one_device(model, HERE):
        middle = model[0](x)
        output = model[1](middle)
        assert (at(middle), at(output)) == (HERE, THERE)
        output.sum().backward()
    assert [p.grad.device for p in model.parameters()] == [HERE, HERE, THERE, THERE]


def test_all_say_that_they_are_on_the_one_device():
    model, x = two(), torch.randn(2, 3, device=HERE)
    with as_on_one_device(model, HERE):
        weight, output = model[1].weight, model(x)
        assert weight.device == output.device == x.device == HERE
        assert at(weight) == at(output) == THERE
        assert torch.zeros(1, device=ELSEWHERE).device == ELSEWHERE, "where the model is not"
        assert torch.equal(torch.ones(3, device=weight.device) + weight, 1 + weight)
    assert weight.device == THERE


def test_the_devices_on_which_it_computes_are_known():
    model = two()
    assert devices_used([model[1].weight]) == {THERE}
    with as_on_one_device(model, ELSEWHERE):
        assert devices_used([model[1].weight]) == {THERE, ELSEWHERE}


@pytest.mark.parametrize(
    "write",
    [
        lambda x, weight: x.add_(weight),
        lambda x, weight: x.__iadd__(weight),
        lambda x, weight: torch.add(x, weight, out=x),
        lambda x, weight: torch.ops.aten.add_.Tensor(x, weight),
        lambda x, weight: x.__setitem__(slice(None), x + weight),
    ],
)
def test_a_tensor_that_is_written_to_stays_where_it_is(write):
    model, x = two(), torch.ones(3, 3, device=HERE)
    with as_on_one_device(model, HERE), torch.no_grad():
        written = write(x, model[1].weight)
        assert written is None or written is x
        assert at(x) == HERE
        assert torch.equal(x, 1 + model[1].weight)


def test_running_statistics_are_updated_where_they_are():
    model = nn.Sequential(nn.Linear(3, 3).to(HERE), nn.BatchNorm1d(3).to(THERE))
    norm = model[1]
    mean, before = norm.running_mean, norm.running_mean.data_ptr()
    with as_on_one_device(model, HERE):
        model(torch.randn(5, 3, device=HERE))
    assert norm.running_mean is mean and mean.data_ptr() == before
    assert mean.device == THERE and bool(mean.any())


def test_one_tensor_stays_one():
    """Attention computes otherwise where queries, keys and values are the same."""
    model = nn.Sequential(nn.Linear(4, 4).to(HERE), nn.MultiheadAttention(4, 2).to(THERE))
    x, alike = torch.randn(2, 1, 4, device=HERE), []

    def attention(query, key, *weights):
        if torch.overrides.has_torch_function((query, key, *weights)):
            return torch.overrides.handle_torch_function(
                attention, (query, key, *weights), query, key, *weights
            )
        alike.append(query is key)
        return query

    with as_on_one_device(model, HERE):
        assert at(attention(x, x, model[1].in_proj_weight)) == THERE
    assert alike == [True]


def test_otherwise_it_is_computed_where_most_of_it_is():
    model = two()
    small, large = torch.ones(3, device=HERE), torch.ones(30, 3, device=THERE)
    with as_on_one_device(model, HERE):
        assert at(small + large) == at(large + small) == THERE
        assert at(torch.cat([small[None], large])) == THERE


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        seen.append((at(x), at(weight)))
        return x * weight**2

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        seen.append((at(grad), at(weight)))
        return grad * weight**2, (grad * x * 2 * weight).sum(0)


seen: list[tuple[torch.device, torch.device]] = []


def test_an_autograd_function_has_all_it_gets_on_one_device():
    seen.clear()
    model, x = two(), torch.randn(2, 3, device=HERE)
    with as_on_one_device(model, HERE):
        Squared.apply(x, model[1].bias).sum().backward()
    assert seen == [(THERE, THERE)] * 2
    assert model[1].bias.grad.device == THERE
    torch.testing.assert_close(model[1].bias.grad, (x.to(THERE) * 2 * model[1].bias).sum(0))


def test_fake_tensors_of_it_are_on_the_one_device():
    model = two()
    with as_on_one_device(model, HERE):
        mode = FakeTensorMode()
        for tensor in (model[1].weight, model[1].weight.detach()[1:]):
            assert mode.from_tensor(tensor).device == HERE
        program = torch.export.export(model, (torch.randn(2, 3, device=HERE),), strict=False)
    devices = {n.meta["val"].device for n in program.graph.nodes if n.op != "output"}
    assert devices == {HERE}
    assert FakeTensorMode().from_tensor(model[1].weight).device == THERE


def test_a_symbolic_trace_does_not_see_it():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = two()

        def forward(self, x):
            return F.linear(F.linear(x, self.layers[0].weight), self.layers[1].weight)

    model, x = Twice(), torch.randn(2, 3, device=HERE)
    with as_on_one_device(model, HERE):
        graph_module = fx.symbolic_trace(model)
        assert torch.equal(graph_module(x), model(x))
    assert [n.op for n in graph_module.graph.nodes].count("call_function") == 2


def test_a_model_on_that_device_runs_as_ever():
    model = nn.Linear(3, 3).to(HERE)
    with as_on_one_device(model, HERE):
        assert not is_spread()
    with as_on_one_device(model, THERE):
        assert is_spread()
    assert not is_spread()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        threads.append(threading.get_ident())
        return grad * torch.full((3,), 2.0, device=THERE)


threads: list[int] = []


@pytest.mark.parametrize("run", [torch.autograd.backward, torch.Tensor.backward])
def test_a_backward_runs_so_too_in_the_threads_of_the_engine(run):
    threads.clear()
    model = two()
    with as_on_one_device(model, HERE):
        run(Twice.apply(model[0].bias).sum())
    assert threads != [threading.get_ident()]
    assert torch.equal(model[0].bias.grad, torch.full((3,), 2.0, device=HERE))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_it_has_computed(reentrant):
    model, x = two(), torch.randn(2, 3, device=HERE)
    scripted = torch.jit.script(nn.Linear(3, 3)).to(ELSEWHERE)

    def part(x):
        return torch.tanh(Squared.apply(scripted(model[0](x)), model[1].bias))

    wanted = []
    with as_on_one_device(nn.ModuleList([model, scripted]), HERE):
        for run in (part, partial(checkpoint, part, use_reentrant=reentrant)):
            torch.autograd.backward(run(x.clone().requires_grad_()).sum())
            wanted.append([p.grad for p in (*model.parameters(), *scripted.parameters())])
            model.zero_grad()
            scripted.zero_grad()
    assert same(*wanted)
    assert wanted[0][3].device == THERE


def test_another_device_makes_no_other_history():
    """A gradient is the same on another device: histories of two runs agree where one of them has
    brought tensors elsewhere."""
    x = torch.ones(3, device=HERE, requires_grad=True)
    histories = [history_of([y * 2]) for y in (x, x.to(THERE))]
    assert histories[0] == histories[1] != history_of([x.double() * 2])
