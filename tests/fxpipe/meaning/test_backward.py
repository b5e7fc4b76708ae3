"""The backward of a model, too, is that of its rows; or it is refused."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.meaning.problem import Problem
from tests.kernels import by_shape

TWO = ["cpu", "cpu"]


class Changed(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


class Net(nn.Module):
    def __init__(self, change, by="function"):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change, self.by = change, by

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.by == "function":
            h = Changed.apply(h, self.change)
        elif self.by == "hook" and h.requires_grad:
            h.register_hook(self.change)
        return self.b(h)


SLIGHT = Problem("gradient", "the gradient differs", is_slight=True)
LARGE = Problem("gradient", "the gradient differs")

ACROSS = {
    "centred": lambda grad: grad - grad.mean(0),
    "clipped": lambda grad: grad / grad.norm(),
    "averaged": lambda grad: grad / grad.shape[0],
}


def compiled(model, **options):
    return fxpipe.compile(model, TWO, chunks=2, example_inputs=(torch.randn(6, 8),), **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("by", ["function", "hook"])
@pytest.mark.parametrize("name", ACROSS)
def test_a_backward_that_puts_rows_together_is_refused(name, by):
    with pytest.raises(fxpipe.BatchError, match=r"gradient of a\.weight, a\.bias depends on which"):
        compiled(Net(ACROSS[name], by))


@pytest.mark.parametrize("by", ["function", "hook"])
def test_so_is_one_that_does_so_a_little_in_every_sample(by):
    def change(grad):
        return grad + 0.01 * grad.mean(0)

    with pytest.raises(fxpipe.BatchError, match=r"gradient of a.weight depends on which"):
        compiled(Net(change, by))


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        ([SLIGHT, None], False),  # a ReLU, say, of a value near zero in the first of the samples
        ([SLIGHT, SLIGHT], True),
        ([LARGE], True),  # another sample is not asked for
    ],
)
def test_a_slight_difference_has_to_be_there_in_another_sample(found, is_refused, monkeypatch):
    samples, problems = [], iter(found)

    def problem(recorded, model, trial, *_):
        samples.append(trial.tensors)
        return next(problems)

    monkeypatch.setattr("fxpipe.meaning.asking.backward_problem", problem)
    refused = pytest.raises(fxpipe.BatchError, match="the gradient differs")
    with refused if is_refused else contextlib.nullcontext():
        compiled(Net(torch.clone))  # whose backward has a function of a user's, so it is run
    assert len(samples) == len(found)
    assert len(samples) == 1 or not torch.equal(samples[0][0], samples[1][0])


def test_it_is_accepted_with_a_warning():
    with (
        pytest.warns(fxpipe.BatchWarning, match="puts rows together"),
        compiled(Net(ACROSS["centred"]), check="warn") as pipe,
    ):
        assert "gradient of a.weight" in pipe.report()
    compiled(Net(ACROSS["centred"]), check=False).close()


def test_a_backward_of_each_row_by_itself_is_right():
    model, x = Net(lambda grad: -grad), torch.randn(6, 8)
    with compiled(model) as pipe:
        pipe(x).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().mean().backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])


class FewRowsTrainAll(nn.Module):
    """A history that depends on the number of rows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        return self.b(h.detach() if len(x) > 4 else h)


def test_a_parameter_that_only_many_rows_leave_without_a_gradient_is_named():
    with pytest.raises(fxpipe.BatchError, match=r"a\.weight, a\.bias has a gradient from 3 and 3"):
        compiled(FewRowsTrainAll())


