"""What the verifier knows of the value of each node, in place of the value itself.

::

    results = forward(stage_1, ...)           ("stage_1", 0) of micro-batch 2, ready on lane 1
    wait((results,), compute, copy)           the same value, ready to leave lane 1
    send(...)                                 the same value, arriving at lane 2
    wait(..., copy, compute)                  the same value, ready on lane 2

A value has a name that is the same for all micro-batches, the micro-batch, the place at which it is
ready, and the clock (:mod:`passes.verify.clocks`) that says after which events that is. Values in
tuples, lists and dicts are known one by one; what is no tensor is known as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import fx

from fxpipe.ir.graph import LANE, STAGE
from passes.verify.clocks import Clock


class Role(StrEnum):
    """Which streams of a lane a value is ready for."""

    COMPUTE = "compute"  #: the compute stream of the lane has made it, or has waited for it
    LEAVING = "leaving"  #: links that begin at the lane's device may copy it
    ARRIVING = "arriving"  #: a link has copied it to the lane's device; nobody has waited for it
    ANYWHERE = "anywhere"  #: it is a number on the host, or unknown


class Spot(NamedTuple):
    """Where a value is ready: a lane, and the role of the lane's streams that may use it."""

    lane: int
    role: Role

    def __str__(self) -> str:
        lane = "the caller" if self.lane == CALLER else f"lane {self.lane}"
        return {
            Role.COMPUTE: f"on the compute stream of {lane}",
            Role.LEAVING: f"leaving {lane}",
            Role.ARRIVING: f"arriving at {lane}",
            Role.ANYWHERE: "anywhere",
        }[self.role]


CALLER = -1  # the lane of nodes that no stage runs
GIVEN = Spot(CALLER, Role.COMPUTE)  # of the caller's tensors
ANYWHERE = Spot(CALLER, Role.ANYWHERE)


@dataclass(slots=True, eq=False)  # a frozen one takes three times as long to be made
class Known:
    """A tensor, or whatever else travels as one value.

    Args:
        what: a name, which is the same for all micro-batches.
        microbatch: None for a value that all micro-batches share.
        place: where it is ready.
        clock: after which events it is ready there.
        maker: the node that made it, or has moved it last.
        giver: the stage whose forward has given it, in a training step: the gradient goes back to
            that stage.
    """

    what: Hashable
    microbatch: int | None
    place: Spot
    clock: Clock
    maker: fx.Node
    giver: Hashable = None

    def at(self, place: Spot, clock: Clock, maker: fx.Node) -> Known:
        """Give what is known of the value where a node has moved it to."""
        return Known(self.what, self.microbatch, place, clock, maker, self.giver)


@dataclass(frozen=True, slots=True)
class KnownPortal:
    """A value that a portal hides from autograd. ``blue`` is the node that took it in."""

    value: Known
    blue: fx.Node


@dataclass(frozen=True, slots=True)
class KnownPhony:
    """The tensor without elements that a fork gives, and a join takes."""

    fork: fx.Node


@dataclass(frozen=True, slots=True)
class KnownHandle:
    """By which a checkpointed call is run again. ``call`` is the node of the call."""

    call: fx.Node


@dataclass(frozen=True, slots=True)
class KnownTape:
    """The autograd graph that a forward, or a loss, has recorded. ``maker`` is the node of it."""

    maker: fx.Node


@dataclass(frozen=True, slots=True)
class KnownState:
    """A parameter, a buffer or a module of the graph, by its path."""

    path: str


@dataclass(frozen=True, slots=True)
class KnownLent:
    """One of the views of a parameter that a node has lent: for one stage, which is brought it."""

    path: str
    index: int
    lender: fx.Node


@dataclass(frozen=True, slots=True)
class KnownParts:
    """What ``scatter`` and its like give: an element for each micro-batch, of the same name."""

    what: Hashable
    place: Spot
    clock: Clock
    maker: fx.Node
    is_copied: bool = True


@dataclass(slots=True, eq=False)
class KnownResults:
    """The results of a stage that is called by a node; ``what`` names the stage."""

    what: Hashable
    microbatch: int | None
    place: Spot
    clock: Clock
    maker: fx.Node


@dataclass(frozen=True, slots=True)
class NotKnown:
    """What another rank sends, when the graph of one rank is looked at by itself."""


NOT_KNOWN = NotKnown()
_SEQUENCES = list, tuple
_NESTED = list, tuple, dict


def mapped(function: Callable[[Any], Any], known: Any) -> Any:
    """What is known, with each value in tuples, lists and dicts replaced by ``function(value)``."""
    if isinstance(known, _SEQUENCES):
        return tuple([mapped(function, each) for each in known])
    if isinstance(known, dict):
        return {key: mapped(function, each) for key, each in known.items()}
    return function(known)


def leaves(known: Any) -> list[Any]:
    """The values in tuples, lists and dicts, one after the other."""
    if isinstance(known, dict):
        return leaves([*known.values()])
    if not isinstance(known, _SEQUENCES):
        return [known]
    found: list[Any] = []
    for each in known:
        if isinstance(each, _NESTED):
            found += leaves(each)
        else:
            found.append(each)
    return found


def named(known: Any) -> Any:
    """What is known as names alone: the same for all micro-batches, in all places."""
    return mapped(_name, known)


def _name(leaf: Any) -> Any:
    match leaf:
        case Known() | KnownParts() | KnownResults():
            return leaf.what
        case KnownPortal():
            return "portal", leaf.value.what
        case KnownTape():
            return "tape", leaf.maker.target
        case KnownState():
            return "state", leaf.path
        case KnownPhony() | KnownHandle():
            return type(leaf).__name__
        case _:
            return leaf


def lane_of(node: fx.Node) -> int:
    """The lane that runs a node: in a pipeline graph that of its stage, which has its number."""
    lane: int = node.meta.get(LANE, node.meta.get(STAGE, CALLER))
    return lane
