"""Which lane is busy with what, and when: spans of work, copies, memory, and their measures."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.schedule.actions import Action


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit to say a time in: how many seconds it has, and its name."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if seconds >= u[0]), (1e-6, "µs"))


@dataclass(frozen=True)
class Span:
    """Something that a lane does, from ``start`` to ``end``, in seconds since the step began.

    ``name`` says what it is where it is not an action: the loss, the optimizer's step.
    """

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
    """A copy from one lane to another: ``action`` is the one that made what travels; None for what
    goes once in a step."""

    source: int
    target: int
    start: float
    end: float
    action: Action | None
    bytes: float = 0

    def __str__(self) -> str:
        return "copy, once" if self.action is None else f"copy {self.action}"


@dataclass(frozen=True)
class Occupancy:
    """A step of training in time, as data; :class:`fxpipe.schedule.Timeline` can show it too.

    Attributes:
        lanes: their names, one each.
        spans: what they do; those of one lane do not overlap.
        transfers: what travels between them meanwhile.
        memory: for each lane, ``(seconds, bytes)`` wherever the bytes change, in order; empty if
            nothing is known of it.
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
        """When the first lane begins."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end, over all lanes."""
        return max((span.end for span in self.spans), default=self.start) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each lane works."""
        return tuple(sum(s.seconds for s in self.of_lane(i)) for i in range(len(self.lanes)))

    @property
    def own_spans(self) -> tuple[float, ...]:
        """Seconds from each lane's own first start to its own last end."""
        lanes = [self.of_lane(lane) for lane in range(len(self.lanes))]
        return tuple(max(s.end for s in own) - own[0].start if own else 0.0 for own in lanes)

    @property
    def period(self) -> float:
        """Seconds that a step adds to a long run in which steps follow each other.

        A lane that is done begins with the next step, so that all keep their distance in time: it
        is the longest of the lanes' own spans.
        """
        return max(self.own_spans, default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all lanes' time, from the first start to the last end, that is idle."""
        return _idle(sum(self.busy), self.makespan * len(self.lanes))

    @property
    def bubble_in_span(self) -> float:
        """The share of the lanes' time that is idle, each from its own first start to its last end.

        Steps that follow each other overlap, so this is what a long run pays.
        """
        return _idle(sum(self.busy), sum(self.own_spans))

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most bytes of each lane; empty if nothing is known of it."""
        return tuple(max((amount for _, amount in lane), default=0.0) for lane in self.memory)


def _idle(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole > 0 else 0.0
