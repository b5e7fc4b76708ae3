"""The place of each node in a drawing: its stage, its micro-batch, and in a step graph whether it
belongs to the forward or to the backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import ACTION, MICROBATCH
from passes.common.skips import stage_of


class Place(NamedTuple):
    """The place where a node is drawn: its stage and its micro-batch, each None if it has none. In
    a step graph ``part`` is "forward" or "backward"."""

    stage: int | None
    microbatch: int | None
    part: str = ""

    def __str__(self) -> str:
        said = []
        if self.stage is not None:
            said.append(f"stage {self.stage}")
        if self.microbatch is not None:
            said.append(f"mb {self.microbatch}")
        if self.part:
            said.append(self.part)
        return ", ".join(said) or "the caller"


def in_words(places: Iterable[Place]) -> str:
    """The stages and micro-batches of a graph, in words, for a message."""
    all_of = zip(*(place[:2] for place in places), strict=True)
    stages, microbatches = ([value for value in values if value is not None] for values in all_of)
    said = [f"stages 0 to {max(stages)}"] if stages else []
    said += [f"micro-batches 0 to {max(microbatches)}"] if microbatches else []
    return " and ".join(said) or "none"


_BACKWARD = (
    *(ops.loss_backward, ops.replay, ops.backward, ops.backward_input, ops.weight_grad),
    *(ops.reload, ops.optimize),
)


def places_of(graph: fx.Graph) -> dict[fx.Node, Place]:
    """The place of every node. In a step graph, all nodes that depend on a backward are drawn as
    part of the backward."""
    is_step = any(ACTION in node.meta for node in graph.nodes)
    places: dict[fx.Node, Place] = {}
    for node in graph.nodes:
        place = _place(node)
        if is_step and place != Place(None, None):
            parts = {places[source].part for source in node.all_input_nodes}
            is_backward = node.target in _BACKWARD or "backward" in parts
            place = place._replace(part="backward" if is_backward else "forward")
        places[node] = place
    return places


def _place(node: fx.Node) -> Place:
    """The stage and micro-batch of a node. A parameter has the place of its first user."""
    stage = stage_of(node)
    if stage is None and node.op == "get_attr":
        users = [user for user in node.users if stage_of(user) is not None]
        first = min(users, key=lambda user: user.meta["stage"], default=node)
        return Place(stage_of(first), first.meta.get(MICROBATCH))
    return Place(stage, node.meta.get(MICROBATCH))


def drawing_order(place: Place) -> tuple[bool, int]:
    """The key that sorts the clusters of a micro-batch in the order in which they run."""
    stage = -1 if place.stage is None else place.stage
    is_backward = place.part == "backward"
    return is_backward, -stage if is_backward else stage


def are_beside(one: Place, other: Place) -> bool:
    """Whether two places are in different micro-batches, which are drawn beside each other."""
    return Place(None, None) not in (one, other) and one.microbatch != other.microbatch
