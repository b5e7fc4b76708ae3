"""While a model is checked, Python's and NumPy's random numbers are the same for all rows."""

from __future__ import annotations

import random
import threading
from random import random as drawn_by_its_own_name

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.drawn_on_the_host import stilled_host
from tests.fxpipe.meaning.test_hidden import TWO, rows, said

D = 8

ROWS = {
    "rand": lambda n: np.random.rand(n, 2),
    "one rand": lambda n: np.random.rand(),
    "randn": lambda n: np.random.randn(n, 2),
    "one randn": lambda n: np.random.randn(),
    "random": lambda n: np.random.random((n, 2)),
    "random_sample": lambda n: np.random.random_sample(size=n),
    "sample": lambda n: np.random.sample(n),
    "uniform": lambda n: np.random.uniform(-1, 1, (n, 2)),
    "one uniform": lambda n: np.random.uniform(2, 3),
    "uniform of arrays": lambda n: np.random.uniform(np.zeros(n), np.ones(n)),
    "normal": lambda n: np.random.normal(1.0, 0.1, size=(n,)),
    "normal of arrays": lambda n: np.random.normal(np.ones(n), 0.1),
    "normal of arrays, and a size": lambda n: np.random.normal(np.ones(2), 0.1, size=(n, 2)),
    "beta": lambda n: np.random.beta(0.2, 0.2, n),
    "randint": lambda n: np.random.randint(0, 2, n),
    "binomial": lambda n: np.random.binomial(1, 0.5, n),
    "poisson": lambda n: np.random.poisson(0.5, size=n),
    "choice": lambda n: np.random.choice([0.5, 2.0], n),
    "choice by probabilities": lambda n: np.random.choice(2, size=n, p=[0.5, 0.5]),
    "dirichlet": lambda n: np.random.dirichlet([1.0, 1.0], n),
    "multivariate_normal": lambda n: np.random.multivariate_normal([0, 0], np.eye(2), n),
    "one after the other": lambda n: [np.random.choice(9, 3, replace=False) for _ in range(n)],
    "Python's random": lambda n: [random.random() for _ in range(n)],
    "Python's uniform": lambda n: [random.uniform(1, 2) for _ in range(n)],
    "Python's gauss": lambda n: [random.gauss(0, 1) for _ in range(n)],
    "Python's choices": lambda n: random.choices(range(1, 9), k=n),
    "Python's sample": lambda n: [random.sample(range(8), 3) for _ in range(n)],
    "Python's randint": lambda n: [random.randint(0, 1) for _ in range(n)],
}


@pytest.mark.parametrize("draw", ROWS.values(), ids=ROWS)
def test_all_rows_draw_the_same_and_no_generator_moves(draw):
    real = draw(5)
    states = random.getstate(), np.random.get_state()[2]
    with stilled_host(0.6) as met:
        found, fewer = draw(5), draw(2)
    assert met.any
    assert (random.getstate(), np.random.get_state()[2]) == states
    assert np.shape(found) == np.shape(real) and type(found) is type(real)
    first = np.ravel(fewer) if np.ndim(fewer) < 2 else np.asarray(fewer)[0]
    for row in np.broadcast_to(found, (5, *np.shape(found)[1:])):
        np.testing.assert_array_equal(row, first if np.ndim(row) else first[0])
    assert np.any(found)


def test_numbers_from_0_to_1_are_what_is_asked_for():
    with stilled_host(0.25) as met:
        assert random.random() == np.random.rand() == np.random.random_sample() == 0.25
        assert random.uniform(1, 2) == np.random.uniform(1, 2) == 1.25
        assert met.uniform


def test_orders_are_turned():
    numbers, array = [1, 2, 3], np.arange(3)
    with stilled_host(0.6) as met:
        random.shuffle(numbers)
        np.random.shuffle(array)
        assert np.random.permutation(3).tolist() == array.tolist() == [2, 1, 0]
        assert np.random.permutation([7, 8]).tolist() == [8, 7]
    assert numbers == [3, 2, 1]
    assert met.any and not met.uniform


def test_another_thread_draws_on():
    drawn = []
    with stilled_host(0.25) as met:
        thread = threading.Thread(target=lambda: drawn.append((random.random(), np.random.rand())))
        thread.start()
        thread.join()
    assert 0.25 not in drawn[0] and not met.any


# -------------------------------------------------------------------------- in a model's check


