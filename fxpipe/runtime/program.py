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
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import fx, nn

from fxpipe.ir.graph import DEVICE, MICROBATCH, STAGE, attribute
from fxpipe.ir.printing import format_node
from fxpipe.ir.source import model_frame

CALLER = -1
Env = dict[fx.Node, Any]
Reader = Callable[[Env], Any]


@dataclass
class Instruction:
    """One node of the graph, as a call that a lane runs."""

    node: fx.Node
    function: Callable[..., Any]
    awaits: tuple[fx.Node, ...] = ()  # values from other lanes that this lane does not have yet
    posts: tuple[int, ...] = ()  # other lanes that need the node's value
    forgets: tuple[fx.Node, ...] = ()  # values that this lane does not need any more

    device: torch.device | None = field(init=False, repr=False)  # of its stage; None: the CPU
    _read: Reader = field(init=False, repr=False)
    _read_named: Reader | None = field(init=False, repr=False)
    _named: dict[str, Any] = field(init=False, repr=False)  # used if no nodes are in it

    def __post_init__(self) -> None:
        device = self.node.meta.get(DEVICE)
        self.device = None if device is None or device.type == "cpu" else device
        self._read = _reader(self.node.args) or _constantly(self.node.args)
        self._read_named, self._named = _reader(self.node.kwargs), dict(self.node.kwargs)

    def run(self, env: Env) -> Any:
        """Read the arguments from ``env``, call the function, and store its result there.

        An exception gets a note that says at which node, and line of the model, it was raised.
        """
        try:
            named = self._named if self._read_named is None else self._read_named(env)
            value = self.function(*self._read(env), **named)
        except BaseException as error:
            error.add_note(_where(self.node, error))
            raise
        env[self.node] = value
        return value


def _reader(argument: Any) -> Reader | None:
    """A function that takes an environment and gives an argument of a node: in place of each node
    within the argument, it has that node's value. None if no nodes are in the argument.

    It is made once, when a graph is lowered, because to look for the nodes at each run would take
    longer than many operators do.
    """
    if isinstance(argument, fx.Node):
        return itemgetter(argument)
    if type(argument) is not tuple:
        found: list[fx.Node] = []
        fx.map_arg(argument, found.append)
        return partial(_mapped, argument) if found else None
    if argument and all(isinstance(each, fx.Node) for each in argument):
        if len(argument) > 1:
            return itemgetter(*argument)
        (node,) = argument
        return lambda env: (env[node],)
    readers = [(i, reader) for i, each in enumerate(argument) if (reader := _reader(each))]
    if [i for i, _ in readers] != [0]:
        return partial(_filled, argument, readers) if readers else None
    (_, first), rest = readers[0], argument[1:]
    return lambda env: (first(env), *rest)


def _mapped(argument: Any, env: Env) -> Any:
    return fx.map_arg(argument, env.__getitem__)


def _filled(argument: tuple[Any, ...], readers: list[tuple[int, Reader]], env: Env) -> Any:
    values = list(argument)
    for i, read in readers:
        values[i] = read(env)
    return tuple(values)


def _constantly(argument: Any) -> Reader:
    return lambda env: argument


@dataclass
class Program:
    """A pipeline graph, lane by lane."""

    inputs: dict[fx.Node, tuple[int, ...]]  # placeholders, each with the lanes that use its value
    output: fx.Node  # the caller's last instruction
    lanes: dict[int, list[Instruction]] = field(default_factory=dict)


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
        return (lambda: value) if isinstance(value, nn.Module) else lambda: attribute(gm, target)
    if node.op == "call_module":
        # The module's forward is called, and not the module itself, because fx prints an error in
        # the call of a graph module to stderr.
        forward: Callable[..., Any] = gm.get_submodule(target).forward
        return forward
    raise ValueError(f"a pipeline graph has no {node.op} nodes: {format_node(node)}")


# ------------------------------------------------------------------------------ notes on exceptions


def _where(node: fx.Node, error: BaseException) -> str:
    if STAGE not in node.meta:
        return f"in fxpipe: {format_node(node)}"
    text = f"in fxpipe: stage {node.meta[STAGE]}, micro-batch {node.meta.get(MICROBATCH)}"
    inner = _inner_node(node, error)
    if inner is None:
        return f"{text}, node {node.name!r}"
    text += f", node {inner.name!r}"
    line = _model_line(inner)
    return f"{text}, from\n{line}" if line else text


def _inner_node(node: fx.Node, error: BaseException) -> fx.Node | None:
    """The node of the stage's own graph that was running, found by its line of generated code."""
    module = node.graph.owning_module
    target = node.target if node.op == "call_module" else None
    if node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        target = node.args[0].target if node.args[0].op == "get_attr" else None
    stage = module.get_submodule(str(target)) if module is not None and target else None
    if not isinstance(stage, fx.GraphModule):
        return None
    for filename, line_number in _frames(error):
        line = linecache.getline(filename, line_number)
        if filename.startswith("<eval_with_key>") and (m := re.match(r"\s*(\w+)\b.*?=", line)):
            for inner in stage.graph.nodes:
                if inner.name == m[1]:
                    return inner  # type: ignore[no-any-return]
    return None


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _model_line(node: fx.Node) -> str | None:
    """The innermost line of the model's source in a node's stack trace; None if there is none."""
    frame = model_frame(node.meta.get("stack_trace"))
    return f"  {frame['text']}" if frame else None
