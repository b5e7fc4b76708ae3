"""The bytes that lanes hold while a step runs. Lane 1 takes longer, so that results of lane 0 have
to wait for it."""

from __future__ import annotations

from fxpipe.runtime import streams
from fxpipe.schedule import (
    Edge,
    Links,
    Memory,
    Schedule,
    StageCost,
    WhileRunning,
    Workspace,
    named,
    simulate,
)
from fxpipe.schedule import held as held_module
from fxpipe.schedule.held import _launches
from fxpipe.schedule.world import World

NOTHING = Workspace()


def held(costs, running, schedule="gpipe", microbatches=4, **options):
    order = named(schedule, lanes=2, microbatches=microbatches)
    links = Links([Edge(0, 1, 10.0, 1.0)])
    memory = Memory([100.0, 100.0], running=running, **options)
    return simulate(order, [StageCost(*each) for each in costs], links, memory).memory


def at_begins(series, seconds):
    """The bytes from these times on."""
    return [
        max((t, i, amount) for i, (t, amount) in enumerate(series) if t <= s)[2] for s in seconds
    ]


def test_results_wait_until_the_thread_of_the_next_lane_takes_them():
    quick, slow = (1.0, 1.0), (10.0, 1.0)
    first, _ = held([quick, slow], WhileRunning([NOTHING] * 2), microbatches=6)
    # Lane 1's thread takes the results of three micro-batches at once, as it launches two actions
    # ahead of its device. The thread of lane 0 launches the fourth forward when the first has
    # ended, and so on: nothing waits yet. The result of the fourth waits until lane 1 has done its
    # first forward, after 11 seconds, and so do the others.
    assert at_begins(first, [0, 1, 2, 3, 4, 5]) == [100, 200, 300, 400, 510, 620]


def test_a_result_that_is_an_activation_anyway_takes_no_more_memory():
    quick, slow = (1.0, 1.0), (10.0, 1.0)
    running = WhileRunning([NOTHING] * 2, kept_results={(0, 1): 10.0})
    first, _ = held([quick, slow], running, microbatches=6)
    assert at_begins(first, [0, 1, 2, 3, 4, 5]) == [100, 200, 300, 400, 500, 600]
    # A checkpointed micro-batch keeps no activations, so that its results do count.
    first, _ = held([quick, slow], running, microbatches=6, checkpointed=6, inputs=5.0)
    assert at_begins(first, [0, 1, 2, 3, 4, 5]) == [5, 10, 15, 20, 35, 50]


def test_an_action_needs_its_workspace_only_while_it_runs():
    even = (1.0, 2.0)
    stages = [Workspace(forward=1, again=2, backward=3, half=4)] * 2
    first, last = held([even, even], WhileRunning(stages, loss=7), microbatches=1)
    assert first == ((0.0, 0.0), (0.0, 101.0), (1.0, 100.0), (4.0, 103.0), (6.0, 0.0))
    # The loss and its backward need more than the last stage does.
    assert last == ((0.0, 0.0), (1.0, 107.0), (2.0, 100.0), (2.0, 107.0), (4.0, 0.0))


def test_an_optimizer_may_need_more_when_the_actions_of_a_stage_are_done():
    even = (1.0, 2.0)
    running = WhileRunning([NOTHING] * 2, updating=[50.0, 0.0])
    first, last = held([even, even], running, microbatches=1, fixed=7.0)
    assert first[-2:] == ((6.0, 57.0), (6.0, 7.0))
    assert last[-1] == (4.0, 7.0)


def test_the_second_half_of_a_backward_makes_gradients_of_parameters():
    even = (1.0, 1.0, 1.0)
    stages = [Workspace(forward=1, backward=30, half=4, weights=20)] * 2
    first, _ = held([even, even], WhileRunning(stages), schedule="zb_h1", microbatches=1)
    assert first == (
        (0.0, 0.0),
        (0.0, 101.0),
        (1.0, 100.0),
        (3.0, 104.0),
        (4.0, 100.0),
        (4.0, 120.0),
        (5.0, 0.0),
    )


