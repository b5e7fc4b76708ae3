"""What a module that is kept whole changes in itself, now and then, it changes once in each call,
also where a checkpoint calls it again: and the second call reads what the first has read."""

from __future__ import annotations

import copy
import operator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

pytestmark = pytest.mark.filterwarnings("ignore::fxpipe.BatchWarning")


class Clip(nn.Module):
    """Raises its bound where a value exceeds it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bound", torch.tensor(50.0))
        self.register_buffer("clipped", torch.zeros(()))

    def forward(self, x):
        if x.abs().max() > self.bound:
            self.bound.mul_(1.5)
            self.clipped += 1
            x = x.clamp(-float(self.bound), float(self.bound))
        return x


class Assigning(Clip):
    """The same, with other tensors in the place of its buffers."""

    def forward(self, x):
        if x.abs().max() > self.bound:
            self.bound = self.bound * 1.5
            self.clipped = self.clipped + 1
            x = x.clamp(-float(self.bound), float(self.bound))
        return x


class Anneal(nn.Module):
    """Counts outliers in a Python number, and divides by it."""

    def __init__(self):
        super().__init__()
        self.outliers, self.sizes = 0, []

    def forward(self, x):
        if x.abs().max() > 50:
            self.outliers += 1
            self.sizes.append(len(x))
        return x / (1 + 0.1 * self.outliers)


class Averaging(nn.Module):
    """Has a running mean, which is no buffer, and a bound of outliers, which it raises."""

    def __init__(self):
        super().__init__()
        self.mean, self.bound = torch.zeros(8), torch.tensor(50.0)

    def forward(self, x):
        y = (x - self.mean).clamp(-float(self.bound), float(self.bound))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        if x.abs().max() > self.bound:
            self.bound.mul_(1.5)
        return y


class Restart(nn.Module):
    """Nearest codes, of which it replaces those that are hardly used: what a call before has read
    is written to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("used", torch.ones(5))

    def forward(self, x):
        nearest = torch.cdist(x, self.codes).argmin(1)
        found = self.codes[nearest]
        with torch.no_grad():
            self.used.mul_(0.8).add_(torch.bincount(nearest, minlength=5), alpha=0.2)
            if (rare := self.used < 0.3).any():
                self.codes[rare] = x[: int(rare.sum())].mean(0)
                self.used[rare] = 1.0
        return x + (found - x).detach()


class Now(nn.Module):
    """Has a batch norm for outliers alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x) if x.abs().max() > 50 else x


class Renormed(nn.Module):
    """A layer that scales its own weight down, now and then, and reads it detached."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x):
        if x.abs().max() > 50:
            self.weight.mul_(0.5)
        return x @ self.weight.clone()


KINDS = [Clip, Assigning, Anneal, Averaging, Restart, Now, Renormed]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.one = nn.Linear(8, 8), kind()
        self.second, self.other = nn.Linear(8, 8), kind()
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.other(self.second(self.one(self.first(x))).relu()))


def batches():
    """Six mini-batches, of which the third and the sixth have an outlier."""
    for i in range(6):
        generator = torch.Generator().manual_seed(i)
        x, target = torch.randn(12, 8, generator=generator), torch.randn(12, 4, generator=generator)
        if i % 3 == 2:
            x[5] *= 1000
        yield x, target


