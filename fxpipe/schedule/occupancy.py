"""A step in time, as data: when each lane is busy with which action, when copies run, and how much
memory lanes hold; and the makespan and bubble that follow."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fxpipe.schedule.actions import Action, Kind


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which to print a time: the number of seconds in it, and its name."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if seconds >= u[0]), (1e-6, "µs"))


@dataclass(frozen=True)
class Span:
    """Work of a lane, from ``start`` to ``end``, in seconds since the step began. Work that is no
    action, such as the loss, has a ``name`` instead."""

    lane: int
    start: float
    end: float
    action: Action | None
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __str__(self) -> str:
        return self.name or str(self.action)


@dataclass(frozen=True)
class Transfer:
    """A copy from one lane to another, in seconds since the step began. ``action`` made the values
    that are copied; it is None for a copy that happens once in a step, as of a shared parameter. A
    copy from a lane to itself is one of activations to the host's memory, which a forward has
    begun, or back from there, which a reload has begun."""

    source: int
    target: int
    start: float
    end: float
    action: Action | None
    bytes: float = 0

    def __str__(self) -> str:
        if self.action is None:
            return "copy, once"
        if self.source != self.target:
            return f"copy {self.action}"
        way = "back from" if self.action.kind is Kind.RECOMPUTE else "to"
        return f"activations of {self.action}, {way} the host"


@dataclass(frozen=True)
class Occupancy:
    """A step of training in time, as data; :class:`fxpipe.schedule.Timeline` can show it too.

    Attributes:
        name: the name of the schedule, or another name for the step.
        lanes: the names of the lanes.
        spans: the work of the lanes. Spans of one lane do not overlap.
        transfers: the copies between lanes, and between a lane and the host.
        memory: for each lane, pairs ``(seconds, bytes)`` of a time and the bytes held from then on,
            in order of time; empty if the memory is not known.
    """

    name: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...] = ()
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()

    def of_lane(self, lane: int) -> list[Span]:
        """A lane's spans, in order of time."""
        return sorted((s for s in self.spans if s.lane == lane), key=lambda s: (s.start, s.end))

    @property
    def start(self) -> float:
        """The time, in seconds, at which the first lane begins."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, over all lanes."""
        return max((span.end for span in self.spans), default=self.start) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """The seconds that each lane works."""
        return tuple(sum(s.seconds for s in self.of_lane(i)) for i in range(len(self.lanes)))

    @property
    def own_spans(self) -> tuple[float, ...]:
        """The seconds from each lane's first start to its last end."""
        lanes = [self.of_lane(lane) for lane in range(len(self.lanes))]
        return tuple(max(s.end for s in own) - own[0].start if own else 0.0 for own in lanes)

    @property
    def period(self) -> float:
        """The seconds that each further step takes in a long run of steps.

        A lane that has ended a step begins the next one at once, so that steps overlap. The lane
        with the longest time from its first start to its last end sets the pace.
        """
        return max(self.own_spans, default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of all lanes' time that is idle, if every lane's time goes from the first
        start of any lane to the last end of any lane."""
        return _idle(sum(self.busy), self.makespan * len(self.lanes))

    @property
    def bubble_in_span(self) -> float:
        """The fraction of the lanes' time that is idle, if a lane's time goes from its own first
        start to its own last end.

        In a long run steps overlap (see :attr:`period`), and only this idle time remains.
        """
        return _idle(sum(self.busy), sum(self.own_spans))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most bytes that each lane holds at once; empty if the memory is not known."""
        return tuple(max((amount for _, amount in lane), default=0.0) for lane in self.memory)

    @property
    def host_memory(self) -> float:
        """The most bytes of activations that wait in the host's memory at once, for all lanes
        together: from the begin of their copy there to the end of their backward."""
        sizes = {
            (copy.action.stage, copy.action.microbatch): (copy.start, copy.bytes)
            for copy in self.transfers
            if copy.source == copy.target and copy.action and copy.action.kind is Kind.FORWARD
        }
        ends = {
            (span.action.stage, span.action.microbatch): span.end
            for span in sorted(self.spans, key=lambda span: span.end)
            if span.action is not None
        }
        changes = [(start, size) for start, size in sizes.values()]
        changes += [(ends[cell], -size) for cell, (_, size) in sizes.items()]
        return max(accumulate((change for _, change in sorted(changes)), initial=0.0))


def _idle(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole > 0 else 0.0
