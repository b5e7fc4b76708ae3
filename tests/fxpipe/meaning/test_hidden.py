"""What an example does not show by its values, its number of rows or a single call is found out,
or asked for: layers that are zero, losses that are zero, branches, states and random numbers."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe

TWO = ["cpu", "cpu"]
N, D = 6, 8


class Net(nn.Module):
    """Two layers, and then what the case is about, of itself and the hidden rows."""

    def __init__(self, then):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.factor = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.randn(12, D))
        self.then = then

    def forward(self, x):
        return self.then(self, self.b(torch.tanh(self.a(x))))


def rows(count=N):
    return torch.randn(count, D)


def compiled(model, x=None, **options):
    inputs = (rows() if x is None else x,)
    return fxpipe.compile(model, TWO, chunks=2, example_inputs=inputs, **options)


def said(model, x=None, **options):
    """The warnings of the check."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compiled(model, x, **options).close()
    return [str(w.message) for w in found if isinstance(w.message, fxpipe.BatchWarning)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


# ------------------------------------------------------------------------- layers that are zero


def test_a_branch_that_mixes_rows_shows_although_its_factor_is_zero():
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        compiled(Net(lambda net, h: h + net.factor * h.flip(0)))


def with_a_last_layer_of_zeros(then):
    net = Net(then)
    nn.init.zeros_(net.b.weight)
    nn.init.zeros_(net.b.bias)
    return net


def test_a_last_layer_of_zeros_hides_nothing():
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        compiled(with_a_last_layer_of_zeros(lambda net, h: h + h.mean(0)))


@pytest.mark.parametrize("reduced", [torch.Tensor.sum, torch.Tensor.mean])
def test_a_loss_of_a_layer_of_zeros_is_told_by_other_values_of_it(reduced):
    """All the same, the layer is zero afterwards."""
    model, x = with_a_last_layer_of_zeros(lambda net, h: reduced((h - 1).square())), rows()
    expected = torch.stack([model(part) for part in x.chunk(2)])
    with compiled(model, x) as pipe:
        assert not model.b.weight.any()
        torch.testing.assert_close(pipe(x), reduced(expected))


def test_a_frozen_parameter_of_zeros_stays_what_it_is():
    model = Net(lambda net, h: h + net.factor * h.flip(0))
    model.factor.requires_grad_(False)
    compiled(model).close()


# ------------------------------------------------------------------------- losses that are zero


def hinge(net, h):
    return {"loss": h.square().mean(), "margin": F.relu(-1 - h.square()).sum()}


def test_a_loss_that_is_zero_for_all_rows_is_asked_for():
    with pytest.raises(fxpipe.BatchError, match=r"output\.margin has no dimension of ro") as error:
        compiled(Net(hinge))
    assert 'give out_dims, with None for a mean or "sum" for a sum' in str(error.value)


def test_it_is_what_the_user_says():
    x = rows()
    with compiled(Net(hinge), x, out_dims={"margin": "sum"}) as pipe:
        assert pipe(x)["margin"] == 0


def test_a_loss_in_the_model_that_is_zero_is_what_loss_weight_says():
    net, x = Net(lambda net, h: F.relu(-1 - h.square()).sum()), rows()
    with compiled(net, x, loss_weight="sum") as pipe:
        assert pipe.step(x) == 0


def test_a_count_that_is_zero_for_all_rows_is_warned_of():
    (text,) = said(Net(lambda net, h: (h, (h > 100).float().sum())))
    assert "output[1] has no dimension of rows, and it was zero" in text


def test_a_zero_that_no_input_leads_to_is_a_zero():
    assert not said(Net(lambda net, h: (h, torch.zeros(()))))


# ------------------------------------------------------------- branches on the number of rows


@pytest.mark.parametrize(
    "then",
    [
        lambda net, h: h - h.mean(0) if h.shape[0] > 8 else h,
        lambda net, h: h * 2 if h.shape[0] == 16 else h,
    ],
)
def test_a_branch_that_a_mini_batch_takes_and_a_micro_batch_does_not_is_refused(then):
    with pytest.raises(fxpipe.BatchError, match="a branch of it depends on the batch size"):
        compiled(Net(then), rows(16))


def test_a_branch_that_both_take_is_right():
    model, x = Net(lambda net, h: h * 2 if h.shape[0] > 4 else h * 1), rows(16)
    with compiled(model, x) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
        with pytest.raises(fxpipe.BatchError, match="a branch of it depends on the batch size"):
            pipe(rows(6))  # a part of three rows takes the other branch


class Crops(nn.Module):
    """Leaves out the time steps behind the longest row, which may be any dimension to the check."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, lengths):
        longest = int(lengths.max())
        return self.b(self.a(x[:, :longest]).relu()).sum(1) / lengths[:, None]


def test_so_is_a_dimension_of_which_a_length_is_left_out():
    lengths = torch.tensor([1, 2, 3, 4] * 4)
    said = r"with x along dimension 1 cut into .* leaves out rows behind a number .* give in_dims"
    with pytest.raises(fxpipe.BatchError, match=said):
        fxpipe.compile(Crops(), TWO, chunks=4)(torch.randn(16, 6, 4), lengths)


# ------------------------------------------------------------------- what is kept between calls


def moving_average(net, h):
    net.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return h


def test_a_moving_average_that_each_micro_batch_moves_is_warned_of():
    (text,) = said(Net(moving_average))
    assert "the forward changes mean, which each micro-batch does by itself" in text
    assert "chunks=1" in text


def count(net, h):
    net.calls.add_(1)
    return h


def test_a_count_of_calls_is_warned_of():
    (text,) = said(Net(count))
    assert "after 1 and then 3 rows calls differs by 1" in text


def in_a_queue(net, h):
    similar = h @ net.queue.t().clone()
    net.queue.copy_(torch.cat([h.detach(), net.queue[: -len(h)]]))
    return similar


def test_a_queue_that_has_rows_of_the_same_mini_batch_in_it_is_warned_of():
    (text,) = said(Net(in_a_queue))
    assert "output depends on the state that an earlier call leaves in queue" in text


def in_a_queue_and_counted(net, h):
    count(net, h)
    net.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return in_a_queue(net, h)


def test_of_the_states_that_change_those_are_named_on_which_the_output_depends():
    (text,) = said(Net(in_a_queue_and_counted))
    assert "output depends on the state that an earlier call leaves in queue, and each" in text


def by_one_of_two(net, h):
    once = (net.calls > 0) * (net.mean.sum() != 0)
    net.calls.add_(1)
    net.mean.add_(1)
    return h * (1 + once)


def test_states_on_which_the_output_depends_only_together_are_named_together():
    (text,) = said(Net(by_one_of_two))
    assert "an earlier call leaves in mean, calls, and each" in text


class Counter(nn.Module):
    """Adds the number of its calls, which it keeps in a list, and keeps another number beside it
    that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.seen, self.last = [], 0

    def forward(self, x):
        self.last += 1
        self.seen.append(1)
        return x + len(self.seen)


def test_an_attribute_on_which_the_output_depends_is_named_and_none_beside_it():
    model = nn.Sequential(nn.Linear(D, D), Counter(), nn.Linear(D, D))
    (text,) = said(model)
    assert "an earlier call leaves in 1.seen, and each" in text
    assert not model[1].seen, "the check leaves no trace"


def less_the_mean(net, h):
    net.calls.add_(1)
    net.queue[:1].copy_(h.detach()[:1])
    net.mean.lerp_(h.detach().mean(0), 0.1)  # of all rows
    return h - net.mean


def test_a_buffer_by_way_of_which_rows_are_mixed_is_named_with_its_line():
    model = Net(less_the_mean)
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows") as error:
        compiled(model)
    text = str(error.value)
    assert "the forward writes to mean (at " in text
    assert "net.mean.lerp_(h.detach().mean(0), 0.1)  # of all rows) what it computes of" in text
    assert "compute with the values that mean had ahead of the call" in text
    assert "calls" not in text.replace("calls.add_", "")
    assert "queue" not in text
    assert not model.mean.any(), "the check leaves no trace"


def flipped_and_counted(net, h):
    net.calls.add_(1)
    net.mean.lerp_(h.detach().mean(0), 0.1)
    return h + h.flip(0) + net.calls


def test_no_buffer_is_named_where_rows_are_mixed_without_it():
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows") as error:
        compiled(Net(flipped_and_counted))
    assert "the forward writes to" not in str(error.value)


def largest(net, h):
    net.mean.copy_(torch.maximum(net.mean, h.detach().amax(0)))
    return h


def test_a_running_maximum_is_that_of_all_rows():
    model, x = Net(largest), rows()
    assert not said(model, x)
    with compiled(model, x) as pipe:
        pipe(x)
        found = model.mean.clone()
        model.mean.zero_()
        model(x)
        assert torch.equal(found, model.mean)


def test_nothing_is_said_of_a_state_if_nothing_is_asked():
    assert not said(Net(count), check=False)


CALLS = [0]


def counted(net, h):
    CALLS[0] += 1
    return h * min(1, CALLS[0] / 1000)


def test_a_state_that_no_module_has_is_named_as_such():
    with pytest.raises(fxpipe.BatchError, match="between two calls with the same inputs") as error:
        compiled(Net(counted))
    assert "keep such a state in a buffer" in str(error.value)


# ------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h[torch.randperm(len(h))],
        lambda h: h[torch.randint(0, len(h), (len(h),))],
        lambda h: h[torch.multinomial(torch.ones(len(h)), len(h))],
    ],
)
def test_rows_that_a_random_order_mixes_are_refused(draw):
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        compiled(Net(lambda net, h: 0.7 * h + 0.3 * draw(h)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h * torch.randint(0, 5, (len(h), 1)),
        lambda h: h * torch.randint_like(h, 2, 5),
        lambda h: h[:, torch.randperm(D)],
        lambda h: h * torch.bernoulli(h.sigmoid()),
        lambda h: h * torch.poisson(h.exp()),
        lambda h: h.gather(1, torch.multinomial(h.softmax(1), 2)),
        lambda h: torch.normal(h, torch.ones_like(h)),
        lambda h: h * torch.empty(len(h), 1).random_(5),
        lambda h: F.gumbel_softmax(h),
    ],
)
def test_what_is_drawn_for_each_row_is_checked_without_the_draw(draw):
    with compiled(Net(lambda net, h: draw(h))) as pipe:
        report = pipe.report()
    assert "random numbers are drawn for each micro-batch by itself" in report
    assert "not checked" not in report


