import re
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.inspect.report import advice, bubble_advice
from fxpipe.inspect.step_work import StepWork
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import ALIAS, COST, GAP, STAGE, stage_nodes
from fxpipe.ir.text import human_bytes, human_time, optimality
from fxpipe.schedule import Schedule, named


def test_a_cut_is_optimal_or_at_most_so_far_from_it():
    assert optimality(0.019) == "the slowest stage is at most 1.9% from optimal"
    assert "at most 0.1% from" in optimality(4e-4), "and not 0.0%"
    assert optimality(0.0) == "the cut is optimal: no other has a faster slowest stage"
    assert optimality(0.0, is_limited=True).startswith("no other cut that was expected to fit")
    assert optimality(0.1, is_limited=True).endswith("among the cuts that were expected to fit")


def test_sizes_and_times_are_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]
    assert [human_time(s) for s in (2, 1.5e-3, 4e-6)] == ["2.00 s", "1.5 ms", "4 µs"]


class Row(nn.Module):
    def forward(self, x):
        return torch.cos(torch.sin(torch.exp(torch.tanh(x))))


def cut(*stages):
    """A model graph of tanh, exp, sin and cos: in each stage, the seconds of its nodes."""
    gm = fx.symbolic_trace(Row())
    work = iter(stage_nodes(gm.graph))
    for stage, seconds in enumerate(stages):
        for s in seconds:
            next(work).meta.update(
                {STAGE: stage, COST: Cost(forward_s=s / 3, backward_s=s * 2 / 3)}
            )
    times = tuple(float(sum(seconds)) for seconds in stages)
    return gm, StepWork(times, times, range(len(times)))


def test_an_even_cut_with_enough_micro_batches_needs_no_advice():
    assert advice(*cut((1, 1), (1, 1))) == []
    assert advice(*cut((0, 0), (0, 0))) == []


def test_a_node_that_is_too_large_for_any_even_cut_is_named():
    (line,) = advice(*cut((1,), (6, 1), (2,)))
    assert line == (
        "stage 1 takes 70% of the time: the cut is limited by 'exp', "
        "with 60% in one piece; no cut into 2 stages or more can be even, "
        "since exp is a single operation; compute it in several parts"
    )


def test_nodes_that_have_to_stay_together_limit_the_cut_together():
    gm, work = cut((2, 2), (1,), (1,))
    assert "limited" not in advice(gm, work)[0], "two pieces of 33% each"
    for node in list(stage_nodes(gm.graph))[:2]:
        node.meta[ALIAS] = 0
    (line,) = advice(gm, work)
    assert "limited by 'tanh' and 1 more that stay with it, with 67% in one piece" in line


def test_a_cut_that_could_be_more_even_is_said_to_be_so_unless_it_was_searched_for():
    gm, work = cut((3, 3, 3), (3,))
    (line,) = advice(gm, work)
    assert line == (
        "stage 0 takes 75% of the time, and all others wait for it; its largest part is 'tanh', "
        'with 25%; partition="auto" looks for a more even cut'
    )
    gm.meta[GAP] = 0.0
    assert "auto" not in advice(gm, work)[0]


def test_no_stage_is_waited_for_where_the_loss_makes_lanes_even():
    gm, work = cut((3, 3), (2, 1))
    assert "stage 0 takes 67% of the time" in advice(gm, work)[0]
    assert advice(gm, StepWork((6.0, 6.0), (6.0, 6.0), (0, 1), loss=3.0)) == []
    assert advice(gm, replace(work, busy=(6.0, 6.0))) == [], "the optimizer makes them even"


def test_a_loss_that_is_the_largest_part_is_named():
    gm, _ = cut((1, 1), (1, 1))
    (line,) = advice(gm, StepWork((2.0, 8.0), (2.0, 8.0), (0, 1), loss=6.0))
    assert line.startswith(
        "stage 1 takes 80% of the time, and all others wait for it; its largest part is the loss, "
        "with 60%"
    )


def test_stages_of_one_lane_are_waited_for_together():
    gm, work = cut((2,), (1,), (1,), (2,))
    assert advice(gm, replace(work, busy=(3.0, 3.0), placement=(0, 1, 0, 1))) == []
    (line,) = advice(gm, replace(work, busy=(4.0, 2.0), placement=(0, 1, 1, 0)))
    assert line.startswith("stages 0 and 3 take 67% of the time, and all others wait for them")
    assert "their largest part is 'tanh', with 33%" in line


def test_more_micro_batches_are_advised_where_they_are_worth_it():
    (line,) = bubble_advice(1 / 3, 1 / 9, 8)
    assert line.startswith("with chunks=8 the bubble would be 11%, in place of 33%")
    assert bubble_advice(0.2, 0.12, 8) == []


def test_the_report_says_which_activations_are_not_kept():
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(8, 8)
    for mode, said in (("never", ""), (["always", "selective"], "always, selective")):
        with fxpipe.compile(model, ["cpu"] * 2, checkpoint=mode, example_inputs=(x,)) as pipe:
            line = re.search(r"not kept \(checkpoint\): (.*)", str(pipe.report()))
            assert (line[1] if line else "") == said


