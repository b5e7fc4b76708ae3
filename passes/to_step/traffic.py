"""Writes what goes from stage to stage in a step, in both directions, for pass "step".

::

    compute stream of 0      forward ─ wait                          the copy stream waits
    copy stream of 0               └──────── send                    for what has been computed
    copy stream of 1                            └─ wait              and the compute stream
    compute stream of 1                               └─ forward     for what has been sent
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.runtime.streams import COMPUTE, COPY
from fxpipe.schedule import Action, Kind
from passes.to_step.nodes import Nodes

Place = tuple[fx.Node, int, int]  # a value of the stage graph, a stage, a micro-batch


class Traffic:
    """Lets values leave their stage, and brings them to another stage when an action there needs
    them."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        # By source, target and micro-batch: values of the stage graph that have left and not yet
        # arrived, and the nodes of the step graph that give them.
        self.going: dict[tuple[int, int, int], tuple[list[fx.Node], Any]] = {}

    def leave(self, values: Mapping[fx.Node, Any], target: int, at: Action) -> None:
        """Let values that an action has made leave its stage for the stage ``target``."""
        made = self.depart(list(values.values()), target, at)
        self.going[at.stage, target, at.microbatch] = list(values), made

    def arrive(self, sources: Iterable[int], at: Action) -> dict[fx.Node, Any]:
        """Bring all values that have left these stages for the action's stage to its device.

        Returns the nodes of the step graph that give them, by the values of the stage graph.
        """
        arrived: dict[fx.Node, Any] = {}
        for source in sources:
            key = source, at.stage, at.microbatch
            if key not in self.going:
                continue
            values, made = self.going.pop(key)
            if isinstance(made, fx.Node):
                kind = "" if at.kind is Kind.FORWARD else "grad_"
                start = self.nodes.stream(source, COPY)
                made = self.bring(made, start, at, [f"{kind}{value}" for value in values])
            arrived.update(zip(values, made, strict=True))
        return arrived

    def depart(self, made: list[fx.Node], target: int, at: Action) -> Any:
        """Let the copy stream of the action's device wait for values that go to another stage.

        Returns the node of the wait. Within one lane nothing is copied and nothing has to wait: the
        values are returned as a tuple of nodes.
        """
        if self.nodes.lane(at.stage) == self.nodes.lane(target):
            return tuple(made)
        streams = (self.nodes.stream(at.stage, role) for role in (COMPUTE, COPY))
        return self.nodes.call(ops.wait, (tuple(made), *streams), "wait", at)

    def bring(self, together: Any, start: str, at: Action, names: Sequence[str]) -> list[fx.Node]:
        """Send values from the stream ``start`` to the device of the action's stage.

        The compute stream there waits for them. Returns the nodes of the values that have arrived.
        """
        copying, computing = (self.nodes.stream(at.stage, role) for role in (COPY, COMPUTE))
        sent = self.nodes.call(ops.send, (together, start, copying), "send", at, COPY)
        waited = self.nodes.call(ops.wait, (sent, copying, computing), "wait", at)
        return [self.nodes.item(waited, i, name, at) for i, name in enumerate(names)]
