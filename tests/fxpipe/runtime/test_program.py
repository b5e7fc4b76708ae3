from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import CALLER, lower
from tests.zoo import Chain, after

X = torch.ones(4, 3)


def programs(**options):
    gm = after("dependencies", Chain(2), (X,), ["b"], chunks=2, **options)
    return gm, lower(gm), lower(gm, placement=[0, 1])


def test_lanes_keep_the_graphs_order_and_have_all_of_it():
    gm, inline, lanes = programs()
    nodes = [n for n in gm.graph.nodes if n.op != "placeholder"]
    assert [i.node for i in inline.lanes[CALLER]] == nodes
    assert sorted(lanes.lanes) == [CALLER, 0, 1]
    for lane in lanes.lanes.values():
        order = [nodes.index(instruction.node) for instruction in lane]
        assert order == sorted(order)
    assert sum(map(len, lanes.lanes.values())) == len(nodes)


def test_every_value_that_a_lane_needs_from_another_is_posted_to_it():
    _, _, program = programs()
    posted = {(i.node, lane) for lane_ in program.lanes.values() for i in lane_ for lane in i.posts}
    awaited = {(n, lane) for lane, lane_ in program.lanes.items() for i in lane_ for n in i.awaits}
    assert posted == awaited
    assert len(posted) == 6, "two inputs, two values between stages, the parts' sizes, the output"


def test_every_value_is_forgotten_after_its_last_use():
    _, inline, lanes = programs(checkpoint="always")
    for program in (inline, lanes):
        for lane, instructions in program.lanes.items():
            env = {*program.inputs} if lane == CALLER else set()
            for instruction in instructions:
                env |= {*instruction.awaits, instruction.node}
                assert env >= set(instruction.node.all_input_nodes), "nothing is forgotten early"
                env -= set(instruction.forgets)
            assert env == ({program.output} if lane == CALLER else set())


def test_nothing_outlives_a_run():
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            y = torch.sin(x)
            seen.append(weakref.ref(y))
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.spy, self.a = Spy(), nn.Linear(3, 3)

        def forward(self, x):
            return self.a(self.spy(x))

    class LeafTracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Spy) or super().is_leaf_module(m, name)

    def tracer(model, args, kwargs):
        return torch.fx.GraphModule(model, LeafTracer().trace(model))

    for devices in (["cpu"], ["cpu", "cpu"]):
        with fxpipe.compile(
            Model(), devices, chunks=2, tracer=tracer, partition=["a"][: len(devices) - 1]
        ) as pipe:
            with torch.no_grad():
                pipe(X)
                seen.clear()
                y = pipe(X)
            gc.collect()
            assert len(seen) == 2 and all(ref() is None for ref in seen)
            assert y.shape == (4, 3)


def test_lists_and_dicts_that_a_model_returns_are_its_own():
    class Model(nn.Module):
        def forward(self, x):
            return [x + 1, {"a": (x * 2,)}]

    pipe = fxpipe.compile(Model(), ["cpu"], chunks=1)
    first, second = pipe(X)
    assert type(pipe(X)) is list and type(second) is dict and type(second["a"]) is tuple
    assert torch.equal(first, X + 1)


def test_a_method_call_is_not_part_of_a_pipeline_graph():
    graph = torch.fx.Graph()
    graph.output(graph.call_method("sin", (graph.placeholder("x"),)))
    with pytest.raises(ValueError, match=r"has no call_method nodes: sin = \.sin"):
        lower(torch.fx.GraphModule({}, graph))


def test_an_inline_run_is_the_graph_module():
    gm, inline, _ = programs()
    assert torch.equal(run_inline(inline, [X]), gm(X))
