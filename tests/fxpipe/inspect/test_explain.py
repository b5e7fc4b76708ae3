"""What a pipeline says of itself in sentences, and that the calls it suggests do what they say."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.compiler.replanned import Replanned
from fxpipe.ir.graph import COST, stage_nodes
from fxpipe.ir.text import human_time
from fxpipe.planning.lanes import PlannedLanes
from fxpipe.schedule import Schedule, Timeline
from tests.zoo import MLP

TWO, X = ["cpu"] * 2, torch.ones(8, 12)


def layers(count: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def explained(model, example=(X,), devices=TWO, **options):
    """The explanation of a model that has been compiled with an example."""
    with (
        warnings.catch_warnings(),
        fxpipe.compile(model, devices, example_inputs=example, **options) as pipe,
    ):
        return pipe.explain()


def said(explanation, heading):
    """The sentences below a heading, as one text."""
    return " ".join(explanation.paragraphs[heading])


# ----------------------------------------------------------------------------------------- the call


def run_again(call, model, **named):
    """Run the call of a suggestion, as a user would who has these names."""
    return eval(call, {"fxpipe": fxpipe, "model": model, **named})


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": 2},
        {"chunks": 4, "schedule": "1f1b"},
        {"chunks": 4, "checkpoint": "always"},
        {"chunks": 4, "partition": ["1"]},
        {"chunks": 4, "loss_fn": nn.MSELoss(), "memory": "2GiB"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_the_calls_that_are_suggested_run_and_take_what_was_predicted(options):
    model, x = layers(4), torch.randn(16, 64)
    found = explained(model, (x,), **options).suggestions
    assert found, "there is something to gain for each of these"
    for each in found:
        assert 0.05 <= each.saved < 1 and each.seconds < each.before
        with run_again(each.call, model, example_inputs=(x,), loss_fn=nn.MSELoss()) as pipe:
            assert pipe.timeline().makespan == pytest.approx(each.seconds, rel=1e-6)
            assert torch.isfinite(pipe(x)).all()


def test_what_is_suggested_is_said_with_its_gain_and_its_call():
    explanation = explained(layers(4), (torch.randn(16, 64),), chunks=2)
    best, *others = explanation.suggestions
    assert all(best.saved >= other.saved for other in others)
    text = str(explanation)
    assert f"{best.saved:.0%} less" in text and f"pipe = {best.call}" in text
    assert best.call.startswith('fxpipe.compile(model, ["cpu", "cpu"], example_inputs=')
    found = said(explanation, "What would help")
    assert "A schedule acts in pipe.step(input, target=target), which needs loss_fn=" in found


class Recurrent(nn.Module):
    """Its recurrent layer is called with some of its own weights as arguments, which are shared."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.rnn = nn.GRU(5, 16, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["", "which draws random numbers"])
def test_a_module_that_is_called_with_shared_weights_is_predicted_for_other_numbers_of_chunks(
    dropout,
):
    model, x = Recurrent(dropout), torch.randn(32, 6, 5)
    options = {"chunks": 4, "schedule": "1f1b", "partition": ["head"]}
    given = fxpipe.plan(model, ["cpu"] * 2, example_inputs=(x,), **{**options, "chunks": 2})
    with fxpipe.compile(model, TWO, example_inputs=(x,), **options) as pipe:
        (mode, _), compiler = pipe._runner.reported(), pipe._runner.compiler
        compiled = Replanned(compiler.options, compiler.layout, mode, 4)
        assert compiled.with_options(chunks=2).seconds == pytest.approx(given.seconds, rel=0.01)
        costs = [node.meta[COST] for node in stage_nodes(compiled._at(2).graph)]
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    assert sum(cost.param_bytes for cost in costs) == weights


def test_a_pipeline_that_cannot_be_made_faster_is_not_given_advice():
    explanation = explained(layers(1), (torch.randn(4, 64),), ["cpu"], chunks=1)
    assert explanation.suggestions == []
    assert "Nothing that was tried" in said(explanation, "What would help")
    call = 'fxpipe.tune(model, ["cpu"], (input,), measure=3, loss_fn=loss_fn, target=target)'
    assert call in said(explanation, "What would help")


