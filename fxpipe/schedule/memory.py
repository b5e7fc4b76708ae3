"""The memory of a step: the bytes that each action adds to those that its lane holds, or frees.

::

                  micro-batch that keeps its activations    checkpointed micro-batch
    forward       begins: + activations                     begins: + inputs
    recompute                                               begins: + recomputed activations
    backward      ends:   - activations                     ends:   - activations - inputs

A backward in two halves begins with the first and ends with the second; at the end of the first the
inputs, and a part of the activations, may be free already. Where a schedule has no recomputation of
its own, the backward begins with it. A stage may be recomputed in segments, each right ahead of its
own backward, so that only the activations of one are there at a time; but those of all are there in
a backward in two halves, until the second. In the last stage, a forward is followed by the loss,
and a recomputation, or a backward without one, begins with the loss's backward. So what the loss
has saved is added to the former and is free at the begin of the latter; no checkpoint makes it any
smaller. Since a lane does one thing at a time, what it holds follows from the order of its actions
alone, whatever time they take.

The timeline of a step also shows what a bound on memory leaves out: the bytes that an action needs
only while it runs (:class:`Workspace`), and results that wait until another lane takes them
(:mod:`fxpipe.schedule.held`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.schedule.actions import Action, Kind
from fxpipe.schedule.bounds import Bound, spread
from fxpipe.schedule.recomputation import Cell, recomputed_cells
from fxpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class Workspace:
    """The bytes that a stage needs for a micro-batch only while it computes, such as its result and
    gradients within it: the most at any time, beyond what the stage keeps at the end of a forward.

    Attributes:
        forward: for a forward that keeps its activations, with those of its inputs that it does
            not keep.
        again: for a forward that keeps its inputs only, since it is run again: it frees at its end
            what it has saved.
        rerun: for the forward that is run again, beyond its inputs and its activations.
        backward: for a whole backward, which frees activations as it goes.
        half: for the first half of a backward; gradients that the second half needs take the place
            of activations that the first half has used.
        weights: for the second half of a backward.
    """

    forward: float = 0.0
    again: float = 0.0
    rerun: float = 0.0
    backward: float = 0.0
    half: float = 0.0
    weights: float = 0.0


@dataclass(frozen=True)
class WhileRunning:
    """What lanes hold while a step runs, beside what they keep for backwards.

    Attributes:
        stages: what each stage needs while it computes.
        loss: the most that the loss and its backward need beyond what the loss has saved.
        kept_results: how many of the bytes that one stage sends to another are activations of the
            first as well, so that they take no more memory while they wait to be sent. Keys are
            pairs of stages.
        updating: what each stage needs, when its actions are done, while the optimizer steps its
            parameters; none: nothing.
        views: how many bytes more than the gradients that one stage sends back to another the
            memories have of which these are views. Keys are pairs of stages.
    """

    stages: Sequence[Workspace]
    loss: float = 0.0
    kept_results: Mapping[tuple[int, int], float] = field(default_factory=dict)
    updating: Sequence[float] = ()
    views: Mapping[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """The bytes that lanes hold.

    Attributes:
        activations: the bytes that each stage keeps of a micro-batch until its backward.
        fixed: the bytes that a lane holds all the time, such as parameters and their gradients: one
            number for all lanes, or one for each.
        released_by_input: the fraction of the activations that the input half of a backward frees:
            one number for all stages, or one for each. It is negative where that half leaves more
            gradients for the other half than it frees.
        checkpointed: the number of micro-batches that are checkpointed, which are the first ones:
            one number for all stages, or one for each. They keep only ``inputs`` until their
            backward, which recomputes their activations.
        offloaded: the stages whose checkpointed micro-batches are not recomputed: their activations
            come back from the host's memory. They keep no inputs.
        inputs: the bytes that a stage keeps of a checkpointed micro-batch: one number for all
            stages, or one for each.
        recomputed: the most activations, in bytes, that are there at one time of a checkpointed
            micro-batch, for each stage: fewer than its ``activations`` if it is recomputed in
            segments. None: all of them.
        loss: the bytes that the loss saves of a micro-batch for its backward.
        shared_with_loss: how many of these bytes are activations of the last stage as well, such as
            the model's output where the last operator has saved it too.
        kept_inputs: how many of the ``inputs`` are activations as well, so that a micro-batch that
            is recomputed does not need them twice: one number for all stages, or one for each.
        running: what lanes hold beside that while a step runs, for its timeline; None: not known.
    """

    activations: Sequence[float]
    fixed: Bound = 0.0
    released_by_input: Bound = 0.0
    checkpointed: int | Sequence[int] = 0
    inputs: Bound = 0.0
    recomputed: Sequence[float] | None = None
    loss: float = 0.0
    shared_with_loss: float = 0.0
    kept_inputs: Bound = 0.0
    running: WhileRunning | None = None
    offloaded: Collection[int] = frozenset()

    def again(self, stages: int) -> list[int]:
        """For each stage, how many micro-batches are checkpointed."""
        return spread(self.checkpointed, stages, "checkpointed micro-batches of each stage")


class MemoryChanges:
    """By how many bytes each action changes what its lane holds, at its begin and at its end.

    ``recomputed``: the cells whose recomputation, or reload, is an action of its own; other
    checkpointed ones are recomputed when their backward begins. Cells of offloaded stages that are
    not among them stay on the device. None: the schedule has yet to be made, so that all offloaded
    cells are taken to be reloaded when their backward begins.
    """

    def __init__(
        self, memory: Memory, stages: int, recomputed: Collection[Cell] | None = None
    ) -> None:
        self._recomputed, self._offloaded = recomputed, memory.offloaded
        sizes: list[float] = spread(memory.activations, stages, "activations of each stage")
        inputs = spread(memory.inputs, stages, "inputs of each stage")
        shared = spread(memory.kept_inputs, stages, "inputs of each stage that are activations")
        parts: list[float] = spread(memory.recomputed or sizes, stages, "recomputed of each stage")
        released: list[float] = spread(memory.released_by_input, stages, "part that is released")
        self._checkpointed = memory.again(stages)
        self._kept = [_of_kept(*each, 0.0) for each in zip(sizes, released, strict=True)]
        self._again = [
            _of_checkpointed(*of_stage, 0.0)
            for of_stage in zip(sizes, parts, inputs, shared, released, strict=True)
        ]
        if stages and memory.loss:
            own = memory.loss - memory.shared_with_loss
            self._kept[-1] = _of_kept(sizes[-1], released[-1], own)
            self._again[-1] = _of_checkpointed(
                sizes[-1], parts[-1], inputs[-1], shared[-1], released[-1], memory.loss
            )
            if stages - 1 in memory.offloaded:  # its loss's backward begins the backward itself
                begin, end = self._again[-1][Kind.RECOMPUTE]
                self._again[-1][Kind.RECOMPUTE] = begin + memory.loss, end

    def is_again(self, action: Action) -> bool:
        """Whether an action's micro-batch has its activations recomputed, or brought back."""
        if action.stage in self._offloaded and self._recomputed is not None:
            return (action.stage, action.microbatch) in self._recomputed
        return action.microbatch < self._checkpointed[action.stage]

    def is_begun(self, action: Action) -> bool:
        """Whether a recomputation or reload of an action's micro-batch is an action of its own."""
        return (action.stage, action.microbatch) in (self._recomputed or ())

    def of(self, action: Action) -> tuple[float, float]:
        """The bytes that an action adds when it begins, and when it ends; negative if it frees."""
        is_again = self.is_again(action)
        begin, end = (self._again if is_again else self._kept)[action.stage][action.kind]
        if is_again and self.is_begun(action) and action.kind.begins_backward:
            before, _ = self._again[action.stage][Kind.RECOMPUTE]
            return begin - before, end  # the recomputation has added this already
        return begin, end


