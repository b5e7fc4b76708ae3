import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fxpipe import ops
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, STAGE, stage_nodes
from passes import Alias, AnalyticCost, Partition, PartitionError, Shared
from passes.partition.automatic import Auto
from tests.zoo import Chain


def cut(model, stages, spec="auto"):
    """The names of the nodes of each stage."""
    gm = AnalyticCost()(Alias((torch.ones(2, 3),))(fx.symbolic_trace(model)))
    Partition(stages, spec)(gm)
    found = [[] for _ in range(stages)]
    for node in stage_nodes(gm.graph):
        found[node.meta[STAGE]].append(node.name)
    return found


def test_equal_layers_are_shared_out_equally():
    assert cut(Chain(6), 3) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_one_stage_takes_all():
    assert cut(Chain(3), 1) == [["a", "b", "c"]]


def test_a_model_that_computes_nothing_is_not_cut():
    with pytest.raises(PartitionError, match="2 stages asked for, but the model computes nothing"):
        cut(nn.Identity(), 2)


def contiguous_cuts(count, stages):
    """All ways to cut a row: which stage each is in."""
    for inner in itertools.combinations(range(1, count), stages - 1):
        yield [sum(i >= cut for cut in inner) for i in range(count)]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_a_row_is_cut_where_the_slowest_is_fastest_and_then_least_is_sent(times, stages, random):
    stages = min(stages, len(times))
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.ones(1)
    for i, seconds in enumerate(times):
        value = graph.call_function(torch.sin, (value,), name=f"n{i}")
        value.meta = {"val": torch.ones(random.randrange(1, 100)), COST: Cost(forward_s=seconds)}
    graph.output(value)
    work = list(stage_nodes(graph))

    def slowest(labels):
        return max(
            sum(t for t, s in zip(times, labels, strict=True) if s == stage) for stage in labels
        )

    def sent(labels):
        ends = [i for i, (a, b) in enumerate(itertools.pairwise(labels)) if a != b]
        return sum(len(work[i].meta["val"]) for i in ends)

    every = list(contiguous_cuts(len(times), stages))
    best = min(map(slowest, every))
    Partition(stages)(fx.GraphModule({}, graph))
    found = [node.meta[STAGE] for node in work]
    assert found in every
    assert slowest(found) == best
    assert sent(found) == min(sent(e) for e in every if slowest(e) == best)


def test_parts_of_one_result_stay_with_it():
    class Model(nn.Module):
        def forward(self, x):
            a, b, c = x.sin().chunk(3, 1)
            return a + b + c

    stages = cut(Model(), 3)
    assert ["chunk", "getitem", "getitem_1", "getitem_2"] in [stage[-4:] for stage in stages]


def test_what_writes_stays_with_what_is_read_afterwards():
    class Model(nn.Module):
        def forward(self, x):
            a = x.sin()
            b = a[:, 0]
            b.mul_(2)
            return a.cos().tan()

    stages = cut(Model(), 3)
    assert stages[0] == ["sin", "getitem", "mul_"]


def test_the_graph_module_says_how_far_from_optimal_the_cut_is():
    gm = AnalyticCost()(Alias((torch.ones(2, 3),))(fx.symbolic_trace(Chain(7))))
    Partition(2)(gm)
    assert gm.meta["gap"] == 0
    Partition(2, ["b"])(gm)
    assert "gap" not in gm.meta, "that cut was not ours"


def test_names_begin_stages():
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3), nn.ReLU())
    assert cut(model, 2, ["1"]) == [["_0_0", "_0_1"], ["_1", "_2"]]
    assert cut(model, 2, ["0.1"]) == [["_0_0"], ["_0_1", "_1", "_2"]]
    assert cut(model, 2, ["0", "1"]) == [["_0_0", "_0_1"], ["_1", "_2"]], "the first may be named"
    assert cut(model, 2, ["_2"]) == [["_0_0", "_0_1", "_1"], ["_2"]], "nodes have names too"