def test_what_does_not_fit_into_the_memory_is_not_suggested():
    x, model = torch.randn(64, 64), layers(4)
    open_ended = explained(model, (x,), chunks=4, checkpoint="always")
    assert any("checkpoint" in each.options for each in open_ended.suggestions)
    with fxpipe.compile(model, TWO, chunks=4, checkpoint="always", example_inputs=(x,)) as pipe:
        limit = max(pipe.timeline().peak_memory) * 1.1
    tight = explained(model, (x,), chunks=4, checkpoint="always", memory=limit)
    assert tight.suggestions
    assert all(max(each.memory) <= limit for each in tight.suggestions)
    assert "of " in said(tight, "What it needs of memory")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_memory_of_a_schedule_that_only_a_step_follows_is_said_to_be_that_of_a_step(schedule):
    explanation = explained(layers(4), (torch.randn(64, 64),), chunks=4, schedule=schedule)
    is_said = "a backward that you run after pipe(x)" in said(
        explanation, "What it needs of memory"
    )
    assert is_said == (schedule == "1f1b")


def test_segments_are_left_out_of_calls_with_other_modes():
    x, model = torch.randn(64, 64), layers(4)
    options = {"chunks": 4, "checkpoint": "always", "checkpoint_segments": [1, 2]}
    explanation = explained(model, (x,), **options)
    kept = "What stages recompute (checkpoint): always, always in 2 segments."
    assert kept in said(explanation, "Where it is cut")
    calls = [each.call for each in explanation.suggestions]
    assert any('checkpoint="auto"' in call for call in calls)
    for call in calls:
        assert ("checkpoint_segments=[1, 2]" in call) == ('checkpoint="always"' in call)
        run_again(call, model, example_inputs=(x,)).close()


def test_a_schedule_of_the_users_own_may_be_replaced_by_a_faster_one():
    slow = Schedule.from_text("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 \n 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    model, x = layers(4), torch.randn(16, 64)
    (best, *_) = explained(model, (x,), schedule=slow).suggestions
    assert best.options["chunks"] == 4, "as many micro-batches as the schedule had"
    with run_again(best.call, model, example_inputs=(x,)) as pipe:
        assert pipe.timeline().makespan == pytest.approx(best.seconds, rel=1e-6)


# ------------------------------------------------------------------------------------ what there is


def test_it_is_said_how_long_compiling_has_taken():
    x, heading = torch.randn(16, 64), "What compiling has taken"
    with fxpipe.compile(layers(2), TWO, example_inputs=(x,)) as pipe:
        first = said(pipe.explain(), heading)
        with torch.no_grad():
            pipe.eval()(x)
        second = said(pipe.explain(), heading)
        seconds = sum(each.seconds for each in pipe.compilations)
    assert first.startswith("1 compilation has taken ")
    assert second.startswith(f"2 compilations have taken {human_time(seconds)} in all")


def test_what_takes_time_after_a_compilation_is_said_beside_it():
    x, y, heading = torch.randn(4, 64), torch.randn(4, 64), "What compiling has taken"
    with fxpipe.compile(layers(2), TWO, chunks=2, loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
        (lowered,) = map(human_time, pipe.compilations.lowered)
        graph = f"1 graph of all micro-batches, with the check of what a loss means, took {lowered}"
        assert f"; {graph}. print(" in said(pipe.explain(), heading)
        pipe.step(x, target=y)  # the 2nd mini-batch is checked
        (checked,) = map(human_time, pipe.compilations.checks)
        later = f"1 check of a later mini-batch took {checked}"
        assert f"; {graph}; {later}. print(" in said(pipe.explain(), heading)
        assert str(pipe.compilations).endswith(f"\n{graph}\n{later}")


def test_before_there_is_a_call_it_says_what_to_call():
    with fxpipe.compile(MLP(), TWO) as pipe:
        text = str(pipe.explain())
        assert "is not compiled yet" in text and "pipe.prepare(x)" in text
        pipe.prepare(X)
        assert "Where the batch is" in str(pipe.explain())


def test_after_a_call_that_was_refused_it_says_why():
    with fxpipe.compile(MLP(), TWO) as pipe:
        with pytest.raises(fxpipe.TraceError):
            pipe(iter([X]))
        text = str(pipe.explain())
        assert "as the last call could not be compiled" in text
        assert "That call ended with Unsupported: the argument x is a list_iterator" in text
        pipe.prepare(X)
        assert "could not be compiled" not in str(pipe.explain())


def test_it_says_where_the_batch_is_and_how_that_is_known():
    found = said(explained(MLP()), "Where the batch is")
    assert found.startswith("A mini-batch of 8 rows is cut into 8 micro-batches: x along dimension")
    assert "The check has found it out" in found
    found = said(explained(MLP(), in_dims=0, chunks=2), "Where the batch is")
    assert "because in_dims says it" in found and "found it out" not in found
    found = said(explained(MLP(), chunks=1), "Where the batch is")
    assert "has not been checked" in found, "there is one micro-batch, so that nothing was run"
    found = said(explained(MLP(), check=False), "Where the batch is")
    assert "With check=False a difference from the model is accepted" in found


def test_inputs_that_all_micro_batches_share_are_named():
    class Scaled(nn.Module):
        def forward(self, x, table):
            return (x @ table).relu()

    example = torch.randn(8, 5), torch.randn(5, 3)
    assert "All of them share table." in said(explained(Scaled(), example), "Where the batch is")


def test_what_is_computed_for_each_micro_batch_anew_is_said_with_its_part_of_the_time():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, image, text):
            return self.text(text) @ self.image(image).T

    example = torch.randn(8, 6), torch.randn(8, 6)
    found = said(explained(Towers(), example, chunks=2), "Where the batch is")
    assert "All of them share image. What depends on that alone takes" in found
    share = int(re.search(r"alone takes (\d+)% of the model's time", found)[1])
    assert 25 < share < 50, "the towers are alike, and the matrix product is beside them"


def test_lists_with_an_element_for_each_row_are_the_batch():
    class Stacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, rows):
            return list(self.last(self.linear(torch.stack(rows))))

    rows = [torch.randn(3) for _ in range(4)]
    explanation = explained(Stacks(), (rows,), chunks=2)
    assert "rows along the list" in said(explanation, "Where the batch is")


