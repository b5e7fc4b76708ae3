"""Tuning: many settings are planned, and the best few measured."""

from __future__ import annotations

import json
import math
import re
import warnings

import pytest
import torch
from torch import nn

import fxpipe
import fxpipe.tuning.tune as tuning
from fxpipe.tuning.pareto import front, picture
from fxpipe.tuning.results import Tuning, TuningTrial
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta
from tests.zoo import UNet


def planned(**options):
    """The plan for a U-Net on two devices, and its trials."""
    model, x = on_meta(UNet(4, 3), torch.zeros(16, 3, 32, 32))
    return fxpipe.tune(model, [FREE_LINKS] * 2, x, progress=False, **options)


def test_the_best_trial_is_the_fastest_plan_of_all_settings():
    found = planned(schedules=["gpipe", "1f1b", "zbv"], chunks=[2, 4, 8])
    assert len(found.trials) == 9
    model, x = on_meta(UNet(4, 3), torch.zeros(16, 3, 32, 32))
    every = [
        fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, chunks=chunks, schedule=schedule)
        for schedule in ("gpipe", "1f1b", "zbv")
        for chunks in (2, 4, 8)
    ]
    assert found.best.seconds == min(plan.seconds for plan in every)
    assert [trial.seconds for trial in found.trials] == sorted(plan.seconds for plan in every)


def test_by_default_all_schedules_and_all_even_chunks_are_tried():
    found = planned()
    assert {trial.options["chunks"] for trial in found.trials} == {1, 2, 4, 8, 16}
    assert {trial.options["schedule"] for trial in found.trials} >= {"gpipe", "1f1b", "zbv"}


def test_what_does_not_fit_is_recomputed_or_left_out():
    free = planned(schedules=["gpipe"], chunks=[4, 16])
    limit = 0.8 * max(free.trials[0].memory)
    found = planned(schedules=["gpipe"], chunks=[4, 16], memory=limit)
    assert found.best.options["checkpoint"] != "never"
    assert all(max(trial.memory) <= limit for trial in found.trials if trial.fits)
    none = planned(schedules=["gpipe"], chunks=[4, 16], memory="1KiB")
    assert not any(trial.fits for trial in none.trials)
    with pytest.raises(fxpipe.DoesNotFit, match="nothing that was tried fits; gpipe, "):
        none.best  # noqa: B018


