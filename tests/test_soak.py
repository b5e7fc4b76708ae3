"""A little of the long run ``python -m tests.soak``."""

from __future__ import annotations

import pytest

from tests import soak


@pytest.mark.parametrize(
    "state", ["in the middle of steps of a daemon thread", "with a pending backward"]
)
def test_an_interpreter_ends_in_any_state(state):
    assert soak.ends(state) is None


@pytest.mark.parametrize(
    ("run", "turns"), [(soak.unet, 20), (soak.pipelines, 10), (soak.workers, 10)]
)
def test_what_a_process_holds_stays_flat(run, turns):
    assert run(turns)


def test_a_chain_that_is_deeper_than_python_may_recurse():
    assert soak.deep(2000)
