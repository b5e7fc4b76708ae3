"""Of cuts that are about equally fast, the one is taken that divides the fewest modules."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, STAGE, stage_nodes
from passes import Alias, AnalyticCost, Partition, PartitionError
from passes.common.stage_names import stage_names
from passes.partition.automatic import Auto
from passes.partition.partition import within


class Block(nn.Module):
    """Five nodes. Between its two linear layers fewer values travel than between blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x):
        return torch.tanh(self.second(torch.sin(self.first(x))) * 2)


class Model(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Tailed(Model):
    """With two operations at its end, between which less travels than between blocks."""

    def __init__(self):
        super().__init__(2)

    def forward(self, x):
        return super().forward(x).sum(1).relu()


def cut(model, stages, spec=None, seconds=None, of=1.0):
    """The names of the stages, where each node takes ``of`` seconds unless ``seconds`` has it."""
    gm = AnalyticCost()(Alias((torch.ones(4, 6),))(fx.symbolic_trace(model)))
    for node in stage_nodes(gm.graph):
        node.meta[COST] = Cost((seconds or {}).get(node.name, of))
    Partition(stages, Auto() if spec is None else spec)(gm)
    return stage_names(gm.graph), gm


def test_a_cut_between_modules_is_taken_that_is_nearly_as_fast():
    # Twenty nodes of blocks, and the stem: 10.1 s and 10 s, or 10 s and 10.1 s.
    stages, gm = cut(Model(4), 2, seconds={"stem": 0.1})
    assert stages == ["stem, blocks.0 to 1", "blocks.2 to 3"]
    assert gm.meta["gap"] <= 0.02


def test_no_stage_is_left_with_next_to_nothing_to_do():
    # The stem takes so long that all cuts behind it are equally fast. The one that sends least is
    # that ahead of the last node, which takes no time.
    stages, _ = cut(Tailed(), 3, seconds={"stem": 100.0, "relu": 0.0})
    assert stages == ["stem", "blocks.0", "blocks.1, .sum"]


def test_with_no_slack_the_fastest_cut_is_taken_through_whatever_it_goes():
    _, gm = cut(Model(3), 2, Auto(slack=0.0), seconds={"stem": 1.0})
    work = list(stage_nodes(gm.graph))
    assert [sum(n.meta[STAGE] == s for n in work) for s in (0, 1)] == [8, 8]
    assert gm.meta["gap"] == 0


def test_a_cut_between_modules_that_is_too_slow_is_not_taken():
    _, gm = cut(Model(3), 2, seconds={"stem": 1.0})
    work = list(stage_nodes(gm.graph))
    assert [sum(n.meta[STAGE] == s for n in work) for s in (0, 1)] == [8, 8], "not 6 and 10"


def test_of_cuts_between_modules_the_one_that_sends_least_is_taken():
    class Two(nn.Module):
        """After the first of two equal modules, two values are needed; after the second, one."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            first = self.a(x)
            second = self.b(first)
            third = self.c(second)
            return self.d(third + first)

    # 0.05 s and 9.95 s more or less: a | b c d sends first; a b | c d sends first and second.
    seconds = {"a": 9.9, "b": 0.1, "c": 9.9, "d": 0.1}
    _, gm = cut(Two(), 2, seconds=seconds, of=0.0)
    stage = {node.name: node.meta[STAGE] for node in stage_nodes(gm.graph)}
    assert (stage["a"], stage["b"]) == (0, 1)


def test_an_inner_cut_goes_between_the_parts_of_a_block_ahead_of_through_them():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Model(3), Model(2)

        def forward(self, x):
            return self.right(self.left(x))

    # The fastest cut, 15.05 s and 15.1 s, is ahead of the last operator of a block.
    seconds = {"left_stem": 6.05, "tanh_1": 0.1, "right_stem": 0.0}
    fastest, _ = cut(Deep(), 2, Auto(slack=0.0), seconds)
    assert "left.blocks.1 without its last tanh" in fastest[0]
    stages, _ = cut(Deep(), 2, seconds=seconds)
    assert stages == ["left.stem, left.blocks.0 to 1", "left.blocks.2, right"]


def test_boundaries_say_where_cuts_may_be():
    model, seconds = Model(4), {"stem": 4.0}
    free, _ = cut(model, 3, Auto(slack=0.0), seconds)
    told, _ = cut(model, 3, Auto(boundaries=["blocks.*"]), seconds)
    assert told == ["stem", "blocks.0 to 1", "blocks.2 to 3"], "4 s, 10 s and 10 s"
    assert free[0] == "stem, blocks.0 without its last tanh", "8 s each"
    assert told == cut(model, 3, Auto(boundaries=["blocks.?"]), seconds)[0]


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        (["layers.*"], r"boundaries has 'layers.\*', which is the path of no module of the graph"),
        ("blocks.*", r"boundaries is 'blocks.\*': give a list of paths of modules"),
        ([1], r"boundaries is \[1\]: give a list of paths of modules"),
    ],
)
def test_boundaries_that_are_none_are_refused(boundaries, message):
    with pytest.raises(PartitionError, match=message):
        cut(Model(2), 2, Auto(boundaries=boundaries))


@pytest.mark.parametrize("spec", [["blocks.1"], {"stem": 0}, Auto(boundaries=["stem"])])
def test_boundaries_are_refused_beside_a_partition_that_says_where_the_cut_is(spec):
    with pytest.raises(PartitionError, match="boundaries says where an automatic cut may be, and"):
        within(spec, ["blocks.*"])


def test_boundaries_keep_the_other_settings_of_an_automatic_cut():
    assert within("auto", ["blocks.*"]) == Auto(boundaries=["blocks.*"])
    assert within(Auto(slack=0.0), ["blocks.*"]) == Auto(slack=0.0, boundaries=["blocks.*"])
    assert within(["blocks.1"], None) == ["blocks.1"]
