"""Ranks in processes of their own compute what the lanes of one process do, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.structure import Structure
from fxpipe.schedule import NAMES
from tests.delays import on_ranks
from tests.fxpipe.ranks.jobs import (
    Call,
    Trained,
    checkpointed,
    chosen,
    drawn_behind_steps,
    stepped,
    train,
    train_all,
    train_all_sharing,
    unfit,
)
from tests.models.registry import ENTRIES
from tests.zoo import Chain, Tied, UNet, same

pytestmark = pytest.mark.one_thread  # as each rank has


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The lanes of this process, and the ranks, compute with one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(ranks: Sequence[Trained], lanes: Trained) -> None:
    """All ranks have the losses of the lanes; together they have the gradients and the state, and
    each tensor is of one rank; one rank has the output, if there is one."""
    for rank in ranks:
        assert same(rank.losses, lanes.losses)
    for what in ("grads", "state"):
        found = [dict(getattr(rank, what)) for rank in ranks]
        together: dict[str, Tensor] = {}
        for own in found:
            assert not together.keys() & own.keys()
            together |= own
        expected = getattr(lanes, what)
        assert together.keys() == expected.keys()
        assert [name for name in expected if not same(together[name], expected[name])] == []
    outputs = [rank.output for rank in ranks if rank.output is not None]
    assert len(outputs) == (lanes.output is not None)
    for output in outputs:
        found, expected = (Structure.of(each)[0] for each in (output, lanes.output))
        assert expected and same(found, expected)


def on_both(pool: Any, job: Any, *args: Any, ranks: int = 4, lanes: Any = None, **options: Any):
    """What a job returns on so many ranks, and what it does, or the job ``lanes``, on as many lanes
    of this process meanwhile."""
    results = pool.begin(job, *args, ranks=ranks, **options)
    try:
        here = (lanes or job)(ranks, *args, **options)
    finally:
        found = results()
    return found, here


def images(rows: int, steps: int = 2) -> list[Call]:
    return [Call((torch.randn(rows, 3, 8, 8),), torch.randn(rows)) for _ in range(steps)]


class Skipping(Chain):
    """Eight layers; the output of some skips others, and ranks between."""

    def __init__(self) -> None:
        super().__init__(8, {0: (4, 6), 1: (7,), 2: (3,)})


def rows(count: int) -> list[Call]:
    return [Call((torch.randn(count, 3),), torch.randn(count))]


def test_a_unet_with_a_skip_over_two_stages_uneven_micro_batches_and_an_optimizer_in_the_step(pool):
    """What the first rank's convolution gives goes straight to the last rank, which is given it
    again."""
    calls = images(7)
    cut = ["down.0", "down.1", "up.0"]
    options = {"chunks": 3, "schedule": "1f1b", "in_step": True, "partition": cut}
    assert_same(*on_both(pool, train, UNet, calls, **options))


# A call in eval mode depends on where the stages are, and on nothing else of a schedule.
ONE_OF_EACH_PLACEMENT = {"1f1b", "interleaved_1f1b", "zbv"}


@pytest.mark.parametrize(
    "names",
    [
        sorted(ONE_OF_EACH_PLACEMENT),
        pytest.param(sorted({*NAMES} - ONE_OF_EACH_PLACEMENT), marks=pytest.mark.long),
    ],
    ids=["one of each placement", "the others"],
)
def test_every_schedule_on_four_ranks_also_where_the_network_keeps_nothing(pool, names):
    """Eleven rows in eight micro-batches. In the second step every transmit waits for its receive:
    a program that ends nevertheless needs no memory in the network."""
    calls = rows(11) + rows(11)
    options = [
        {
            "schedule": name,
            "chunks": 8,
            "is_meeting": True,
            "is_evaluated": name in ONE_OF_EACH_PLACEMENT,
        }
        for name in names
    ]
    found, lanes = on_both(pool, train_all, Skipping, calls, options)
    for ranks, expected in zip(zip(*found, strict=True), lanes, strict=True):
        assert_same(ranks, expected)


SHARING = [
    {"schedule": name, "chunks": 4, "is_meeting": True, "is_evaluated": False}
    for name in ("1f1b", "zbv")
]


def test_edges_that_share_a_communicator_carry_the_same_values(pool):
    """A rank with more edges than communicators does all their transfers in the order of the step,
    also where every transmit waits for its receive."""
    calls = rows(7) + rows(7)
    found, lanes = on_both(pool, train_all_sharing, Skipping, calls, SHARING, lanes=train_all)
    for ranks, expected in zip(zip(*found, strict=True), lanes, strict=True):
        assert_same(ranks, expected)


class Drawing(nn.Module):
    """Dropout and batch norm in every stage."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()) for _ in "abcd")
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


