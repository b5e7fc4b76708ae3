"""A little of the long run ``python -m tests.soak``."""

from __future__ import annotations

import gc

import pytest

from tests import soak


@pytest.fixture
def older_objects_set_aside():
    """What is held is counted after each turn, among all objects of the process: seconds, if these
    include those of all tests before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "state", ["in the middle of steps of a daemon thread", "with a pending backward"]
)
def test_an_interpreter_ends_in_any_state(state):
    assert soak.ends(state) is None


@pytest.mark.parametrize(
    ("run", "turns"), [(soak.unet, 20), (soak.pipelines, 6), (soak.workers, 6)]
)
@pytest.mark.usefixtures("older_objects_set_aside")
def test_what_a_process_holds_stays_flat(run, turns):
    assert run(turns)


@pytest.mark.long  # tests/fxpipe/test_autograd.py has a chain that is compiled, trains and is freed
@pytest.mark.usefixtures("older_objects_set_aside")
def test_a_chain_that_is_deeper_than_python_may_recurse():
    assert soak.deep(1200)
