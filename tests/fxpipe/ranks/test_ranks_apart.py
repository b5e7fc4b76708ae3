"""Ranks that fail, differ, or are asked for what they have not, say so; none waits for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fxpipe.schedule import named
from tests.fxpipe.ranks import jobs
from tests.fxpipe.ranks.jobs import Call
from tests.zoo import Chain, mean_loss, same


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """This process computes with one thread, like each rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def four() -> Chain:
    return Chain(4)


X = torch.randn(8, 3)


@pytest.mark.parametrize("training", [True, False])
def test_the_output_is_on_the_last_rank_or_everywhere(pool, training):
    model = jobs.made(four)
    expected = torch.cat([model(part) for part in X.tensor_split(2)]).detach()
    found = pool.run(jobs.outputs, four, X, chunks=2, training=training)
    assert [last for last, _ in found[:-1]] == [None] * 3 and same(found[-1][0], expected)
    assert all(same(everywhere, expected) for _, everywhere in found)


def test_a_backward_from_an_output_without_training_is_refused_on_every_rank(pool):
    said = pool.run(jobs.said_to_a_backward, four, X, chunks=2, training=False)
    assert len(said) == 4 and all("was compiled with training=False" in each for each in said)


def test_what_ranks_do_not_do_is_refused(pool):
    said = pool.run(jobs.refusals, four, X)
    assert said[0] == said[3]
    gradients, parameters, pickle, backend = said[0]
    assert "RuntimeError" in gradients and "train with pipe.step(x, target=y)" in gradients
    assert "NotYet" in parameters and "give example_inputs to compile()" in parameters
    assert "TypeError: a pipeline of several ranks cannot be pickled" in pickle
    assert "NotImplementedError: stage_backend is not supported for ranks" in backend


def test_a_scaler_needs_an_optimizer_in_the_step_and_the_same_state_on_all_ranks(pool):
    found = pool.run(jobs.scalers_apart, Call((X,), torch.randn(8)), ranks=2)
    for alone, apart in found:
        assert alone.startswith("ValueError: a scaler is given without an optimizer")
        assert apart.startswith("RankError: the scalers of the ranks are in different states")
        assert "rank 0 has {'scale': 8.0" in apart and "rank 1 has {'scale': 16.0" in apart


def test_a_step_of_ranks_is_measured_with_a_lane_for_each(pool):
    call = Call((X,), torch.randn(8))
    found = pool.run(jobs.timelines, four, call)
    assert all(is_same for _, is_same in found)
    timelines = [timeline for timeline, _ in found]
    assert all(timeline == timelines[0] for timeline in timelines)
    assert timelines[0].lanes == tuple(f"lane {rank} · cpu" for rank in range(4))
    for lane in range(4):
        spans = [span for span in timelines[0].of_lane(lane) if span.action is not None]
        order = [str(span.action) for span in spans]
        assert order == list(map(str, named("1f1b", lanes=4, microbatches=3).actions(lane)))
        assert all(a.end <= b.start for a, b in pairwise(spans))


def test_each_rank_loads_its_own_part_of_the_models_state(pool):
    torch.manual_seed(3)
    model = Chain(4)
    found = pool.run(jobs.loaded, four, X, model.state_dict())
    expected = torch.cat([model(part) for part in X.tensor_split(8)]).detach()
    for (output, said), name in zip(found, "abcd", strict=True):
        assert same(output, expected)
        assert f"the checkpoint lacks ['{name}.weight', '{name}.bias']" in said


@pytest.mark.parametrize("where", ["a forward", "c forward", "b backward", "d backward"])
def test_a_rank_that_fails_ends_the_step_on_all_ranks_which_can_go_on(pool, where):
    call = Call((X,), torch.randn(8))
    partition = ["b", "c", "d"]
    found = pool.run(jobs.breaking, where, call, chunks=4, schedule="1f1b", partition=partition)
    failed = "abcd".index(where[0])
    for rank, (before, said, after) in enumerate(found):
        assert same(before, after)
        if rank == failed:
            assert said.startswith("ValueError: it is broken")
        else:
            assert said.startswith(f"RankError: rank {failed} failed: ValueError: it is broken")
            assert f"stage {failed}, micro-batch" in said


