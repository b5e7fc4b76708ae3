"""Which parameters a loss leads to, and whose they are."""

from __future__ import annotations

import torch
from torch import nn

from fxpipe.runtime.penalty import homes_of, leaves_of, penalties


def test_leaves_are_what_a_value_has_been_computed_from_each_once():
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    value = (a * a + b.detach() + c.sum()).sum()
    assert {id(leaf) for leaf in leaves_of([value, a + 1, 3])} == {id(a), id(c)}
    assert len(leaves_of([value, a + 1])) == 2
    assert leaves_of([a.detach().sum()]) == []


def test_a_value_of_a_very_long_history_is_no_matter():
    a = torch.ones((), requires_grad=True)
    value = a
    for _ in range(20_000):
        value = value + 0
    assert [id(leaf) for leaf in leaves_of([value])] == [id(a)]


def test_a_parameter_of_several_stages_lives_in_the_first_and_one_of_none_nowhere():
    tied, own = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    stages = [nn.Linear(2, 2), nn.Sequential(tied), tied]
    homes = homes_of([own, tied.weight, torch.ones(1), stages[0].bias], stages)
    assert {id(p): home for p, home in homes.items()} == {id(tied.weight): 1, id(stages[0].bias): 0}


def test_only_the_gradients_asked_for_are_made_and_the_loss_can_be_gone_through_again():
    a, b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    value = a * a * b
    ((parameter, grad),) = penalties(value, torch.tensor(0.5), [a])
    assert parameter is a and grad == 6 and a.grad is None
    value.backward()
    assert b.grad == 4