CHECKPOINTS = [
    {"checkpoint": "always", "schedule": "1f1b", "chunks": 3},
    {"checkpoint": "except_last", "checkpoint_segments": [1, 2], "schedule": "zb_h1", "chunks": 3},
    {"deferred_batch_norm": True, "chunks": 3, "schedule": "1f1b"},
]


def test_checkpoints_dropout_and_deferred_batch_norm(pool):
    calls = rows(8) * 2
    found, lanes = on_both(pool, train_all, Drawing, calls, CHECKPOINTS, ranks=2)
    for ranks, expected in zip(zip(*found, strict=True), lanes, strict=True):
        assert_same(ranks, expected)


def test_what_a_script_draws_behind_a_step_is_the_same_on_all_ranks(pool):
    """A shuffled loader, or noise: the ranks have to get the same of it."""
    found, lanes = on_both(pool, drawn_behind_steps, Drawing, rows(8) * 2, ranks=3)
    for ranks in found:
        assert same(ranks, lanes)


def test_ranks_that_are_given_other_values_are_refused_and_may_give_none(pool):
    (one,), (other,) = rows(8)[:1], rows(8)[:1]
    absent = Call((None,), one.target)
    said = pool.run(stepped, Drawing, [[one, one], [one, other]], ranks=2)
    for text in said:
        assert text.startswith(
            "rank 0 and rank 1 have been given other values of 'x': all ranks of a pipeline take "
            "the same batch, as from one sampler with one seed"
        ), text
        assert text.endswith("those of 'x' are needed by rank 0")
    assert pool.run(stepped, Drawing, [[one, one], [one, absent]], ranks=2) == ["", ""]


def tanh_layers() -> nn.Module:
    """Layers whose activations take more memory than their parameters."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(3, 3), nn.Tanh())))


def test_checkpoints_that_are_chosen_for_a_limit_of_memory_are_alike_on_all_ranks(pool):
    """With 1F1B the first stage has two micro-batches under way, and the second has one: the
    limit lets the second one keep its activations."""
    calls = rows(1024) * 2
    options = {"chunks": 4, "schedule": "1f1b", "partition": ["12"]}
    x = (calls[0].args[0].to("meta"),)
    kept = fxpipe.plan(tanh_layers().to("meta"), ["cpu"] * 2, example_inputs=x, **options)
    options |= {"checkpoint": "auto", "memory": int(sum(kept.memory) / 2)}

    chosen = pool.run(checkpointed, tanh_layers, calls[0], ranks=2, **options)
    assert chosen == [{0: {True}, 1: {False}}] * 2
    assert_same(*on_both(pool, train, tanh_layers, calls, ranks=2, **options))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("modes", [["offload", "always"], ["selective", "offload"]])
def test_ranks_keep_and_bring_back_activations_as_lanes_do(pool, modes):
    options = {"chunks": 4, "schedule": "gpipe", "checkpoint": modes}
    assert_same(*on_both(pool, train, tanh_layers, rows(1024) * 2, ranks=2, **options))


class Structured(nn.Module):
    """Dicts, tuples, None and numbers go from stage to stage, and some values get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.c, self.d = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        first = self.a(x)
        seen = {"rank": first.argmax(1), "hidden": (first, None), "size": 2.5}
        second = self.b(first) * seen["size"] + seen["rank"][:, None]
        third = self.c(second.detach()) + seen["hidden"][0]
        return {"out": self.d(third), "rank": seen["rank"], "nothing": seen["hidden"][1]}


