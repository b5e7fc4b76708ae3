"""What a user leaves open is chosen by prediction, and then compiled as if it had been given."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.planning.search import Choice
from fxpipe.schedule import ALL_FORWARDS, AUTO, NAMES, Schedule
from passes.partition.problem import PartitionError
from tests.zoo import same

TWO = ["cpu", "cpu"]


def made(depth=8, width=48):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))


X, Y = torch.randn(16, 48), torch.randn(16, 48)


def loop(model, x, y, chunks):
    """The gradients of a loop over micro-batches, in their order."""
    for part, target in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
        loss = nn.functional.mse_loss(model(part), target) * len(part) / len(x)
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def tuned(model, x, **options):
    """The trials of a tuning, of which those of named schedules are all that there are."""
    return fxpipe.tune(model, TWO, (x,), progress=False, checkpoint="never", **options)


def chosen(pipe):
    return pipe._runner.options.choice


@pytest.mark.one_in(2)
@pytest.mark.parametrize("given", [{}, {"chunks": 4}, {"stages": 4}, {"chunks": "auto"}])
def test_it_is_as_fast_as_the_best_that_tune_finds(given):
    number = given.get("chunks")
    own = {"chunks": [number]} if isinstance(number, int) else {}
    best = tuned(made(), X, stages=[given.get("stages")], **own).best
    options = {"schedule": "auto", "loss_fn": nn.functional.mse_loss, "example_inputs": (X,)}
    with fxpipe.compile(made(), TWO, **options, **given) as pipe:
        choice = chosen(pipe)
        assert choice.seconds <= best.seconds * (1 + 1e-9)
        assert choice.name in (*NAMES, AUTO)
        assert len(pipe.stages) == choice.stages == given.get("stages", choice.stages)
        assert pipe.chunks == choice.chunks == own.get("chunks", [choice.chunks])[0]
        assert pipe.timeline().makespan == pytest.approx(choice.seconds)
        nodes = {node.name: node for node in pipe.model_graph.graph.nodes}
        cut = {name: nodes[name].meta["stage"] for name in choice.partition}
        assert cut == choice.partition


def test_without_a_loss_there_are_no_steps_to_choose_an_order_for():
    """A backward of the user's own comes after all forwards, whatever the schedule."""
    with fxpipe.compile(made(), TWO, schedule="auto", example_inputs=(X,)) as pipe:
        assert chosen(pipe).name in ALL_FORWARDS

    class OwnLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = made()

        def forward(self, x):
            return self.net(x).square().mean()

    with fxpipe.compile(OwnLoss(), TWO, schedule="auto", chunks=8, example_inputs=(X,)) as pipe:
        assert chosen(pipe).name not in ALL_FORWARDS


def test_the_number_for_a_named_schedule_is_the_best_that_tune_finds():
    best = tuned(made(), X, schedules=["1f1b"]).best
    options = {"schedule": "1f1b", "chunks": "auto", "example_inputs": (X,)}
    with fxpipe.compile(made(), TWO, **options) as pipe:
        assert pipe.chunks == best.options["chunks"]
        assert chosen(pipe).seconds == best.seconds
        assert chosen(pipe).name == "1f1b"


@pytest.mark.parametrize("rows", [16, 7, 1])
def test_what_is_chosen_trains_like_a_loop_over_its_micro_batches(rows):
    x, y = torch.randn(rows, 48), torch.randn(rows, 48)
    options = {"schedule": "auto", "loss_fn": nn.functional.mse_loss, "example_inputs": (X,)}
    model = made()
    with fxpipe.compile(model, TWO, **options) as pipe:
        pipe.step(x, target=y)
        chunks = pipe.chunks
        assert chunks == min(rows, chosen(pipe).chunks)
    expected = loop(made(), x, y, chunks)
    order = pipe._runner.options.schedule
    order = order if isinstance(order, str) else order.name
    found = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with fxpipe.compile(
        made(),
        TWO,
        schedule=pipe._runner.options.schedule,
        chunks=chosen(pipe).chunks,
        partition=chosen(pipe).partition,
        loss_fn=nn.functional.mse_loss,
    ) as said:
        said.step(x, target=y)
        same_bits = [parameter.grad for parameter in said.parameters()]
    assert all(map(torch.equal, found, same_bits))


def test_a_first_batch_of_one_row_decides_nothing_for_larger_ones():
    with fxpipe.compile(made(), TWO, schedule="auto", example_inputs=(X[:1],)) as pipe:
        assert pipe.chunks == 1
        pipe(X)
        assert pipe.chunks == 4 * len(pipe.stages) or pipe.chunks == 16
        assert not isinstance(pipe._runner.options.schedule, Schedule)


