"""Pictures of ranks show each transfer once, from what makes a value to what needs it."""

from __future__ import annotations

import re

import pytest

from fxpipe import ops
from fxpipe.inspect.draw import draw_rank, draw_ranks
from passes import Reduce, Unshard
from passes.to_rank.project import edge_of, transfers_of
from tests.fxpipe.inspect.draw.test_levels import clusters, edges, laid_out
from tests.passes.to_rank.test_project import TOKENS, X, projected, step
from tests.zoo import Chain, Tied

SCHEDULES = ["gpipe", "1f1b", "zb_h1"]


def chain(schedule="1f1b"):
    """Four stages of a model in which a value skips two of them, each on a rank."""
    gm = step(Chain(4, {0: (3,)}), ["b", "c", "d"], schedule=schedule, microbatches=3)
    return projected(gm, (0, 1, 2, 3))


def positions(source):
    """Of each box: its x coordinate and its row, from above."""
    pattern = r'^\s*"?(rank_\d\w*|edge_\w+)"? \[.*?pos="([-\d.e+]+),([-\d.e+]+)"'
    found = {name: (float(x), -float(y)) for name, x, y in re.findall(pattern, source, re.M)}
    rows = sorted({y for _, y in found.values()})
    return {name: (x, rows.index(y)) for name, (x, y) in found.items()}


def transfers(graphs):
    """All transfers: their edges and numbers."""
    return {edge_of(node) for gm in graphs for node in transfers_of(gm)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_picture_of_all_ranks_has_a_line_for_each_transfer(schedule):
    graphs = chain(schedule)
    source = draw_ranks(graphs).source
    assert list(clusters(source)) == [*(f"cluster_row_{i}" for i in range(4)), "cluster_legend"]
    lines, at = edges(source), positions(source)
    found = [(at[tail][1], at[head][1]) for tail, head in lines]
    assert sorted(found) == sorted(edge for edge, _ in transfers(graphs))
    assert all(at[tail][0] < at[head][0] for tail, head in lines), "values arrive after they left"


def test_values_gradients_and_what_travels_once_have_lines_of_their_own():
    lines = edges(draw_ranks(chain()).source)
    kinds = {(tail[7:10], head[7:10]): line["style"] for (tail, head), line in lines.items()}
    assert kinds == {
        ("for", "for"): "solid",
        ("bac", "bac"): "dashed",
        ("los", "bac"): "dashed",
        ("for", "out"): "dotted",
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_picture_of_one_rank_has_a_circle_for_each_transfer_in_the_order_of_the_program(
    schedule, rank
):
    gm = chain(schedule)[rank]
    source = draw_rank(gm, rank).source
    at, lines = positions(source), edges(source)
    own = [edge_of(node) for node in transfers_of(gm)]
    names = [f"edge_{here}_{there}_{number}" for (here, there), number in own]
    assert sorted(names, key=lambda name: at[name][0]) == names
    for ((here, _), _), name in zip(own, names, strict=True):
        ends = [pair for pair in lines if name in pair]
        assert len(ends) == 1 and ends[0].index(name) == int(here == rank)
    assert all(at[tail][0] < at[head][0] for tail, head in lines)


def test_the_tooltip_of_a_transfer_says_what_it_carries():
    source = draw_rank(chain()[3], 3).source
    tips = re.findall(r'edge_2_3_0"? \[.*?tooltip="([^"]*)"', source)
    shape = f"float32 ({len(X)}·part, 3), part: the micro-batch's share of the rows"
    assert tips == [f"receive_wait_s2_mb0_1: {shape}"]


def test_the_tooltips_of_lines_and_their_numbers_say_what_transfers_carry():
    graphs = chain()
    source = draw_ranks(graphs).source
    expected = {
        node.name for gm in graphs for node in transfers_of(gm) if node.target is ops.receive
    }
    shape = f"float32 ({len(X)}·part, 3), part: the micro-batch's share of the rows"
    tips = [line["tooltip"] for line in edges(source).values()]
    assert {tip.split(":")[0] for tip in tips} == expected and len(tips) == len(transfers(graphs))
    assert f"receive_wait_s2_mb0_1: {shape}" in tips
    numbers = re.findall(r'"number \d+" \[.*?tooltip="([^"]*)"', source)
    assert numbers == tips


def test_shared_weights_and_seeds_have_boxes_where_they_leave_and_sums_where_they_begin():
    gm = step(Tied(), ["other"], inputs=(TOKENS,), microbatches=2, places=(0, 1))
    gm = Unshard(frozenset({1}))(Reduce()(gm))
    graphs = projected(gm, (0, 1))
    source = draw_ranks(graphs).source
    assert len(edges(source)) == len(transfers(graphs))
    texts = re.findall(r"label=(?:\"([^\"]*)\"|(\w+)) (?:fill|fixed|font|height|margin)", source)
    said = {first or second for first, second in texts}
    assert {"sum 0", "sum 1", "gather 1", "scatter 1", "free 1", "step 0", "step 1"} <= said
    assert graphs[0].graph.find_nodes(op="call_function", target=ops.accumulate)


def test_pictures_of_ranks_are_laid_out():
    graphs = chain()
    for drawn in draw_ranks(graphs), draw_rank(graphs[1], 1):
        assert "1F0" in laid_out(drawn)