def test_it_says_why_symbolic_tracing_was_not_enough():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            return self.last(self.linear(x) if len(x.shape) == 2 and x.size(1) > 1 else x)

    found = said(explained(Branches()), "How it was traced")
    assert "torch.export has traced the model" in found
    assert "symbolic: " in found and "if len(x.shape) == 2 and x.size(1) > 1 else x" in found
    assert "That is nothing to mend: symbolic tracing, which was tried before" in found
    assert "What differs is that nodes are operators, and no layers" in found
    found = said(explained(MLP()), "How it was traced")
    assert "symbolically" in found and "tried before" not in found
    found = said(explained(MLP(), tracer="export"), "How it was traced")
    assert 'because of tracer="export"' in found and "tried before" not in found


def test_correct_code_with_sizes_is_said_to_be_nothing_to_mend():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            _, length, _ = x.shape
            return self.last(torch.ones(length, length).tril() @ self.linear(x))

    explanation = explained(Causal(), (torch.randn(4, 3, 12),), chunks=2)
    found = said(explanation, "How it was traced")
    assert "That is nothing to mend" in found and "symbolic: TypeError: ones() takes 1" in found


def test_a_symbolic_graph_that_is_wrong_is_not_called_usual():
    class Asks(nn.Module):
        """Gives something else where it is traced symbolically."""

        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            return self.last(self.linear(x) * (2 if isinstance(x, fx.Proxy) else 3))

    found = said(explained(Asks()), "How it was traced")
    assert "nothing to mend" not in found
    assert "What was tried before that" in found and "symbolic: " in found


def test_a_reason_is_kept_in_the_cache_on_disk(tmp_path):
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            if x.size(1) < 2:
                return x
            return self.last(self.linear(x))

    first, second = (
        said(explained(Sized(), cache=tmp_path), "How it was traced") for _ in range(2)
    )
    assert "x.size(1) < 2" in first and first == second


class EachStep(nn.Linear):
    """Makes the number of its steps a constant."""

    def forward(self, x, flag=False):
        return super().forward(x) * len([flag] * x.shape[1])


