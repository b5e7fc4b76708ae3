"""The bytes that lanes hold while a step runs. Lane 1 takes longer, so that results of lane 0 have
to wait for it."""

from __future__ import annotations

from fxpipe.schedule import (
    Edge,
    Links,
    Memory,
    StageCost,
    WhileRunning,
    Workspace,
    named,
    simulate,
)

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


def test_an_optimizer_may_need_more_when_the_actions_of_a_lane_are_done():
    even = (1.0, 2.0)
    running = WhileRunning([NOTHING] * 2, updating=[50.0, 0.0])
    first, last = held([even, even], running, microbatches=1, fixed=7.0)
    assert first[-3:] == ((6.0, 7.0), (6.0, 57.0), (6.0, 7.0))
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
