import re

import pytest
from torch import fx, nn

from fxpipe.inspect.draw import draw_model
from fxpipe.inspect.draw.fold import fold


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Tanh()

    def forward(self, x):
        return self.b(self.a(x)) + x


class Deep(nn.Module):
    """``depth`` blocks of three nodes each, and a head that is called at both ends."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.blocks(self.head(x)))


def graph(depth):
    return fx.symbolic_trace(Deep(depth))


def folded(depth, limit, place=lambda node: None):
    work = [n for n in graph(depth).graph.nodes if n.op not in ("placeholder", "output")]
    return [(box.title, len(box.nodes)) for box in fold(work, limit, place)]


def test_a_graph_that_is_small_enough_is_left_alone():
    assert {count for _, count in folded(2, 8)} == {1}


def test_modules_are_folded_as_deep_as_there_is_room():
    blocks = [(f"blocks.{i}", 3) for i in range(3)]
    assert folded(3, 5) == [("head", 1), *blocks, ("head", 1)]
    assert folded(3, 4) == [("head", 1), ("blocks", 9), ("head", 1)]


def test_neighbours_of_a_module_with_very_many_are_folded_together():
    # 30 blocks and two heads for 16 boxes: half of them are filled, with four blocks each.
    assert folded(30, 16) == [
        ("head", 1),
        *((f"blocks.{i} … blocks.{i + 3}", 12) for i in range(0, 28, 4)),
        ("blocks.28 … blocks.29", 6),
        ("head", 1),
    ]


def test_stages_are_not_folded_into_each_other():
    cut = ("blocks_1_b", "add_1", "head_1")
    found = folded(2, 6, lambda node: node.name in cut)
    assert found == [("head", 1), ("blocks.0", 3), ("blocks.1", 1), ("blocks.1", 2), ("head", 1)]


def test_a_result_with_many_parts_is_taken_apart_in_one_box():
    class Parts(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.count = count

        def forward(self, x):
            parts = x.split(1)
            return sum([parts[i] for i in range(self.count)])

    for count, sizes in ((4, [1] * 9), (5, [1, 5, 1, 1, 1, 1, 1])):
        nodes = list(fx.symbolic_trace(Parts(count)).graph.nodes)[1:-1]
        assert [len(box.nodes) for box in fold(nodes, 80, lambda node: None)] == sizes


def test_a_drawing_says_what_was_folded_and_draws_an_edge_once():
    source = draw_model(graph(3), boxes=5).source
    assert r'blocks_0_a [label="blocks.0 · 3 nodes\nBlock" fillcolor=white peripheries=2' in source
    edges = re.findall(r"^\t(\w+) -> (\w+) ", source, re.M)
    assert edges == [
        ("x", "head"),
        ("head", "blocks_0_a"),
        ("blocks_0_a", "blocks_1_a"),
        ("blocks_1_a", "blocks_2_a"),
        ("blocks_2_a", "head_1"),
        ("head_1", "output"),
    ]
    assert "double frame: several nodes as one (13 nodes in 7 boxes)" in source


@pytest.mark.parametrize("limit", [1, 2])
def test_where_folding_all_is_not_enough_it_is_all_that_is_done(limit):
    assert len(folded(3, limit)) <= 3