def test_a_size_that_the_model_fixes_is_named_with_its_line_and_what_to_do():
    explanation = explained(EachStep(6, 6), (torch.ones(8, 5, 6),), dynamic=True)
    traced = re.sub(r"\S*/", "", said(explanation, "How it was traced"))
    assert re.search(
        r"Dimension 1 of x has to be 5: test_explain\.py:\d+: return super\(\)", traced
    )
    assert traced.endswith("where sizes vary, pad to few of them, multiples of 64 say.")
    varies = said(explained(layers(2), (torch.ones(8, 5, 64),)), "How it was traced")
    assert "has to be" not in varies and "multiples" not in varies


def test_what_is_kept_whole_is_named_with_the_reason():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(12, 12) for _ in range(3))

        def forward(self, x):
            return self.c(checkpoint(lambda x: self.b(self.a(x).relu()), x, use_reentrant=False))

    found = said(explained(Checkpointed()), "What is kept whole")
    assert "the model checkpoints it; checkpoint smaller parts of it" in found
    assert "Nothing beside" in said(
        explained(layers(4), (torch.ones(8, 64),)), "What is kept whole"
    )


def test_a_layer_that_is_too_large_for_an_even_cut_is_named_as_the_limit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    explanation = explained(model, (torch.ones(8, 4),), costs={"0": 1.0, "1": 6.0, "2": 1.0})
    assert "'_1' (Linear) takes 75% of the time" in said(explanation, "What is kept whole")
    assert "the cut is limited by '_1'" in said(explanation, "What limits the speed")


def test_the_stages_are_named_by_what_is_in_them():
    model, costs = layers(4), {str(i): 1.0 for i in range(4)}
    example = (torch.ones(8, 64),)
    found = said(explained(model, example, partition=["1"], costs=costs), "Where it is cut")
    assert "Stage 0 on cpu, 25% of the time: 0." in found
    assert "Stage 1 on cpu, 75% of the time: 1 to 3." in found
    assert "The cut is yours, by partition=." in found
    assert "The cut is optimal" in said(explained(model, example), "Where it is cut")


def test_what_limits_the_speed_is_given_in_parts_of_the_step():
    seconds = {str(i): 1.0 for i in range(4)}
    explanation = explained(
        layers(4), (torch.ones(8, 64),), chunks=2, costs=seconds, partition=["2"]
    )
    found = said(explanation, "What limits the speed")
    assert "So 2 lanes are 1.33 times as fast as one that runs the same micro-batches." in found, (
        "GPipe: 2 x 2 / (2 + 1)"
    )
    assert "the stages are even." in found
    assert "The bubble: lane 0 waits 33% of the step" in found
    assert "The times of nodes are those of costs=; pipe.measure(...) measures steps" in found


@pytest.mark.parametrize("number", [1, 2])
def test_lanes_that_share_cores_are_predicted_on_those(monkeypatch, number):
    monkeypatch.setattr("fxpipe.inspect.views.cores", lambda: number)
    even = {"costs": {str(i): 1.0 for i in range(4)}, "partition": ["2"]}
    found = said(explained(layers(4), (torch.ones(8, 64),), **even), "What limits the speed")
    # Each of four layers takes a second, forward and backward.
    shared = "But here 2 lanes share 1 core, on which a step takes no less than 4.00 s." in found
    assert shared == (number == 1)


def test_it_is_said_how_long_the_model_takes_without_a_pipeline():
    model, example = layers(8, 512), (torch.ones(512, 512),)
    found = said(explained(model, example, chunks=4), "What limits the speed")
    alone = fxpipe.plan(model, ["cpu"], example_inputs=example, chunks=1).seconds
    took = (
        f"with the mini-batch in one piece, a step would take {human_time(alone)}: the pipeline is "
    )
    assert f"Without a pipeline, on one core and {took}" in found
    tiny = layers(4), (torch.ones(8, 64),)
    found = said(explained(*tiny, chunks=8), "What limits the speed")
    assert ", which is faster." in found, "each micro-batch starts all operators"
    of_given = explained(*tiny, costs={str(i): 1.0 for i in range(4)})
    found = said(of_given, "What limits the speed")
    assert "Without a pipeline" not in found, "these costs do not say it"
    assert "costs say nothing of a mini-batch in one piece" in found
    assert "fxpipe.tune(..., measure=3) measures the model alone, too." in found


