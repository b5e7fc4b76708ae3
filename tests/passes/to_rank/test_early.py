"""Receives of a rank are posted when the memory for their values is free."""

from __future__ import annotations

import pytest
from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from fxpipe.schedule import NAMES
from passes import PostEarly
from passes.to_rank.project import edge_of
from tests.passes.to_rank.test_project import projected, step
from tests.zoo import Chain


def order(gm: fx.GraphModule) -> list[str]:
    """The actions and receives of a rank's graph in their order: "F1" and "B1" for micro-batch 1,
    and "0>1 #2" for transfer 2 of an edge."""
    kinds = {ops.forward: "F", ops.backward: "B"}
    found = []
    for node in gm.graph.nodes:
        if node.target in kinds:
            found.append(f"{kinds[node.target]}{node.meta[MICROBATCH]}")
        elif node.target is ops.receive:
            (source, target), number = edge_of(node)
            found.append(f"{source}>{target} #{number}")
    return found


def test_a_rank_posts_as_many_receives_as_it_has_micro_batches_in_flight():
    """In 1F1B the middle one of three ranks has two micro-batches, and awaits a third."""
    gm = step(Chain(3), ["b", "c"], "1f1b", microbatches=4)
    rank = projected(gm, (0, 1, 2), everywhere=False)[1]
    assert " ".join(order(rank)) == (
        "0>1 #0 0>1 #1 F0 0>1 #2 F1 2>1 #0 B0 F2 2>1 #1 0>1 #3 B1 F3 2>1 #2 B2 2>1 #3 B3"
    )
    assert " ".join(order(PostEarly()(rank))) == (
        "0>1 #0 0>1 #1 0>1 #2 2>1 #0 F0 F1 B0 0>1 #3 2>1 #1 F2 B1 2>1 #2 F3 B2 2>1 #3 B3"
    )


def test_edges_that_share_a_communicator_keep_the_places_of_their_receives():
    gm = step(Chain(3), ["b", "c"], "1f1b", microbatches=4)
    (_, rank, _), (_, other, _) = (projected(gm, (0, 1, 2)) for _ in range(2))
    assert order(PostEarly({(0, 1), (2, 1)})(rank)) == order(other)


def held(gm: fx.GraphModule) -> dict[tuple[int, int], int]:
    """How many values of each edge the rank has, received or awaited, at most at a time."""
    nodes = list(gm.graph.nodes)
    last = {(n.meta.get(STAGE), n.meta.get(MICROBATCH)): i for i, n in enumerate(nodes)}
    ends: dict[tuple[int, int], list[int]] = {}
    most: dict[tuple[int, int], int] = {}
    for place, node in enumerate(nodes):
        if node.target is ops.receive:
            edge, _ = edge_of(node)
            keys = [(u.meta.get(STAGE), u.meta.get(MICROBATCH)) for u in node.users]
            end = max((last[key] for key in keys if None not in key), default=len(nodes))
            ends[edge] = [each for each in ends.get(edge, []) if each > place] + [end]
            most[edge] = max(most.get(edge, 0), len(ends[edge]))
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_no_rank_has_more_values_of_an_edge_than_before(schedule):
    assert schedule in NAMES
    gm = step(Chain(4, {0: (2, 3)}), ["b", "c", "d"], schedule, microbatches=5)
    for rank in projected(gm, (0, 1, 2, 3)):
        before, places = held(rank), order(rank)
        early = PostEarly()(rank)
        early.graph.lint()
        assert held(early) == before
        edges = {each.split()[0] for each in places if ">" in each}
        for edge in edges:  # the transfers of an edge keep their order
            numbers = [each for each in order(early) if each.startswith(edge)]
            assert numbers == [each for each in places if each.startswith(edge)]
