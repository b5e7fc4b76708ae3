"""Functions that draw random numbers, which the second run has to draw again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.checkpoint_cases.harness import Cases, Checkpoint, leaf

CASES = Cases()
case = CASES.case


@case()
def two_dropouts_in_a_row(c: Checkpoint) -> Any:
    x = leaf(20)
    fn = lambda x: F.dropout(x.sin(), 0.5).exp()  # noqa: E731
    c(fn, c(fn, x)).sum().backward()
    return x.grad, torch.rand(2)


@case()
def dropout_nested(c: Checkpoint) -> Any:
    x = leaf(20)
    inner = lambda x: F.dropout(x.sin(), 0.5).exp()  # noqa: E731
    c(lambda x: F.dropout(c(inner, F.dropout(x).cos()), 0.3).sin(), x).sum().backward()
    return x.grad, torch.rand(2)


@case()
def random_numbers_between(c: Checkpoint) -> Any:
    x = leaf(20)
    y = c(lambda x: F.dropout(x.sin(), 0.5).exp(), x)
    between = torch.rand(3)
    y.sum().backward()
    return x.grad, between, torch.rand(3)


@case()
def a_generator_is_given(c: Checkpoint) -> Any:
    """A generator among the arguments."""
    x, g = leaf(4), torch.Generator().manual_seed(7)
    fn = lambda x, g: (x * torch.rand(4, generator=g)).sin().exp()  # noqa: E731
    c(fn, x, g).sum().backward()
    return x.grad, torch.rand(2, generator=g)


@case()
def noise_in_an_operator(c: Checkpoint) -> Any:
    """rrelu, which saves its noise before it draws it."""
    x = leaf(500)
    c(lambda x: F.rrelu(x, training=True), x).sum().backward()
    return x.grad


@case(differs=True)
def random_state_not_kept(c: Checkpoint) -> Any:
    """preserve_rng_state=False: a second draw."""
    x = leaf(4)
    y = c(lambda x: x * torch.rand(4), x, preserve_rng_state=False)
    y.sum().backward()
    return torch.rand(2).shape