def test_a_measured_step_is_said_to_be_slower_than_the_model_alone_is_predicted_to_be():
    model, x = layers(8, 512), torch.ones(512, 512)
    with fxpipe.compile(model, TWO, chunks=4, example_inputs=(x,)) as pipe:
        spans = pipe.timeline().spans
        assert "times as fast." in said(pipe.explain(), "What limits the speed")
        long = (replace(span, start=span.start * 9, end=span.end * 9) for span in spans)
        pipe._views.measured = Timeline("measured", ("a", "b"), tuple(long))
        found = said(pipe.explain(), "What limits the speed")
    assert "as fast, by prediction; but its measured step, below, takes longer than that" in found


def test_the_optimizers_step_is_a_part_of_it_if_the_optimizer_is_known():
    of_named = explained(layers(4), (torch.ones(8, 64),), chunks=2, optimizer="adam")
    assert "The optimizer's step is predicted to take " in said(of_named, "What limits the speed")
    of_none = explained(layers(4), (torch.ones(8, 64),), chunks=2)
    assert "optimizer" not in said(of_none, "What limits the speed")


def test_recomputing_is_given_as_a_part_of_the_step():
    even = {"costs": {str(i): 1.0 for i in range(4)}, "partition": ["2"]}
    explanation = explained(layers(4), (torch.ones(8, 64),), chunks=2, checkpoint="always", **even)
    assert "always" in said(explanation, "Where it is cut")
    # A backward takes as long as two forwards. Stage 0 recomputes one of two micro-batches while
    # it waits for a gradient, so that a step takes as long as 11 forwards, and else it takes 9.
    assert "To recompute activations costs 18%" in said(explanation, "What limits the speed")


def test_a_measured_step_is_said_beside_the_predicted_one():
    with fxpipe.compile(MLP(), TWO, chunks=2, loss_fn=lambda y, _: y.mean()) as pipe:
        pipe.measure(X, rounds=1)
        explanation = pipe.explain()
        found = said(explanation, "What limits the speed")
        assert "times as long as predicted. Its stages work" in found
        assert "2 lanes share cpu: what one of them takes, the others lack" in found
        assert "print(pipe.measure(" not in str(explanation), "that has just been done"
        found = said(explanation, "What would help")
        assert found.startswith("These are predictions from the times of nodes"), "not measured"


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_where_times_of_nodes_are_off_measured_ones_are_advised_if_they_are_estimates(costs):
    with fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,), costs=costs) as pipe:
        slow = Timeline(
            "measured",
            ("a", "b"),
            tuple(
                replace(span, start=100 * span.start, end=100 * span.end)
                for span in pipe.timeline().spans
            ),
        )
        pipe._views.measured = slow
        found = said(pipe.explain(), "What limits the speed")
    assert "100 times as long as predicted" in found
    is_advised = 'chunks=2, costs="measured")' in found
    assert is_advised == (costs == "analytic")
    assert ("The times of nodes were measured, each by itself" in found) == (not is_advised)


def test_where_measured_nodes_took_longer_than_their_stages_they_are_to_be_measured_again():
    with fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,), costs="measured") as pipe:
        spans = pipe.timeline().spans
        short = (replace(span, start=span.start / 100, end=span.end / 100) for span in spans)
        pipe._views.measured = Timeline("measured", ("a", "b"), tuple(short))
        found = said(pipe.explain(), "What limits the speed")
    assert "0.01 times as long" in found and "compile again to measure them again" in found


def test_a_measured_step_of_longer_inputs_is_not_compared():
    short, long = torch.randn(4, 3, 8), torch.randn(4, 300, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with fxpipe.compile(model, TWO, chunks=2, loss_fn=lambda y, _: y.mean()) as pipe:
        pipe.step(short)
        pipe.measure(long, rounds=1)
        found = said(pipe.explain(), "What limits the speed")
        assert "for inputs of [4, 300, 8]. Predictions and the cut are for [4, 3, 8]" in found
        assert "as long as predicted" not in found and "example_inputs=" in found
        pipe.measure(short, rounds=1)
        assert "as long as predicted" in said(pipe.explain(), "What limits the speed")


class ReturnsItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, target):
        return (self.second(self.first(x)) - target).square().mean()


