"""Parameters and modules that a model computes with, and that are none of its own."""

import copy

import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import outputs_of_loop

CHUNKS = 4


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.heads = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 3)]

    def forward(self, x):
        return self.heads[1](self.heads[0](self.first(x)).relu())

    def others(self):
        return self.heads


class Holder:
    def __init__(self):
        self.module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


class InAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.holder = nn.Linear(6, 6), Holder()
        self.scales = {"scale": nn.Parameter(torch.full((6,), 0.5))}

    def forward(self, x):
        return self.holder.module(self.first(x)) * self.scales["scale"]

    def others(self):
        return [self.holder.module, nn.ParameterDict(self.scales)]


GLOBAL = nn.Linear(6, 3)


class InAGlobalVariable(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x):
        return GLOBAL(self.first(x).tanh())

    def others(self):
        return [GLOBAL]


def state(model):
    """All tensors of a model, and of what it computes with beside its own modules."""
    modules = [model, *model.others()]
    return [tensor for module in modules for tensor in module.state_dict().values()]


def gradients(model):
    modules = [model, *model.others()]
    return [p.grad for module in modules for p in module.parameters()]


def equal(ones, others):
    return all(
        one is other is None or torch.equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )


@pytest.fixture(params=[InAList, InAnObject, InAGlobalVariable])
def model(request):
    torch.manual_seed(0)
    model = request.param()
    for module in model.others():
        module.zero_grad()
    return model


@pytest.mark.parametrize("check", [True, False])
def test_their_gradients_and_buffers_are_those_of_the_loop(model, check):
    """No gradient of the check's own runs is left with them, and no statistics of its batches."""
    x, before = torch.randn(8, 6), copy.deepcopy([m.state_dict() for m in model.others()])
    outputs = outputs_of_loop(model, (x,), CHUNKS)
    for output in reversed(outputs):
        output.square().mean().backward()
    wanted, buffers = copy.deepcopy(gradients(model)), copy.deepcopy(state(model))
    model.zero_grad()
    for module, own in zip(model.others(), before, strict=True):
        module.zero_grad()
        module.load_state_dict(own)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS, check=check) as pipe:
        output = pipe(x)
        assert all(gradient is None for gradient in gradients(model))
        sum(part.square().mean() for part in output.split(2)).backward()
    assert equal(gradients(model), wanted)
    assert equal(state(model), buffers)


def test_a_step_trains_them(model):
    x, target = torch.randn(8, 6), torch.randn(8, 1)
    parameters = [p for module in (model, *model.others()) for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    before = [p.detach().clone() for p in parameters]

    def loss_fn(output, target):
        return (output - target).square().mean()

    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS, loss_fn=loss_fn) as pipe:
        pipe.step(x, target=target, optimizer=optimizer)
        assert not any(map(torch.equal, before, parameters))


def to_eval_mode(head):
    head.eval()


def with_another_parameter(head):
    head[0].weight = nn.Parameter(torch.randn(6, 6))


def with_another_module(head):
    head[0] = nn.Linear(6, 6)


def with_another_setting(head):
    head[1].eps = 0.1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (to_eval_mode, "mode of the Sequential beside the model: train → eval"),
        (with_another_parameter, "0 of the Sequential beside the model has another module, param"),
        (with_another_module, "the Sequential beside the model has another module, parameter or"),
        (with_another_setting, "1 of the Sequential beside the model.eps: 1e-05 → 0.1"),
    ],
)
def test_what_changes_in_a_module_beside_the_model_is_seen(change, why):
    torch.manual_seed(0)
    model, x = InAList(), torch.randn(8, 6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        pipe(x)
        change(model.heads[0])
        expected = torch.cat(outputs_of_loop(copy.deepcopy(model), (x,), CHUNKS))
        assert torch.equal(pipe(x), expected)
        assert why in str(pipe.compilations[-1])
        pipe(x)
        assert len(pipe.compilations) == 2