class Drops(nn.Module):
    """Leaves out its layer by a number that the host draws."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(D, D), draw

    def forward(self, x):
        return x + self.layer(x) if self.draw() < 0.5 else x


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_module_that_draws_on_the_host_is_kept_whole_and_draws_at_every_call(draw):
    model, x = nn.Sequential(nn.Linear(D, D), Drops(draw), nn.Linear(D, D)), rows(8)
    with torch.no_grad(), fxpipe.compile(model, TWO, chunks=4, example_inputs=(x,)) as pipe:
        assert "random numbers are drawn for each micro-batch by itself" in pipe.report()
        dropped = torch.cat([model[2](model[0](part)) for part in x.chunk(4)])
        seen = {tuple((pipe(x) == dropped).all(1).tolist()) for _ in range(9)}
    assert len(seen) > 1, "it takes other decisions"


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_a_model_that_draws_on_the_host_is_refused(draw):
    with pytest.raises(fxpipe.TraceError, match="draws random numbers with Python's random, or"):
        compiled(Net(lambda net, h: h * 2 if draw() < 0.1 else h))


def test_what_the_host_draws_while_a_model_is_compiled_is_put_back():
    expected = random.random(), np.random.rand()
    random.seed(0)
    np.random.seed(0)
    compiled(nn.Sequential(nn.Linear(D, D), Drops(random.random), Drops(np.random.rand))).close()
    assert (random.random(), np.random.rand()) == expected


class GoesOn(nn.Module):
    """Goes on from the hidden state of each row in the call before, as truncated backpropagation
    through time does: a call has as many rows as the call before it."""

    def __init__(self):
        super().__init__()
        self.layer, self.hidden = nn.RNNCell(D, D), None

    def forward(self, x):
        hidden = self.layer(x, self.hidden)
        self.hidden = hidden.detach()
        return hidden


def test_a_hidden_state_that_rows_of_other_micro_batches_go_on_from_is_warned_of():
    model = nn.Sequential(nn.Linear(D, D), GoesOn(), nn.Linear(D, D))
    (text,) = said(model)
    assert "output depends on the state that an earlier call leaves in 1.hidden, and each" in text
    assert "for 1 row it differs by" in text
    assert "where a call with 1 row comes ahead of it" in text


class BeginsAnew(GoesOn):
    """Begins with a new hidden state where a call has another number of rows than the call before
    it, as for the last mini-batch of an epoch."""

    def forward(self, x):
        if self.hidden is not None and len(self.hidden) != len(x):
            self.hidden = None
        return super().forward(x)


def test_so_is_one_that_begins_anew_with_another_number_of_rows():
    model = nn.Sequential(nn.Linear(D, D), BeginsAnew(), nn.Linear(D, D))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compiled(model).close()
    texts = [str(each.message) for each in found]
    told = "output depends on the state that an earlier call leaves in 1.hidden, and each"
    assert any(told in text for text in texts)
    assert not any("assigned during export" in text for text in texts), "advice of PyTorch's"


class Counting(nn.Module):
    """Multiplies by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_a_state_that_has_been_told_of_is_not_told_of_again_with_other_numbers():
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        with pytest.warns(fxpipe.BatchWarning, match=r"an earlier call leaves in 1\.calls"):
            pipe(torch.randn(8, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error", fxpipe.BatchWarning)
            pipe(torch.randn(8, 4))
            pipe.eval()
            pipe(torch.randn(8, 4))  # compiled and checked again, after another number of calls
        assert len(pipe.compilations) == 2