def test_a_target_that_the_model_takes_is_an_input_of_a_measured_step():
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    with fxpipe.compile(ReturnsItsLoss(), TWO, chunks=2) as pipe:
        pipe.step(x, target=target)
        pipe.measure(x, target=target, rounds=1)
        found = said(pipe.explain(), "What limits the speed")
    assert "as long as predicted" in found and "for inputs of" not in found


def test_a_measured_step_of_other_micro_batches_is_not_compared():
    with fxpipe.compile(MLP(), TWO, chunks=2, loss_fn=lambda y, _: y.mean()) as pipe:
        pipe.measure(X[:1], rounds=1)
        pipe(X)
        found = said(pipe.explain(), "What limits the speed")
    assert ", for a mini-batch of 1 micro-batch." in found and "as predicted" not in found


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("deferred", [False, True])
def test_more_micro_batches_are_not_advised_without_a_word_on_batch_norm(tracer, deferred):
    def cautions(model):
        options = {"tracer": tracer, "deferred_batch_norm": deferred}
        found = explained(model, (torch.randn(4, 8, 64, 64),), chunks=1, **options)
        order = [bool(each.caution) for each in found.suggestions]
        assert order == sorted(order), "what changes what is computed comes last"
        text = said(found, "What would help")
        assert all(text.count(each.caution) == 1 for each in found.suggestions if each.caution)
        return {
            each.options["chunks"]: each.caution
            for each in found.suggestions
            if each.caution and f"{each.caution}." in said(found, "What would help")
        }

    found = cautions(Normed())
    assert found, "more micro-batches would help"
    for chunks, caution in found.items():
        rows = 4 // chunks
        assert f"those of {rows} row{'s' * (rows > 1)} in place of 4" in caution
        assert ("one row are hardly those of the data" in caution) == (rows == 1)
    assert not cautions(Normed().eval()), "its statistics are fixed"


def test_a_schedule_that_cannot_run_is_said_to_be_the_reason_for_no_prediction():
    stuck = Schedule.from_text("0F0 0F1 0B0 0B1 \n 1B0 1B1 1F0 1F1")
    explanation = explained(layers(2), (torch.ones(2, 64),), schedule=stuck)
    assert "No step can be predicted" in said(explanation, "What limits the speed")
    assert explanation.suggestions == ()


class Resizing(nn.Module):
    """Its last layer is in the last stage and reads a size of the input: by ``size_of``."""

    def __init__(self, size_of):
        super().__init__()
        self.size_of = size_of
        self.body = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)))

    def forward(self, x):
        return F.interpolate(self.body(x), size=self.size_of(x))


def unpacked(x):
    _, _, height, width = x.shape
    return height, width


@pytest.mark.parametrize(
    "size_of",
    [
        lambda x: x.shape[-2:],
        lambda x: x.shape[2:],
        lambda x: x.size()[2:],
        lambda x: (x.shape[2], x.shape[3]),
        unpacked,
    ],
    ids=["shape[-2:]", "shape[2:]", "size()[2:]", "two sizes", "unpacked"],
)
def test_a_model_that_resizes_to_the_size_of_its_input_is_predicted(size_of):
    with fxpipe.compile(
        Resizing(size_of), TWO, chunks=4, example_inputs=(torch.randn(8, 3, 16, 16),)
    ) as pipe:
        explanation = pipe.explain()
        assert "A training step takes" in said(explanation, "What limits the speed")
        assert any("chunks" in each.options for each in explanation.suggestions)
        (again,) = {each.before for each in explanation.suggestions}
        assert again == pytest.approx(pipe.timeline().makespan), "the same cut, planned again"


def test_where_one_prediction_fails_the_others_are_said(monkeypatch):
    def fails(compiled):
        raise fxpipe.PartitionError("no such cut")

    monkeypatch.setattr(Replanned, "without_checkpoints", fails)
    explanation = explained(layers(4), (torch.ones(8, 64),), chunks=2, checkpoint="always")
    found = said(explanation, "What limits the speed")
    assert "What it costs to recompute activations cannot be predicted: no such cut." in found
    assert "A training step takes" in found and explanation.suggestions


def test_where_no_step_can_be_predicted_a_measured_one_is_said(monkeypatch):
    def fails(compiled):
        raise fxpipe.PartitionError("no such cut")

    monkeypatch.setattr(Replanned, "as_it_is", fails)
    with fxpipe.compile(MLP(), TWO, chunks=2, loss_fn=lambda y, _: y.mean()) as pipe:
        pipe.measure(X, rounds=1)
        found = said(pipe.explain(), "What limits the speed")
    assert "No step can be predicted: no such cut." in found
    assert "Measured, by pipe.measure, it was" in found


