"""What a loss saves for its backward is part of the memory that decides where a model is cut, and
its time is part of that of the last stage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir.devices import CPU_CORE
from fxpipe.trace.errors import source_line
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta

CLASSES = 512


class Language(nn.Module):
    """A model whose loss keeps as much as all of its layers: the logits are wide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens):
        return {"logits": self.head(self.layers(self.embed(tokens)))}


def cross_entropy(output, target):
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


TOKENS, LABELS = torch.arange(128).reshape(16, 8) % 64, torch.arange(128).reshape(16, 8)
LOGITS = 128 * CLASSES * 4
SCALARS = 4 * 4  # each micro-batch has one, such as the sum of the weights of a cross entropy


def compiled(memory="1GiB", model=None, loss_fn=cross_entropy, **options):
    model = Language() if model is None else model
    options = {"chunks": 4, "example_target": LABELS, **options}
    return fxpipe.compile(model, ["cpu"] * 2, memory=memory, loss_fn=loss_fn, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_is_expected_ahead_of_the_first_step_is_what_the_step_saves(schedule, checkpoint):
    options = {"schedule": schedule, "checkpoint": checkpoint}
    with compiled(example_inputs=(TOKENS,), **options) as pipe:
        expected = pipe.timeline().peak_memory
        pipe.step(TOKENS, target=LABELS)
        assert pipe.timeline().peak_memory == pytest.approx(expected, abs=SCALARS)
    with compiled(example_inputs=(TOKENS,), example_target=None, **options) as pipe:
        assert pipe.timeline().peak_memory[1] <= expected[1] - LOGITS / 4


def squares(output, target):
    return output["logits"].square().mean()


def total(output, target):
    return output["logits"].sum()


def test_logits_that_a_stage_keeps_are_not_counted_for_the_loss_once_more():
    # "selective" keeps the results of products. GPipe holds them for all four micro-batches.
    peaks = []
    for loss_fn in squares, total:  # the first saves the logits, the second nothing
        options = {"schedule": "gpipe", "checkpoint": "selective", "loss_fn": loss_fn}
        with compiled(example_inputs=(TOKENS,), **options) as pipe:
            peaks.append(pipe.timeline().peak_memory[1])
    assert peaks[0] >= LOGITS
    own = 2 * LOGITS / 4 + SCALARS
    assert peaks[0] - peaks[1] <= own, "a micro-batch's squares and gradients"


def test_a_limit_that_leaves_no_room_for_the_loss_is_kept():
    with compiled(example_inputs=(TOKENS,)) as pipe:
        needed = max(pipe.timeline().peak_memory)
    compiled(needed, example_inputs=(TOKENS,)).close()
    limit = needed - LOGITS / 8
    with pytest.raises(fxpipe.DoesNotFit, match='it would fit with schedule="1f1b"'):
        compiled(limit, example_inputs=(TOKENS,))
    with compiled(limit, example_inputs=(TOKENS,), schedule="1f1b") as pipe:
        pipe.step(TOKENS, target=LABELS)
        assert max(pipe.timeline().peak_memory) <= limit
    compiled(limit, example_inputs=(TOKENS,), example_target=None).close()  # as far as is known


def test_the_target_of_the_first_step_serves_as_the_example():
    with compiled(example_inputs=(TOKENS,)) as pipe:
        expected = pipe.timeline().peak_memory
    with compiled(example_target=None) as pipe:
        pipe.step(TOKENS, target=LABELS)
        assert pipe.timeline().peak_memory == pytest.approx(expected, abs=SCALARS)
        assert "has not counted" not in pipe.report()


def test_a_target_on_meta_serves_as_well():
    with compiled(example_inputs=(TOKENS,), example_target=LABELS.to("meta")) as pipe:
        expected = pipe.timeline().peak_memory
        pipe.step(TOKENS, target=LABELS)
        assert pipe.timeline().peak_memory == pytest.approx(expected, abs=SCALARS)


class OneSize(Language):
    """It holds for one batch size only, so that it is traced with one micro-batch."""

    def forward(self, tokens):
        if len(tokens) == 4:
            tokens = tokens + 1 - 1
        return super().forward(tokens)


def test_of_a_graph_of_one_micro_batch_the_rows_of_one_are_expected():
    with compiled(example_inputs=(TOKENS,), model=OneSize(), tracer="export") as pipe:
        expected = pipe.timeline().peak_memory
        pipe.step(TOKENS, target=LABELS)
        assert pipe.timeline().peak_memory == pytest.approx(expected, abs=SCALARS)


@pytest.mark.parametrize(
    ("loss_fn", "why"),
    [
        (lambda output, y: cross_entropy(output, y) * float(y.max() > 0), "loss_fn does not run"),
        (cross_entropy, "no target is known when the model is cut: give example_target"),
    ],
)
def test_what_is_not_counted_is_said(loss_fn, why):
    target = None if loss_fn is cross_entropy else LABELS
    with compiled(loss_fn=loss_fn, example_inputs=(TOKENS,), example_target=target) as pipe:
        assert f"the cut has not counted what the loss saves: {why}" in pipe.report()


def line_of(function, offset):
    """A line of a function, as messages show it; the line of its ``def`` has the offset 0."""
    return source_line(__file__, function.__code__.co_firstlineno + offset)


def why_not_counted(loss_fn):
    """What the report of a pipeline says of a loss that cannot be counted."""
    with compiled(loss_fn=loss_fn, example_inputs=(TOKENS,)) as pipe:
        return next(line for line in pipe.report().splitlines() if "has not counted" in line)


def test_a_loss_whose_memory_depends_on_values_is_refused_at_its_line():
    """The size of what a CTC loss saves depends on the longest label."""

    def ctc(output, target):
        logits = output["logits"].log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(target),), len(logits))
        return F.ctc_loss(logits, target, frames, torch.full((len(target),), 3))

    found = why_not_counted(ctc)
    assert f"aten._ctc_loss.Tensor (at {line_of(ctc, 3)})" in found
    assert "what it computes there depends on the values of tensors: leave room for it" in found
    assert "device=" not in found


