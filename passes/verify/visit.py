"""A visit of a graph: what is known of the nodes so far, and the checks that the rules for single
functions share.

A rule says, for a function of the vocabulary, what is known of a node's value, and checks what the
node is given. Rules are in a file for each subject.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE, STREAM, attribute
from fxpipe.ir.tensors import in_memory_of_others
from passes.to_pipeline.cells import Cell
from passes.verify.clocks import Clocks, Event
from passes.verify.effects import MemoryUses
from passes.verify.errors import VerifyError
from passes.verify.places import Places
from passes.verify.record import Exchange, StepRecord
from passes.verify.stages import StageSummary, stage_of, writes_to_what_it_is_given
from passes.verify.values import (
    CALLER,
    NOT_KNOWN,
    Known,
    KnownPortal,
    KnownResults,
    KnownState,
    Role,
    Spot,
    lane_of,
    leaves,
    named,
)

Rule = Callable[["Visit", fx.Node], Any]
RULES: dict[Any, Rule] = {}
"""By a function of the vocabulary, or by the ``op`` of a node: its rule."""

PARAMETER, GRADIENT = "parameter", "gradient"  # kinds of memory

_WITH_CLOCK = Known, KnownResults
_SEQUENCES = list, tuple


def rule(*keys: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some functions of the vocabulary, or of nodes with an ``op``."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(keys, function))
        return function

    return register


@dataclass(frozen=True)
class ParameterHome:
    """Where a parameter lives: the lane and the stage that use it, and its name there."""

    lane: int
    stage: int | None
    name: str


class Visit:
    """What is known of a graph's nodes while they are visited one after the other.

    Args:
        gm: a pipeline graph, a step graph, or the graph of one rank.
        exchange: what passes between this graph and those of other ranks, which are visited at the
            same time; None if this one is visited alone.
    """

    def __init__(self, gm: fx.GraphModule, exchange: Exchange | None = None) -> None:
        self.gm, self.exchange = gm, exchange or Exchange()
        transmits = gm.graph.find_nodes(op="call_function", target=ops.transmit)
        self.is_one_of_several = exchange is None and bool(transmits)
        """Whether other ranks have parts of the same program, of which nothing is known."""
        lanes = sorted({CALLER, *map(lane_of, gm.graph.nodes)})
        self._number = {lane: i for i, lane in enumerate(lanes)}
        self._spots = {lane: {role: Spot(lane, role) for role in Role} for lane in lanes}
        self.lane = CALLER  # of the node that is visited
        self.clocks = Clocks(len(lanes))
        self.effects = MemoryUses()
        self.places = Places(gm.graph, self.exchange.lanes)
        self.known: dict[fx.Node, Any] = {}
        self.cells: dict[Cell, list[fx.Node]] = defaultdict(list)
        self.events: dict[fx.Node, Event] = {}
        self.portals: dict[fx.Node, list[fx.Node]] = {}  # by the blue node: moves and takers
        self.step = StepRecord()
        self.lent: dict[fx.Node, dict[int, fx.Node]] = {}  # by lender and view: what brings it
        self.homes: dict[int, ParameterHome] = {}  # by a parameter's id
        self.given_by: dict[str, fx.Node] = {}  # by a result's name: a node of the stage
        self.taken: set[Any] = set()  # the names of values that have been used
        self._stages: dict[str, StageSummary] = {}
        self._alike: dict[Any, tuple[fx.Node, Any]] = {}
        self._find_homes()

    def begin(self, node: fx.Node) -> None:
        """Begin the visit of a node."""
        self.lane = self.places.lane(node)
        meta = node.meta
        if STAGE in meta and MICROBATCH in meta:
            self.cells[meta[MICROBATCH], meta[STAGE]].append(node)

    def here(self, role: Role = Role.COMPUTE) -> Spot:
        """Give the place in the visited node's lane where the streams of this role use values."""
        return self._spots[self.lane][role]

    def event(self, node: fx.Node, given: Any = ()) -> Event:
        """The event of a node's work in its lane, which knows what these values know."""
        clocks = [each.clock for each in leaves(given) if isinstance(each, _WITH_CLOCK)]
        event = self.clocks.event(node, self._number[self.lane], clocks)
        self.events[node] = event
        return event

    def ready(self, node: fx.Node, given: Any, place: Spot) -> Any:
        """Check that values are ready at the place where a node uses them, and belong to the node's
        micro-batch. Returns the values."""
        for value in leaves(given):
            inner = value.value if isinstance(value, KnownPortal) else value
            if isinstance(inner, _WITH_CLOCK):
                self._check_ready(node, inner, place)
            elif isinstance(inner, KnownState):
                self._check_home(node, inner)
        return given

    def _check_ready(self, node: fx.Node, value: Known | KnownResults, place: Spot) -> None:
        meta, at = node.meta, value.place
        microbatch = meta.get(MICROBATCH)
        if microbatch != value.microbatch and None not in (microbatch, value.microbatch):
            raise VerifyError(
                f"a node of micro-batch {microbatch} is given a value of micro-batch "
                f"{value.microbatch}",
                node,
                value.maker,
            )
        if at == place or at.role is Role.ANYWHERE:
            return
        if STAGE in meta and STREAM not in meta:
            return  # in a graph without streams, one thread runs all nodes of a rank
        is_made_here = at.role in (Role.COMPUTE, Role.LEAVING)  # by the lane's compute stream
        if is_made_here and place.role is Role.COMPUTE and place.lane in (at.lane, CALLER):
            return  # the caller's thread, too, computes on the streams of the lanes
        raise VerifyError(
            f"{said(value)} is {at}, and the node uses it {place}",
            node,
            value.maker,
            _needed(at, place),
        )

    def _check_home(self, node: fx.Node, state: KnownState) -> None:
        """Check that a parameter that a node is given lives in the node's lane."""
        tensor = attribute(self.gm, state.path)
        home = self.homes.get(id(tensor))
        if home is not None and STAGE in node.meta and home.lane != self.lane:
            raise VerifyError(
                f"the parameter {state.path} lives in lane {home.lane}, and is used in lane "
                f"{self.lane} without having been brought there",
                node,
            )

    def _find_homes(self) -> None:
        """Note in which lane each parameter of the stages lives: each has one home."""
        lanes: dict[str, int] = {}  # by a stage's path: the lane that was met last
        for node, path in _calls_of_stages(self.gm.graph):
            lane = lane_of(node)
            if lanes.get(path) == lane:
                continue
            lanes[path] = lane
            for number, name in self.stage(path, node).parameters.items():
                own = ParameterHome(lane, node.meta.get(STAGE), name)
                if (home := self.homes.setdefault(number, own)).lane != lane:
                    raise VerifyError(
                        f"the parameter {name} has two homes, the lanes {home.lane} and {lane}: "
                        "both would add to its gradient at the same time",
                        node,
                    )

    @cached_property
    def in_memory_of_others(self) -> set[int]:
        """The ids of parameters and buffers that share memory with another one of another stage."""
        paths = dict.fromkeys(path for _, path in _calls_of_stages(self.gm.graph))
        stages: list[Any] = [attribute(self.gm, path) for path in paths]
        return in_memory_of_others((*each.parameters(), *each.buffers()) for each in stages)

    def at(self, path: str, node: fx.Node) -> Any:
        """Give what the graph module has at a path, which ``node`` names."""
        try:
            return attribute(self.gm, path)
        except AttributeError as error:
            raise VerifyError(f"the graph module has nothing at {path}", node) from error

    def stage(self, path: str, node: fx.Node) -> StageSummary:
        """What is known of the stage at a path; ``node`` runs it."""
        known = self._stages.get(path)
        if known is None:
            module = self.at(path, node)
            written = writes_to_what_it_is_given(module)
            if written is not None:
                raise VerifyError(
                    f"{path} writes to the memory of its argument {written[1]}, which another "
                    "stage may still use: it has to write to a copy",
                    node,
                )
            known = self._stages[path] = stage_of(module, path)
            for number, name in known.parameters.items():
                self.effects.names[PARAMETER, number] = f"parameter {name}"
                self.effects.names[GRADIENT, number] = f"gradient of {name}"
        return known

    def given(self, args: Any) -> Any:
        """What is known of an argument, in which nodes stand for their values."""
        if isinstance(args, fx.Node):
            return self.known[args]
        if isinstance(args, _SEQUENCES):
            return tuple([self.given(each) for each in args])
        if isinstance(args, dict):
            return {key: self.given(each) for key, each in args.items()}
        return args

    def alike(self, key: Any, node: fx.Node, known: Any) -> None:
        """Check that something is the same for all micro-batches: what a stage is given, say."""
        if NOT_KNOWN in leaves(known):
            return
        names = named(known)
        first, before = self._alike.setdefault(key, (node, names))
        if before != names:
            raise VerifyError(
                f"micro-batches {first.meta.get(MICROBATCH)} and {node.meta.get(MICROBATCH)} "
                f"are not treated alike: {before} in one, {names} in the other",
                node,
                first,
            )

    def take(self, given: Any) -> None:
        """Note that values are used, and not just passed on."""
        for leaf in leaves(given):
            if isinstance(leaf, Known):
                self.taken.add(leaf.what)
            elif isinstance(leaf, KnownResults) and isinstance(leaf.what, tuple):
                self.taken.update(leaf.what[1])


def said(value: Known | KnownResults) -> str:
    """Say in words which value this is, for messages."""
    own = "" if value.microbatch is None else f" of micro-batch {value.microbatch}"
    return f"{value.what if isinstance(value.what, str) else 'a value'}{own}"


def _needed(at: Spot, place: Spot) -> str:
    if at.lane != place.lane:
        return "a copy to the lane that uses it, between two waits"
    return f"a wait of the {'copy' if place.role is Role.LEAVING else 'compute'} stream"


def _calls_of_stages(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """Give the nodes that run stages, and the paths of these."""
    found = [(node, str(node.target)) for node in graph.find_nodes(op="call_module")]
    for function in (ops.checkpoint, ops.selective, ops.offloaded, ops.forward):
        for node in graph.find_nodes(op="call_function", target=function):
            module = node.args[0]
            assert isinstance(module, fx.Node)
            found.append((node, str(module.target)))
    return found