def state(model):
    """The buffers and what is not trained; what is trained; and numbers and lists of modules."""
    own = [
        {name: value for name, value in vars(each).items() if name in ("outliers", "sizes")}
        for each in (model.one, model.other)
    ]
    tensors = [value for value in vars(model.one).values() if isinstance(value, torch.Tensor)]
    kept = [*tensors, *model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    trained = [p for p in model.parameters() if p.requires_grad]
    return [[t.detach().clone() for t in each] for each in (kept, trained)], copy.deepcopy(own)


def is_same(one, other):
    return one[1] == other[1] and all(
        torch.equal(a, b)
        for of_one, of_other in zip(one[0], other[0], strict=True)
        for a, b in zip(of_one, of_other, strict=True)
    )


def has_changed(one, other):
    """Whether something else has changed than what is trained."""
    return not is_same((one[0][:1], one[1]), (other[0][:1], other[1]))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def trained(request):
    """A model, and its states in a loop over three micro-batches of each mini-batch, with Adam."""
    torch.manual_seed(0)
    model = Net(request.param)
    trained, states = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
    for x, target in batches():
        for part, its in zip(x.chunk(3), target.chunk(3), strict=True):
            (F.mse_loss(trained(part), its) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(state(trained))
    return model, states


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [("1f1b", "always"), ("gpipe", "except_last"), ("zbv", "selective"), ("1f1b", "always 1/2")],
)
def test_a_step_with_checkpoints_changes_what_a_loop_does(trained, schedule, checkpoint):
    model, states = copy.deepcopy(trained[0]), trained[1]
    assert any(has_changed(one, other) for one, other in pairwise(states))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    options = {"schedule": schedule, "checkpoint": checkpoint, "loss_fn": F.mse_loss}
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, **options) as pipe:
        for (x, target), expected in zip(batches(), states, strict=True):
            pipe.step(x, target=target, optimizer=optimizer, zero_grad=True)
            assert is_same(state(model), expected)


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("kind", [Assigning, Restart, Anneal])
def test_a_call_with_checkpoints_changes_what_a_loop_does(kind, checkpoint):
    torch.manual_seed(0)
    model = Net(kind)
    other = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        for x, target in batches():
            F.mse_loss(pipe(x), target).backward()
            F.mse_loss(torch.cat([other(part) for part in x.chunk(3)]), target).backward()
            assert is_same(state(model), state(other))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, its.grad) for one, its in pairs)


def without_statistics(norm):
    norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None


def with_statistics(norm):
    norm.track_running_stats = True
    norm.running_mean, norm.running_var = torch.zeros(8), torch.ones(8)


def untracked(norm):
    norm.track_running_stats = False


def tracked(norm):
    norm.track_running_stats = True


def without_momentum(norm):
    norm.momentum = 0.0


def with_momentum(norm):
    norm.momentum = 0.5


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (with_statistics, without_statistics),
        (without_statistics, with_statistics),
        (untracked, tracked),
        (without_momentum, with_momentum),
    ],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("checkpoint", ["always", "selective"])
def test_a_batch_norm_that_changes_how_it_computes_counts_each_batch_once(first, then, checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    other, options = copy.deepcopy(model), {"checkpoint": checkpoint, "loss_fn": F.mse_loss}
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, **options) as pipe:
        for change, (x, target) in zip((first, then, first, then), batches(), strict=False):
            change(model[1])
            change(other[1])
            pipe.step(x, target=target)
            for part, its in zip(x.chunk(3), target.chunk(3), strict=True):
                (F.mse_loss(other(part), its) / 3).backward()
            pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
            assert all(torch.equal(one, its) for one, its in pairs)


class Shifted(nn.Module):
    """Adds a buffer, an attribute and a bias: no backward needs their values."""

    def __init__(self):
        super().__init__()
        self.linear, self.plain = nn.Linear(8, 8), torch.zeros(8)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        return (self.linear(x) + self.shift + self.plain).tanh()


class ShiftedWhole(Shifted):
    """The same, kept whole, since it branches by values."""

    def forward(self, x):
        return x if x.sum() > 1e9 else super().forward(x)


