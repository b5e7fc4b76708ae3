"""A part of the table of faults that ``python -m tests.faults`` goes through as a whole."""

from __future__ import annotations

import inspect

import pytest

from fxpipe import ops
from tests.faults.table import SETTINGS, Subject, cells

EVERY = 23
OF_STAGES = {
    ops.share,
    ops.call,
    ops.batch_norm,
    ops.defer,
}  # in a stage's graph
OF_RANKS = {  # what goes wrong there is in tests/fxpipe/ranks/faults.py
    *(ops.transmit, ops.receive, ops.arrived, ops.elsewhere, ops.total, ops.reduce, ops.reduced),
    *(ops.unshard, ops.unsharded, ops.reduce_scatter, ops.reshard, ops.resharded),
}


def test_faults_happen_at_every_operation_of_the_vocabulary():
    vocabulary = {op for _, op in inspect.getmembers(ops) if hasattr(op, "__wrapped__")}
    met: set[str] = set()
    for setting in SETTINGS:
        subject = Subject(setting)
        met |= {place for place, _ in subject.places}
        subject.pipe.close()
        if {op.__name__ for op in vocabulary - OF_STAGES - OF_RANKS} <= met:
            break
    assert {op.__name__ for op in vocabulary - OF_STAGES - OF_RANKS} - met == set()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_after_a_fault_nothing_waits_nothing_is_left_and_the_next_call_is_right(setting):
    subject = Subject(setting)
    try:
        for place, number, kind in list(cells(subject))[::EVERY]:
            assert subject.fails((place, number), kind) is None, (place, number, kind)
        assert subject.living() <= subject.tensors
    finally:
        subject.pipe.close()