def loss_of_structured(output: dict[str, Any], target: dict[str, Tensor]) -> Tensor:
    return (torch.sin(output["out"]).sum(1) * target["y"]).mean()


def test_dicts_nones_and_values_without_gradients(pool):
    calls = [Call((torch.randn(6, 3),), {"y": torch.randn(6)})] * 2
    options = {"loss_fn": loss_of_structured, "chunks": 3, "schedule": "1f1b"}
    assert_same(*on_both(pool, train, Structured, calls, **options))


def test_tied_weights_travel_once_and_are_trained_on_one_rank(pool):
    calls = [Call((torch.randint(11, (5, 4)),), torch.randn(5)) for _ in range(2)]
    options = {"chunks": 3, "schedule": "1f1b", "partition": ["other"]}
    assert_same(*on_both(pool, train, Tied, calls, ranks=2, **options))


def built(name: str) -> nn.Module:
    """A model of the zoo."""
    return next(entry for entry in ENTRIES if entry.name == name).build()


@pytest.mark.parametrize(
    ("name", "is_evaluated"),
    [
        ("GPT2LMHeadModel", False),
        pytest.param("GPT2LMHeadModel", True, marks=pytest.mark.long),
        pytest.param("T5ForConditionalGeneration", False, marks=pytest.mark.long),
        pytest.param("LlamaForCausalLM", False, marks=pytest.mark.long),
        pytest.param("MixtralForCausalLM", False, marks=pytest.mark.long),
    ],
)
def test_models_of_transformers(pool, name, is_evaluated):
    entry = next(entry for entry in ENTRIES if entry.name == name)
    inputs = entry.inputs(4)
    if "labels" not in inputs:
        inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
        inputs.pop("decoder_input_ids", None)
    calls = [Call(kwargs=inputs)] * 2
    options = {"loss_fn": None, "chunks": 2, "schedule": "1f1b", "check": "warn", **entry.options}
    options["is_evaluated"] = is_evaluated
    make = functools.partial(built, name)
    assert_same(*on_both(pool, train, make, calls, ranks=2, **options))


# ------------------------------------------------------------------------------ what is left open


def tanhs():
    return nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(8)))


@pytest.mark.parametrize("left", [{"schedule": "auto"}, {"schedule": "1f1b", "chunks": "auto"}])
def test_ranks_take_one_choice_and_train_as_lanes_to_which_it_is_given(pool, left):
    call = Call((torch.randn(16, 48),), torch.randn(16))
    found = pool.run(chosen, tanhs, call, ranks=2, **left)
    choices = [choice for choice, _ in found]
    assert choices[0].chunks > 0 and choices == choices[:1] * 2
    names = ("schedule", "chunks", "partition")
    given = {name: getattr(choices[0], name) for name in names}
    assert left["schedule"] in ("auto", choices[0].name)
    _, lanes = chosen(2, tanhs, call, **given)
    assert_same([trained for _, trained in found], lanes)


def test_where_nothing_fits_all_ranks_say_so(pool):
    x = torch.randn(16, 48)
    first, second = pool.run(unfit, tanhs, x, ranks=2, schedule="auto", memory="1KiB")
    assert first.startswith("DoesNotFit: the model does not fit into the devices' memory")
    assert second.startswith("RankError: rank 0 failed: DoesNotFit: ")


@pytest.mark.parametrize(("name", "schedule"), [("U-Net", "1f1b"), ("tied", "zb_h1")])
def test_whichever_rank_is_slow_the_bits_are_the_same(pool, name, schedule):
    assert on_ranks(pool, name, schedule, range(3)) == []
