from __future__ import annotations

import copy
import os
import random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn

import fxpipe
from passes import Alias, AnalyticCost, PartitionError
from passes.partition.problem import problem
from tests.test_random_programs import CHANNELS, VIEWING, WRITING, Program, cases, reference, total
from tests.zoo import MODELS, gradients, loop, loss_of, same

EXAMPLES = int(os.environ.get("FXPIPE_EXAMPLES", "30"))


def random_cut(stages: int, seed: int):
    """A partition= that draws any cut by which no stage needs a later one."""

    def cut(gm: fx.GraphModule) -> dict[str, int]:
        rng = random.Random(seed)
        found = problem(gm.graph)
        if found.dag.size < stages:
            raise PartitionError("can be cut into fewer")
        # A random order of the units, cut at random: any cut may come of it.
        order, ready = [], []
        waiting = [len(before) for before in found.dag.before]
        ready = [v for v, count in enumerate(waiting) if not count]
        while ready:
            order.append(ready.pop(rng.randrange(len(ready))))
            for v in found.dag.after[order[-1]]:
                waiting[v] -= 1
                if not waiting[v]:
                    ready.append(v)
        ends = sorted(rng.sample(range(1, len(order)), stages - 1))
        place = {v: i for i, v in enumerate(order)}
        stage = [sum(place[v] >= end for end in ends) for v in range(len(order))]
        return {node.name: s for node, s in found.labels(stage).items()}

    return cut


def order_of(model: nn.Module) -> set[tuple[str, str]]:
    """Who has to come no later than whom, though nothing flows between them."""
    x = torch.ones(2, requires_grad=True)
    found = problem(AnalyticCost()(Alias((x,))(fx.symbolic_trace(model))).graph)
    return {(found.work[u].name, found.work[v].name) for u, v in found.whole.order}


def test_the_first_two_gradients_of_a_sum_may_come_in_any_order():
    class Model(nn.Module):
        def forward(self, x):
            a = x.exp()
            return a.sin(), a.cos(), a.tan()

    assert order_of(Model()) == {("sin", "cos"), ("sin", "tan")}


def test_the_users_of_a_value_with_two_names_come_in_order():
    class Model(nn.Module):
        def forward(self, x):
            a = x.exp()
            left = a.sin()
            b = a.contiguous()  # is a
            return left, b.cos(), b.tan()

    assert order_of(Model()) == {("sin", "contiguous")}


@given(cases(), st.integers(0, 10**6))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_cut_that_keeps_the_order_gives_the_bits_of_the_loop(case, seed):
    torch.manual_seed(0)
    model, x = Program(case), torch.randn(case.batch, CHANNELS, 4, 4)
    own = copy.deepcopy(model)
    try:
        expected = reference(model, x, case.chunks)
    except RuntimeError:  # autograd forbids the program: something it needs has been written to
        assume(False)
    try:
        pipe = fxpipe.compile(
            own,
            ["cpu"] * case.stages,
            chunks=case.chunks,
            partition=random_cut(case.stages, seed),
            checkpoint=case.checkpoint,
            checkpoint_segments=case.checkpoint_segments,
            example_inputs=(x,),
            tracer="symbolic",
        )
    except PartitionError as error:
        assert "can be cut into" in str(error)
        assume(False)
    with pipe:
        outputs = pipe(x)
        total(outputs).backward()
    assert same([output.detach() for output in outputs], expected[0]), "outputs"
    assert same(list(own.buffers()), expected[2]), "buffers"
    kinds = {step.kind for step in case.steps}
    if not (kinds & VIEWING and kinds & WRITING):  # see tests/test_random_programs.py
        assert same(gradients(own), expected[1]), "gradients"


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", MODELS)
def test_models_cut_anyhow_give_the_bits_of_the_loop(name, seed):
    make, inputs = MODELS[name]
    model, x = make(), inputs(5)
    reference = copy.deepcopy(model)
    expected = loop(reference, x, 2)
    with fxpipe.compile(model, ["cpu"] * 4, chunks=2, partition=random_cut(4, seed)) as pipe:
        output = pipe(*x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])