def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it_as_long_as_their_group_does(pool):
    call = Call((X,), torch.randn(8))
    said = pool.run(jobs.hanging, "b forward", call, timeout=5.0)
    for rank in 0, 2, 3:  # rank 3 waits for rank 2, which is not to blame
        assert said[rank].startswith("LostRank: rank 1 hangs or has ended"), said
        waited = "rank 2 has lost rank 1 at forward_s1_mb0 (stage 1, micro-batch 0), "
        assert f"{waited}transfer 0 of the edge (1, 2)" in said[rank]


def test_an_answer_that_comes_when_a_rank_has_just_stopped_waiting_is_taken(pool):
    assert pool.run(jobs.just_in_time, ranks=2) == ["here"] * 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "kind, message",
    [
        ("model", "have not compiled the same: they differ in their parameters and buffers"),
        ("options", "have not compiled the same: they differ in their options"),
        ("batch", "the ranks have come to different places"),
        ("batch", "is one of them in another mode than the others (train or eval, autocast"),
        ("shapes", "have traced the model with other shapes or dtypes of the tensors between"),
        ("error", "rank 1 failed: ValueError: not here"),
    ],
)
def test_ranks_that_do_not_do_the_same_all_say_so(pool, kind, message):
    said = pool.run(jobs.apart, kind)
    for rank, each in enumerate(said):
        if kind == "shapes":  # of the model on rank 1
            other = 0 if rank == 1 else 1
            assert each.startswith(f"RankError: rank {rank} and rank {other} have traced"), each
        if (kind, rank) == ("error", 1):
            assert each.startswith("ValueError: not here")
        else:
            assert message in each


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_meta", [False, True])
def test_inputs_are_given_to_the_ranks_that_need_their_values_only(pool, is_meta):
    call = Call((X,), torch.randn(8))
    options = {"chunks": 2, "schedule": "1f1b", "partition": ["b", "c", "d"]}
    found = pool.run(jobs.without_inputs, four, call, is_meta, **options)
    with jobs.compiled(4, four, mean_loss, **options) as pipe:
        losses = [pipe.step(X[:n], target=call.target[:n]) for n in (8, 8, 3)]
        expected = {n: p.grad for n, p in pipe.named_parameters()}
        with torch.no_grad():
            output = pipe(X)
    assert all(same(rank[0], losses) and same(rank[2], output) for rank in found)
    assert same({n: grad for rank in found for n, grad in rank[1].items()}, expected)
    needed = "The inputs are needed by these ranks: x: rank 0; target_0: rank 3"
    assert all(needed in said for *_, said in found)
    assert found[3][3].startswith("ValueError: rank 3 has been given no values for 'target_0'")


def test_labels_that_are_left_out_are_told_of_by_the_rank_that_has_them(pool):
    """The others have none: a check, for which all ranks have to meet, would never end."""
    options = {"chunks": 2, "schedule": "1f1b", "partition": ["b", "c", "d"]}
    *others, (first, second, third) = pool.run(jobs.told_of_labels, four, X, **options)
    assert not any(map(any, others)) and not first and not third
    (text,) = second
    assert text.startswith("micro-batches have unequal shares of labels that the loss leaves out")


def test_no_backward_of_a_call_is_advised_as_ranks_have_none(pool):
    options = {"loss_fn": jobs.contrastive_loss, "chunks": 2, "partition": ["b", "c", "d"]}
    *_, last = pool.run(jobs.told_of_loss, four, X, **options)
    (text,) = last
    assert text.startswith("the loss is neither a mean over the rows nor a sum")
    assert text.endswith("give chunks=1") and "pipe(x)" not in text


def test_a_hook_that_changes_a_parameter_between_micro_batches_ends_the_step_on_all_ranks(pool):
    options = {"chunks": 4, "schedule": "1f1b", "partition": ["b", "c", "d"]}
    said = pool.run(jobs.said_to_an_optimizer_in_hooks, four, Call((X,), torch.randn(8)), **options)
    for each in said:
        assert "a hook on the parameter 'd." in each and "while micro-batches" in each
        assert "give pipe.step(optimizer=...)" in each and "pipe(x)" not in each
