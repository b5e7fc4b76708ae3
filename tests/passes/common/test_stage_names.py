"""Stages are named by the modules that are in them."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, STAGE, stage_nodes
from passes.common.stage_names import stage_names


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """An embedding, eight blocks of five nodes, and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.layers = nn.Sequential(*(Block() for _ in range(8)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x))).sum(1)


def names(model, *starts, seconds=None, parameters=None):
    """The names of stages that begin at the nodes of these numbers.

    Every node takes a second unless ``seconds`` says otherwise, and has no parameters unless
    ``parameters`` has their bytes.
    """
    gm = fx.symbolic_trace(model)
    for i, node in enumerate(stage_nodes(gm.graph)):
        taken, held = (seconds or {}).get(node.name, 1.0), (parameters or {}).get(node.name, 0)
        cost = Cost(taken, param_bytes=held)
        node.meta.update({STAGE: sum(i >= start for start in starts), COST: cost})
    return stage_names(gm.graph)


def test_neighbouring_layers_are_named_as_a_row():
    assert names(Model(), 1 + 5 * 4) == [
        "embed, layers.0 to 3",
        "layers.4 to 7, head",
    ]


def test_the_model_in_one_stage_is_named_by_its_modules():
    assert names(Model()) == ["embed, layers, head"]


def test_a_module_that_is_divided_is_named_by_where_that_is():
    assert names(Model(), 1 + 2) == [
        "embed, layers.0 up to add",
        "layers.0 from mlp on, layers.1 to 7, head",
    ]


def test_a_module_without_its_last_operator_is_named_so():
    assert names(Model(), 1 + 4) == [
        "embed, layers.0 without its last add",
        "the last add of layers.0, layers.1 to 7, head",
    ]


def test_what_is_in_a_module_that_is_divided_is_named_by_its_own_path():
    assert names(Model(), 1 + 3) == [
        "embed, layers.0.attn, add of layers.0, layers.0.mlp.0",
        "layers.0.mlp.1, add of layers.0, layers.1 to 7, head",
    ]


def test_what_takes_no_time_is_counted():
    small = {"embed": 0.0, "head": 0.0}
    assert names(Model(), 1, seconds=small) == ["embed", "layers, head"]
    assert names(Model(), seconds=small) == ["layers and 2 smaller ones"]


def test_a_single_module_that_takes_no_time_is_named():
    small = {"embed": 0.0, "head": 0.0}
    assert names(Model(), 11, seconds=small) == ["embed, layers.0 to 1", "layers.2 to 7, head"]


def test_what_takes_no_time_is_named_if_it_holds_many_of_the_parameters():
    seconds = {"embed": 0.0, "head": 0.0}
    large = {"embed": 200, "head": 1000}
    assert names(Model(), seconds=seconds, parameters=large) == ["embed, layers, head"]


@pytest.mark.parametrize(
    ("parts", "said"), [("abcde", "a, b, c, d, e"), ("abcdefg", "a, b, c, 3 more, g")]
)
def test_many_parts_are_counted(parts, said):
    model = nn.Sequential()
    for name in parts:
        model.add_module(name, nn.Linear(3, 3))
    assert names(model) == [said]


def test_two_calls_of_one_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(self.block(x))

    assert names(Twice(), 5) == ["block", "block@1"]


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_stages_of_pipelines_and_plans_and_the_report_say_what_they_contain(tracer):
    model, x = Model(), torch.randn(8, 3)
    said = ["embed, layers.0 to 3", "layers.4 to 7, head"]
    costs = {"layers": 8.0}
    plan = fxpipe.plan(model, ["h100"] * 2, example_inputs=(x,), costs=costs, tracer=tracer)
    with fxpipe.compile(
        model, ["cpu"] * 2, example_inputs=(x,), costs=costs, tracer=tracer
    ) as pipe:
        assert [stage.contains for stage in pipe.stages] == said
        for stage in pipe.stages:
            assert f"stage {stage.index}: {stage.contains}\n" in pipe.report()
            assert stage.contains in pipe.draw("stage").source
    for stage, text in zip(plan.stages, said, strict=True):
        assert stage.contains == text
        assert f"stage {stage.index}: {text}\n" in str(plan)


class Fails(nn.Module):
    def forward(self, x):
        return x.index_select(0, torch.where(x[:1, 0] > 100, 1000, 0))


def test_an_error_within_a_stage_says_what_the_stage_contains():
    model = nn.Sequential()
    model.add_module("fine", nn.Identity())
    model.add_module("fails", Fails())
    x = torch.zeros(4, 3)
    options = {"check": False, "tracer": "symbolic", "out_dims": 0}
    pipe = fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, partition=["fails"], example_inputs=(x,), **options
    )
    with pipe, pytest.raises(IndexError) as error:
        pipe(x + 1000)
    assert (
        "stage 1, micro-batch 0, node 'index_select' (the stage contains fails)"
        in (error.value.__notes__[0])
    )


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_layers_that_are_alike_have_names_of_their_own(tracer):
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(8))), torch.randn(8, 3)
    with fxpipe.compile(model, ["cpu"] * 2, example_inputs=(x,), tracer=tracer) as pipe:
        assert [stage.contains for stage in pipe.stages] == ["0 to 3", "4 to 7"]
