"""Schedules by name, each from the paper that introduced it.

The pictures are what the schedules print, with a row for each lane and a column for each action.
``1F0`` is the forward of stage 1 for micro-batch 0. ``B`` is a whole backward; ``I`` (gradients of
inputs) and ``W`` (gradients of weights) are its halves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from fxpipe.schedule.actions import Action, Entry, Kind, Overlap
from fxpipe.schedule.schedule import Schedule


def named(name: str, *, lanes: int, microbatches: int, stages: int | None = None) -> Schedule:
    """A schedule by its name, which is one of :data:`NAMES`, for numbers of lanes, stages and
    micro-batches.

    Args:
        stages: the number of stages. None: each lane has :func:`stages_per_lane` of them.

    Raises:
        ValueError: for an unknown name, or for numbers for which there is no such schedule; the
            message says for which numbers there is one.
    """
    usual = stages_per_lane(name)
    for what, count in (("lanes", lanes), ("microbatches", microbatches)):
        if count < 1:
            raise ValueError(f"{what} is {count}: give 1 or more")
    generate, _, is_fixed = _NAMED[name]
    if stages is None:
        stages = lanes * usual
    if is_fixed and stages != lanes * usual:
        raise ValueError(
            f"{name} has {usual} stage{'s' * (usual > 1)} on each lane: "
            f"{lanes} lanes take {lanes * usual} stages, not {stages}"
        )
    if stages < 1 or stages % lanes:
        nearest = max(1, round(stages / lanes)) * lanes
        raise ValueError(
            f"{name} has as many stages on each lane: {lanes} lanes take {nearest} stages, say, "
            f"not {stages}"
        )
    if microbatches < least_microbatches(name, lanes):
        raise ValueError(
            f"{name} on {lanes} lanes needs {least_microbatches(name, lanes)} micro-batches or "
            f"more, not {microbatches}"
        )
    return Schedule(name, stages, microbatches, tuple(generate(lanes, stages, microbatches)))


def stages_per_lane(name: str) -> int:
    """The number of stages that a named schedule gives each lane by default."""
    if name not in _NAMED:
        raise ValueError(unknown(name))
    return _NAMED[name][1]


def unknown(name: object, more: str = "") -> str:
    """What to say of a name that no schedule has: which name it may stand for, and all of them.

    Others write the names of these schedules in other ways: "1F1B", "Interleaved1F1B".

    Args:
        more: what else can be given.
    """
    plain = {each.replace("_", ""): each for each in NAMES}
    written = "".join(filter(str.isalnum, name.lower())) if isinstance(name, str) else ""
    near = get_close_matches(written, plain, 1)
    meant = f"did you mean {plain[near[0]]!r}? There are" if near else "give one of"
    return f"schedule is {name!r}: {meant} {', '.join(NAMES)}{more}"


def least_microbatches(name: str, lanes: int) -> int:
    """The fewest micro-batches that a named schedule takes."""
    return 2 * lanes if name == "dualpipe_v" else 1


# -------------------------------------------------------------------------------- one stage a lane


def gpipe(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, section 2.2).

    ::

        lane 0 | 0F0 0F1 0F2  .   .  0B0 0B1 0B2
        lane 1 |  .  1F0 1F1 1F2 1B0 1B1 1B2  .

    Every activation is kept until the backwards begin.
    """
    for lane in range(lanes):
        line = _LaneActions()
        line.forward(*[lane] * microbatches)
        line.backward(*[lane] * microbatches)
        yield line.entries


