"""What PyTorch's checkpoint does, ours does, with no more calls and no more memory.

``python -m tests.benchmarks.checkpoint`` prints the situations as a table.
"""

from __future__ import annotations

import pytest

from tests.checkpoint_cases import CASES, Case, equal, verdict


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_does_what_pytorchs_does(case: Case) -> None:
    """Where PyTorch's is right, so is ours. Where it is wrong, or fails and we do not, ours is
    right, or says what is wrong."""
    plain, theirs, ours = (case.outcome(kind) for kind in ("plain", "torch", "ours"))
    if case.differs:  # without a checkpoint there is no second run, and nothing to compare with
        if theirs.error is None:
            assert ours.error is not None or equal(ours.result, theirs.result)
        else:
            assert isinstance(ours.error, type(theirs.error))
        return
    found = verdict(ours, plain)
    if verdict(theirs, plain) == "right":
        assert found == "right", repr(ours.error)
        assert ours.calls <= theirs.calls
        assert theirs.kept is None or ours.kept is None or ours.kept <= theirs.kept
    elif theirs.error is None:
        assert found == "right", "where PyTorch's is wrong without a word"
    else:
        assert found == "right" or isinstance(ours.error, type(theirs.error))


def test_there_are_many_and_each_has_a_name() -> None:
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)
