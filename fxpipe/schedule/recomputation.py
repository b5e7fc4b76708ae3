"""Recomputation: a checkpointed micro-batch's forward is run again ahead of its backward.

::

    lane 0    0F0 0F1  .   .  0R0 0B0 0B1          the schedule puts 0R0 where the lane would idle,
    lane 1     .  1F0 1B0 1F1 1B1                  and says nothing of stage 0's micro-batch 1

    lane 0    0F0 0F1 0R0 0B0 0R1 0B1              what runs if both are checkpointed

A recomputation needs no gradient, so that it runs while the gradient is computed and sent. Where a
schedule has none for a checkpointed micro-batch, it comes right ahead of the backward.

Where activations wait in the host's memory, the same action begins to bring them back. This
occupies a link, and not the lane. So it comes one action ahead of the backward, and what travels
has the time of that action. If there is no other action in between, they stay on the device::

    lane 0    0F0 0F1 0R0 0F2 0B0          micro-batch 0 of stage 0 has been on the host
    lane 1     .  1F0 1B0 1F1 1B1          those of stage 1 have no time for it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest

from fxpipe.schedule.actions import Action, Entry, Kind

Cell = tuple[int, int]
"""A stage and a micro-batch."""


def recomputed_cells(actions: Iterable[Action]) -> frozenset[Cell]:
    """The cells whose recomputation is among these actions."""
    return frozenset((a.stage, a.microbatch) for a in actions if a.kind is Kind.RECOMPUTE)


def with_reloads(entries: Sequence[Entry], offloaded: Collection[int]) -> Iterator[Entry]:
    """The entries of a lane with the reloads that they lack, one entry ahead of the backward, where
    there is another entry between the forward and that one.

    ``offloaded``: the stages whose activations wait in the host's memory.
    """
    actions = [(i, action) for i, entry in enumerate(entries) for action in entry.parts]
    done = recomputed_cells(action for _, action in actions)
    begun: dict[Cell, int] = {}
    ahead: dict[int, list[Action]] = {}
    for i, action in actions:
        cell = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            begun[cell] = i
        is_lacking = action.stage in offloaded and cell not in done
        if is_lacking and action.kind.begins_backward and begun[cell] < i - 2:
            reload = Action(action.stage, Kind.RECOMPUTE, action.microbatch)
            ahead.setdefault(i - 1, []).append(reload)
    for i, entry in enumerate(entries):
        yield from ahead.get(i, ())
        yield entry


def with_recomputations(actions: Iterable[Action], checkpointed: Sequence[int]) -> Iterator[Action]:
    """The actions of a lane, or of all lanes, in their order, with each recomputation that they
    lack right ahead of its backward.

    ``checkpointed``: for each stage, how many micro-batches are checkpointed, which are the first
    ones.
    """
    done: set[Cell] = set()
    for action in actions:
        cell = action.stage, action.microbatch
        if action.kind is Kind.RECOMPUTE:
            done.add(cell)
        is_again = action.microbatch < checkpointed[action.stage]
        if is_again and cell not in done and action.kind.begins_backward:
            yield Action(action.stage, Kind.RECOMPUTE, action.microbatch)
        yield action


def without_needless(actions: Sequence[Action]) -> Iterator[Action]:
    """The actions of a lane without the recomputations that change nothing: those right ahead of
    their backward, where they run anyway, and those behind it, which come too late."""
    begun: set[Cell] = set()
    for action, behind in zip_longest(actions, actions[1:]):
        cell = action.stage, action.microbatch
        if action.kind.begins_backward:
            begun.add(cell)
        is_default = behind is not None and behind.kind.begins_backward
        is_default = is_default and (behind.stage, behind.microbatch) == cell
        if action.kind is not Kind.RECOMPUTE or not (is_default or cell in begun):
            yield action
