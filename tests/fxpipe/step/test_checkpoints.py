"""A step with checkpoints gives the same bits as one without."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as own_checkpoint

import fxpipe
from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from fxpipe.schedule import Action, Kind, Memory, Schedule, StageCost, auto, joined, named
from fxpipe.schedule.recomputation import recomputed_cells, without_needless
from passes.common.segments import counts
from tests.zoo import MLP, MODELS, gradients, mean_loss, parts, same, step_of_loop


@pytest.mark.one_in(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("name", ["resnet", "unet", "transformer"])
def test_checkpoints_change_nothing(name, schedule, checkpoint):
    make, inputs = MODELS[name]
    first, x, target = make(), inputs(6), torch.randn(6)
    results = []
    for mode, segments in (("never", 1), (checkpoint, 1), (checkpoint, 3)):
        model = copy.deepcopy(first)
        with fxpipe.compile(
            model,
            ["cpu"] * 2,
            chunks=3,
            schedule=schedule,
            checkpoint=mode,
            checkpoint_segments=segments,
            loss_fn=mean_loss,
        ) as pipe:
            loss = pipe.step(*x, target=target)
        results.append([loss, gradients(model), list(model.buffers())])
    assert same(results[0], results[1]) and same(results[0], results[2])


ANY_ORDER = """
    0F0 0F1 0R1 0F2 0R0 0B0 0R2 0B1 0B2
    1F0 1R0 1F1 1F2 1I0 1R2 1R1 1I1 1W0 1W1 1I2 1W2
