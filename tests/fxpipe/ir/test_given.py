"""What is said of a function of the user's that does not take what it is called with."""

from __future__ import annotations

import pytest
import torch

from fxpipe.ir.given import CalledByName, CalledWithTarget


def by_name(function):
    return CalledByName("loss_weight", function)


def test_a_function_that_takes_the_arguments_is_called_with_them():
    assert by_name(lambda labels, **_: labels + 1)(tokens=1, labels=2) == 3


@pytest.mark.parametrize(
    "function, why",
    [
        (lambda labelz, **_: 1, "(labelz, **_) does not take these: missing a required argument"),
        (lambda labels: 1, "(labels) does not take these: got an unexpected keyword"),
    ],
)
def test_one_that_does_not_take_them_is_refused_with_what_to_write(function, why):
    with pytest.raises(TypeError) as raised:
        by_name(function)(tokens=1, labels=2)
    said = str(raised.value)
    assert (
        "loss_weight is called with the model's arguments by their names, (tokens, labels)" in said
    )
    assert why in said and said.endswith("let **_ take the others: lambda labels, **_: ...")


def test_an_error_within_the_function_stays_as_it_is():
    with pytest.raises(TypeError, match="unsupported operand"):
        by_name(lambda labels: labels + "")(labels=1)


@pytest.mark.parametrize(
    "called, what",
    [
        (lambda: by_name(lambda labels: {}["mask"])(labels=torch.ones(2, 3)), "'labels' (2, 3)"),
        (
            lambda: CalledWithTarget("loss_weight", lambda y: y["mask"])({"y": torch.ones(2)}),
            "the target is a dict with 'y' (2,)",
        ),
    ],
)
def test_an_error_within_the_function_is_noted_with_what_it_was_given(called, what):
    with pytest.raises(KeyError, match="mask") as raised:
        called()
    [note] = raised.value.__notes__
    assert note.startswith("in fxpipe: loss_weight is called for each micro-batch; here ")
    assert note.endswith(what)
