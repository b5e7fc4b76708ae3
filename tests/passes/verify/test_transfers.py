"""Graphs of ranks that do not fit together are refused, and the transfers named."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import CARRIED, ORIGIN
from passes import Project, TransferError
from passes.common.shapes import TensorShape
from passes.to_rank.carried import Carried
from passes.to_rank.project import transfers_of
from passes.verify.transfers import verify


def program(rank, *transfers):
    """A rank's graph with nothing but transfers; each is (source, target, number, value)."""
    graph = fx.Graph()
    transport = graph.placeholder("transport")
    for source, target, number, value in transfers:
        edge = source, target
        if rank == source:
            node = graph.call_function(ops.transmit, (transport, value, edge, number))
        else:
            node = graph.call_function(ops.receive, (transport, edge, number))
        node.meta[ORIGIN] = value
    graph.output(None)
    return fx.GraphModule({}, graph)


def test_ends_that_meet_are_accepted():
    verify([program(0, (0, 1, 0, "a"), (1, 0, 0, "b")), program(1, (0, 1, 0, "a"), (1, 0, 0, "b"))])


@pytest.mark.parametrize(
    "first, second, message",
    [
        ([(0, 1, 0, "a"), (0, 1, 1, "b")], [(0, 1, 0, "b"), (0, 1, 1, "a")], "different values"),
        ([(0, 1, 0, "a"), (0, 1, 1, "b")], [(0, 1, 1, "b"), (0, 1, 0, "a")], "come as number 0"),
        ([(0, 1, 0, "a")], [], "rank 0, transmit = .*receives nothing for it"),
        ([], [(0, 1, 0, "a")], "rank 1, receive = .*sends nothing for it"),
        ([(0, 2, 0, "a")], [], "no edge of rank 0"),
    ],
)
def test_ends_that_differ_are_named(first, second, message):
    with pytest.raises(TransferError, match=message):
        verify([program(0, *first), program(1, *second)])


def test_ends_that_differ_in_shape_or_dtype_are_named():
    programs = [program(rank, (0, 1, 0, "a")) for rank in range(2)]
    for gm, dtype in zip(programs, (torch.float32, torch.float16), strict=True):
        (transfer,) = transfers_of(gm)
        transfer.meta[CARRIED] = Carried((TensorShape(dtype, (8, 3), (0,)),), 0)
    with pytest.raises(TransferError, match="the two ends differ in shapes or dtypes"):
        verify(programs)


def test_ranks_that_wait_for_each_other_in_a_circle_are_named():
    circle = [
        program(0, (0, 1, 0, "a"), (2, 0, 0, "c")),
        program(1, (1, 2, 0, "b"), (0, 1, 0, "a")),
        program(2, (2, 0, 0, "c"), (1, 2, 0, "b")),
    ]
    with pytest.raises(TransferError) as caught:
        verify(circle)
    said = re.findall(r"rank (\d), (\w+) =", str(caught.value))
    assert said == [("0", "transmit"), ("1", "transmit"), ("2", "transmit")]


@st.composite
def graphs(draw):
    """A graph of stages on ranks, in any order in which values are there before they are used."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = [x]
    ranks = tuple(range(draw(st.integers(2, 5))))
    for i in range(draw(st.integers(1, 25))):
        used = draw(st.lists(st.sampled_from(made), max_size=3))
        node = graph.call_function(max, (tuple(used), i))
        node.meta["stage"] = draw(st.sampled_from(ranks))
        made.append(node)
    results = draw(st.lists(st.sampled_from(made), max_size=3))
    graph.output(tuple(results))
    return fx.GraphModule({}, graph), ranks


@given(graphs(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_parts_of_any_graph_fit_together_whatever_its_order(given, everywhere):
    gm, ranks = given
    programs = [Project(ranks, rank, everywhere)(gm) for rank in ranks]
    verify(programs)
    done = [node.name for part in programs for node in part.graph.nodes if node.target is max]
    assert sorted(done) == sorted(n.name for n in gm.graph.nodes if n.target is max)