def one_f_one_b(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """One forward and one backward in turn (Narayanan et al. 2021, PipeDream-Flush).

    ::

        lane 0 | 0F0 0F1  .  0B0 0F2 0B1  .  0B2
        lane 1 |  .  1F0 1B0 1F1 1B1 1F2 1B2  .

    The step takes as long as GPipe's, but stage ``s`` keeps the activations of at most
    ``stages - s`` micro-batches.
    """
    for lane in range(lanes):
        warmup = min(lanes - 1 - lane, microbatches)
        line = _LaneActions()
        line.forward(*[lane] * warmup)
        for _ in range(microbatches - warmup):
            line.forward(lane)
            line.backward(lane)
        line.backward(*[lane] * warmup)
        yield line.entries


# --------------------------------------------------------------------------- several stages a lane


def interleaved_1f1b(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """1F1B with several stages on each lane (Narayanan et al. 2021, Megatron-LM, section 2.2).

    ::

        lane 0 | 0F0 0F1 2F0 2F1  .  2B0  .  2B1 0B0 0B1
        lane 1 |  .  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1  .

    Lane ``i`` has the stages ``i``, ``i + lanes``, ... A round of micro-batches, about as many as
    there are lanes, goes through a lane's first stage, then through its second. With ``v`` stages a
    lane the bubble is 1F1B's divided by ``v``, at the price of more copies and more activations.
    Any number of micro-batches will do: rounds are as even as they can be, larger ones first.
    """
    return _interleaved(lanes, stages, microbatches, hop=2, halves=False)


def zb_h1(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """1F1B with backwards in halves, and with no more memory (Qi et al. 2024, Zero Bubble, section
    2).

    ::

        lane 0 | 0F0 0F1  .  0I0 0W0 0F2 0I1 0W1 0I2 0W2
        lane 1 |  .  1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Gradients are sent after the first half of a backward; the second half fills idle time. If a
    forward and both halves take equally long, a third of 1F1B's idle time is left. Lane ``i`` puts
    weight gradients off by ``i`` micro-batches. If a lane has several stages, they are interleaved
    as in :func:`interleaved_1f1b`.
    """
    return _interleaved(lanes, stages, microbatches, hop=1, halves=True)


def _interleaved(
    lanes: int, stages: int, microbatches: int, hop: int, halves: bool
) -> Iterable[tuple[Entry, ...]]:
    """The lanes of 1F1B, interleaved if a lane has several stages. Before its first backward a lane
    does ``hop`` more forwards than the next lane. ``halves``: whether backwards are in halves."""
    rounds = _rounds(lanes, microbatches)
    for lane in range(lanes):
        own = range(lane, stages, lanes)
        forwards = [stage for size in rounds for stage in own for _ in range(size)]
        backwards = [stage for size in rounds for stage in reversed(own) for _ in range(size)]
        warmup = min((len(own) - 1) * rounds[0] + hop * (lanes - 1 - lane), len(forwards))
        line = _LaneActions()
        line.forward(*forwards[:warmup])
        for i, stage in enumerate(backwards):
            line.forward(*forwards[warmup + i : warmup + i + 1])
            if halves:
                line.backward_input(stage)
                line.weight_grads(owing=lane)
            else:
                line.backward(stage)
        line.weight_grads(owing=0)
        yield line.entries


def _rounds(lanes: int, microbatches: int) -> list[int]:
    count = max(1, microbatches // lanes)
    size, larger = divmod(microbatches, count)
    return [size + (i < larger) for i in range(count)]


def looped_bfs(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """All micro-batches go through a stage, then through the lane's next stage (Lamy-Poirier 2023,
    Breadth-First).

    ::

        lane 0 | 0F0 0F1 2F0 2F1  .   .  2B1 2B0 0B1 0B0
        lane 1 |  .  1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0  .

    Lane ``i`` has the stages ``i``, ``i + lanes``, ... The backwards go the same way back, the last
    micro-batch first. A stage's parameters are needed in one stretch of time, which suits sharding.
    """
    for lane in range(lanes):
        own = range(lane, stages, lanes)
        entries = [Action(s, Kind.FORWARD, m) for s in own for m in range(microbatches)]
        back = range(microbatches)[::-1]
        entries += [Action(s, Kind.BACKWARD, m) for s in reversed(own) for m in back]
        yield tuple(entries)


# ------------------------------------------------------------------- two stages a lane, down and up


def zbv(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """Two stages a lane in the shape of a V (Qi et al. 2024, Zero Bubble, section 6, ZB-V).

    ::

        lane 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2  .
        lane 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Stages go down the lanes and up again, so that the last stage is on the first lane and backwards
    begin there at once. If a forward and both halves of a backward take equally long, and there are
    ``2 * lanes`` micro-batches or more, no lane idles between its first and its last action, and no
    lane keeps more than the first lane of 1F1B does. For fewer micro-batches, it is the schedule of
    ``2 * lanes - 1`` micro-batches, from which the surplus ones are left out.
    """
    whole = max(microbatches, 2 * lanes - 1)
    for lane in range(lanes):
        down, up, below = lane, stages - 1 - lane, lanes - lane
        line = _LaneActions()
        line.forward(*[down] * (2 * below - 1))
        line.forward(*[up, down] * lane)
        for _ in range(below):
            line.forward(up)
            line.halves(up)
        for i in range(whole - lanes):
            if i < whole - 2 * lanes + lane + 1:
                line.forward(down)
            line.halves(down)
            line.forward(up)
            line.halves(up)
        line.backward_input(*[down, up] * lane)
        for _ in range(below):
            line.backward_input(down)
            line.weight_grad(down)
        line.weight_grad(*[up] * lane, *[down] * lane)
        yield tuple(entry for entry in line.entries if entry.parts[0].microbatch < microbatches)


def dualpipe_v(lanes: int, stages: int, microbatches: int) -> Iterable[tuple[Entry, ...]]:
    """A V in which forwards and backwards overlap (DualPipe, DeepSeek-AI 2024, cut in half).

    ::

        lane 0 | 0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1

    As in :func:`zbv` stages go down the lanes and up again. In the middle the forward of one stage
    is paired with the backward of the lane's other stage, so that one's copies hide behind the
    other's computation. At both ends backwards are in halves. It needs ``2 * lanes`` micro-batches
    or more.
    """
    for lane in range(lanes):
        down, up, below = lane, stages - 1 - lane, lanes - 1 - lane
        line = _LaneActions()
        line.forward(*[down] * (2 * below))
        line.forward(*[down, up] * (lane + 1))
        for _ in range(below):
            line.backward_input(up)
            line.weight_grads(owing=0)
            line.forward(up)
        for i in range(microbatches - 2 * lanes + lane + 1):
            if i == 0 and below == 0:
                # On the lane at the turn of the V, the backward needs the forward just before it,
                # so the two cannot overlap.
                line.forward(down)
                line.backward(up)
            else:
                line.overlap(down, up)
            line.overlap(up, down)
        for _ in range(below):
            line.backward(up)
            line.overlap(up, down)
        tail = [up, down] * (lane + 1)
        line.backward(*tail[: lane + 1])
        line.backward_input(*tail[lane + 1 :])
        for _ in range(below):
            line.weight_grads(owing=line.owed - 1)
            line.backward_input(down)
        line.weight_grads(owing=0)
        yield line.entries


_Generator = Callable[[int, int, int], Iterable[tuple[Entry, ...]]]

_NAMED: dict[str, tuple[_Generator, int, bool]] = {
    "gpipe": (gpipe, 1, True),
    "1f1b": (one_f_one_b, 1, True),
    "interleaved_1f1b": (interleaved_1f1b, 2, False),
    "looped_bfs": (looped_bfs, 2, False),
    "zb_h1": (zb_h1, 1, False),
    "zbv": (zbv, 2, True),
    "dualpipe_v": (dualpipe_v, 2, True),
}
"""For each name: the function that makes the schedule, the number of stages on a lane by default,
and whether a lane has to have that number."""

NAMES = tuple(_NAMED)
"""The names of the schedules that :func:`named` makes."""

ALL_FORWARDS = "gpipe", "looped_bfs"
"""Those in which all forwards come ahead of all backwards. So it is where the user calls a pipeline
and runs a backward then: all activations are kept, as these schedules do."""


class _LaneActions:
    """The list of a lane's actions, while it is being written. Micro-batches need not be given: the
    n-th action of a kind at a stage is for micro-batch n."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._next: Counter[tuple[int, Kind]] = Counter()
        self._owed: deque[Action] = deque()

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    @property
    def owed(self) -> int:
        """The number of first halves of backwards whose second half has not been added yet."""
        return len(self._owed)

    def forward(self, *stages: int) -> None:
        self._entries += [self._take(stage, Kind.FORWARD) for stage in stages]

    def backward(self, *stages: int) -> None:
        self._entries += [self._take(stage, Kind.BACKWARD) for stage in stages]

    def backward_input(self, *stages: int) -> None:
        for stage in stages:
            action = self._take(stage, Kind.BACKWARD_INPUT)
            self._entries.append(action)
            self._owed.append(Action(stage, Kind.WEIGHT_GRAD, action.microbatch))

    def weight_grads(self, owing: int) -> None:
        """Add second halves, the oldest first, until only ``owing`` are left to add."""
        while len(self._owed) > owing:
            self._entries.append(self._owed.popleft())

    def weight_grad(self, *stages: int) -> None:
        """Add, for each of the stages, the second half that has been left to add for longest."""
        for stage in stages:
            action = next(action for action in self._owed if action.stage == stage)
            self._owed.remove(action)
            self._entries.append(action)

    def halves(self, stage: int) -> None:
        self.backward_input(stage)
        self._entries.append(self._owed.pop())

    def overlap(self, forward: int, backward: int) -> None:
        parts = self._take(forward, Kind.FORWARD), self._take(backward, Kind.BACKWARD)
        self._entries.append(Overlap(parts))

    def _take(self, stage: int, kind: Kind) -> Action:
        """Whole backwards and first halves are counted together: a micro-batch has one of them."""
        counted = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
        self._next[stage, counted] += 1
        return Action(stage, kind, self._next[stage, counted] - 1)