def _of_kept(size: float, released: float, loss: float) -> dict[Kind, tuple[float, float]]:
    return {
        Kind.FORWARD: (size + loss, 0.0),
        Kind.BACKWARD: (-loss, -size),
        Kind.BACKWARD_INPUT: (-loss, -released * size),
        Kind.WEIGHT_GRAD: (0.0, (released - 1.0) * size),
        Kind.RECOMPUTE: (0.0, 0.0),
    }


def _of_checkpointed(
    size: float, part: float, inputs: float, shared: float, released: float, loss: float
) -> dict[Kind, tuple[float, float]]:
    # What a second run adds to the inputs, which are still there: one segment after the other, and
    # all of them where the second halves of their backwards are put off. A second half needs none
    # of the inputs but those that are activations as well.
    again, all_again = part - shared, size - shared
    return {
        Kind.FORWARD: (inputs + loss, 0.0),
        Kind.BACKWARD: (again - loss, -again - inputs),
        Kind.BACKWARD_INPUT: (all_again - loss, shared - inputs - released * size),
        Kind.WEIGHT_GRAD: (0.0, (released - 1.0) * size),
        Kind.RECOMPUTE: (again - loss, 0.0),
    }


def most_held(actions: Iterable[Action], changes: MemoryChanges) -> float:
    """The most that a lane holds at any time while it does these actions, one after the other."""
    now = most = 0.0
    for action in actions:
        begin, end = changes.of(action)
        most = max(most, now + begin)
        now += begin + end
    return most