def test_it_is_chosen_at_the_first_call_and_stays():
    with fxpipe.compile(made(), TWO, schedule="auto", loss_fn=nn.functional.mse_loss) as pipe:
        assert chosen(pipe) is None
        pipe.step(X, target=Y)
        first = chosen(pipe)
        pipe.eval()
        pipe(X[:5])
        pipe.train()
        pipe.step(torch.cat([X, X]), target=torch.cat([Y, Y]))
        assert chosen(pipe) is first
        assert pipe.chunks == first.chunks


def test_a_first_call_that_fails_decides_nothing():
    with fxpipe.compile(made(), TWO, schedule="auto") as pipe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            pipe(torch.randn(16, 3))
        assert chosen(pipe) is None
        pipe(X)
        assert isinstance(chosen(pipe), Choice)


def test_a_number_that_is_given_is_kept_where_the_first_batch_has_fewer_rows():
    options = {"schedule": "auto", "chunks": 8, "example_inputs": (X[:4],)}
    with fxpipe.compile(made(), TWO, **options) as pipe:
        assert pipe.chunks == 4
        pipe(X)
        assert pipe.chunks == 8


def test_a_cut_that_is_given_is_kept():
    options = {"schedule": "auto", "partition": ["5"], "example_inputs": (X,)}
    with fxpipe.compile(made(), TWO, **options) as pipe:
        assert [stage.contains for stage in pipe.stages] == ["0 to 4", "5 to 7"]
        assert chosen(pipe).stages == 2
        assert "the cut is" not in str(pipe.report()), "nothing was searched for"


@pytest.mark.parametrize("left", [{"schedule": "auto"}, {"chunks": "auto"}])
def test_a_cut_that_is_given_and_fits_with_nothing_is_warned_of_and_kept(left):
    options = {"partition": ["5"], "memory": "1KiB", "example_inputs": (X,), **left}
    with pytest.warns(UserWarning, match="predicted not to fit"):
        pipe = fxpipe.compile(made(), TWO, **options)
    with pipe:
        assert "nothing has been chosen by prediction: the cut that is given" in str(pipe.report())
        assert [stage.contains for stage in pipe.stages] == ["0 to 4", "5 to 7"]


def test_a_model_that_cannot_be_cut_as_asked_is_refused_as_ever():
    for left in ({"schedule": "auto"}, {"chunks": "auto"}, {}):
        with pytest.raises(PartitionError, match="nope") as error:
            fxpipe.compile(made(), TWO, partition=["nope"], example_inputs=(X,), **left)
        assert not isinstance(error.value, fxpipe.DoesNotFit)


def test_there_is_no_advice_against_what_is_predicted_to_be_fastest():
    small = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
    with fxpipe.compile(small, TWO, chunks="auto", example_inputs=(X,)) as pipe:
        assert pipe.chunks < 8
        assert "advice: with chunks=" not in str(pipe.report())


@pytest.mark.covering(1)
@pytest.mark.parametrize("costs", ["analytic", "measured"])
@pytest.mark.parametrize("left", [{"schedule": "auto"}, {"schedule": "zbv", "chunks": "auto"}])
def test_a_plan_is_of_what_would_be_chosen(left, costs):
    devices, schedules = ["h100"] * 2, None if left["schedule"] == AUTO else [left["schedule"]]
    best = fxpipe.tune(
        made(), devices, (X,), schedules=schedules, checkpoint="never", progress=False
    ).best
    plan = fxpipe.plan(made(), devices, example_inputs=(X,), costs=costs, **left)
    assert plan.chunks == best.options["chunks"]
    assert plan.schedule.name in (best.options["schedule"], AUTO)
    if costs == "analytic":
        assert plan.seconds <= best.seconds * (1 + 1e-9)


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_the_report_says_that_a_choice_is_made_with_estimated_times(costs):
    options = {"schedule": "zbv", "chunks": "auto", "costs": costs, "example_inputs": (X,)}
    with fxpipe.compile(made(4), TWO, **options) as pipe:
        assert ("these times are estimated" in str(pipe.report())) == (costs == "measured")