def test_a_stage_that_is_run_again_needs_what_its_forward_does_and_its_inputs_once():
    even = (1.0, 2.0)
    stages = [Workspace(forward=1, again=2, backward=3, half=4)] * 2
    first, _ = held(
        [even, even],
        WhileRunning(stages),
        microbatches=1,
        checkpointed=1,
        inputs=10.0,
        kept_inputs=[10.0, 10.0],
    )
    assert first == ((0.0, 0.0), (0.0, 12.0), (1.0, 10.0), (4.0, 103.0), (6.0, 0.0))


def test_without_a_running_step_only_what_is_kept_counts():
    quick, slow = (1.0, 1.0), (10.0, 1.0)
    first, _ = held([quick, slow], None, microbatches=6)
    assert at_begins(first, [0, 1, 2, 3, 4, 5]) == [100, 200, 300, 400, 500, 600]


def test_a_gradient_that_is_a_view_waits_with_all_of_its_memory():
    """Lane 1 sends the gradients of two micro-batches, one right after the other, to lane 0, which
    is slow: the second one waits while lane 1 is done."""
    slow, quick = (1.0, 10.0), (1.0, 1.0)
    running = WhileRunning([NOTHING] * 2, views={(1, 0): 5.0})
    _, last = held([slow, quick], running, microbatches=8)
    plain = held([slow, quick], WhileRunning([NOTHING] * 2), microbatches=8)[1]
    more = [a - b for (_, a), (_, b) in zip(last, plain, strict=True)]
    assert set(more) <= {5.0 * n for n in range(8)} and max(more) > 0


def test_a_gradient_for_the_same_lane_brings_all_of_its_memory_to_its_backward():
    """Stages 0 and 1 are in one lane, whose thread launches one action after the other."""
    schedule = named("zbv", lanes=1, microbatches=1)
    running = WhileRunning([NOTHING] * 2, views={(1, 0): 5.0})
    memory = Memory([100.0, 100.0], running=running)
    links = Links([Edge(0, 1, 10.0)])
    costs = [StageCost(1.0, 1.0, 1.0)] * 2
    (series,) = simulate(schedule, costs, links, memory).memory
    # F0, F1 and I1, which has the result of F0; W1, beside which the gradient waits with all of
    # its memory; I0, whose own the gradient is, but not the rest; W0.
    assert at_begins(series, [0, 1, 2, 3, 4, 5]) == [100, 200, 200, 215, 105, 100]


def test_a_lanes_thread_runs_ahead_by_four_crossings():
    """Each forward of lane 0 has two crossings, of its input and of its result. So its thread
    launches the second one's send when the device is done with nothing yet, and the third forward
    when the first one has ended."""
    costs = [StageCost(1.0, 1.0)] * 2
    links = Links([Edge(0, 1)])
    spans = simulate(named("gpipe", lanes=2, microbatches=4), costs, links).spans
    world = World([0, 1], costs, links)
    found = {str(action): launch.time for action, launch in _launches(spans, world).items()}
    assert [found[f"0F{i}"] for i in range(4)] == [0, 0, 0, 1]
    assert [found[f"1F{i}"] for i in range(4)] == [0, 0, 1, 2]


def test_a_lane_that_reloads_first_takes_what_others_send_it_later():
    """1B0 gives a gradient to stage 0, which begins to reload something as soon as that is there.
    So the gradient waits in lane 1 while 1B1 begins."""
    order = Schedule.from_text("0F0 0F1 0R0 0B0 0R1 0B1 \n 1F0 1F1 1B0 1B1")
    links = Links([Edge(0, 1, 0.0, 10.0)])
    running, memory = WhileRunning([NOTHING] * 2), [0.0, 100.0]

    def while_the_second_backward_runs(offloaded):
        first = StageCost(1.0, 5.0, offloaded=offloaded, checkpointed=0 if offloaded else 2)
        costs = [first, StageCost(1.0, 1.0)]
        found = simulate(order, costs, links, Memory(memory, running=running))
        start = next(span.start for span in found.spans if str(span) == "1B1")
        return at_begins(found.memory[1], [start])

    assert while_the_second_backward_runs(0.0) == [100]
    assert while_the_second_backward_runs(1.0) == [110]


def test_it_is_known_how_far_the_threads_of_the_runtime_run_ahead():
    assert held_module.AHEAD == streams.AHEAD