def test_the_report_says_how_long_each_stage_waits():
    model = nn.Sequential(nn.Linear(64, 64), *(nn.Tanh() for _ in range(2)), nn.Linear(64, 64))
    with fxpipe.compile(
        model,
        ["cpu", "cpu"],
        chunks=2,
        partition=["3"],
        costs={"0": 2.0, "1": 1.0, "2": 1.0, "3": 4.0},
        example_inputs=(torch.ones(4, 64),),
    ) as pipe:
        rows = [line.split("│") for line in pipe.report().splitlines() if line.startswith("│")]
    shares = [[cell.strip() for cell in row[4:6]] for row in rows]
    assert shares == [["50%", "33%"], ["50%", "33%"]], "of equal stages: 1 / (2 + 1)"


def test_a_parameter_that_stages_on_one_device_share_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[0].weight
    with fxpipe.compile(
        model, ["cpu"] * 3, partition=["2", "3"], example_inputs=(torch.ones(8, 4),)
    ) as pipe:
        said = "shared parameter 0.weight: stages 0 and 2 use it, on one device"
        assert said in pipe.report().splitlines()
    with fxpipe.compile(
        model, ["cpu"] * 2, partition=["1"], example_inputs=(torch.ones(8, 4),)
    ) as pipe:
        assert said.replace("0 and 2", "0 and 1") in pipe.report().splitlines()


def test_the_last_mini_batch_of_an_epoch_does_not_count_if_it_is_smaller():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=8) as pipe:
        said = []
        for rows in 3, 32, 1, 40:
            pipe(torch.ones(rows, 4))
            said.append(re.findall(r"\d+ micro-batch(?:es)?\b", pipe.report())[0])
        assert said == ["3 micro-batches", *["8 micro-batches"] * 3]
        pipe.eval()
        pipe(torch.ones(1, 4))
        assert "1 micro-batch" in pipe.report(), "it is another program"


def equal_stages(count, lanes, **options):
    """The report of a row of equal stages, whose backwards take as long as their forwards."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    with fxpipe.compile(
        model,
        ["cpu"] * lanes,
        partition=[str(i) for i in range(1, count)],
        costs={str(i): 1.0 for i in range(count)},
        example_inputs=(torch.ones(8, 4),),
        **options,
    ) as pipe:
        return pipe.report(), pipe.timeline()


def test_the_bubble_is_that_of_the_schedule_with_its_stages_on_their_lanes():
    # Two stages a lane: in GPipe's order four stages of a lane each would wait 3 / (4 + 3).
    text, timeline = equal_stages(4, 2, chunks=4, schedule="interleaved_1f1b")
    assert f"bubble {timeline.bubble:.0%} of all lanes' time (predicted, interleaved_1f1b)" in text
    assert timeline.bubble < 3 / 7
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    idle = [row[5].strip() for row in rows]
    assert idle == [f"{1 - timeline.busy[i] / timeline.makespan:.0%}" for i in (0, 1, 0, 1)]


def test_more_micro_batches_are_advised_as_the_schedule_takes_them():
    text, _ = equal_stages(2, 2, chunks=2)
    said = "with chunks=8 the bubble would be 11%, in place of 33%"
    # Times that are given are for micro-batches of one size.
    assert f"{said}, if stages take time in proportion to the rows" in " ".join(text.split())
    text, _ = equal_stages(4, 4, chunks=2)
    assert "with chunks=8 the bubble" in text, "not 16: there are 8 rows"
    schedule = named("gpipe", lanes=2, microbatches=2)
    text, _ = equal_stages(2, 2, chunks=2, schedule=schedule)
    assert "bubble 33%" in text and "with chunks=" not in text, "it is for two micro-batches"


@pytest.mark.parametrize(
    "schedule, said",
    [
        (named("gpipe", lanes=2, microbatches=4), "2 micro-batches, bubble"),
        (
            Schedule.from_text("0F0 0F1 0B0 0B1 \n 1B0 1B1 1F0 1F1"),
            "2 micro-batches, no training step: its schedule cannot run",
        ),
    ],
    ids=["for more micro-batches", "that cannot run"],
)
def test_a_pipeline_with_any_schedule_has_a_report(schedule, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with fxpipe.compile(
        model, ["cpu"] * 2, schedule=schedule, example_inputs=(torch.ones(2, 4),)
    ) as pipe:
        text = pipe.report()
    assert said in text


@pytest.mark.parametrize(("rows", "chunks"), [(4, 4), (8, 8), (12, 8)])
def test_the_report_says_that_a_batch_has_too_few_rows_for_the_micro_batches_asked_for(
    rows, chunks
):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=8) as pipe:
        pipe(torch.randn(rows, 4))
        said = "chunks=8 is given, and the mini-batch of 4 rows is cut into 4 micro-batches"
        assert (said in str(pipe.report())) == (chunks < 8)