def test_a_model_without_a_batch_has_an_explanation():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, scale):
            return self.b(self.a(torch.ones(4))) * scale

    explanation = explained(Constant(), (2.0,))
    assert "No input has a batch dimension" in said(explanation, "Where the batch is")


def test_a_graph_for_one_batch_size_is_explained_by_why_there_is_none_for_any():
    class Loops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.stack([self.b(self.a(row)) for row in x])

    found = said(explained(Loops(), (torch.randn(4, 4),), chunks=2), "How it was traced")
    assert "this batch size only, because for any size there was none" in found
    assert "no front end can trace Loops" in found


def test_the_explanation_is_kept_until_the_pipeline_changes(monkeypatch):
    calls = []
    plan = Replanned.as_it_is
    monkeypatch.setattr(Replanned, "as_it_is", lambda self: calls.append(1) or plan(self))

    def asks(pipe):
        before = len(calls)
        explanation = pipe.explain()
        assert pipe.explain() is explanation
        return len(calls) > before

    with fxpipe.compile(MLP(), TWO, chunks=2, loss_fn=lambda y, _: y.mean()) as pipe:
        pipe(X[:1])
        assert asks(pipe) and not asks(pipe)
        pipe(X[:1])
        assert not asks(pipe), "the same program has run"
        pipe(X)
        assert asks(pipe), "there are two micro-batches"
        pipe.step(X)
        assert asks(pipe), "there has been a step, with what its loss saves"
        pipe.measure(X, rounds=1)
        assert asks(pipe)
        pipe.measure(X, rounds=1)
        assert asks(pipe), "another measurement"
        pipe.recompile()
        pipe(X)
        assert asks(pipe)


def test_schedules_that_place_stages_alike_are_planned_with_one_cut(monkeypatch):
    cuts = []
    cut_up = PlannedLanes.cut_up

    def counted(self, gm, partition, *args):
        cuts.append((self.placement, self.chunks, str(partition)))
        return cut_up(self, gm, partition, *args)

    monkeypatch.setattr(PlannedLanes, "cut_up", counted)
    explained(layers(4), (torch.randn(16, 64),), chunks=2)
    searched = [each for each in cuts if each[2] == "auto"]
    assert len(searched) == len(set(searched)) > 3


def test_lines_fit_the_terminal_but_for_code_and_lines_of_models():
    text = str(explained(MLP(), chunks=2))
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("    "))


class Clicks(nn.Module):
    """Tables of embeddings, of which a batch looks up some rows, and a small network."""

    def __init__(self, sparse):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, 16, sparse=sparse) for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, ids):
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.head(torch.cat(found, 1))


def test_more_micro_batches_are_not_advised_where_each_makes_gradients_of_large_tables():
    ids = torch.zeros(256, 4, dtype=torch.long)
    found = explained(Clicks(sparse=False), (ids,), chunks=2)
    assert all(each.options.get("chunks", 2) <= 2 for each in found.suggestions)
    (single,) = (each for each in found.suggestions if dict(each.options) == {"chunks": 1})
    assert str(single).endswith("less; lanes work one after the other then, as without a pipeline")
    auto = explained(Clicks(sparse=False), (ids,), chunks="auto")
    assert "1 micro-batch," in auto.title


@pytest.mark.parametrize(
    "costs, source",
    [("measured", "were measured"), ({str(i): 1.0 for i in range(4)}, "are those of costs=")],
    ids=["measured", "given"],
)
@pytest.mark.parametrize("training", [True, False])
def test_times_of_one_size_of_micro_batches_are_no_ground_for_advice_on_another(
    costs, source, training
):
    options = {"chunks": 2, "costs": costs, "training": training}
    explanation = explained(layers(4), (torch.randn(16, 64),), **options)
    assert all(each.options.get("chunks", 2) == 2 for each in explanation.suggestions)
    found = said(explanation, "What would help")
    assert f"were not tried, as the times of nodes {source}, for micro-batches of this" in found
    assert ("print(fxpipe.tune(" in found) == training, "which measures steps of some of them"
    assert "other numbers of micro-batches," not in found