# ------------------------------------------------------------------- of a schedule, without times


@dataclass(frozen=True)
class Live:
    """The most micro-batches whose activations are alive at once, at each stage and in each lane.

    A lane counts a micro-batch once for each of its stages that keeps activations of it. If
    :func:`live` is given ``weights``, these numbers are sums of weights (such as bytes).
    """

    stages: tuple[float, ...]
    lanes: tuple[float, ...]


def live(
    schedule: Schedule, weights: Sequence[float] | None = None, released_by_input: float = 0.0
) -> Live:
    """The most micro-batches that are alive at once during a step. A micro-batch is alive at a
    stage from its forward to the end of its backward.

    Args:
        weights: how much a micro-batch counts at each stage; None: 1.
        released_by_input: the fraction of a micro-batch's activations that the input half of its
            backward frees; the weight half frees the rest.
    """
    return peaks(schedule, counting(schedule, weights, released_by_input))


def counting(
    schedule: Schedule, weights: Sequence[float] | None, released_by_input: float = 0.0
) -> Memory:
    """A memory in which a micro-batch counts ``weights[stage]`` at each stage, or 1 for None."""
    each = [1.0] * schedule.stages if weights is None else weights
    return Memory(each, released_by_input=released_by_input)


def peaks(schedule: Schedule, memory: Memory) -> Live:
    """The most that each stage, and each lane, holds at once, without ``memory.fixed``, which does
    not depend on the schedule."""
    every = (action for lane in range(len(schedule.lanes)) for action in schedule.actions(lane))
    changes = MemoryChanges(memory, schedule.stages, recomputed_cells(every))
    stages = [0.0] * schedule.stages
    lanes = [0.0] * len(schedule.lanes)
    for lane in range(len(schedule.lanes)):
        for _, action, at_stage, in_lane in held_in_order(schedule, lane, changes):
            stages[action.stage] = max(stages[action.stage], at_stage)
            lanes[lane] = max(lanes[lane], in_lane)
    return Live(tuple(stages), tuple(lanes))


def held_in_order(
    schedule: Schedule, lane: int, changes: MemoryChanges
) -> Iterator[tuple[int, Action, float, float]]:
    """Each action of a lane, with its position, and with the bytes that its stage and the lane hold
    while it runs. These include what the action frees when it ends."""
    amounts, total = [0.0] * schedule.stages, 0.0
    for position, entry in enumerate(schedule.lanes[lane]):
        for action in entry.parts:
            begin, end = changes.of(action)
            amounts[action.stage] += begin
            total += begin
            yield position, action, amounts[action.stage], total
            amounts[action.stage] += end
            total += end