@pytest.mark.parametrize("name", ["shift", "plain", "linear.bias"])
@pytest.mark.parametrize("kind", [Shifted, ShiftedWhole])
@pytest.mark.parametrize("checkpoint", ["always", "selective"])
def test_what_others_write_to_before_the_backward_is_not_read_again(name, kind, checkpoint):
    model, x = nn.Sequential(kind(), nn.Linear(8, 8)), torch.randn(6, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        loss = pipe(x).sum()
        with torch.no_grad():
            operator.attrgetter(name)(model[0]).add_(1)
        with pytest.raises(RuntimeError, match=f"{name} has been modified by an inplace operation"):
            loss.backward()
        pipe(x).sum().backward()


@pytest.mark.parametrize("kind", [Shifted, ShiftedWhole])
def test_what_others_put_in_the_place_of_a_tensor_before_the_backward_is_not_read_again(kind):
    model, x = nn.Sequential(kind(), nn.Linear(8, 8)), torch.randn(6, 8)
    other = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint="always") as pipe:
        losses = [pipe(x).sum(), sum(other(part).sum() for part in x.chunk(2))]
        for each in (model[0], other[0]):
            each.shift, each.plain = torch.ones(8), torch.ones(8)
        for loss in losses:
            loss.backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, its.grad) for one, its in pairs)


def test_a_hook_that_writes_to_a_buffer_before_it_is_read_again_is_an_error():
    model, x, target = nn.Sequential(Shifted(), nn.Linear(8, 8)), *torch.randn(2, 6, 8)
    options = {"checkpoint": "always", "loss_fn": F.mse_loss, "schedule": "gpipe"}
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, **options) as pipe:
        model[1].weight.register_hook(lambda grad: model[0].shift.add_(1) * 0 + grad)
        with pytest.raises(RuntimeError, match="shift has been modified by an inplace operation"):
            pipe.step(x, target=target)


class Moded(nn.Module):
    """Scales its input by another factor in eval mode, and is kept whole, by values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x if x.sum() > 1e9 else (self.linear(x) * (2 if self.training else 3)).sin()


@pytest.mark.parametrize("part", [Moded, lambda: nn.BatchNorm1d(8)], ids=["whole", "norm"])
@pytest.mark.parametrize("checkpoint", ["always", "selective"])
def test_a_change_to_eval_mode_before_the_backward_changes_no_gradient(part, checkpoint):
    model, x = nn.Sequential(nn.Linear(8, 8), part(), nn.Linear(8, 8)), torch.randn(6, 8)
    other = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint=checkpoint) as pipe:
        losses = [pipe(x).sin().sum(), torch.cat([other(part) for part in x.chunk(2)]).sin().sum()]
        for each, loss in zip((model, other), losses, strict=True):
            each.eval()
            loss.backward()
        assert not any(module.training for module in model.modules())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, its.grad) for one, its in pairs)


class Peak(nn.Module):
    """Adds the largest value so far: the first rows may leave it as it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("peak", torch.tensor(9.0))

    def forward(self, x):
        self.peak.copy_(torch.maximum(self.peak, x.detach().max()))
        return (self.linear(x) + self.peak / 9).sin()


def test_a_buffer_that_gets_the_value_that_it_has_is_read_as_it_was_in_each_call():
    model = nn.Sequential(Peak(), nn.Linear(8, 8))
    other, x = copy.deepcopy(model), torch.randn(6, 8)
    x[5, 0] = 20.0
    options = {"partition": ["1"], "checkpoint": "always", "check": "warn"}
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, **options) as pipe:
        pipe(x).sum().backward()
    torch.cat([other(part) for part in x.chunk(3)]).sum().backward()
    assert model[0].peak == other[0].peak == 20
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, its.grad) for one, its in pairs)


class Energy(nn.Module):
    """Adds the gradient of an energy, which a backward within the forward computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        if float(x.detach().abs().max()) > 1e9:  # for this it is kept whole
            return x
        energy = self.layer(x).tanh().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.layer(x) + slope


@pytest.mark.parametrize("mode", ["always", "selective"])
def test_a_backward_within_the_first_call_may_run_that_call_again(mode):
    model = nn.Sequential(nn.Linear(6, 6), Energy(), nn.Tanh(), nn.Linear(6, 6))
    alone, x = copy.deepcopy(model), torch.randn(8, 6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, checkpoint=mode) as pipe:
        pipe(x).square().sum().backward()
    sum(alone(part).square().sum() for part in x.chunk(4)).backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
