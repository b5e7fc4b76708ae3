"""Nodes that use the same memory are in order, or named."""

from __future__ import annotations

import pytest
from torch import fx

from passes import VerifyError
from passes.verify.clocks import Clocks
from passes.verify.effects import MemoryUses

MEMORY = ("parameter", 0)


@pytest.fixture
def nodes():
    graph = fx.Graph()
    return [graph.placeholder(name) for name in "abcd"]


def test_an_event_knows_what_came_before_it_in_its_lane_and_what_it_has_waited_for(nodes):
    clocks = Clocks(2)
    a, b, c, d = nodes
    first = clocks.event(a, 0, ())
    second = clocks.event(b, 0, ())
    alone = clocks.event(c, 1, ())
    last = clocks.event(d, 1, (second.clock,))
    assert [e.clock for e in (first, second, alone, last)] == [(1, 0), (2, 0), (0, 1), (2, 2)]
    assert first.is_before(second) and first.is_before(last) and alone.is_before(last)
    assert not second.is_before(alone) and not alone.is_before(second)


def test_a_write_has_to_come_after_all_reads_since_the_write_before_it(nodes):
    clocks, effects = Clocks(3), MemoryUses()
    a, b, c, d = nodes
    made = clocks.event(a, 0, ())
    effects.write(MEMORY, made)
    effects.read(MEMORY, clocks.event(b, 1, (made.clock,)))
    seen = clocks.event(c, 2, (made.clock,))
    effects.read(MEMORY, seen)
    with pytest.raises(VerifyError) as caught:
        effects.write(MEMORY, clocks.event(d, 2, (seen.clock,)))
    assert (caught.value.node, caught.value.other) == (d, b)


def test_reads_need_no_order(nodes):
    clocks, effects = Clocks(2), MemoryUses()
    effects.read(MEMORY, clocks.event(nodes[0], 0, ()))
    effects.read(MEMORY, clocks.event(nodes[1], 1, ()))


def test_a_read_has_to_come_after_the_last_write(nodes):
    clocks, effects = Clocks(2), MemoryUses()
    effects.names[MEMORY] = "parameter w"
    effects.write(MEMORY, clocks.event(nodes[0], 0, ()))
    with pytest.raises(VerifyError, match="both nodes use the parameter w"):
        effects.read(MEMORY, clocks.event(nodes[1], 1, ()))
