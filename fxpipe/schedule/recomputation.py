"""Recomputation: a checkpointed micro-batch's forward is run again ahead of its backward.

::

    lane 0    0F0 0F1  .   .  0R0 0B0 0B1          the schedule puts 0R0 where the lane would idle,
    lane 1     .  1F0 1B0 1F1 1B1                  and says nothing of stage 0's micro-batch 1

    lane 0    0F0 0F1 0R0 0B0 0R1 0B1              what runs if both are checkpointed

A recomputation needs no gradient, so that it runs while the gradient is computed and sent. Where a
schedule has none for a checkpointed micro-batch, it comes right ahead of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from fxpipe.schedule.actions import Action, Kind

Cell = tuple[int, int]
"""A stage and a micro-batch."""


def recomputed_cells(actions: Iterable[Action]) -> frozenset[Cell]:
    """The cells whose recomputation is among these actions."""
    return frozenset((a.stage, a.microbatch) for a in actions if a.kind is Kind.RECOMPUTE)


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
