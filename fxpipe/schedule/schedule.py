"""A schedule: the actions of each lane, in order. It can be printed, written and read."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fxpipe.ir.log import warn
from fxpipe.ir.text import kind
from fxpipe.schedule.actions import Action, Entry, Kind, NotAnAction, Overlap, parse_entry
from fxpipe.schedule.gantt import FORWARDS, draw
from fxpipe.schedule.occupancy import Occupancy, Span
from fxpipe.schedule.order import earliest_starts, run_order
from fxpipe.schedule.recomputation import recomputed_cells, with_reloads

Edges = Sequence[tuple[int, int]]
"""Pairs ``(source, target)`` of stages, where ``target`` takes an output of ``source``."""

_IDLE = "."


def chain(stages: int) -> tuple[tuple[int, int], ...]:
    """The edges of a stage graph without skips, in which each stage sends to the next one only."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Schedule:
    """A training step as data: ``lanes[i]`` has the actions of lane ``i``, in order.

    A schedule has no times: an action runs as soon as its lane is free and its inputs have arrived.
    Schedules are made by :func:`fxpipe.schedule.named`, read from text or a file, or written by
    hand; :func:`fxpipe.schedule.validate` refuses a schedule that cannot run.
    """

    name: str
    stages: int
    microbatches: int
    lanes: tuple[tuple[Entry, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", tuple(map(tuple, self.lanes)))  # lists may be given

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The lane of each stage; -1 for a stage that has no actions."""
        lane_of: dict[int, int] = {}
        for lane in range(len(self.lanes)):
            for action in self.actions(lane):
                lane_of.setdefault(action.stage, lane)
        return tuple(lane_of.get(stage, -1) for stage in range(self.stages))

    def actions(self, lane: int) -> Iterator[Action]:
        """The actions of a lane in order, with overlapping ones one after the other."""
        for entry in self.lanes[lane]:
            yield from entry.parts

    def first(self, microbatches: int) -> Schedule:
        """The schedule without the actions of all but the first ``microbatches`` micro-batches. The
        other actions keep their order.

        The last one's recomputations are left out: with ``checkpoint="except_last"`` the last one
        keeps its activations, and if it does not, it is recomputed right ahead of its backward.
        """
        if microbatches >= self.microbatches:
            return self

        def is_kept(action: Action) -> bool:
            is_again = action.kind is Kind.RECOMPUTE
            return action.microbatch < microbatches - is_again

        return replace(self, microbatches=microbatches, lanes=self._only(is_kept))

    def recomputing(self, checkpointed: Sequence[int]) -> Schedule:
        """The schedule with the recomputations of these micro-batches only: for each stage, of the
        first ones."""

        def is_kept(action: Action) -> bool:
            is_again = action.kind is Kind.RECOMPUTE
            return not is_again or action.microbatch < checkpointed[action.stage]

        return replace(self, lanes=self._only(is_kept))

    def reloading(self, offloaded: Collection[int]) -> Schedule:
        """The schedule with a reload of each micro-batch of these stages, whose activations wait in
        the host's memory (:func:`fxpipe.schedule.recomputation.with_reloads`)."""
        if not offloaded:
            return self
        lanes = (tuple(with_reloads(lane, offloaded)) for lane in self.lanes)
        return replace(self, lanes=tuple(lanes))

    def _only(self, is_kept: Callable[[Action], bool]) -> tuple[tuple[Entry, ...], ...]:
        """The lanes with some of their actions only. An overlap of which one action is left is that
        action."""
        lanes = []
        for lane in self.lanes:
            kept = (tuple(filter(is_kept, entry.parts)) for entry in lane)
            lanes.append(tuple(p[0] if len(p) == 1 else Overlap(p) for p in kept if p))
        return tuple(lanes)

    # ------------------------------------------------------------------------------------- as text

    @classmethod
    def from_text(cls, text: str, name: str = "text") -> Schedule:
        """Read a schedule from text, as :meth:`text` writes it: one line for each lane, and spaces
        between actions.

        Text before a ``|`` is a label, ``.`` is idle time, and both are left out, as are empty
        lines. ``Schedule.from_text("0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1")`` has two lanes.

        Raises ValueError for a word that is no action, the message says which; and for a text that
        has none.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is {kind(text)}: give lines of actions, such as '0F0 0B0'")
        lines = [line.rpartition("|")[2].split() for line in text.splitlines() if line.strip()]
        return cls._read(name, lines)

    def text(self) -> str:
        """The lanes as a grid of text: a row for each lane. Each action takes one column, and is in
        the first one in which it can run."""
        columns = [dict[int, str]() for _ in self.lanes]
        for lane, slots in enumerate(_slots(self)):
            for slot, entry in zip(slots, self.lanes[lane], strict=True):
                columns[lane][slot] = str(entry)
        last = max((slot for row in columns for slot in row), default=-1)
        widths = [max(len(row.get(i, _IDLE)) for row in columns) for i in range(last + 1)]
        label = len(f"lane {len(self.lanes) - 1}")
        return "\n".join(
            f"{f'lane {lane}':{label}} | "
            + " ".join(row.get(i, _IDLE).center(width) for i, width in enumerate(widths)).rstrip()
            for lane, row in enumerate(columns)
        )

    def __str__(self) -> str:
        sizes = (
            _count(self.stages, "stage"),
            _count(len(self.lanes), "lane"),
            _count(self.microbatches, "micro-batch", "micro-batches"),
        )
        return f"{self.name}: {sizes[0]} on {sizes[1]}, {sizes[2]}\n{self.text()}"

    def _repr_svg_(self) -> str | None:
        """The drawing that notebooks show: a Gantt chart, in which a backward takes as long as two
        forwards. None if actions wait for each other forever; then notebooks show the text."""
        needs = Needs(self)
        lanes = [list(self.actions(lane)) for lane in range(len(self.lanes))]
        order = run_order(lanes, needs.of)
        if len(order) < sum(map(len, lanes)):
            return None
        starts = earliest_starts(order, needs.of, _forwards)
        spans = (Span(lane, at, at + _forwards(action), action) for lane, action, at in starts)
        names = tuple(f"lane {lane}" for lane in range(len(lanes)))
        in_lanes = tuple(sorted(spans, key=lambda span: (span.lane, span.start)))
        return draw([Occupancy(self.name, names, in_lanes)], unit=FORWARDS)

    # -------------------------------------------------------------------------------------- as CSV

    def to_csv(self, path: str | os.PathLike[str], *, recomputations: bool = True) -> None:
        """Write the file that ``torch.distributed.pipelining`` loads as ``compute_only``.

        ``recomputations=False`` leaves recomputations out: ``torch.distributed.pipelining`` has no
        action for them, since a checkpoint within a stage of its own runs in the backward.
        """
        is_kept = (lambda a: True) if recomputations else (lambda a: a.kind is not Kind.RECOMPUTE)
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(self._only(is_kept))

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], name: str | None = None) -> Schedule:
        """Read a CSV file as ``torch.distributed.pipelining`` dumps and loads it.

        Actions that compute nothing (sends, receives, sharding) are left out, with a warning: they
        follow from the other actions and from the stage graph.

        Args:
            name: the name of the schedule. None: the name of the file, without its ending.

        Raises:
            ValueError: for a cell that is no action, the message gives its lane and column; and
                for a file that has none, or that is no CSV file in UTF-8.
        """
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:  # with or without a mark
                rows = list(csv.reader(file))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{os.fspath(path)} is no CSV file of a schedule ({error}): give a file in UTF-8, "
                "as Schedule.to_csv or torch.distributed.pipelining writes it"
            ) from error
        return cls._read(name or Path(path).stem, rows, path)

    @classmethod
    def _read(
        cls, name: str, rows: Iterable[Iterable[str]], path: str | os.PathLike[str] | None = None
    ) -> Schedule:
        place = "" if path is None else f"{os.fspath(path)}, "
        lanes, others = [], Counter[str]()
        for lane, row in enumerate(rows):
            entries: list[Entry] = []
            for column, cell in enumerate(row):
                if cell.strip() in ("", _IDLE):
                    continue
                try:
                    entry = parse_entry(cell)
                except NotAnAction as error:
                    raise ValueError(f"{place}lane {lane}, column {column}: {error}") from None
                if isinstance(entry, str):
                    others[entry] += 1
                else:
                    entries.append(entry)
            lanes.append(tuple(entries))
        if others:
            said = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items()))
            warn(f"{place}actions that compute nothing are left out: {said}")
        actions = [action for lane in lanes for entry in lane for action in entry.parts]
        if not actions:
            raise ValueError(f"{place}there is no action: write one line for each lane, 0F0 0B0")
        stages = 1 + max((action.stage for action in actions), default=-1)
        microbatches = 1 + max((action.microbatch for action in actions), default=-1)
        return cls(name, stages, microbatches, tuple(lanes))


def _count(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"


class Needs:
    """The actions that each action of a schedule waits for.

    A forward waits for the forwards of the stages whose outputs it takes. A backward waits for the
    forward of the same stage and micro-batch, and for the gradients from the stages that took its
    output. A weight gradient waits for the first half of its backward. A recomputation waits for
    its forward, and its backward waits for it.

    Args:
        edges: the edges of the stage graph. None: each stage sends to the next one only.
    """

    def __init__(self, schedule: Schedule, edges: Edges | None = None) -> None:
        self._halved = {
            (action.stage, action.microbatch)
            for lane in range(len(schedule.lanes))
            for action in schedule.actions(lane)
            if action.kind is Kind.BACKWARD_INPUT
        }
        self._recomputed = recomputed_cells(
            action for lane in range(len(schedule.lanes)) for action in schedule.actions(lane)
        )
        self._before: dict[int, list[int]] = {}
        self._after: dict[int, list[int]] = {}
        for source, target in chain(schedule.stages) if edges is None else edges:
            self._before.setdefault(target, []).append(source)
            self._after.setdefault(source, []).append(target)

    def of(self, action: Action) -> list[Action]:
        """The actions that must be done, in any lane, before this one starts."""
        stage, kind, microbatch = action.stage, action.kind, action.microbatch
        if kind is Kind.FORWARD:
            return [Action(s, kind, microbatch) for s in self._before.get(stage, ())]
        if kind is Kind.WEIGHT_GRAD:
            return [Action(stage, Kind.BACKWARD_INPUT, microbatch)]
        needs = [Action(stage, Kind.FORWARD, microbatch)]
        if kind is Kind.RECOMPUTE:
            return needs
        if (stage, microbatch) in self._recomputed:
            needs.append(Action(stage, Kind.RECOMPUTE, microbatch))
        return [*needs, *(self._gradient(s, microbatch) for s in self._after.get(stage, ()))]

    def _gradient(self, stage: int, microbatch: int) -> Action:
        is_halved = (stage, microbatch) in self._halved
        kind = Kind.BACKWARD_INPUT if is_halved else Kind.BACKWARD
        return Action(stage, kind, microbatch)


def _forwards(action: Action) -> float:
    """How long an action takes if no costs are given: a backward as long as two forwards."""
    return 2.0 if action.kind is Kind.BACKWARD else 1.0


def _slots(schedule: Schedule) -> list[list[int]]:
    """For each lane, the columns of its entries in the printed grid: an entry starts as early as it
    can, and takes one column.

    Schedules that cannot run are printed too: no entry waits for an action that is missing from the
    schedule, and entries that wait for each other forever come last.
    """
    needs = Needs(schedule)
    present = {action for lane in range(len(schedule.lanes)) for action in schedule.actions(lane)}

    def needs_of(action: Action) -> list[Action]:
        return [need for need in needs.of(action) if need in present]

    slots: list[list[int]] = [[] for _ in schedule.lanes]
    order = run_order(schedule.lanes, needs_of)
    for lane, _, start in earliest_starts(order, needs_of, lambda entry: 1.0):
        slots[lane].append(int(start))
    stuck = 1 + max((row[-1] for row in slots if row), default=-1)
    for lane, entries in enumerate(schedule.lanes):
        slots[lane] += range(stuck, stuck + len(entries) - len(slots[lane]))
    return slots