def test_of_outputs_alone_the_number_of_micro_batches_is_chosen():
    wide, rows = (nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), torch.randn(512, 256))
    seconds = {}
    options = {"example_inputs": (rows,), "training": False}
    for chunks in (1, 2, 4, 8, 16):
        seconds[chunks] = fxpipe.plan(wide, ["h100"] * 2, chunks=chunks, **options).seconds
    best = fxpipe.plan(wide, ["h100"] * 2, chunks="auto", **options)
    assert best.seconds == min(seconds.values()) and seconds[best.chunks] == best.seconds
    with fxpipe.compile(wide, TWO, chunks="auto", training=False, example_inputs=(rows,)) as pipe:
        parts = rows.tensor_split(chosen(pipe).chunks)
        assert torch.equal(pipe(rows), torch.cat([wide(part) for part in parts]))
        assert " a call\n" in str(pipe.report()) and "gpipe" not in str(pipe.report())
    with pytest.raises(ValueError, match="no backwards to be put in order"):
        fxpipe.compile(wide, TWO, schedule="auto", training=False)


def test_the_report_says_what_has_been_chosen_and_what_others_would_take():
    with fxpipe.compile(made(), TWO, schedule="auto", example_inputs=(X,)) as pipe:
        choice, report = chosen(pipe), str(pipe.report())
        assert all(line in report for line in choice.lines)
        assert "chosen by prediction, for a mini-batch of 16 rows: " in report
        assert f"chosen: {choice}" in repr(pipe)
        assert len(choice.others) >= 2


def test_without_anything_left_open_nothing_is_chosen():
    with fxpipe.compile(made(), TWO, example_inputs=(X,)) as pipe:
        assert chosen(pipe) is None
        assert pipe.chunks == 8, "four for each stage"
        assert "chosen by prediction" not in str(pipe.report())
    for chunks in (None, "auto"):
        order = fxpipe.schedule.named("1f1b", lanes=2, microbatches=6)
        with fxpipe.compile(made(), TWO, schedule=order, chunks=chunks) as pipe:
            pipe(X)
            assert pipe.chunks == 6, "a Schedule says it"
            assert chosen(pipe) is None


def test_what_is_chosen_fits_the_memory_that_is_given():
    rows = torch.randn(256, 48)
    options = {"schedule": "auto", "chunks": 4, "stages": 2, "optimizer": "sgd"}
    options |= {"checkpoint": "auto", "example_inputs": (rows,)}
    with fxpipe.compile(made(), TWO, **options) as pipe:
        free = pipe.timeline().peak_memory
    limit = 0.8 * max(free)
    with fxpipe.compile(made(), TWO, memory=limit, **options) as pipe:
        assert max(pipe.timeline().peak_memory) <= limit * (1 + 1e-9)
    with pytest.raises(fxpipe.DoesNotFit, match=r"and has 1\.0 KiB"):
        fxpipe.compile(made(), TWO, memory="1KiB", **options)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_has_what_has_been_chosen(way):
    with fxpipe.compile(made(), TWO, schedule="auto", example_inputs=(X,)) as pipe:
        output = pipe(X)
        with way(pipe) as twin:
            assert same(twin(X), output)
            assert chosen(twin) == chosen(pipe)
            assert twin.chunks == pipe.chunks


def test_choosing_changes_neither_the_model_nor_the_random_state():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
            self.norm, self.dropout = nn.BatchNorm1d(48), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.norm(self.layers(x)))

    model = Noisy()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    with fxpipe.compile(model, TWO, schedule="auto", example_inputs=(X,)):
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_where_nothing_can_be_predicted_the_usual_is_taken_and_the_report_says_why():
    class OfLists(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, images):
            return self.second(torch.relu(self.first(torch.stack(images))))

    images = [torch.randn(4) for _ in range(8)]
    options = {"schedule": "auto", "in_dims": {"images": "list"}, "example_inputs": (images,)}
    with fxpipe.compile(OfLists(), TWO, **options) as pipe:
        assert pipe.chunks == 8
        assert "nothing has been chosen by prediction: no plan can be made for" in str(
            pipe.report()
        )


def test_costs_that_are_given_leave_the_number_as_usual():
    costs = {f"{i}": 1.0 for i in range(8)}
    options = {"schedule": "auto", "costs": costs, "example_inputs": (X,)}
    with fxpipe.compile(made(), TWO, **options) as pipe:
        assert pipe.chunks == 8
        assert chosen(pipe).name != "gpipe"


def test_a_loss_that_is_no_mean_is_warned_of_with_the_chosen_number_too():
    def spread(output, target):
        return (output - target).std()

    model, x = made(width=128), torch.randn(512, 128)
    with fxpipe.compile(model, TWO, schedule="auto", loss_fn=spread, example_inputs=(x,)) as pipe:
        assert pipe.chunks > 1
        with pytest.warns(fxpipe.BatchWarning, match="neither a mean over the rows nor a sum"):
            pipe.step(x, target=x)


@pytest.mark.parametrize("given", ["many", 0, 1.5])
def test_a_number_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=r'chunks is .*: give "auto", or the number'):
        fxpipe.compile(made(), TWO, chunks=given)