class Reentrant(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.net, self.first = Net(change), nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(self.net, self.first(x), use_reentrant=True)


def test_it_is_seen_within_a_reentrant_checkpoint():
    with pytest.raises(fxpipe.BatchError, match="depends on which rows go through the backward"):
        compiled(Reentrant(ACROSS["centred"]))


class Hyper(nn.Module):
    """Computes with numbers that were made of a parameter before the call, and has a backward that
    has to be run to be checked, be it the user's own or that of a checkpoint."""

    def __init__(self, way):
        super().__init__()
        self.of, self.net, self.way = nn.Linear(3, 8), Net(lambda grad: grad), way
        self.made = [self.of(torch.ones(3)).exp()]  # exp saves its result for its backward

    def forward(self, x):
        h = x * self.made[0]
        return checkpoint(self.net, h, use_reentrant=True) if self.way == "again" else self.net(h)


@pytest.mark.parametrize("way", ["once", "again"])
def test_no_backward_goes_into_what_the_user_has_computed_before(way):
    model, x = Hyper(way), torch.randn(6, 8)
    with compiled(model) as pipe:
        assert all(parameter.grad is None for parameter in model.parameters())
        pipe(x).sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model.made = [model.of(torch.ones(3)).exp()]
    sum(model(part).sum() for part in x.chunk(2)).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


class OfNoTensor(torch.autograd.Function):
    """Gives the gradient to a module's parameters by a backward of its own; it is called with a
    tensor that has no other purpose than to have a gradient."""

    @staticmethod
    def forward(ctx, x, module, _):
        ctx.x, ctx.module = x.detach(), module
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.module(ctx.x).backward(grad - grad.mean(0))
        return None, None, None


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.inner, self.made = nn.Embedding(9, 8), nn.Linear(8, 8), torch.ones(8)

    def forward(self, index):
        h = self.table(index).detach()
        return OfNoTensor.apply(h, self.inner, torch.ones(1, requires_grad=True)) * self.made


@pytest.mark.parametrize("made", [False, True])
def test_a_backward_within_one_is_seen_though_it_leads_to_no_parameter(made):
    model = Hidden()
    if made:
        model.made = nn.Linear(3, 8)(torch.ones(3))
    with pytest.raises(fxpipe.BatchError, match="depends on which rows go through the backward"):
        fxpipe.compile(model, TWO, chunks=2, example_inputs=(torch.arange(6),))


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("there is none")


class Evaluated(Net):
    def forward(self, x):
        return self.b(NoBackward.apply(self.a(x)))


def test_a_model_without_a_backward_is_compiled():
    model, x = Evaluated(None), torch.randn(6, 8)
    with compiled(model) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x))


class WithToken(nn.Module):
    """Puts a parameter in front of each row, expanded to all rows, which does nothing for one."""

    def __init__(self):
        super().__init__()
        self.token, self.a = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)

    def forward(self, x):
        token = self.token.expand(x.shape[0], -1, -1)
        return self.a(torch.cat([token, x[:, None]], 1)).tanh()


class Scaled(nn.Module):
    """Has an attribute with a history, which has nothing to do with how its forward is written."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.scale = self.a.weight.sum(0)

    def forward(self, x):
        return self.a(x) * self.scale


def test_no_backward_is_run_where_the_histories_are_the_same(monkeypatch):
    ran = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: ran.append(backward(*a, **k)))
    compiled(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))).close()
    compiled(WithToken()).close()
    compiled(Scaled()).close()
    assert not ran
    compiled(Net(lambda grad: grad)).close()
    assert ran


class ByFrequency(nn.Module):
    """An embedding whose gradients are divided by how often each index occurs among all rows."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b = kind(5, 8, scale_grad_by_freq=True), nn.Linear(8, 8)

    def forward(self, ids):
        return self.b(self.a(ids))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_go_by_how_often_an_index_occurs_are_refused(kind):
    ids = torch.tensor([[1, 2], [1, 1], [2, 3], [1, 4], [0, 1], [1, 1]])
    with pytest.raises(fxpipe.BatchError, match=r"gradient of a\.weight depends on which rows"):
        fxpipe.compile(ByFrequency(kind), TWO, chunks=2, example_inputs=(ids,))


class ChangedAtOnce(Net):
    """Its first operation has a backward of its own, which no parameter's gradient goes through."""

    def forward(self, x):
        return super().forward(Changed.apply(x, self.first))


def test_a_gradient_of_an_input_that_puts_rows_together_is_refused():
    model = ChangedAtOnce(None, by="nothing")
    model.first = ACROSS["centred"]
    with pytest.raises(fxpipe.BatchError, match="the gradient of x depends on which rows"):
        compiled(model)


def test_a_gradient_of_an_input_of_each_row_by_itself_is_right():
    model, x = ChangedAtOnce(None, by="nothing"), torch.randn(6, 8, requires_grad=True)
    model.first = lambda grad: -grad
    with compiled(model) as pipe:
        (found,) = torch.autograd.grad(pipe(x).square().mean(), x)
        (expected,) = torch.autograd.grad(model(x).square().mean(), x)
        torch.testing.assert_close(found, expected)


class Measures(nn.Module):
    """Takes no input that needs a gradient, since NumPy takes none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        assert not x.requires_grad
        return self.b(Changed.apply(self.a(x), ACROSS["centred"]))


def test_a_model_that_takes_no_inputs_with_gradients_is_checked_without():
    with pytest.raises(fxpipe.BatchError, match=r"gradient of a\.weight depends on which"):
        compiled(Measures())


class PartWithoutGradients(nn.Module):
    """What it does ahead of its first parameter has gradients in part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True)
        return self.b(torch.tanh(self.a(x / scale)))


def test_the_gradient_of_an_input_that_a_part_without_gradients_uses_is_the_models():
    model, x = PartWithoutGradients(), torch.randn(6, 8, requires_grad=True)
    with compiled(model) as pipe:
        (found,) = torch.autograd.grad(pipe(x).square().mean(), x)
        (expected,) = torch.autograd.grad(model(x).square().mean(), x)
        torch.testing.assert_close(found, expected)


