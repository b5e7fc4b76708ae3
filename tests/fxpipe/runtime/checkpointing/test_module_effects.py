"""What a module that is kept whole changes in itself, now and then, it changes once in each call,
also where a checkpoint calls it again: and the second call reads what the first has read."""

from __future__ import annotations

import copy
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
