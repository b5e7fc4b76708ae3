"""What travels for a transfer, and in which order."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.fxpipe.ranks import jobs
from tests.zoo import Chain, same

SMALL, LARGE = torch.ones(3), torch.arange(40_000.0)
_count = itertools.count()


@pytest.fixture(params=[False, True], ids=["", "rendezvous"])
def sent(pool, request):
    """Sends the messages of each run; what arrives is what was sent."""

    def sent(runs, sizes=()):
        job = jobs.messages_that_meet if request.param else jobs.messages
        there, here = pool.run(job, f"messages {next(_count)}", runs, sizes, ranks=2)
        for got, values in zip(here, runs, strict=True):
            assert isinstance(got, str) or same(got, values)
        return there, here

    return sent


def test_nothing_travels_ahead_of_a_tensor_whose_size_follows_from_shapes(sent):
    there, _ = sent([[LARGE], [LARGE]], sizes=[(160_000,)])
    assert there == [["tensor", "header", "text"], ["tensor", "header"]]


def test_small_tensors_of_known_sizes_travel_in_the_header(sent):
    values = SMALL, LARGE, 2 * SMALL, torch.empty(0)
    there, _ = sent([[values], [values], [values]], sizes=[(12, 160_000, 12, 0)])
    assert there == [["tensor", "header", "text"], ["tensor", "header"], ["tensor", "header"]]


def test_a_header_travels_ahead_only_once_where_sizes_stay_the_same(sent):
    there, _ = sent([[LARGE, SMALL], [LARGE, SMALL]])
    assert there[0] == ["header", "text", "rest"] * 2
    assert there[1] == ["tensor", "header", "header"]


def test_the_header_says_that_a_gradient_is_missing(sent):
    there, _ = sent([[LARGE, LARGE], [None, LARGE], [LARGE, LARGE]], sizes=[(160_000,), (160_000,)])
    assert there[1] == ["tensor", "header", "text", "tensor", "header"]
    assert there[2] == ["header", "rest", "tensor", "header"]


def test_sizes_that_follow_from_values_travel_ahead(sent):
    lengths = 40_000, 50_000, 35_000, 60_000, 0, 90_000
    there, _ = sent([[torch.ones(length), SMALL] for length in lengths], sizes=[(160_000,), (12,)])
    ahead = [order[0] == "header" for order in there]
    assert ahead == [False, False, True, True, True, True]


def test_a_rank_that_fails_leaves_nothing_on_the_way(sent):
    """The other rank expects tensors: they are sent, and dropped. Its next run gets its own."""
    broken = [SMALL, ValueError("it is broken"), LARGE]
    runs = [[SMALL, LARGE, LARGE], broken, [LARGE[:35_000], LARGE, LARGE]]
    there, here = sent(runs, sizes=[(12,), (160_000,), None])
    assert there[1] == "ValueError: it is broken"
    assert here[1] == "RankError: rank 0 failed: ValueError: it is broken"
    assert there[2] == ["header", "text", "rest", *["tensor", "header"] * 2]


ALONE = (torch.arange(40_000.0).view(200, 200),)


def test_a_tensor_that_is_known_from_the_run_before_travels_alone(sent):
    there, _ = sent([[ALONE, (torch.ones(8),)]] * 3, sizes=[(160_000,), (32,)])
    assert there[0] == ["tensor", "header", "text", "header", "text"]
    assert there[1:] == [["tensor", "tensor"]] * 2


@pytest.mark.parametrize(
    "other",
    [
        None,
        ALONE[0],
        (ALONE[0][:180],),
        (ALONE[0].T,),
        (ALONE[0].int(),),
        (torch._neg_view(ALONE[0]),),
        (ALONE[0].clone().requires_grad_(),),
        (*ALONE, SMALL),
    ],
    ids=["missing", "bare", "fewer", "strides", "dtype", "negated", "gradient", "two"],
)
def test_what_comes_in_place_of_a_tensor_that_was_to_travel_alone(sent, other):
    """The receiver waits for the tensor: it gets a mark in its place, and a header behind it."""
    there, here = sent([[ALONE], [ALONE], [other, ALONE], [ALONE], [other]], sizes=[(160_000,)])
    assert there[1] == ["tensor"]
    assert there[2][:2] == ["tensor", "late header"]
    if other is not None and not torch.is_tensor(other):
        (got, *_), (meant, *_) = here[2][0], other
        assert got.stride() == meant.stride()
        assert got.requires_grad == meant.requires_grad


def test_a_rank_that_fails_in_place_of_a_tensor_that_was_to_travel_alone(sent):
    broken = [ALONE, ValueError("it is broken"), ALONE]
    there, here = sent([[ALONE] * 3, [ALONE] * 3, broken, [ALONE] * 3])
    assert there[2] == "ValueError: it is broken"
    assert here[2] == "RankError: rank 0 failed: ValueError: it is broken"
    assert there[1] == there[3] == ["tensor"] * 3


def two():
    return Chain(2)


def test_shapes_of_values_and_gradients_are_known_in_the_first_step_of_any_number_of_rows(pool):
    """The model is traced with eight rows. Of seven rows three micro-batches have two, and one has
    one. The loss goes to the first rank, too: its dtype is known when it has been there once."""
    calls = [jobs.Call((torch.randn(count, 3),), torch.randn(count)) for count in (8, 7, 7)]
    options = {"chunks": 4, "partition": ["b"]}
    first, last = pool.run(jobs.sent_in_steps, two, calls, ranks=2, **options)
    described, known = ["header", "text"], ["header"]  # a few rows travel in the header itself
    assert first == [
        [*described, *known * 3],
        [*known * 3, *described],  # one row has other strides than two, which are described once
        known * 4,
    ]
    losses = ["rest"] * 5  # the mean, and those of the micro-batches
    assert last == [
        [*described, *known * 3, *described, *losses],
        [*known * 3, *described, "header", *losses],  # so have their gradients
        known * 5,
    ]