def narrow(limit=None, **options):
    """The trials of 16 layers whose activations are many times their parameters."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(16)))
    model, x = on_meta(layers, torch.zeros(512, 16))
    own = {"schedules": ["gpipe"], "chunks": [4], "progress": False, **options}
    return fxpipe.tune(model, [FREE_LINKS.with_memory(limit)] * 2, x, **own)


def test_a_table_of_what_does_not_fit_says_how_much_is_missing_and_what_would_fit(tmp_path):
    limit = 0.35 * max(narrow().best.memory)
    found = narrow(limit, checkpoint="never", chunks=[2, 4])
    needed = [max(trial.memory) for trial in found.trials]
    assert needed == sorted(needed) and needed[0] > limit
    text = " ".join(str(found).split())
    assert text.count("does not fit │") == 2
    assert "0 of 2 settings fit; the nearest is gpipe, 4 chunks, checkpoint never: " in text
    assert re.search(r"device 0 needs .* short; as for gpipe .* it would fit with ", text)
    found.save(tmp_path / "tuning.json")
    assert str(Tuning.load(tmp_path / "tuning.json")) == str(found)


def test_segments_that_are_given_are_tried_and_shown():
    found = narrow(checkpoint="always", checkpoint_segments=[1, 2, 4], chunks=[1])
    assert len(found.trials) == 3
    (whole,) = (t for t in found.trials if "checkpoint_segments" not in t.options)
    for trial in found.trials:
        assert trial is whole or max(trial.memory) < max(whole.memory)
    assert "always in 2 segments" in str(found)
    assert len(narrow(checkpoint="never").trials) == 1
    assert len(narrow(checkpoint_segments=[1, 2]).trials) == 1, "nothing is recomputed"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", [0.9, 0.7, 0.5])
def test_what_compile_plans_is_among_the_trials(part):
    limit = part * max(narrow().best.memory)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(16)))
    model, x = on_meta(layers, torch.zeros(512, 16))
    devices = [FREE_LINKS.with_memory(limit)] * 2
    given = {"schedule": "gpipe", "chunks": 4, "checkpoint": "auto"}
    plan = fxpipe.plan(model, devices, example_inputs=x, **given)
    (trial,) = narrow(limit).trials
    assert trial.seconds == plan.seconds and trial.memory == plan.memory


def test_an_order_of_its_own_is_tried_as_compile_tries_it():
    found = narrow(chunks=None, schedules=None)
    assert found.best.seconds <= narrow(schedules=["auto"]).best.seconds * (1 + 1e-9)
    assert any(trial.options["schedule"] == "auto" for trial in found.trials)


def test_the_options_name_the_nodes_only_at_which_the_cut_is():
    assert narrow().best.options == {
        "chunks": 4,
        "schedule": "gpipe",
        "checkpoint": "never",
        "partition": {"_8_0": 1},
    }


def test_segments_may_be_those_of_each_stage_or_be_chosen(tmp_path):
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(16)))
    model, x = on_meta(layers, torch.zeros(4096, 32))

    def planned(device, **options):
        own = {"schedules": ["1f1b"], "chunks": [4], "progress": False}
        return fxpipe.tune(model, [device] * 2, x, **own, **options)

    limit = 0.55 * max(planned(FREE_LINKS, checkpoint="never").best.memory)
    tight = FREE_LINKS.with_memory(limit)
    assert not any(t.fits for t in planned(tight, checkpoint_segments=[1]).trials)
    given = planned(tight, checkpoint_segments=[[1, 2]]).best
    assert given.options["checkpoint_segments"] == [1, 2]
    found = planned(tight, checkpoint="always", checkpoint_segments=["auto"])
    assert found.best.options == given.options and found.best.seconds == given.seconds
    assert "always, always in 2 segments" in str(found)
    found = planned(tight, checkpoint_segments=["auto"])
    assert found.best.options["checkpoint"] == ["always", "always 1/2"]
    assert found.best.seconds < given.seconds
    found.save(tmp_path / "tuning.json")
    assert Tuning.load(tmp_path / "tuning.json").best == found.best
    with pytest.raises(ValueError, match="checkpoint_segments is 0: give"):
        planned(tight, checkpoint_segments=[0])


def test_the_best_with_each_number_of_micro_batches_are_measured_first():
    numbers = [16, 16, 8, 16, 4, 8]  # of trials, the fastest by prediction first
    trials = [TuningTrial({"chunks": number}, float(i)) for i, number in enumerate(numbers)]
    trials.insert(1, TuningTrial({"chunks": 2}, math.inf, why="it does not fit"))
    order = [trials[i].options["chunks"] for i in tuning.to_measure(trials)]
    assert order == [16, 8, 4, 16, 8, 16]


def test_the_best_are_measured_and_make_a_pipeline(tmp_path):
    torch.manual_seed(0)
    model, x = UNet(4, 3), torch.randn(8, 3, 16, 16)
    found = fxpipe.tune(
        model,
        ["cpu", "cpu"],
        (x,),
        schedules=["gpipe", "1f1b"],
        chunks=[2, 4],
        measure=2,
        rounds=1,
        target=torch.randn(8, 3, 16, 16),
        loss_fn=nn.MSELoss(),
        progress=False,
    )
    measured = [trial for trial in found.trials if trial.measured is not None]
    assert sorted(trial.options["chunks"] for trial in measured) == [2, 4]
    assert found.best == min(measured, key=lambda trial: trial.measured)
    assert all(parameter.grad is None for parameter in model.parameters()), "copies have trained"
    assert found.plain and "without a pipeline, on the first device, a step was" in str(found)
    is_slower = found.plain < min(trial.measured for trial in measured)
    assert (
        "faster than each setting that was measured" in " ".join(str(found).split())
    ) == is_slower

    found.save(tmp_path / "tuning.json")
    again = Tuning.load(tmp_path / "tuning.json")
    assert again == found
    with fxpipe.compile(model, ["cpu", "cpu"], **again.best.options) as pipe:
        pipe(x)
        assert pipe._runner.last()[1] == again.best.options["chunks"]


def test_a_file_of_an_earlier_version_has_no_time_of_the_model_by_itself(tmp_path):
    planned(schedules=["gpipe"], chunks=[2]).save(tmp_path / "t.json")
    written = json.loads((tmp_path / "t.json").read_text())
    assert written.pop("plain") is None, "nothing was measured"
    (tmp_path / "t.json").write_text(json.dumps(written))
    assert Tuning.load(tmp_path / "t.json").plain is None


def test_the_table_shows_what_is_chosen():
    text = str(planned(schedules=["gpipe", "1f1b"], chunks=[4]))
    assert "schedule" in text
    assert "1f1b" in text
    assert "2 of 2 settings fit" in text


def test_the_table_counts_stages_and_not_lanes():
    line = next(
        line for line in str(planned(schedules=["zbv"], chunks=[4])).splitlines() if "zbv" in line
    )
    assert line.split("│")[1:4] == [" zbv      ", "      4 ", "      4 "]


def test_the_front_has_what_no_other_is_better_than_in_both():
    assert front([(1, 9), (2, 5), (3, 6), (2, 5), (4, 1), (1, 8)]) == [5, 1, 4]
    assert front([]) == []


def test_the_picture_has_a_point_for_each_and_a_line_through_the_front():
    drawing = picture([(1.0, 2**20), (2.0, 2**19), (2.0, 2**21)], ["a", "b <", "c"])
    assert drawing.count("<circle") == 3
    assert "<title>b &lt;: 2.00 s, 512.0 KiB</title>" in drawing
    assert drawing.count("<polyline") == 1
    assert len(drawing.split('points="')[1].split('"')[0].split()) == 2
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert texts[2:6] == ["500.0 ms", "1.00 s", "1.50 s", "2.00 s"]  # round numbers of each unit
    assert texts[6:10] == ["512.0 KiB", "1.0 MiB", "1.5 MiB", "2.0 MiB"]
    front = ["a: 1.00 s, 1.0 MiB", "b &lt;: 2.00 s, 512.0 KiB"]
    assert texts[10:] == ["1", "1", front[0], "2", "2", front[1]], "beside the point, and below"


def test_a_long_name_in_a_picture_has_several_lines_for_which_there_is_room():
    short, long = picture([(1.0, 2**20)], ["a"]), picture([(1.0, 2**20)], ["a " * 100])
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", long)
    assert max(map(len, texts)) < 100 and " ".join(texts[-3:]).startswith("a a a")
    heights = [int(re.search(r'height="(\d+)"', each)[1]) for each in (short, long)]
    assert heights[1] == heights[0] + 2 * 15


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"trials": [1]}', '{"trials": [{}]}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "tuning.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"is no file that Tuning\.save has written"):
        Tuning.load(path)


def test_what_does_not_fit_is_saved_without_a_time(tmp_path):
    Tuning((TuningTrial({"checkpoint": "never"}, math.inf, why="too small"),)).save(
        tmp_path / "t.json"
    )
    assert json.loads((tmp_path / "t.json").read_text())["trials"][0]["seconds"] is None
    assert not Tuning.load(tmp_path / "t.json").trials[0].fits


def test_an_argument_that_nothing_takes_is_refused_also_if_nothing_is_measured():
    with pytest.raises(TypeError, match="tune takes no option 'chunk': did you mean 'chunks'"):
        fxpipe.tune(nn.Linear(2, 2), ["cpu"] * 2, (torch.zeros(4, 2),), chunk=[4], progress=False)


@pytest.mark.parametrize(
    ("devices", "options", "said"),
    [
        ("cpu", {}, "devices is 'cpu': give a list"),
        ([], {}, "devices is \\[\\]: give a list"),
        (["h100", "cpu"], {}, "and not both"),
        (["h100"] * 2, {"measure": 1}, "give devices that are here"),
        (["cpu"] * 2, {"chunks": [0]}, "chunks is 0"),
        (["cpu"] * 2, {"schedules": ["2f2b"]}, "schedule is '2f2b'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(devices, options, said):
    with pytest.raises(ValueError, match=said):
        fxpipe.tune(nn.Linear(2, 2), devices, (torch.zeros(4, 2),), progress=False, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"the model returns is a tensor of shape \(4, 2\): a scalar .* give loss_fn\("),
        (
            {"loss_fn": lambda y, t: y - t, "target": torch.ones(4, 2)},
            "what loss_fn returns is a tensor",
        ),
        ({"loss_fn": lambda y, t: 0.0}, "what loss_fn returns is a float"),
    ],
)
def test_steps_without_a_scalar_loss_are_refused_ahead_of_the_search(monkeypatch, options, said):
    monkeypatch.setattr(tuning, "SettingSearch", None)
    with pytest.raises(ValueError, match=said):
        fxpipe.tune(nn.Linear(2, 2), ["cpu"], (torch.zeros(4, 2),), measure=1, **options)


def test_a_loss_function_that_needs_a_target_is_refused_without_one(monkeypatch):
    monkeypatch.setattr(tuning, "SettingSearch", None)
    loss_fn = nn.MSELoss()
    with pytest.raises(AttributeError) as caught:
        fxpipe.tune(nn.Linear(2, 2), ["cpu"], (torch.zeros(4, 2),), measure=1, loss_fn=loss_fn)
    assert "tune was given no target=" in caught.value.__notes__[0]


def test_a_loss_function_that_needs_values_is_not_judged_by_tensors_without_values():
    def loss_fn(output, target):
        return output.sum() * (1.0 if output.sum().item() > 0 else 2.0)

    options = {"chunks": [2], "schedules": ["gpipe"], "progress": False, "loss_fn": loss_fn}
    with warnings.catch_warnings(action="ignore"):
        found = fxpipe.tune(nn.Linear(2, 2), ["cpu"], (torch.ones(4, 2),), measure=1, **options)
    assert found.best.measured