"""


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [6, 2])
@pytest.mark.parametrize("name", ["resnet", "unet", "transformer"])
def test_recomputations_in_any_order_change_nothing(name, rows):
    make, inputs = MODELS[name]
    first, x, target = make(), inputs(rows), torch.randn(rows)
    results = []
    for mode in ("never", "always"):
        order = ANY_ORDER if mode == "always" else re.sub(r"\dR\d", "", ANY_ORDER)
        model = copy.deepcopy(first)
        with fxpipe.compile(
            model,
            ["cpu"] * 2,
            schedule=Schedule.from_text(order),
            checkpoint=mode,
            loss_fn=mean_loss,
            example_inputs=inputs(6),
        ) as pipe:
            loss = pipe.step(*x, target=target)
        results.append([loss, gradients(model), list(model.buffers())])
    assert same(*results)


@pytest.mark.parametrize("name", ["resnet", "unet", "transformer"])
def test_recomputations_that_the_search_has_placed_change_nothing(name):
    """Stage 0, which is recomputed, has time for several micro-batches while it waits."""
    make, inputs = MODELS[name]
    model, x, target = make(), inputs(6), torch.randn(6)
    reference = copy.deepcopy(model)
    costs = [StageCost(n, 2 * n, recompute=n, checkpointed=3) for n in (2, 1, 1)]
    memory = Memory([10] * 3, checkpointed=3, inputs=1)
    order = auto(costs, 3, 3, placement=(0, 1, 2), memory=memory, max_bytes=40)
    assert recomputed_cells(order.actions(0)) >= {(0, 1)}
    with fxpipe.compile(
        model, ["cpu"] * 3, schedule=order, checkpoint="always", loss_fn=mean_loss
    ) as pipe:
        loss = pipe.step(*x, target=target)
        found = step_of_loop(reference, x, target, pipe, order, 3, mean_loss)
    assert same([loss, gradients(model)], list(found))


@pytest.mark.parametrize("segments", [1, 2])
def test_the_search_moves_recomputations_of_whole_stages_only(segments):
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x, target, reference = torch.randn(960, 64), torch.randn(960), copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        chunks=3,
        schedule="auto",
        stages=3,
        partition=["10", "18"],
        checkpoint="always",
        checkpoint_segments=segments,
        memory="1GiB",
        loss_fn=mean_loss,
    ) as pipe:
        loss = pipe.step(x, target=target)
        lines = [
            tuple(span.action for span in pipe.timeline().of_lane(lane) if span.action)
            for lane in range(3)
        ]
        order = Schedule("auto", 3, 3, tuple(lines))
        found = step_of_loop(reference, (x,), target, pipe, order, 3, mean_loss)
    assert bool(recomputed_cells(without_needless(lines[0]))) == (segments == 1)
    assert same([loss, gradients(model)], list(found))


def test_a_smaller_batch_is_recomputed_as_far_as_its_mode_says():
    order = Schedule.from_text("0F0 0F1 0R1 0F2 0R0 0B0 0B1 0B2 \n 1F0 1B0 1F1 1B1 1F2 1B2")
    x, first = torch.randn(6, 12), MLP()
    with fxpipe.compile(
        first, ["cpu"] * 2, schedule=order, checkpoint="except_last", loss_fn=mean_loss
    ) as pipe:
        for rows, again in ((6, {(0, 0), (0, 1), (1, 0), (1, 1)}), (2, {(0, 0), (1, 0)})):
            pipe.step(x[:rows], target=torch.randn(rows))
            nodes = pipe.step_graph.graph.find_nodes(op="call_function", target=ops.replay)
            assert {(node.meta[STAGE], node.meta[MICROBATCH]) for node in nodes} == again


@pytest.mark.covering(1)
@pytest.mark.parametrize("segments", [1, 3, [3, 2, 4, 1]])
@pytest.mark.parametrize(
    ("schedule", "modes"),
    [
        ("gpipe", ["always", "never"]),
        ("1f1b", ["never", "except_last"]),
        ("zb_h1", ["except_last", "always"]),
        ("zbv", ["never", "always", "never", "except_last"]),
    ],
)
def test_stages_with_modes_of_their_own_change_nothing_and_only_they_run_again(
    schedule, modes, segments
):
    make, inputs = MODELS["unet"]
    first, x, target = make(), inputs(6), torch.randn(6)
    given = segments[: len(modes)] if isinstance(segments, list) else segments
    # every stage has enough to be run again in three segments
    cut = {2: ["up.1"], 4: ["down.0", "up.1", "up.0"]}[len(modes)]
    results = []
    for mode in ("never", modes):
        model = copy.deepcopy(first)
        with fxpipe.compile(
            model,
            ["cpu"] * 2,
            chunks=3,
            schedule=schedule,
            checkpoint=mode,
            checkpoint_segments=1 if mode == "never" else given,
            partition=cut,
            loss_fn=mean_loss,
        ) as pipe:
            loss = pipe.step(*x, target=target)
            output = pipe(*x)
            output.sum().backward()
            results.append([loss, output.detach(), gradients(model)])
    assert same(results[0], results[1])
    count = {"never": 0, "except_last": 2, "always": 3}
    for graph, again in ((pipe.step_graph, ops.replay), (pipe.graph_module, ops.checkpoint)):
        nodes = graph.graph.find_nodes(op="call_function", target=again)
        found = [(node.meta[STAGE], node.meta[MICROBATCH]) for node in nodes]
        assert [sum(s == i for s, _ in set(found)) for i in range(len(modes))] == [
            count[mode] for mode in modes
        ]
        parts = counts(given, modes, len(modes))
        assert [found.count((i, 0)) for i in range(len(modes))] == [
            0 if mode == "never" else part for mode, part in zip(modes, parts, strict=True)
        ]


def test_where_only_some_micro_batches_are_in_segments_the_order_is_the_schedules():
    order = Schedule.from_text("""
        0F0 0F1 0F2 0I2 0I0 0I1 0W2 0W0 0W1
        1F0 1F1 1F2 1B2 1B0 1B1
    """)
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule=order,
        checkpoint="except_last",
        checkpoint_segments=2,
        loss_fn=mean_loss,
    ) as pipe:
        pipe.step(x, target=target)
        _, wanted = step_of_loop(reference, (x,), target, pipe, order, 3, mean_loss)
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("segments", [1, 2])
def test_what_is_checkpointed_defers_its_gradients_too(segments):
    model, x, target = MLP(), torch.randn(6, 12), torch.randn(6)
    with fxpipe.compile(
        model,
        ["cpu"] * 2,
        chunks=3,
        schedule="zb_h1",
        checkpoint="always",
        checkpoint_segments=segments,
        loss_fn=mean_loss,
    ) as pipe:
        seconds = {s.action: s.seconds for s in pipe.measure(x, target=target).spans if s.action}
        order = joined(named("zb_h1", lanes=2, microbatches=3), [(0, 1)])
        actions = {a for lane in range(2) for a in order.actions(lane)}
        again = {Action(stage, Kind.RECOMPUTE, i) for stage in range(2) for i in range(3)}
        assert set(seconds) == actions | again
        pipe.step(x, target=target)
    found = dict.fromkeys((ops.forward, ops.replay, ops.backward_input, ops.weight_grad), 0)
    for node in pipe.step_graph.graph.nodes:
        if node.meta.get(STAGE) == 1 and node.target in found:
            found[node.target] += 1
    assert set(found.values()) == {3 * segments}, "each segment has its own"


class OwnCheckpoint(nn.Module):
    """A model that checkpoints a block with a batch norm, whose second run counts once more."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = (nn.Linear(12, 12) for _ in range(3))
        self.block = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh())

    def forward(self, x):
        h = self.a(self.first(x))
        return self.b(own_checkpoint(self.block, h, use_reentrant=False))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_running_statistics_within_a_models_own_checkpoint_are_those_of_the_loop(
    schedule, checkpoint
):
    """The checkpoint is in the second stage, whose backward zb_h1 runs in halves."""
    model, x, target = OwnCheckpoint(), torch.randn(9, 12), torch.randn(9)
    reference, rows, outputs = copy.deepcopy(model), parts(x, 3), {}
    with fxpipe.compile(
        model,
        ["cpu"] * 3,
        chunks=3,
        partition=["a", "b"],
        schedule=schedule,
        checkpoint=checkpoint,
        loss_fn=mean_loss,
    ) as pipe:
        pipe.step(x, target=target)
    kinds = set()
    for action in joined(named(schedule, lanes=3, microbatches=3), [(0, 1), (1, 2)]).actions(1):
        kinds.add(action.kind)
        if action.kind is Kind.FORWARD:
            outputs[action.microbatch] = reference(rows[action.microbatch])
        elif action.kind is not Kind.WEIGHT_GRAD:
            outputs.pop(action.microbatch).sum().backward()
    assert (Kind.WEIGHT_GRAD in kinds) == (schedule == "zb_h1")
    assert model.block[1].num_batches_tracked == 6, "PyTorch's checkpoint counts twice"
    assert same(list(model.buffers()), list(reference.buffers()))
