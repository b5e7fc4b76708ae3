"""While a model is checked, no operator of PyTorch draws random numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fxpipe.meaning.drawn import UNIFORM, is_replaced
from fxpipe.meaning.stilled import Still

aten = torch.ops.aten

DRAW_NOTHING = {
    aten._nested_tensor_softmax_with_shape: "a softmax, which draws nothing",
}
"""The operators that are tagged as drawing, and left as they are: why that is right."""


def operators_that_draw():
    names = {each.split(".")[0] for each in torch._C._dispatch_get_all_op_names()}
    for name in sorted(each.removeprefix("aten::") for each in names if each.startswith("aten::")):
        packet = getattr(aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            if torch.Tag.nondeterministic_seeded in func.tags:
                yield func


def is_composite(func):
    kind = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kind)


def test_each_operator_that_draws_is_replaced_or_made_of_others():
    found = list(operators_that_draw())
    assert len(found) > 100
    left = {f.overloadpacket for f in found if not is_replaced(f) and not is_composite(f)}
    assert left == DRAW_NOTHING.keys()


X, ONES, HALF = torch.arange(-3.0, 3.0), torch.ones(6), torch.full((6,), 0.5)

DRAWS = {
    "rand": lambda: torch.rand(6),
    "rand out": lambda: torch.rand(6, out=torch.empty(0)),
    "rand by a generator": lambda: torch.rand(6, generator=torch.Generator()),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(6),
    "randn_like": lambda: torch.randn_like(X, dtype=torch.float64),
    "randint": lambda: torch.randint(2, 9, (6,)),
    "randint to": lambda: torch.randint(9, (6,), dtype=torch.int32),
    "randint_like": lambda: torch.randint_like(X, 2, 9),
    "randperm": lambda: torch.randperm(6),
    "uniform_": lambda: torch.empty(6).uniform_(-1, 1),
    "normal_": lambda: torch.empty(6).normal_(1, 0.1),
    "normal of tensors": lambda: torch.normal(X, ONES),
    "normal of a tensor": lambda: torch.normal(X),
    "normal of a deviation": lambda: torch.normal(1.0, ONES),
    "normal of numbers": lambda: torch.normal(1.0, 2.0, (6,)),
    "normal out": lambda: torch.normal(X, ONES, out=torch.empty(6)),
    "exponential_": lambda: torch.empty(6).exponential_(2.0),
    "log_normal_": lambda: torch.empty(6).log_normal_(),
    "cauchy_": lambda: torch.empty(6).cauchy_(),
    "geometric_": lambda: torch.empty(6).geometric_(0.3),
    "random_": lambda: torch.empty(6).random_(),
    "random_ to": lambda: torch.empty(6).random_(9),
    "random_ from": lambda: torch.empty(6, dtype=torch.long).random_(2, 9),
    "bernoulli": lambda: torch.bernoulli(HALF),
    "bernoulli of a number": lambda: torch.bernoulli(X, 0.5),
    "bernoulli_": lambda: torch.empty(6).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda: torch.empty(6).bernoulli_(HALF),
    "multinomial": lambda: torch.multinomial(ONES, 6),
    "poisson": lambda: torch.poisson(ONES),
    "binomial": lambda: torch.binomial(5 * ONES, HALF),
    "gamma": lambda: torch.distributions.Gamma(ONES, ONES).sample(),
    "beta": lambda: torch.distributions.Beta(0.1, 0.1).sample((6,)),
    "dirichlet": lambda: torch.distributions.Dirichlet(ONES).sample(),
    "student": lambda: torch.distributions.StudentT(ONES).rsample(),
    "dropout": lambda: F.dropout(X, 0.5),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature dropout": lambda: F.dropout1d(X[:, None, None], 0.5),
    "rrelu": lambda: F.rrelu(X, training=True),
    "rrelu_": lambda: F.rrelu(X.clone(), training=True, inplace=True),
    "gumbel": lambda: F.gumbel_softmax(X, hard=True),
    "attention": lambda: F.scaled_dot_product_attention(*[X.view(1, 6, 1)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_stands_for_random_numbers_is_like_them_and_moves_no_generator(draw, inference):
    with torch.inference_mode(inference):
        real = draw()
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with Still() as mode:
            found, again = draw(), draw()
    assert torch.equal(torch.get_rng_state(), before)
    assert mode.drawn.met
    assert torch.equal(found, again)
    assert found.isfinite().all() and found.any()
    assert (found.shape, found.dtype) == (real.shape, real.dtype)


def test_random_slopes_are_those_of_evaluation_also_in_the_backward():
    x = X.clone().requires_grad_()
    expected = F.rrelu(x, training=False)
    with Still():
        found = F.rrelu(x, training=True)
        (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_what_happens_at_any_usual_rate_happens_in_one_of_the_runs_and_in_another_it_does_not(rate):
    seen = []
    for uniform in UNIFORM:
        with Still(uniform) as mode:
            seen.append(bool(torch.rand(()) < rate))
            seen.append(bool(torch.bernoulli(torch.tensor(rate))))
            assert mode.drawn.met_uniform
    assert set(seen[::2]) == set(seen[1::2]) == {False, True}


@pytest.mark.parametrize("keep", [0.5, 0.8, 0.9])
def test_most_masks_keep_what_they_are_made_for(keep):
    with Still():
        assert torch.rand(()) > 1 - keep
        assert torch.bernoulli(torch.tensor(keep))
        assert torch.empty(1).bernoulli_(keep)


def test_the_rate_of_dropout_of_an_operator_is_zero():
    q = torch.randn(1, 1, 4, 8)
    with Still() as mode:
        found = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0]
    assert mode.drawn.met
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q))
    assert not math.isnan(found.sum())
