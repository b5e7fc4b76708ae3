"""What the verifier remembers of the actions of a training step, until their counterparts come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpipe.ir.graph import LANE, STAGE, TURN
from fxpipe.runtime.ranks.transport import Edge
from passes.verify.clocks import Event
from passes.verify.errors import VerifyError
from passes.verify.stages import StageSummary
from passes.verify.values import Known


@dataclass
class Recording:
    """A forward, or a loss, and what has become of the tape that it has recorded.

    ::

        forward ── (replay) ── backward                       of a tape that is used whole
        forward ── (replay) ── backward_input ── weight_grad  of one that is used in halves
        forward ── offload ── reload ── backward              of one that moves to the host

    Args:
        node: the forward or the loss.
        stage: what is known of the stage; None for a loss.
        giver: names the stage among the givers of values.
        given: what is known of the arguments; for a loss, of the output.
        results: what is known of the results; empty for a loss.
        checkpoint: whether the backward needs a replay; "selective" if that is given the results of
            products; "offload" if the activations move to the host and back.
    """

    node: fx.Node
    stage: StageSummary | None
    giver: str
    given: Any
    results: tuple[Known, ...] = ()
    checkpoint: object = False
    replay: fx.Node | None = None
    """The node that makes the activations again, or brings them back."""
    offload: fx.Node | None = None
    backward: Event | None = None
    weight_grad: fx.Node | None = None
    loss: Recording | None = None
    """The loss of the same micro-batch, whose backward comes before this one."""


WHOLE = "whole"


@dataclass
class Exchange:
    """What passes between the graphs of several ranks, while these are visited together."""

    arrivals: dict[tuple[Edge, int], Any] = field(default_factory=dict)
    """What is known of the values that have been transmitted, by edge and number."""
    lanes: dict[int, fx.Node] = field(default_factory=dict)
    """By a stage: the first node of it in any graph, which notes the stage's lane."""
    taken_home: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """By the node that has taken a replica's gradient: those that have added it to the
    parameter's, maybe on another rank."""


@dataclass
class StepRecord:
    """The actions of a training step that have been visited so far."""

    recordings: dict[fx.Node, Recording] = field(default_factory=dict)
    """By the node of the forward or the loss."""
    optimized: dict[int, fx.Node] = field(default_factory=dict)
    """By a parameter's id: the node that has stepped it."""
    stages: dict[str, fx.Node] = field(default_factory=dict)
    """By the path of a stage or a segment: its first forward, which notes the number of the
    stage."""
    stepped_stages: set[str] = field(default_factory=set)
    """The paths of the stages whose parameters have been stepped."""
    shards: dict[int | None, str] = field(default_factory=dict)
    """By the number of a stage whose parameters are in shards: whether they are gathered."""
    reduced: dict[int, fx.Node] = field(default_factory=dict)
    """By a parameter's id: the node that has begun to sum its gradient over replicas."""
    sums: list[fx.Node] = field(default_factory=list)
    """The nodes that have waited for all such sums."""
    replicas: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """By the node that made a replica: those that have taken its gradient."""
    last_action: dict[int | None, fx.Node] = field(default_factory=dict)
    """The last forward, backward or half of a backward so far, by stage."""
    turns: dict[int | None, fx.Node] = field(default_factory=dict)
    """The last action so far, by lane."""

    def note_action(self, node: fx.Node) -> None:
        """Note an action of a stage. Raises :class:`VerifyError` if its lane runs its actions in
        another order than that of the schedule."""
        self.last_action[node.meta.get(STAGE)] = node
        before = self.turns.get(lane := node.meta.get(LANE))
        if before is not None and before.meta.get(TURN, 0) > node.meta.get(TURN, 0):
            raise VerifyError(
                "the lane runs these actions in another order than the schedule", node, before
            )
        self.turns[lane] = node