def of_last_bits(grad):
    """Numbers that depend on the last bits of the gradient, as differences of nearly equal ones."""
    return (grad * 2**20).frac()


@pytest.fixture
def kernels_that_round_by_shape():
    if os.environ.get("FXPIPE_TEST_KERNELS") == "by_shape":
        yield
        return
    with by_shape():
        yield


def test_a_gradient_of_which_rounding_makes_another_is_not_refused(kernels_that_round_by_shape):
    torch.manual_seed(0)
    with compiled(Net(of_last_bits)) as pipe:
        assert pipe.stages


@pytest.mark.parametrize("name", ACROSS)
def test_rows_that_are_put_together_are_seen_with_kernels_that_round_by_shape(
    name, kernels_that_round_by_shape
):
    with pytest.raises(fxpipe.BatchError, match=r"gradient of a\.weight, a\.bias depends on which"):
        compiled(Net(ACROSS[name]))


LOW = {"autocast": torch.float32, "a model of bfloat16": torch.bfloat16}
"""Two ways to compute in bfloat16, and the dtype that the parameters have in each."""


def compiled_in_bfloat16(way, model, x):
    dtype = LOW[way]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        return fxpipe.compile(model.to(dtype), TWO, chunks=3, example_inputs=(x.to(dtype),))


class StraightThrough(nn.Module):
    """Rounds to whole numbers, with the gradient of the identity."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, width)

    def forward(self, x):
        h = self.a(x)
        return self.b(h + (h.round() - h).detach())


@pytest.mark.parametrize("way", LOW)
@pytest.mark.parametrize(
    ("length", "width"),
    [
        *((2, 30), (3, 100), (3, 128), (6, 30), (6, 100)),
        *((12, 30), (16, 48), (16, 64), (16, 128), (24, 128)),
    ],
)
def test_rounding_errors_of_bfloat16_are_not_taken_for_rows_that_are_put_together(
    length, width, way
):
    torch.manual_seed(0)
    model = StraightThrough(width)
    compiled_in_bfloat16(way, model, torch.randn(9, length, 24)).close()


@pytest.mark.parametrize("way", LOW)
@pytest.mark.parametrize("by", ["function", "hook"])
@pytest.mark.parametrize("name", ACROSS)
def test_a_backward_that_puts_rows_together_is_refused_in_bfloat16(name, by, way):
    with pytest.raises(fxpipe.BatchError, match=r"gradient of a\.weight, a\.bias depends on which"):
        compiled_in_bfloat16(way, Net(ACROSS[name], by), torch.randn(9, 8))


@pytest.mark.parametrize("way", LOW)
def test_so_is_one_that_does_so_by_no_more_than_a_number_of_bfloat16_is_off(way):
    def change(grad):
        return grad + 0.01 * grad.mean(0)

    torch.manual_seed(0)
    with pytest.raises(fxpipe.BatchError, match="depends on which rows go through the backward"):
        compiled_in_bfloat16(way, Net(change), torch.randn(9, 8))


class CastsWithin(nn.Module):
    """A model of float32, which switches autocast on by itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def test_autocast_within_a_model_makes_no_difference():
    torch.manual_seed(0)
    x = torch.randn(9, 16, 24)
    model = CastsWithin(StraightThrough(64))
    fxpipe.compile(model, ["cpu"], chunks=3, example_inputs=(x,)).close()
    with pytest.raises(fxpipe.BatchError, match="depends on which rows go through the backward"):
        compiled(CastsWithin(Net(ACROSS["centred"])))


class OfBfloat16(torch.autograd.Function):
    """The identity by a kernel that takes one precision only, with another gradient."""

    @staticmethod
    def forward(ctx, x, change):
        if x.dtype != torch.bfloat16:
            raise TypeError("this kernel is for bfloat16")
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


class WithKernel(nn.Module):
    def __init__(self, width, change):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(24, 24), nn.Linear(24, width), change

    def forward(self, x):
        return self.b(OfBfloat16.apply(self.a(x), self.change))


@pytest.mark.parametrize("way", LOW)
def test_a_model_that_takes_bfloat16_only_is_checked_in_it(way):
    torch.manual_seed(0)
    for length, width in ((2, 30), (16, 64), (24, 128)):
        x = torch.randn(9, length, 24)
        compiled_in_bfloat16(way, WithKernel(width, torch.neg), x).close()
    with pytest.raises(fxpipe.BatchError, match="depends on which rows go through the backward"):
        compiled_in_bfloat16(way, WithKernel(30, ACROSS["centred"]), torch.randn(9, 24))
