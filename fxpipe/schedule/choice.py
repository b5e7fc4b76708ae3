"""Choice: the placement and the schedule of a step, from the arguments ``schedule``, ``stages`` and
``chunks`` of a user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxpipe.ir.counts import count
from fxpipe.schedule.automatic import auto
from fxpipe.schedule.bounds import Bound
from fxpipe.schedule.catalogue import NAMES, least_microbatches, named, unknown
from fxpipe.schedule.memory import Memory
from fxpipe.schedule.schedule import Schedule
from fxpipe.schedule.world import Links, StageCost

AUTO = "auto"  # the name that asks for a search for the best schedule


def placement_of(schedule: str | Schedule, lanes: int, stages: int | None) -> tuple[int, ...]:
    """The lane of each stage. If ``stages`` is None, there are as many as the schedule takes.

    Raises ValueError if there is no such schedule for these numbers of lanes and stages.
    """
    if stages is not None:
        stages = count("stages", stages, "the number of stages")
    if isinstance(schedule, Schedule):
        if len(schedule.lanes) != lanes or stages not in (None, schedule.stages):
            raise ValueError(
                f"the schedule {schedule.name!r} has {len(schedule.lanes)} lanes and "
                f"{schedule.stages} stages, and there are {lanes} devices"
                + ("" if stages is None else f" and stages={stages}")
                + ": give one device for each lane"
            )
        return schedule.placement
    if schedule == AUTO:  # stages go down the lanes and up again, in a V
        down, stages = tuple(range(lanes)), stages or lanes
        if stages % lanes:
            raise ValueError(f"stages is {stages}: give as many for each of the {lanes} devices")
        return ((down + down[::-1]) * stages)[:stages]
    if schedule not in NAMES:
        raise ValueError(unknown(schedule, f", or {AUTO}"))
    # Where the stages are does not depend on the number of micro-batches.
    return named(schedule, lanes=lanes, stages=stages, microbatches=2 * lanes).placement


def microbatches_of(schedule: str | Schedule, chunks: int | None, stages: int) -> int:
    """The number of micro-batches in a mini-batch that has rows enough for them: ``chunks``, if the
    user gives it. Otherwise it is the number that the user's :class:`Schedule` has; or, for the
    name of a schedule, four for each stage.

    Raises ValueError if a :class:`Schedule` has another number of micro-batches than ``chunks``.
    """
    if isinstance(schedule, Schedule):
        if chunks not in (None, schedule.microbatches):
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.microbatches} micro-batches, and "
                f"chunks is {chunks}: give the same, or no chunks"
            )
        return schedule.microbatches
    return chunks or (4 * stages if stages > 1 else 1)


def schedule_of(
    schedule: str | Schedule,
    placement: Sequence[int],
    microbatches: int,
    costs: Callable[[], Sequence[StageCost]],
    *,
    whole: int | None = None,
    links: Links | None = None,
    memory: Memory | None = None,
    max_bytes: Bound | None = None,
    moves_recomputations: bool = True,
) -> Schedule:
    """The order of a training step of ``microbatches`` micro-batches.

    Args:
        schedule: a name, "auto" for a search, or a :class:`Schedule`.
        placement: the lane of each stage.
        costs: gives the costs of the stages. Only the search needs these, ``links``, ``memory``,
            ``max_bytes`` and ``moves_recomputations``; see :func:`fxpipe.schedule.auto`.
        whole: the number of micro-batches in a whole mini-batch; None: ``microbatches``. The last
            batch of an epoch may have fewer. If they are too few for the schedule, it is made for
            more, at most ``whole``, and the first ``microbatches`` of them are kept.

    Raises ValueError for a :class:`Schedule` of another number of micro-batches than ``whole``.
    """
    lanes, whole = 1 + max(placement), max(microbatches, whole or 0)
    if isinstance(schedule, Schedule):
        if schedule.microbatches != whole:
            raise ValueError(
                f"the schedule {schedule.name!r} has {schedule.microbatches} micro-batches, the "
                f"mini-batch {whole}: give chunks={schedule.microbatches}, and a batch of "
                "as many rows or more"
            )
        return schedule.first(microbatches)
    if schedule == AUTO:
        return auto(
            costs(),
            lanes,
            microbatches,
            placement=placement,
            links=links,
            memory=memory,
            max_bytes=max_bytes,
            moves_recomputations=moves_recomputations,
        )
    enough = max(microbatches, min(whole, least_microbatches(schedule, lanes)))
    order = named(schedule, lanes=lanes, microbatches=enough, stages=len(placement))
    return order.first(microbatches)
