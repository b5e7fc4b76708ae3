"""Which errors send the compiler on to another strategy, and which reach the user at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.errors import AnotherStrategy, TraceError, is_the_models
from passes.common.recurrences import Recurrences
from tests.zoo import MLP

TWO = ["cpu", "cpu"]
X = torch.ones(6, 12)


class Fails:
    """Raises what it is told to, and counts how often."""

    name = "fails"

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def __call__(self, gm):
        self.calls += 1
        raise self.error


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("a bug"), torch.OutOfMemoryError("no memory"), RuntimeError("no")],
    ids=lambda error: type(error).__name__,
)
def test_a_bug_or_a_lack_of_memory_is_raised_at_once(error):
    fails = Fails(error)
    chain = fxpipe.default_chain().before("cost", fails)
    with pytest.raises(type(error)) as raised:
        fxpipe.compile(MLP(), TWO, example_inputs=(X,), passes=chain)
    assert raised.value is error and fails.calls == 1


def test_after_an_error_that_says_so_another_strategy_is_tried():
    """Here, a graph for one batch size. It fails as well, and the first error is raised."""
    fails = Fails(TraceError("not for any size"))
    chain = fxpipe.default_chain().before("cost", fails)
    with pytest.raises(TraceError, match="not for any size"):
        fxpipe.compile(MLP(), TWO, example_inputs=(X,), passes=chain)
    assert fails.calls == 2


def test_a_cut_that_cannot_be_is_no_reason_for_another_strategy():
    assert not issubclass(fxpipe.PartitionError, AnotherStrategy)
    assert issubclass(fxpipe.TraceError, AnotherStrategy)
    assert not issubclass(fxpipe.BatchError, AnotherStrategy), "other dimensions were tried before"


def raised_by(function, *args) -> Exception:
    with pytest.raises(Exception) as error:
        function(*args)
    return error.value


def test_whose_error_it_is_is_known_by_the_line_that_raises_it():
    assert is_the_models(raised_by(nn.Linear(3, 3), torch.ones(2, 4)))
    assert is_the_models(raised_by(lambda: [][1]))
    assert not is_the_models(raised_by(fxpipe.default_chain().without, "nothing"))

    def within_a_mode():
        with Recurrences(counts=False):
            torch.ones(2) @ torch.ones(3)

    assert is_the_models(raised_by(within_a_mode)), "the mode has only passed the call on"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("passes.common.recurrences._Recurrence", None)
        assert not is_the_models(raised_by(within_a_mode)), "this error is of the mode's own"

    def exhausted():
        raise torch.OutOfMemoryError("no memory")

    assert not is_the_models(raised_by(exhausted))