def test_a_loss_with_tensors_of_another_device_is_refused_with_the_line_and_a_way_out():
    def elsewhere(output, target):
        logits = output["logits"].flatten(0, 1)
        weight = torch.ones(CLASSES, device="cuda:0")  # without values, no such device is needed
        return F.cross_entropy(logits, target.flatten(), weight=weight)

    def brought(output, target):
        logits = output["logits"].flatten(0, 1)
        weight = torch.ones(CLASSES, device=output["logits"].device)
        return F.cross_entropy(logits, target.flatten(), weight=weight)

    found = why_not_counted(elsewhere)
    assert line_of(elsewhere, 3) in found
    assert "device=output.device" in found and "weight.to(output.device)" in found
    with compiled(loss_fn=brought, example_inputs=(TOKENS,)) as pipe:
        assert "has not counted" not in pipe.report()


def test_any_other_error_of_a_loss_is_said_with_its_line():
    def wrong_key(output, target):
        return output["loss"]

    found = why_not_counted(wrong_key)
    assert f"KeyError: 'loss' (at {line_of(wrong_key, 1)}): leave room for it" in found


def test_a_loss_with_tensors_and_counters_of_its_own_is_left_as_it_was():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.weight = 0, torch.ones(CLASSES)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, output, target):
            self.calls += 1
            self.seen += 1
            logits = output["logits"].flatten(0, 1)
            return F.cross_entropy(logits, target.flatten(), weight=self.weight)

    loss_fn = Counting()
    with compiled(loss_fn=loss_fn, example_inputs=(TOKENS,)) as pipe:
        assert (loss_fn.calls, loss_fn.seen) == (0, 0)
        assert type(loss_fn.seen) is torch.Tensor
        expected = pipe.timeline().peak_memory
        pipe.step(TOKENS, target=LABELS)
        # What a step has saved counts once for each micro-batch, also the weights of classes.
        most = SCALARS + 3 * loss_fn.weight.nbytes
        assert pipe.timeline().peak_memory == pytest.approx(expected, abs=most)


def plan(**options):
    model, (tokens,) = on_meta(Language(), TOKENS)
    return fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=(tokens,), chunks=4, **options)


def test_a_plan_counts_what_the_loss_saves():
    without, counted = plan(), plan(loss_fn=cross_entropy, example_target=LABELS.to("meta"))
    assert counted.stages[1].activation_bytes >= without.stages[1].activation_bytes + LOGITS
    assert counted.stages[0].activation_bytes == without.stages[0].activation_bytes
    limit = (without.memory[1] + counted.memory[1]) / 2
    with pytest.raises(fxpipe.DoesNotFit):
        plan(loss_fn=cross_entropy, example_target=LABELS, memory=limit)
    assert plan(memory=limit).fits


