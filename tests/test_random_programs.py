"""Random programs give the bits of the loop over micro-batches, however they are run as a pipeline.

Stages, micro-batches and checkpoint modes are random, too. The programs are also run as training
steps, cut anywhere, in the order of any schedule.

``python -m tests.campaign --programs 20000`` runs many more of them.
"""

from __future__ import annotations

import bisect
import copy
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.runtime.checkpointing import offload
from fxpipe.schedule import (
    AUTO,
    NAMES,
    Action,
    Kind,
    Needs,
    Schedule,
    StageCost,
    auto,
    named,
    stages_per_lane,
)
from passes.common.modes import away, is_recomputed
from passes.partition.cut.dag import OUTSIDE
from passes.partition.problem import problem
from tests.zoo import gradients, loss_of, same, step_of_loop

EXAMPLES = int(os.environ.get("FXPIPE_EXAMPLES", "10"))
CHANNELS = 4

UNARY = ["conv", "same_conv", "linear", "norm", "tanh", "relu", "relu_", "drop", "view", "scale"]
BINARY = ["add", "mul", "cat", "add_", "sub", "mul_part_", "copy_part_"]
VIEWING = {"view", "linear"}  # a linear's result is a view of a matmul's
WRITING = {"relu_", "add_", "mul_part_", "copy_part_"}
SHARED = "common", "gain"  # the parameters that several steps may use


@dataclass(frozen=True)
class Step:
    """One operation on values made before (0 is the input)."""

    kind: str
    a: int
    b: int


@dataclass(frozen=True)
class Case:
    steps: list[Step]
    stages: int
    chunks: int
    batch: int
    checkpoint: str
    outputs: list[int] = field(default_factory=list)
    segments: int | tuple[int, int] = 1  # of all stages, or of every other one
    names: int = 1  # of the device: with two, what several stages share is copied and lent

    @property
    def checkpoint_segments(self) -> int | list[int]:
        if isinstance(self.segments, int):
            return self.segments
        return [self.segments[stage % 2] for stage in range(self.stages)]

    def devices(self, lanes: int) -> list[str]:
        """The devices of the lanes."""
        return [("cpu", "cpu:0")[lane % self.names] for lane in range(lanes)]


@pytest.fixture(scope="module", autouse=True)
def however_small():
    """Let small tensors move to the host, too, with ``checkpoint="offload"``."""
    with mock.patch.object(offload, "SMALL", 1):
        yield


@st.composite
def cases(draw: st.DrawFn) -> Case:
    steps = []
    for made in range(1, draw(st.integers(3, 12)) + 1):
        kind = draw(st.sampled_from(UNARY + BINARY))
        # Mostly the values made last are used, so that programs are deep, with skips.
        recent = st.integers(max(0, made - 2), made - 1)
        steps.append(Step(kind, draw(recent), draw(st.integers(0, made - 1))))
    checkpoint = draw(st.sampled_from(["never", "selective", "except_last", "always", "offload"]))
    numbers = st.integers(1, 3)
    return Case(
        steps,
        stages=draw(st.integers(1, 4)),
        chunks=draw(st.sampled_from([1, 2, 3, 8])),
        batch=draw(st.integers(1, 6)),
        checkpoint=checkpoint,
        outputs=draw(st.lists(st.integers(1, len(steps)), max_size=2)),
        segments=draw(numbers | st.tuples(numbers, numbers)) if is_recomputed(checkpoint) else 1,
        names=draw(st.integers(1, 2)),
    )