@pytest.mark.parametrize(
    "loss_fn, options, said",
    [
        (nn.MSELoss(), {}, "taken for a mean over the rows"),
        (nn.MSELoss(reduction="sum"), {}, "taken for a sum over the rows"),
        (nn.MSELoss(), {"loss_weight": len}, "with the weights that loss_weight gives"),
    ],
    ids=["mean", "sum", "weighted"],
)
def test_it_is_said_how_losses_are_put_together(loss_fn, options, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss_fn, **options) as pipe:
        pipe.step(x, target=x)
        assert said in " ".join(str(pipe.explain()).split())


class Regressor(nn.Module):
    """Returns its loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, target):
        return {"loss": (self.second(self.first(x)) - target).square().mean()}


def test_no_example_of_a_target_is_advised_where_the_model_returns_its_loss():
    x, target = torch.randn(2, 8, 16)
    with fxpipe.compile(Regressor(), TWO, chunks=2) as pipe:
        pipe.measure(x, target=target, rounds=1)
        assert "example_target" not in str(pipe.explain())


def test_predictions_without_the_loss_say_so_until_it_is_known():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x, target = torch.randn(2, 8, 64)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,), loss_fn=nn.MSELoss()) as pipe:
        found = pipe.explain()
        assert said(found, "What limits the speed").count(
            "Time and memory of the loss are in none of these predictions: no target is known when "
            "the model is cut: give example_target."
        )
        saves = "What the loss saves for its backward is not counted there either."
        assert saves in said(found, "What it needs of memory")
        pipe.step(x, target=target)
        found = pipe.explain()
        assert saves not in said(found, "What it needs of memory")
        assert "none of these predictions" not in said(found, "What limits the speed")
        assert "The cut does not count the loss, which" in said(found, "What limits the speed")
    with fxpipe.compile(model, TWO, chunks=2, loss_fn=nn.MSELoss()) as pipe:
        pipe.step(x, target=target)
        assert "The cut does not count the loss" not in str(pipe.explain()), "it had a target"
    given = {"loss_fn": nn.MSELoss(), "example_target": target}
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,), **given) as pipe:
        assert "none of these predictions" not in str(pipe.explain())
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        assert "none of these predictions" not in str(pipe.explain()), "there is no loss"


def test_why_a_loss_is_not_predicted_although_an_example_of_its_target_is_given_is_said():
    def loss_fn(output, target):
        return (output - target)[target > 0].square().mean()  # as many as the values say

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x, target = torch.randn(2, 8, 64)
    given = {"loss_fn": loss_fn, "example_target": target, "loss_weight": lambda t: (t > 0).sum()}
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,), **given) as pipe:
        pipe.measure(x, target=target, rounds=1)
        found = " ".join(str(pipe.explain()).split())
    why = "which the prediction knows nothing: loss_fn does not run on tensors without values: "
    assert why in found
    assert "example_target= lets it be counted" not in found


def test_shares_of_stages_in_the_report_too_and_what_lanes_work_are_the_same_figures():
    """The loss takes about as long as what the last stage has less of the model."""
    model, x = layers(4, 256), torch.randn(64, 256)

    def loss_fn(output, target):
        return sum(F.mse_loss(output.cos().sin(), target + i) for i in range(3))

    options = {"loss_fn": loss_fn, "example_target": torch.zeros(64, 256)}
    explanation = explained(model, (x,), chunks=2, **options)
    cut, speed = said(explanation, "Where it is cut"), said(explanation, "What limits the speed")
    shares = [int(share) for share in re.findall(r"(\d+)% of the time", cut)]
    assert sum(shares) in (99, 100, 101) and re.search(r", of which the loss takes \d+%: ", cut)
    works = re.search(
        r"is predicted to work most, (\S+) .s, and the mean of all is (\S+) .s", speed
    )
    times = 1.0 if works is None else float(works[1]) / float(works[2])
    assert max(shares) / 50 == pytest.approx(times, abs=0.02)
    assert ("wait for it" in speed) == (times >= 1.2)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,), **options) as pipe:
        rows = [line.split("│") for line in pipe.report().splitlines() if line.startswith("│")]
    assert [int(row[4].strip(" %")) for row in rows] == shares
