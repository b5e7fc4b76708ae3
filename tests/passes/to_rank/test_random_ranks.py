"""Random programs in the order of any schedule, on ranks that wait for each other at each transfer:
always the bits of one process.

A run of more: ``FXPIPE_EXAMPLES=2000 python -m pytest tests/passes/to_rank/test_random_ranks.py``.
"""

from __future__ import annotations

import os
import random

import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import Tensor

import fxpipe
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import lower
from passes import Project
from passes.verify.transfers import verify
from tests.passes.to_rank.played import played
from tests.test_random_programs import (
    CHANNELS,
    Program,
    Training,
    cut_anywhere,
    schedule_of,
    trainings,
)
from tests.zoo import gradients, same


def loss_fn(outputs: list[Tensor], target: Tensor) -> Tensor:
    return sum((torch.sin(o).flatten(1).sum(1) * target).mean() for o in outputs)


def stepped(training: Training, rng: random.Random) -> tuple[fxpipe.Pipeline, list[Tensor]]:
    """A pipeline that has made a step of the program, and its input and target."""
    case = training.case
    torch.manual_seed(0)
    model = Program(case)
    x, target = torch.randn(case.batch, CHANNELS, 4, 4), torch.randn(case.batch)
    try:
        schedule = schedule_of(training, case.chunks, rng)
        pipe = fxpipe.compile(
            model,
            ["cpu"] * training.lanes,
            chunks=case.chunks,
            partition=lambda gm: cut_anywhere(gm, case.stages, rng),
            checkpoint=case.checkpoint,
            checkpoint_segments=case.checkpoint_segments,
            schedule=schedule,
            loss_fn=loss_fn,
            tracer="symbolic",
        )
        pipe.step(x, target=target)
    except (ValueError, RuntimeError):  # such a schedule, cut or backward there is not
        assume(False)
    return pipe, [x, target]


@given(trainings())
@settings(
    max_examples=int(os.environ.get("FXPIPE_EXAMPLES", "8")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_ranks_give_the_bits_of_one_process(training):
    pipe, inputs = stepped(training, random.Random(training.seed))
    with pipe:
        model, gm = pipe.module, pipe.step_graph
        values = [*inputs, None, None]
        model.zero_grad()
        with torch.no_grad():
            alone = run_inline(lower(gm), values)
        expected = gradients(model)
        placement = tuple(stage.lane for stage in pipe.stages)
        graphs = [Project(placement, rank)(gm) for rank in range(1 + max(placement))]
        verify(graphs)
        model.zero_grad()
        assert same(played(graphs, values), [alone] * len(graphs))
        assert same(gradients(model), expected)