def test_a_plan_takes_a_loss_with_its_target():
    with pytest.raises(ValueError, match="from loss_fn and example_target: give both, or neither"):
        plan(loss_fn=cross_entropy)
    with pytest.warns(
        UserWarning, match="does not count what the loss saves: loss_fn does.*leave room for it"
    ):
        plan(loss_fn=lambda output, y: float(y.max()), example_target=LABELS)
    with pytest.raises(ValueError, match="example_target is given, but no loss_fn"):
        compiled(loss_fn=None)


def seconds_of_loss(timeline):
    """The seconds of the spans of the loss, and of its backward."""
    spans = [span for span in timeline.spans if span.action is None]
    names = "loss", "loss backward"
    return [[span.seconds for span in spans if span.name == name] for name in names]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_time_of_a_loss_is_that_of_the_bytes_that_it_reads_and_writes(schedule):
    with compiled(example_inputs=(TOKENS,), schedule=schedule) as pipe:
        forwards, backwards = seconds_of_loss(pipe.timeline())
    assert len(forwards) == len(backwards) == 4
    # Logits are read and their logarithms written; then these are read, and gradients of both are
    # written and read.
    assert forwards[0] >= 2 * LOGITS / 4 / CPU_CORE.bytes_per_s
    assert backwards[0] >= 3 * LOGITS / 4 / CPU_CORE.bytes_per_s
    assert len(set(map(round_to_ns, forwards))) == 1
    with compiled(example_inputs=(TOKENS,), example_target=None, schedule=schedule) as pipe:
        assert seconds_of_loss(pipe.timeline()) == [[], []]


def round_to_ns(seconds):
    return round(seconds * 1e9)


class Layers(nn.Module):
    """Eight layers of one size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x):
        return self.layers(x)


MATRIX = torch.randn(64, 64)


def two_layers_more(output, target):
    """As much work as two further layers have, forward and backward (but for gradients of the
    parameters, which are a third of a layer's work)."""
    return F.mse_loss(output @ MATRIX @ MATRIX @ MATRIX, target)


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_the_last_stage_has_fewer_layers_where_it_computes_a_dear_loss(memory):
    x = torch.randn(512, 64)
    for target, last in (None, 4), (x, 3):
        with compiled(
            memory, Layers(), two_layers_more, example_inputs=(x,), example_target=target
        ) as pipe:
            assert len(list(pipe.stages[1].module.parameters())) == 2 * last


def test_the_target_of_a_first_step_has_the_loss_counted_in_the_cut():
    x = torch.randn(512, 64)
    with compiled(None, Layers(), two_layers_more, example_target=None) as pipe:
        pipe.step(x, target=x)
        assert len(list(pipe.stages[1].module.parameters())) == 2 * 3


def test_a_loss_that_is_seen_after_the_cut_is_predicted_if_the_mini_batch_is_as_large():
    x = torch.randn(512, 64)
    found = []
    for target in None, x:
        given = {"example_inputs": (x,), "example_target": target}
        with compiled(None, Layers(), two_layers_more, **given) as pipe:
            pipe.step(x, target=x)
            found.append([sum(seconds) for seconds in seconds_of_loss(pipe.timeline())])
    assert found[0] == pytest.approx(found[1]) and all(found[0])
    with compiled(
        None, Layers(), two_layers_more, example_inputs=(x,), example_target=None
    ) as pipe:
        pipe.step(x[:256], target=x[:256])
        assert seconds_of_loss(pipe.timeline()) == [[], []]


def test_a_plan_has_the_last_stage_do_less_where_it_computes_a_dear_loss():
    x = torch.randn(512, 64)
    options = {"example_inputs": (x,), "chunks": 4}
    loss = {"loss_fn": two_layers_more, "example_target": x}
    without, counted = (
        fxpipe.plan(Layers(), [FREE_LINKS] * 2, **options, **more) for more in ({}, loss)
    )
    assert [len(plan.stages[1].nodes) for plan in (without, counted)] == [4, 3]
    assert counted.stages[1].compute_s > 3 / 4 * without.stages[1].compute_s
    assert counted.seconds > without.seconds


def test_of_a_graph_of_one_micro_batch_the_loss_takes_as_long():
    times = []
    for model in Language(), OneSize():
        with compiled(example_inputs=(TOKENS,), model=model, tracer="export") as pipe:
            times.append([sum(each) for each in seconds_of_loss(pipe.timeline())])
    assert times[0] == pytest.approx(times[1], rel=1e-3), "but for scalars, such as the loss"