def test_a_mapping_puts_modules_and_nodes_and_the_rest_follows():
    assert cut(Chain(4), 2, {"c": 1}) == [["a", "b"], ["c", "d"]]
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3))
    assert cut(model, 2, {"0": 0, "0.1": 1}) == [["_0_0"], ["_0_1", "_1"]], "the longer path wins"


def test_a_function_of_the_graph_says():
    def halves(gm):
        names = [n.name for n in stage_nodes(gm.graph)]
        return [names[len(names) // 2]]

    assert cut(Chain(4), 2, halves) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("stages", "spec", "message"),
    [
        (4, "auto", "4 stages asked for, but the model can be cut into 3, no more: it has 3 nodes"),
        (2, ["z"], "partition names 'z', but the model graph has no such module or node; it has"),
        (3, ["b"], "names 1 places to cut, which makes 2 stages, but there are 3 devices"),
        (3, ["c", "b"], "'b' begins a stage after 'c', but in the model it comes no later"),
        (2, {"a": 0, "b": 1, "c": 0}, "'c' in stage 0 needs 'b' from the later stage 1, and stage"),
        (2, {"a": 2}, "puts 'a' into stage 2: with 2 devices there are stages 0 to 1"),
        (3, {"b": 2}, "leaves stage 1 without a node"),
        (2, "b", "partition is 'b': give \"auto\""),
        (2, None, 'partition is None: give "auto"'),
        (2, {"b"}, "partition is {'b'}: give \"auto\""),
        (2, lambda gm: 3, 'the function partition has returned 3: give "auto", an Auto, a list'),
        (2, [1], "partition has 1, a int, for a name: give the names of modules or nodes, as str"),
        (2, lambda gm: list(stage_nodes(gm.graph))[1:2], "partition has b, a Node, for a name"),
    ],
)
def test_what_cannot_be_cut_so_is_refused(stages, spec, message):
    with pytest.raises(PartitionError, match=message.replace("[", r"\[")):
        cut(Chain(3), stages, spec)


def test_a_name_that_is_nearly_right_is_suggested():
    model = nn.Sequential()
    model.add_module("encoder", nn.Linear(3, 3))
    model.add_module("decoder", nn.Linear(3, 3))
    with pytest.raises(PartitionError, match=r"'decodr'.*did you mean 'decoder'"):
        cut(model, 2, ["decodr"])


def test_a_split_between_a_write_and_what_it_is_seen_through_is_refused():
    class Model(nn.Module):
        def forward(self, x):
            a = x.sin()
            b = a[:, 0]
            b.mul_(2)
            return a.cos()

    with pytest.raises(PartitionError, match="share memory that is written to"):
        cut(Model(), 2, ["mul_"])


class Diamond(nn.Module):
    """Two branches of three layers; the program goes from one to the other at each step."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        a = b = x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = left(a), right(b)
        return a, b


def test_a_cut_need_not_be_contiguous_in_the_program_where_that_sends_less():
    left, right = cut(Diamond(), 2)
    assert {tuple(left), tuple(right)} == {
        ("left_0", "left_1", "left_2"),
        ("right_0", "right_1", "right_2"),
    }, "no value has to travel"


def test_the_order_of_the_program_can_be_asked_for():
    left, right = cut(Diamond(), 2, Auto(in_order=True))
    assert [*left, *right] == ["left_0", "right_0", "left_1", "right_1", "left_2", "right_2"]


def test_pins_put_nodes_where_they_are_told():
    assert cut(Chain(6), 2, Auto(pins={"b": 1})) == [["a"], ["b", "c", "d", "e", "f"]]


def test_groups_stay_together():
    assert cut(Chain(6), 2, Auto(together=[["b", "e"]]))[0] in (["a"], ["a", "b", "c", "d", "e"])


@pytest.mark.parametrize(
    ("objective", "expected"),
    [("params", [["wide"], ["a", "b", "c"]]), ("memory", [["wide"], ["a", "b", "c"]])],
)
def test_other_things_than_time_can_be_made_even(objective, expected):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Embedding(1000, 3)
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, tokens):
            return self.c(self.b(self.a(self.wide(tokens))))

    gm = AnalyticCost()(Alias((torch.zeros(64, dtype=torch.long),))(fx.symbolic_trace(Model())))
    Partition(2, Auto(objective=objective))(gm)
    found = [[n.name for n in stage_nodes(gm.graph) if n.meta[STAGE] == s] for s in range(2)]
    assert found == expected


@pytest.mark.parametrize(
    ("auto", "message"),
    [
        (lambda: Auto(objective="beauty"), "objective is 'beauty': give one of 'time', 'memory'"),
        (lambda: Auto(slack=-1), "slack is -1: give a fraction"),
        (lambda: Auto(pins={"a": 5}), "pins puts 'a' into stage 5: with 2 devices"),
        (lambda: Auto(pins={"q": 1}), "names 'q', but the model graph has no such module"),
        (lambda: Auto(pins={"a": 1, "c": 0}), "no cut puts all pins into their stages"),
        (lambda: Auto(pins={"a": 1}), "and something into each of the 2: give fewer pins"),
        (lambda: Auto(pins=["a"]), r"pins is \['a'\]: give a dict from names to stages"),
        (lambda: Auto(pins={0: 1}), "partition has 0, a int, for a name"),
        (lambda: Auto(together="ab"), "together is 'ab': give a list of lists of names"),
        (lambda: Auto(together=["a", "b"]), "give a list of lists of names, a list for each group"),
        (
            lambda: Auto(together=[["a", "b"]], pins={"a": 0, "b": 1}),
            "pins puts 'a' into stage 0 and 'b' into stage 1, but they share written memory, are",
        ),
        (lambda: Auto(slack="2%"), "slack is '2%': give a fraction"),
        (lambda: Auto(devices=["p40"]), "1 devices are described, but there are 2 stages"),
    ],
)
def test_what_makes_no_sense_is_refused(auto, message):
    with pytest.raises(PartitionError, match=message):
        cut(Chain(3), 2, auto())


class ReadThenWritten(nn.Module):
    def forward(self, x):
        a = x.sin()
        b = a.cos().exp().tan().sigmoid()
        c = a.mul_(2)
        return b, c


def test_a_cut_by_which_a_later_stage_reads_what_has_been_written_to_is_refused():
    assert cut(ReadThenWritten(), 2, {"exp": 1})[0] == ["sin", "cos", "mul_"]
    with pytest.raises(PartitionError, match="'cos' in stage 1 reads memory that 'mul_' in the ea"):
        cut(ReadThenWritten(), 2, {"cos": 1})


def test_what_is_written_is_not_read_in_a_later_stage_by_what_came_before():
    gm = AnalyticCost()(Alias((torch.ones(2, 3),))(fx.symbolic_trace(ReadThenWritten())))
    for stages in (2, 3):
        Partition(stages)(gm)
        stage = {n.name: n.meta[STAGE] for n in stage_nodes(gm.graph)}
        assert stage["cos"] <= stage["mul_"]


@pytest.mark.parametrize("spec", [["embed", "head"], {"mix": 1, "embed": 1, "head": 2}])
def test_a_shared_parameter_lives_in_the_first_stage_that_uses_it(spec):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.embed, self.mix = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
            self.head = nn.Linear(3, 3, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.mix(self.embed(self.a(x))))

    gm = Alias((torch.ones(2, 3),))(fx.symbolic_trace(Model()))
    Partition(3, spec)(Shared()(gm))
    (weight,) = gm.graph.find_nodes(op="call_function", target=ops.share)
    assert weight.meta[STAGE] == 1