class Program(nn.Module):
    """Runs the steps on values of one shape, batch x CHANNELS x 4 x 4."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.steps, self.outputs = case.steps, case.outputs
        self.common = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)  # for every "same_conv"
        self.gain = nn.Parameter(torch.rand(CHANNELS, 1, 1))
        for i, step in enumerate(case.steps):
            module: nn.Module | None = {
                "conv": nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
                "cat": nn.Conv2d(2 * CHANNELS, CHANNELS, 1),
                "linear": nn.Linear(4, 4),
                "norm": nn.BatchNorm2d(CHANNELS),
                "relu_": nn.ReLU(inplace=True),
                "drop": nn.Dropout(0.0),
            }.get(step.kind)
            if module is not None:
                self.add_module(f"step{i}", module)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x * 1]  # programs that write to the caller's input have a test of their own
        for i, step in enumerate(self.steps):
            values.append(self.run(i, step, values[step.a], values[step.b]))
        return [torch.tanh(values[-1]), *(values[i] for i in self.outputs)]

    def run(self, i: int, step: Step, a: Tensor, b: Tensor) -> Tensor:
        kind = step.kind
        if kind in ("conv", "linear", "norm", "relu_", "drop"):
            return getattr(self, f"step{i}")(a)
        if kind == "cat":
            return self.get_submodule(f"step{i}")(torch.cat([a, b], 1))
        if kind == "same_conv":
            return self.common(a)
        if kind == "mul_part_":
            a[:, 0].mul_(2)
            return a
        if kind == "copy_part_":
            a[:, 1:2].copy_(b[:, :1])
            return a.sin()
        return {
            "tanh": lambda: torch.tanh(a),
            "relu": lambda: torch.relu(a),
            "view": lambda: a.flatten(1).view(-1, CHANNELS, 4, 4),
            "scale": lambda: a * self.gain,
            "add": lambda: a + b,
            "sub": lambda: a - b,
            "mul": lambda: a * b,
            "add_": lambda: a.add_(b),
        }[kind]()


def total(outputs: list[Tensor]) -> Tensor:
    return sum(map(loss_of, outputs))


def reference(model: nn.Module, x: Tensor, chunks: int):
    """The loop over micro-batches."""
    parts = torch.tensor_split(x, min(chunks, len(x)))
    outputs = [model(part) for part in parts]
    for output in reversed(outputs):
        total(output).backward()
    gathered = [torch.cat(column).detach() for column in zip(*outputs, strict=True)]
    return gathered, gradients(model), list(model.buffers())


FOUND = [
    # An output that is used again in a later stage goes by way of its last user, and gates there.
    Case([Step("conv", a, 0) for a in (0, 0, 1, 2, 3, 4, 5, 7, 7, 8)], 3, 2, 2, "never", [7, 9]),
    Case([Step("conv", a, 0) for a in (0, 1, 1)], 3, 1, 1, "never", [1, 2]),
    # A value that is used, and then written to by something that nobody uses.
    Case(
        [
            *[Step("conv", a, 0) for a in (0, 0, 1, 2)],
            Step("add", 3, 4),
            Step("relu_", 4, 0),
            Step("conv", 5, 0),
        ],
        2,
        1,
        1,
        "never",
        [],
    ),
    # A dead end, whose backward would fail if it were run.
    Case(
        [*[Step("conv", a, 0) for a in (0, 0, 1, 3)], Step("relu_", 3, 0)]
        + [Step("conv", a, 0) for a in (4, 5, 7, 7, 8)],
        2,
        1,
        1,
        "never",
        [],
    ),
    # A view that is cut off from a view of itself, which is written to.
    Case(
        [
            Step("tanh", 0, 0),
            Step("conv", 0, 0),
            Step("conv", 1, 0),
            Step("view", 2, 0),
            Step("conv", 3, 0),
            Step("relu_", 4, 0),
            Step("norm", 6, 0),
        ],
        3,
        1,
        1,
        "never",
        [],
    ),
    # What a module that is called twice gives is written to in the next stage.
    Case(
        [Step("same_conv", 0, 0), Step("same_conv", 0, 0), Step("relu_", 1, 0)],
        2,
        1,
        1,
        "never",
        [],
    ),
    # A dead end that is written to, and whose backward would fail.
    Case(
        [
            *[Step("conv", a, 0) for a in (0, 0, 2)],
            *[Step("relu_", a, 0) for a in (2, 3)],
            *[Step("conv", a, 0) for a in (4, 6, 6, 7, 8, 9)],
        ],
        3,
        1,
        1,
        "never",
        [],
    ),
    # A tensor that an in-place operation gives back: one value with two names.
    Case([Step("conv", 0, 0), Step("relu_", 1, 0), Step("conv", 1, 0)], 2, 1, 1, "never", [1, 2]),
    # An output with two users, which a cut that is not contiguous had put into another order.
    Case([Step("conv", a, 0) for a in (0, 0, 2, 2, 3, 5, 6, 6, 7)], 3, 1, 1, "never", [6, 8]),
    # A value that a stage in segments uses twice and passes on.
    Case(
        [
            *[Step("conv", a, 0) for a in (0, 0, 1, 2, 4, 4)],
            Step("copy_part_", 5, 4),
            Step("conv", 7, 0),
        ],
        4,
        2,
        2,
        "except_last",
        [6],
        2,
    ),
    # A value with two names, both of which other stages use.
    Case(
        [
            *[Step("conv", a, 0) for a in (0, 0, 1, 2, 4)],
            Step("drop", 4, 0),
            Step("copy_part_", 5, 4),
            Step("conv", 7, 0),
        ],
        4,
        1,
        1,
        "never",
        [4],
    ),
    # A module that is called twice, for nothing: its parameters get no gradient, not zeros.
    Case(
        [
            *[Step("conv", 0, 0), Step("same_conv", 0, 0), Step("linear", 1, 0)],
            *[Step("same_conv", 2, 0), Step("linear", 3, 0), Step("conv", 4, 0)],
            Step("conv", 5, 0),
        ],
        2,
        1,
        1,
        "never",
        [],
    ),
    # Values without a gradient that pass by a stage whose own values nobody uses.
    Case(
        [
            *[Step("tanh", 0, 0), Step("view", 0, 0), Step("add", 1, 2), Step("cat", 2, 2)],
            *[Step("tanh", 3, 0), Step("drop", 5, 0), Step("tanh", 5, 0), Step("tanh", 6, 0)],
            *[
                Step("cat", 7, 5),
                Step("relu_", 8, 0),
                Step("copy_part_", 10, 0),
                Step("cat", 10, 0),
            ],
        ],
        4,
        2,
        2,
        "except_last",
        [5, 7],
    ),
    # A module with shared weights is called in a stage that gets its input from another device.
    Case(
        [Step("conv", 0, 0), Step("same_conv", 0, 0), Step("same_conv", 1, 0)],
        *(2, 1, 1, "never", []),
        names=2,
    ),
]


@given(cases())
@example(FOUND[0])
@example(FOUND[1])
@example(FOUND[2])
@example(FOUND[3])
@example(FOUND[4])
@example(FOUND[5])
@example(FOUND[6])
@example(FOUND[7])
@example(FOUND[8])
@example(FOUND[9])
@example(FOUND[10])
@example(FOUND[11])
@example(FOUND[12])
@example(FOUND[13])
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_program_gives_the_bits_of_the_loop(case):
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
            case.devices(case.stages),
            chunks=case.chunks,
            checkpoint=case.checkpoint,
            checkpoint_segments=case.checkpoint_segments,
            example_inputs=(x,),
            tracer="symbolic",
        )
    except fxpipe.PartitionError as error:
        assert "can be cut into" in str(error)  # fewer places than stages
        assume(False)
    with pipe:
        outputs = pipe(x)
        total(outputs).backward()
    assert same([output.detach() for output in outputs], expected[0]), "outputs"
    assert same(list(own.buffers()), expected[2]), "buffers"
    check_gradients(case, own, expected[1])


def check_gradients(case: Case, model: nn.Module, expected: list[Tensor | None]) -> None:
    """Check that the gradients of a model have the expected bits, as far as these are defined."""
    kinds = {step.kind for step in case.steps}
    # Autograd makes the node of a view anew when its base has been written to, where the view is
    # used next. In a pipeline that may be a gate, and the order of a sum another one.
    is_in_other_order = kinds & VIEWING and kinds & WRITING
    names = [name for name, _ in model.named_parameters()]
    for name, actual, wanted in zip(names, gradients(model), expected, strict=True):
        # What a second device uses of a parameter is summed there over all micro-batches.
        is_summed_apart = case.names > 1 and name.startswith(SHARED)
        if is_in_other_order or is_summed_apart:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-3)
        else:
            assert same([actual], [wanted]), f"the gradient of {name}"


# ------------------------------------------------------------------------------------------- steps

RANDOM = "random"
STEPS = max(4, EXAMPLES // 5)


@dataclass(frozen=True)
class Training:
    """A program as a training step: ``seed`` decides the cut, what is frozen, and the schedule if
    it is a random one; ``used``: how many of the outputs, after the first, the loss uses."""

    case: Case
    schedule: str
    lanes: int
    seed: int
    used: int


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    case, schedule = draw(cases()), draw(st.sampled_from([*NAMES, AUTO, RANDOM, RANDOM, RANDOM]))
    lanes = draw(st.integers(1, 3))
    each = draw(st.integers(1, 2)) if schedule in (AUTO, RANDOM) else stages_per_lane(schedule)
    return Training(
        replace(case, stages=lanes * each),
        schedule,
        lanes,
        draw(st.integers(0, 999)),
        draw(st.integers(0, 2)),
    )


def cut_anywhere(gm: fx.GraphModule, stages: int, rng: random.Random) -> Mapping[str, int]:
    """A random cut, at random places, of a random order that the program allows."""
    found = problem(gm.graph)
    before: list[set[int]] = [set() for _ in range(found.dag.size)]
    for value in found.dag.values:
        for user in value.users:
            before[user] |= {value.source} - {user, OUTSIDE}
    for first, second in found.dag.order:
        before[second] |= {first} - {second}
    if found.dag.size < stages:
        raise fxpipe.PartitionError(f"can be cut into {found.dag.size}")
    order: list[int] = []
    while len(order) < found.dag.size:
        left = set(range(found.dag.size)).difference(order)
        order.append(rng.choice([i for i in sorted(left) if not before[i] & left]))
    places = sorted(rng.sample(range(1, len(order)), stages - 1))
    stage = {node: bisect.bisect(places, i) for i, node in enumerate(order)}
    labels = found.labels([stage[node] for node in range(found.dag.size)])
    return {node.name: number for node, number in labels.items()}


def any_schedule(
    lanes: int, stages: int, microbatches: int, checkpointed: int, rng: random.Random
) -> Schedule:
    """A random schedule: stages on any lanes, some backwards in halves, recomputations of some of
    the first ``checkpointed`` micro-batches, actions in any valid order."""
    lane_of = [*range(lanes), *(rng.randrange(lanes) for _ in range(stages - lanes))]
    rng.shuffle(lane_of)
    kinds = [
        rng.choice([(Kind.BACKWARD,), (Kind.BACKWARD_INPUT, Kind.WEIGHT_GRAD)])
        for _ in range(stages)
    ]
    left = [
        Action(stage, kind, i)
        for stage in range(stages)
        for i in range(microbatches)
        for kind in (Kind.FORWARD, *kinds[stage])
    ]
    left += [
        Action(stage, Kind.RECOMPUTE, i)
        for stage in range(stages)
        for i in range(checkpointed)
        if rng.random() < 0.6
    ]
    entries: list[list[Action]] = [[] for _ in range(lanes)]
    needs = Needs(Schedule(RANDOM, stages, microbatches, (tuple(left),)))
    put_off: list[Action] = []  # weight gradients come in the order of their backwards
    while left:
        ready = [action for action in left if not set(needs.of(action)) & set(left)]
        ready = [
            action
            for action in ready
            if action.kind is not Kind.WEIGHT_GRAD
            or action == next(each for each in put_off if each.stage == action.stage)
        ]
        action = rng.choice(ready)
        left.remove(action)
        if action.kind is Kind.BACKWARD_INPUT:
            put_off.append(replace(action, kind=Kind.WEIGHT_GRAD))
        elif action.kind is Kind.WEIGHT_GRAD:
            put_off.remove(action)
        entries[lane_of[action.stage]].append(action)
    return Schedule(RANDOM, stages, microbatches, tuple(map(tuple, entries)))


def schedule_of(training: Training, microbatches: int, rng: random.Random) -> Schedule:
    """The schedule that a case asks for: a named, a searched or a random one."""
    lanes, stages = training.lanes, training.case.stages
    if training.schedule == RANDOM:
        case = training.case
        again = away(case.checkpoint, microbatches) if case.segments == 1 else 0
        return any_schedule(lanes, stages, microbatches, again, rng)
    if training.schedule == AUTO:
        costs = [StageCost(*(rng.uniform(0.1, 1) for _ in range(3))) for _ in range(stages)]
        return auto(costs, lanes, microbatches)
    return named(training.schedule, lanes=lanes, stages=stages, microbatches=microbatches)


def is_in_order(schedule: Schedule) -> bool:
    """Whether every stage has its forwards in the order of the micro-batches."""
    forwards = [
        (action.stage, action.microbatch)
        for lane in range(len(schedule.lanes))
        for action in schedule.actions(lane)
        if action.kind is Kind.FORWARD
    ]
    return sorted(forwards, key=lambda pair: pair[0]) == sorted(forwards)


@given(trainings())
@settings(
    max_examples=STEPS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_a_step_of_any_program_gives_the_bits_of_the_loop_in_the_order_of_any_schedule(training):
    case, rng = training.case, random.Random(training.seed)
    torch.manual_seed(0)
    model = Program(case)
    x, target = torch.randn(case.batch, CHANNELS, 4, 4), torch.randn(case.batch)
    for parameter in model.parameters():
        parameter.requires_grad_(rng.random() > 0.15)

    def loss_fn(outputs: list[Tensor], target: Tensor) -> Tensor:
        rows = (torch.sin(o).flatten(1).sum(1) for o in outputs[: 1 + training.used])
        return sum((row * target).mean() for row in rows)

    try:
        schedule = schedule_of(training, case.chunks, rng)
    except ValueError:  # there is none of so many micro-batches
        assume(False)
    try:
        loss_fn(copy.deepcopy(model)(x), target).backward()
    except RuntimeError:  # autograd forbids the program, or nothing of it is trained
        assume(False)
    own = copy.deepcopy(model)
    try:
        pipe = fxpipe.compile(
            own,
            case.devices(training.lanes),
            chunks=case.chunks,
            partition=lambda gm: cut_anywhere(gm, case.stages, rng),
            checkpoint=case.checkpoint,
            checkpoint_segments=case.checkpoint_segments,
            schedule=schedule,
            loss_fn=loss_fn,
            example_inputs=(x,),
            tracer="symbolic",
        )
    except fxpipe.PartitionError as error:
        assert "can be cut into" in str(error)
        assume(False)
    with pipe:
        try:
            loss = pipe.step(x, target=target)
        except fxpipe.BatchError as error:  # it is zero whatever the rows are: no mean, and no sum
            assert "could not be found out" in str(error)
            assume(False)
        order = schedule.first(case.batch)  # a small batch has fewer micro-batches
        expected = step_of_loop(model, (x,), target, pipe, order, case.chunks, loss_fn)
    torch.testing.assert_close(loss, expected[0])
    if is_in_order(order):
        assert same(list(own.buffers()), list(model.buffers())), "buffers"
    check_gradients(case, own, expected[1])
