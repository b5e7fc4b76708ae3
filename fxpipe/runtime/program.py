"""A pipeline graph made ready to run: which lane runs which nodes, and which values lanes exchange.

::

    pipeline graph, in clock order       caller: scatter ...                      ... gather
    ──────────────────────────────  ==>  lane 0: cell (0,0)  cell (1,0)  cell (2,0)
                                         lane 1:             cell (0,1)  cell (1,1)  cell (2,1)

Cell (i, j) is stage j on micro-batch i. A lane runs its nodes in the graph's order, posts their
values to the other lanes that need them, and forgets each value after its last use in the lane.
Where no lanes are given the caller runs all nodes, in its own thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fxpipe.ir.graph import STAGE, attribute
from fxpipe.ir.printing import format_node
from fxpipe.runtime.source import Instruction, LaneFunction

CALLER = -1


@dataclass
class Program:
    """A pipeline graph, lane by lane."""

    inputs: dict[fx.Node, tuple[int, ...]]  # placeholders, each with the lanes that use its value
    output: fx.Node  # the caller's last instruction
    lanes: dict[int, list[Instruction]] = field(default_factory=dict)
    _functions: dict[tuple[int, bool], LaneFunction] = field(default_factory=dict, repr=False)

    def function(self, lane: int, timed: bool = False) -> LaneFunction:
        """The function that runs a lane's instructions. It is written at its first use.

        ``timed``: whether it takes the time of each instruction.
        """
        key = lane, timed
        if key not in self._functions:
            inputs = self.inputs if lane == CALLER else ()
            self._functions[key] = LaneFunction(
                lane, self.lanes[lane], inputs, alone=len(self.lanes) == 1, timed=timed
            )
        return self._functions[key]


def lower(gm: fx.GraphModule, *, placement: Sequence[int] | None = None) -> Program:
    """Make a pipeline graph ready to run.

    ``placement``: the lane of each stage. If it is None, the caller runs all nodes.

    Raises ValueError for a ``call_method`` node, which no pipeline graph has.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    nodes = [n for n in gm.graph.nodes if n.op != "placeholder"]
    lane_of = dict.fromkeys([*inputs, *nodes], CALLER)
    if placement is not None:
        lane_of.update({n: placement[n.meta[STAGE]] for n in nodes if STAGE in n.meta})

    def others(node: fx.Node) -> tuple[int, ...]:
        """The lanes, other than the node's own, that use the node's value."""
        lanes = dict.fromkeys(lane_of[user] for user in node.users)
        return tuple(lane for lane in lanes if lane != lane_of[node])

    program = Program({node: others(node) for node in inputs}, gm.graph.output_node())
    last_use = _last_uses(lane_of)
    arrived: set[tuple[int, fx.Node]] = set()
    program.lanes = {lane: [] for lane in sorted({CALLER, *lane_of.values()})}
    for node in nodes:
        lane = lane_of[node]
        awaits = [n for n in node.all_input_nodes if lane_of[n] != lane]
        awaits = [n for n in awaits if (lane, n) not in arrived]
        arrived.update((lane, n) for n in awaits)
        forgets = [n for n in node.all_input_nodes if last_use[lane, n] is node]
        if (lane, node) not in last_use and node.op != "output":
            forgets.append(node)
        program.lanes[lane].append(
            Instruction(node, _function(gm, node), tuple(awaits), others(node), tuple(forgets))
        )
    return program


def _mutable(value: Any) -> Any:
    """The value with ordinary lists and dicts, as the model returns them: fx's are immutable."""
    if isinstance(value, list):
        return [_mutable(each) for each in value]
    if isinstance(value, dict):
        return {key: _mutable(each) for key, each in value.items()}
    if type(value) is tuple:
        return tuple(_mutable(each) for each in value)
    return value


def _last_uses(lane_of: Mapping[fx.Node, int]) -> dict[tuple[int, fx.Node], fx.Node]:
    """By lane and value: the last node of the lane that uses the value."""
    return {(lane, n): node for node, lane in lane_of.items() for n in node.all_input_nodes}


def _function(gm: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    """What an instruction calls; for a node that stands for a module of the graph, the module."""
    if node.op == "call_function":
        # Unwrapped, since functions of the vocabulary first look for proxies among their arguments,
        # and no proxies come while a program runs.
        function: Callable[..., Any] = inspect.unwrap(node.target)  # type: ignore[arg-type]
        return function
    if node.op == "output":
        return _mutable
    target = str(node.target)
    if node.op == "get_attr":
        value = attribute(gm, target)
        # A tensor is read at each run, as it may have been replaced; a stage is never replaced.
        return value if isinstance(value, nn.Module) else lambda: attribute(gm, target)
    if node.op == "call_module":
        # The module's forward is called, and not the module itself, because fx prints an error in
        # the call of a graph module to stderr.
        forward: Callable[..., Any] = gm.get_submodule(target).forward
        return forward
    raise ValueError(f"a pipeline graph has no {node.op} nodes: {format_node(node)}")
