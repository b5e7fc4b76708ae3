"""Finds which stages each value of a stage graph visits, for pass "step".

::

    stage_0 ─ a ─ stage_1 ─ b ─ stage_3          a visits 0, 1, 2, and 3, in this order: stages 1
         └─ a ──┬── stage_2 ── c ──┘             and 2 pass it on
                └───────────────────┘
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from torch import Tensor, fx, nn

from fxpipe import ops
from fxpipe.ir._torch import pytree
from fxpipe.ir.graph import ONCE, STAGE, VALUE, attribute
from fxpipe.ir.tensors import in_memory_of_others


class StepError(ValueError):
    """A schedule and a stage graph do not go together."""


@dataclass
class Flow:
    """A value of the stage graph, and the stages that it visits, first the one that makes it."""

    value: fx.Node
    stages: list[int]

    def before(self, stage: int) -> int:
        """The stage from which the value comes to this one."""
        return self.stages[self.stages.index(stage) - 1]

    def after(self, stage: int) -> int | None:
        """The stage to which the value goes from this one; None if no later one uses it."""
        later = self.stages[self.stages.index(stage) + 1 :]
        return later[0] if later else None


@dataclass
class StageCall:
    """A stage, with the nodes of the stage graph that are its call and its results."""

    call: fx.Node
    module: fx.GraphModule
    results: list[fx.Node]  # in the order in which the stage returns them
    passed: list[fx.Node] = field(default_factory=list)  # arguments that later stages need as well

    @property
    def gives(self) -> list[fx.Node]:
        """The values that leave the stage: its results, then the arguments that it passes on."""
        return [*self.results, *self.passed]

    @property
    def is_single(self) -> bool:
        """Whether the stage returns one value, and not a tuple of values."""
        return self.results == [self.call]

    @property
    def owned(self) -> list[nn.Parameter]:
        """The parameters that live in this stage and are used in others, which get their values
        from it (pass "shared")."""
        shares = self.module.graph.find_nodes(op="call_function", target=ops.share)
        sources = [node.args[0] for node in shares]
        return [attribute(self.module, n.target) for n in sources if n.op == "get_attr"]


class Flows:
    """The stages of a stage graph, and the stages that each value visits. The loss counts as one
    more stage, after the last one."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.stages = [_stage(gm, call) for call in gm.graph.find_nodes(op="call_module")]
        self.loss_stage = len(self.stages)
        self.outputs = gm.graph.output_node().all_input_nodes
        self.of: dict[fx.Node, Flow] = {}
        for j, stage in enumerate(self.stages):
            for value in stage.results:
                users = {self._stage_of(user) for user in value.users if ONCE not in user.meta}
                later = sorted(user for user in users if user is not None and user != j)
                self.of[value] = Flow(value, [j, *later])
        for value, flow in self.of.items():
            for j in flow.stages[1:-1]:
                self.stages[j].passed.append(value)

    def _stage_of(self, user: fx.Node) -> int | None:
        return self.loss_stage if user.op == "output" else user.meta.get(STAGE)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of stages between which values travel. From every stage the pairs lead to the last
        one: it computes the loss as well, which may contain parameters of any stage."""
        last = self.loss_stage - 1
        hops = {hop for flow in self.of.values() for hop in pairwise(flow.stages)}
        leading = {a for a, _ in hops}
        hops |= {(stage, last) for stage in range(last) if stage not in leading}
        return sorted({(a, min(b, last)) for a, b in hops if a != last})

    def foreign(self, stage: StageCall) -> tuple[str, ...]:
        """The names of those parameters of a stage that live in another stage."""
        own = {id(parameter) for parameter in stage.owned}
        others = {id(parameter) for other in self.stages for parameter in other.owned} - own
        named = stage.module.named_parameters()
        return tuple(name for name, parameter in named if id(parameter) in others)

    def read_elsewhere(self, stage: StageCall) -> tuple[str, ...]:
        """The names of those parameters of a stage whose memory is that of another tensor of
        another stage: of a weight that has been tied by its data, or a buffer that views it."""
        named = stage.module.named_parameters()
        return tuple(name for name, p in named if id(p) in self._in_memory_of_others)

    @cached_property
    def _in_memory_of_others(self) -> set[int]:
        modules = [stage.module for stage in self.stages]
        return in_memory_of_others((*each.parameters(), *each.buffers()) for each in modules)


def is_differentiable(value: fx.Node) -> bool:
    """Whether a value of the stage graph can have a gradient: integers, for example, cannot."""
    leaves = pytree.tree_leaves(value.meta.get(VALUE))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)


def _stage(gm: fx.GraphModule, call: fx.Node) -> StageCall:
    items = [user for user in call.users if user.target is operator.getitem]
    items.sort(key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]
    return StageCall(call, attribute(gm, str(call.target)), items or [call])
