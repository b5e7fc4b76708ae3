"""A checkpointed call is made once more in the surroundings of the first."""

from __future__ import annotations

import contextvars
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpipe.runtime.checkpointing.checkpoint import checkpoint
from tests.zoo import same


def net(*, dropout=0.0):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))


def grads(loss, *tensors):
    return torch.autograd.grad(loss, tensors)


def test_random_numbers_are_those_of_the_forward_and_the_stream_goes_on_undisturbed():
    model, x = net(dropout=0.5), torch.randn(3, 4, requires_grad=True)
    torch.manual_seed(3)
    expected = grads(model(x).sum(), x, *model.parameters())
    after = torch.rand(1)
    torch.manual_seed(3)
    loss = checkpoint(model, x).sum()
    torch.rand(5)
    state = torch.get_rng_state()
    assert same(grads(loss, x, *model.parameters()), expected)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    checkpoint(model, x).sum().backward()
    assert torch.equal(torch.rand(1), after)


ACCELERATOR = torch.accelerator.current_accelerator()


@pytest.mark.parametrize("device", ["cpu", *([ACCELERATOR.type] if ACCELERATOR else [])])
def test_autocast_is_that_of_the_forward(device):
    model, x = net().to(device), torch.randn(3, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = grads(model(x).float().sum(), x)
        out = checkpoint(model, x)
    assert out.dtype == torch.bfloat16
    assert same(grads(out.float().sum(), x), expected)


def test_batch_norm_counts_a_batch_once():
    model, twin = (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for _ in range(3):
        x = torch.randn(5, 4)
        twin(x).sum().backward()
        checkpoint(model, x).sum().backward()
        assert same(list(model.buffers()), list(twin.buffers()))
    assert same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_a_buffer_that_the_forward_reads_is_as_it_was():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.scale += 1
            return torch.tanh(x * self.scale.clone())

    model, x = Counter(), torch.randn(4, requires_grad=True)
    a, b = checkpoint(model, x), checkpoint(model, x)
    assert model.scale == 3
    expected = grads(torch.tanh(x * 2).sum() + torch.tanh(x * 3).sum(), x)
    torch.testing.assert_close(grads(a.sum() + b.sum(), x), expected)
    assert model.scale == 3


def test_devices_that_are_not_used_are_not_asked_for_their_random_state(monkeypatch):
    """To ask one that has never been used would initialise it."""

    def asked(*args, **kwargs):
        raise AssertionError("the random state of a device was asked for")

    for kind in "cuda", "xpu", "mps":
        monkeypatch.setattr(getattr(torch, kind), "get_rng_state", asked)
    x = torch.randn(4, requires_grad=True)
    torch.manual_seed(0)
    expected = grads(F.dropout(x, 0.5).sum(), x)
    torch.manual_seed(0)
    assert same(grads(checkpoint(F.dropout, x, 0.5).sum(), x), expected)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_parameter_that_the_forward_reads_and_writes_to_is_as_it_was(early_stop):
    """Also by way of ``.data``, as moving averages do it, which autograd does not see."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            y = torch.tanh(x * self.scale.clone()) * self.shift.exp()
            self.scale.data.add_(1)
            return torch.tanh(y)

    x = torch.randn(4, requires_grad=True)
    plain, model = Moving(), Moving()
    expected = [plain(x) for _ in range(3)]
    found = [checkpoint(model, x, early_stop=early_stop) for _ in range(3)]
    assert same(found, expected)
    assert same(
        grads(sum(found).sum(), x, *model.parameters()),
        grads(sum(expected).sum(), x, *plain.parameters()),
    )
    assert model.scale == plain.scale == 4, "and what it is now it stays"


def test_a_module_is_let_go():
    model = nn.BatchNorm1d(3)
    checkpoint(model, torch.randn(4, 3)).sum().backward()
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_a_forward_may_write_to_its_own_parameters():
    embed = nn.Embedding(5, 3, max_norm=0.1)
    tokens = torch.arange(4)
    out = [checkpoint(embed, tokens) for _ in range(2)]
    sum(o.sum() for o in out).backward()
    assert embed.weight.grad[:4].eq(2).all()


def test_parameters_and_buffers_that_were_lent_are_those_of_the_forward_again():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return torch.tanh(super().forward(x) * self.scale)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.is_checkpointed = nn.Sequential(Scaled(), Scaled()), False

        def forward(self, x):
            return checkpoint(self.inner, x) if self.is_checkpointed else self.inner(x)

    model, x = Around(), torch.randn(3, 3)  # of the shape of the weights
    own = model.inner[0].weight
    lent = {n: torch.randn_like(t).requires_grad_() for n, t in model.named_parameters()}
    lent |= {name: torch.randn_like(buffer) for name, buffer in model.named_buffers()}
    wanted = [tensor for tensor in lent.values() if tensor.requires_grad]
    results = []
    for model.is_checkpointed in (False, True):
        out = torch.func.functional_call(model, lent, (x,))
        results.append(torch.autograd.grad(out.sum(), wanted))
    assert same(*results) and model.inner[0].weight is own


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_part_may_be_compiled_to_torchscript():
    model, x = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))), torch.randn(3, 4)
    expected = grads(model(x).sum(), *model.parameters())
    assert same(grads(checkpoint(model, x).sum(), *model.parameters()), expected)


factor = contextvars.ContextVar("factor", default=1.0)


def test_context_variables_are_those_of_the_forward():
    """And what the second run sets is not seen outside of it."""

    def fn(x):
        y = torch.sin(x * factor.get())
        factor.set(factor.get() + 1)
        return torch.exp(y)

    x = torch.ones(3, requires_grad=True)
    token = factor.set(2.0)
    try:
        out = checkpoint(fn, x, early_stop=False)
        assert factor.get() == 3.0, "the first call is a call like any other"
    finally:
        factor.reset(token)
    expected = torch.exp(torch.sin(x * 2.0))
    assert same(grads(out.sum(), x), grads(expected.sum(), x))
    assert factor.get() == 1.0
