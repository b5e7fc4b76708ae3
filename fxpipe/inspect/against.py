"""A measured step beside the predicted one, in sentences: by which factor it is longer, and what
that is made of, as far as it is known.

::

    predicted                  9.9 ms
    the stages take longer   176.0 ms   the same step, with the measured times of stages
    what is left             191.8 ms   the host, which starts nodes, lanes that wait, and single
                                        actions that have taken longer than others
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from fxpipe.ir.text import human_time
from fxpipe.schedule import Timeline
from fxpipe.schedule.simulator import LOSS, LOSS_BACKWARD, OPTIMIZER

SEEN = 0.02  # the part of a step, or of the mean time of its stages, that is said
OFF = 1.5  # by this factor the stages take longer, or shorter, where estimates are said to be off
UNCOUNTED = "of which the prediction knows nothing: example_target= lets it be counted"
OF_THE_MODEL = (
    "beside what the model computes of it in its stages; the prediction does not count that"
)
NAMED = 4  # the most stages whose factors are given one by one


def factor(predicted: Timeline, measured: Timeline) -> float:
    """By how much longer the stages work in a measured step than in the predicted one."""
    return _ratio(sum(_seconds(measured).values()), sum(_seconds(predicted).values()))


def is_off(predicted: Timeline, measured: Timeline) -> bool:
    """Whether the stages take so much longer, or shorter, that the times of nodes are wrong."""
    times = factor(predicted, measured)
    return times > OFF or times < 1 / OFF


def against(
    predicted: Timeline,
    measured: Timeline,
    replayed: Timeline,
    devices: Sequence[str],
    run: str = "step",
    uncounted: str = UNCOUNTED,
) -> Iterator[str]:
    """What a measured step says beside the predicted one. Steps are measured without an optimizer,
    so that they are compared with predicted ones without the time of its step.

    Args:
        replayed: the step as it is predicted from the measured times of the stages, which are the
            medians of their actions.
        devices: the name of each lane's device.
        run: what has been measured: "step", or "call".
        uncounted: what to say of the time of the loss where it is not predicted.
    """
    whole, again = measured.makespan, _of_actions(replayed)
    without = _of_actions(predicted)
    times = f"{_ratio(whole, without):.3g} times"
    updates = any(span.name == OPTIMIZER for span in predicted.spans)
    yield (
        f"Measured, by pipe.measure, it was {human_time(whole)}, "
        + (
            f"without a step of the optimizer: {times} the {human_time(without)} that are "
            "predicted without it."
            if updates
            else f"{times} as long as predicted."
        )
    )
    found = _of_stages(predicted, measured)
    if len(found) > NAMED:
        least, most = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        said = f"from {found[least]:.3g} (stage {least}) to {found[most]:.3g} (stage {most})"
    else:
        said = ", ".join(f"stage {stage} {times:.3g}" for stage, times in found.items())
    worked, expected = (sum(_seconds(step).values()) for step in (measured, predicted))
    yield (
        f"Its stages work {human_time(worked)} in all, {factor(predicted, measured):.3g} times "
        f"the {human_time(expected)} that are predicted ({said})."
    )
    if (loss := _of_loss(measured)) > SEEN * whole:
        expected_loss = _of_loss(predicted)
        said = (
            f"{_ratio(loss, expected_loss):.3g} times the {human_time(expected_loss)} that are "
            "predicted"
            if expected_loss
            else uncounted
        )
        yield f"The loss and its backward take {human_time(loss)}, {said}."
    lanes = Counter(devices).items()
    shared = [f"{count} lanes share {name}" for name, count in lanes if count > 1]
    if shared:
        yield (
            f"{', and '.join(shared)}: what one of them takes, the others lack, and that is in "
            "these times."
        )
    rest = whole - again
    if updates:
        yield (
            f"pipe.timeline() predicts {human_time(replayed.makespan)} from these times, with a "
            f"step of the optimizer, and {human_time(again)} without it."
        )
    if rest > SEEN * whole:
        yield (
            f"With these times of the stages the {run} would take {human_time(again)}; "
            f"the other {human_time(rest)} ({rest / whole:.0%} of it) pass between the actions, "
            "where the host starts nodes and lanes wait for each other, or in single actions that "
            "have taken longer than others of their stage."
        )


def microbatches_of(timeline: Timeline) -> int:
    """The number of micro-batches of a step."""
    return 1 + max((s.action.microbatch for s in timeline.spans if s.action), default=0)


def _of_loss(timeline: Timeline) -> float:
    """The seconds that the loss and its backward take in a step, together."""
    return sum(span.seconds for span in timeline.spans if span.name in (LOSS, LOSS_BACKWARD))


def _of_actions(timeline: Timeline) -> float:
    """The seconds from the begin of a step to the end of its last action."""
    ends = [span.end for span in timeline.spans if span.action is not None]
    return max(ends, default=timeline.start) - timeline.start


def _of_stages(predicted: Timeline, measured: Timeline) -> dict[int, float]:
    """By how much longer each stage works in the measured step, of those whose work is seen in the
    predicted one."""
    one, other = _seconds(predicted), _seconds(measured)
    least = SEEN * sum(one.values()) / max(1, len(one))
    return {stage: _ratio(other[stage], one[stage]) for stage in sorted(one) if one[stage] > least}


def _seconds(timeline: Timeline) -> dict[int, float]:
    """By the number of a stage: the seconds that its actions take in a step, together."""
    found: defaultdict[int, float] = defaultdict(float)
    for span in timeline.spans:
        if span.action is not None:
            found[span.action.stage] += span.seconds
    return found


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("inf")