class Drawing(nn.Module):
    """Makes something of hidden rows by what it draws: a module of its own, which is kept whole."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, h):
        return self.make(h)


class Net(nn.Module):
    def __init__(self, make, then=lambda h: h):
        super().__init__()
        self.a, self.draw, self.b = nn.Linear(D, D), Drawing(make), nn.Linear(D, D)
        self.then = then

    def forward(self, x):
        return self.then(self.b(self.draw(self.a(x))))


def noise(h):
    return h + 0.1 * torch.from_numpy(np.random.randn(*h.shape)).float()


def factor_of_each_row(h):
    factors = torch.tensor([random.uniform(0.5, 2) for _ in range(len(h))])
    return h * factors.view(-1, *[1] * (h.ndim - 1))


MAKE = [noise, factor_of_each_row]
IN_TORCH = [
    lambda h: F.rrelu(h, training=True),
    lambda h: h + torch.distributions.Gamma(1.0, 1.0).sample(h.shape),
    lambda h: h * torch.distributions.Beta(1.0, 1.0).sample(),
    lambda h: h * torch.distributions.Dirichlet(torch.ones(D)).sample((len(h),)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", MAKE + IN_TORCH)
def test_rows_that_see_each_other_beside_random_numbers_are_refused(make):
    model = Net(make, lambda h: h - h.mean(0))
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        fxpipe.compile(model, TWO, chunks=2, example_inputs=(rows(),))


@pytest.mark.parametrize("make", MAKE + IN_TORCH)
def test_a_sum_beside_random_numbers_is_added_up(make):
    torch.manual_seed(0)
    model, x = Net(make, lambda h: h.square().sum() + 100 * len(h)), rows()
    with torch.no_grad(), fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        assert pipe(x) > 600
        assert "not checked" not in pipe.report()


@pytest.mark.parametrize("make", MAKE)
def test_the_batch_dimension_is_found_beside_random_numbers(make):
    model = nn.Sequential(nn.Linear(D, D), Drawing(make), Recurrent())
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(torch.randn(5, 6, D),)) as pipe:
        assert "not checked" not in pipe.report()
        assert pipe(torch.randn(5, 6, D)).shape == (5, 6, D)


class Recurrent(nn.Module):
    """A recurrent layer, whose first dimension is time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(D, D)

    def forward(self, x):
        return self.layer(x)[0]


def mixed(weight):
    def make(h):
        by = weight()
        return by * h + (1 - by) * h.flip(0)

    return make


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "weight",
    [
        lambda: np.random.beta(0.2, 0.2),
        lambda: float(np.random.rand()),
        lambda: random.betavariate(1, 1),
        lambda: random.random(),
        lambda: torch.distributions.Beta(0.1, 0.1).sample(),
        lambda: torch.rand(()),
        lambda: torch.randn(()).sigmoid(),
        lambda: torch.bernoulli(torch.tensor(0.5)),
        lambda: (torch.rand(()) > 0.7).float(),
        lambda: float(random.random() < 0.5),
        lambda: float(np.random.rand() > 0.9),
    ],
)
def test_rows_that_are_mixed_with_a_random_weight_are_refused(weight):
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        fxpipe.compile(Net(mixed(weight)), TWO, chunks=2, example_inputs=(rows(),))


@pytest.mark.parametrize(
    "order",
    [
        lambda n: np.random.permutation(n),
        lambda n: random.sample(range(n), n),
    ],
)
def test_rows_in_a_random_order_are_refused(order):
    model = Net(lambda h: 0.7 * h + 0.3 * h[torch.as_tensor(order(len(h)))])
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        fxpipe.compile(model, TWO, chunks=2, example_inputs=(rows(),))


@pytest.mark.parametrize(
    "mask",
    [
        lambda n: torch.rand(n, 1) > 0.5,
        lambda n: torch.rand(n, 1) < 0.5,
        lambda n: torch.rand(n, 1) > 0.9,
        lambda n: torch.rand(n, 1) < 0.1,
        lambda n: torch.bernoulli(torch.full((n, 1), 0.5)),
        lambda n: torch.randint(0, 2, (n, 1)),
        lambda n: torch.randn(n, 1),
        lambda n: torch.from_numpy(np.random.rand(n, 1) > 0.5),
        lambda n: torch.from_numpy(np.random.binomial(1, 0.5, (n, 1))),
    ],
)
def test_a_random_mask_hides_nothing_behind_it(mask):
    model = Net(lambda h: h * mask(len(h)), lambda h: h + 0.5 * h.roll(1, 0))
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        fxpipe.compile(model, TWO, chunks=2, example_inputs=(rows(),))


def test_a_random_branch_that_mixes_rows_is_refused():
    model = Net(lambda h: h - h.mean(0) if random.random() < 0.1 else h)
    with pytest.raises(fxpipe.BatchError, match="depends on which other rows"):
        fxpipe.compile(model, TWO, chunks=2, example_inputs=(rows(),))


def unknown(h):
    """What this draws for each row nobody can replace: the function has its own name here."""
    return h * torch.tensor([[drawn_by_its_own_name()] for _ in range(len(h))])


def test_what_cannot_be_compared_is_refused():
    """It was accepted without a word, cut along the first dimension."""
    with pytest.raises(fxpipe.BatchError, match="output cannot be compared with what") as error:
        fxpipe.compile(Net(unknown), TWO, chunks=2, example_inputs=(rows(),))
    assert "numpy.random.rand(...), say, in place of rand(...)" in str(error.value)


def test_what_cannot_be_compared_is_warned_of_where_the_user_says_how_it_is_cut():
    (text,) = said(Net(unknown), in_dims=0, out_dims=0, check="warn")
    assert "output cannot be compared" in text
    assert not said(Net(unknown), check=False)


def test_what_is_drawn_once_for_all_rows_by_a_function_of_its_own_name_is_compared():
    """All runs of the check start from one state."""
    assert not said(Net(lambda h: h * (1 + drawn_by_its_own_name())))
