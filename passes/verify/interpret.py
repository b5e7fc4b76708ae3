"""Follows the values of a graph from node to node, and checks each node against the promises of the
vocabulary (:mod:`fxpipe.ops`).

::

    node                                        what is known of its value
    x_mb0 = x_parts[0]                          x of micro-batch 0, on the caller's stream
    copy_s1_mb0 = copy((x_mb0,), 'caller', ...) x of micro-batch 0, arriving at lane 1
    wait_s1_mb0 = wait(copy_s1_mb0, ...)        x of micro-batch 0, on the compute stream of lane 1
    stage_1_mb0 = stage_1(x_s1_mb0)             a stage takes what its lane's compute stream has

Nothing is run: a node is visited once, and each of its arguments is looked at once. The promises
about values are:

1. a node uses values that are ready on its stream: another stream's value has been waited for, and
   another device's has been copied. (Waits and copies keep the memory of what they are given until
   their stream has used it, so a value that is ready is also still there.)
2. a node uses values of its own micro-batch, and a stage the values that it takes its names from;
3. all micro-batches are treated alike;
4. nodes that use the same memory, one of which writes to it, are ordered (:mod:`.effects`);
5. a portal is moved once and opened once.

What holds for the actions of a training step is in :mod:`passes.verify.actions`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import DEVICE, LANE, MICROBATCH, ORIGIN, STAGE, STREAM, attribute
from fxpipe.runtime.streams import CALLER as CALLERS_STREAM
from fxpipe.runtime.streams import COMPUTE, COPY, stream_name
from passes.to_rank.project import edge_of
from passes.verify.clocks import Clock, Clocks, Event
from passes.verify.effects import MemoryUses
from passes.verify.errors import VerifyError
from passes.verify.record import WHOLE, Exchange, StepRecord
from passes.verify.stages import StageSummary, stage_of, writes_to_what_it_is_given
from passes.verify.values import (
    ANYWHERE,
    CALLER,
    GIVEN,
    NOT_KNOWN,
    Known,
    KnownHandle,
    KnownParts,
    KnownPhony,
    KnownPortal,
    KnownResults,
    KnownState,
    NotKnown,
    Role,
    Spot,
    leaves,
    mapped,
    named,
)

Rule = Callable[["Interpreter", fx.Node], Any]
RULES: dict[Any, Rule] = {}
"""For each function of the vocabulary: what is known of its value, and what it must be given."""

CARRIERS = (ops.copy, ops.portal_copy, ops.send)
TRANSFERS = (ops.transmit, ops.receive, ops.arrived)


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register the rule of some functions of the vocabulary."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


@dataclass(frozen=True)
class ParameterHome:
    """Where a parameter lives: the lane and the stage that use it, and its name there."""

    lane: int
    stage: int | None
    name: str


class Interpreter:
    """Visits the nodes of a graph in order, and knows of each what its value is.

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
        lanes = {lane_of(node) for node in gm.graph.nodes} | {CALLER}
        self._number = {lane: i for i, lane in enumerate(sorted(lanes))}
        self.clocks = Clocks(len(lanes))
        self.effects = MemoryUses()
        self.known: dict[fx.Node, Any] = {}
        self.events: dict[fx.Node, Event] = {}
        self.portals: dict[fx.Node, list[fx.Node]] = {}  # by the blue node: moves and takers
        self.step = StepRecord()
        self.homes: dict[int, ParameterHome] = {}  # by a parameter's id
        self.given_by: dict[str, fx.Node] = {}  # by a result's name: a node of the stage
        self.taken: set[Any] = set()  # the names of values that have been used
        self._stages: dict[str, StageSummary] = {}
        self._alike: dict[Any, tuple[fx.Node, Any]] = {}
        self._devices: dict[int, tuple[fx.Node, str]] = {}  # by lane
        self._lanes: dict[int, fx.Node] = {}  # by stage: a node of the stage, for its lane
        self._has_streams = any(STREAM in node.meta for node in gm.graph.nodes)
        self._find_homes()

    def run(self) -> Iterator[fx.Node]:
        """Visit all nodes. Yields a node whose value another rank has not sent yet, and goes on
        once it has."""
        for node in self.gm.graph.nodes:
            while self._must_wait(node):
                yield node
            self._check_where(node)
            self.known[node] = self._visit(node)

    def _must_wait(self, node: fx.Node) -> bool:
        if node.target is not ops.arrived or self.is_one_of_several:
            return False
        (received,) = node.all_input_nodes
        return edge_of(received) not in self.exchange.arrivals

    # ------------------------------------------------------------------------------ where nodes are

    def _check_where(self, node: fx.Node) -> None:
        """Check that a lane is on one device, and that a node's stream is one of that device, of
        the kind that the node's function uses."""
        if STAGE not in node.meta:
            return
        if (STREAM in node.meta) != self._has_streams:
            raise VerifyError(
                "either all nodes of stages are noted on a device and a stream, or none: give "
                'node.meta["device"] and node.meta["stream"]',
                node,
            )
        if DEVICE not in node.meta:
            return
        known_to_be = self._lanes.setdefault(node.meta[STAGE], node)
        if lane_of(known_to_be) != lane_of(node):
            raise VerifyError(
                f"stage {node.meta[STAGE]} is in lane {lane_of(known_to_be)}, and this node in "
                f"lane {lane_of(node)}",
                node,
                known_to_be,
            )
        device = str(node.meta[DEVICE])
        first, known = self._devices.setdefault(lane_of(node), (node, device))
        if known != device:
            raise VerifyError(
                f"stages of one lane are on two devices, {known} and {device}", node, first
            )
        if node.target in TRANSFERS:
            return
        role = COPY if node.target in CARRIERS else COMPUTE
        if STREAM in node.meta and node.meta[STREAM] != (own := stream_name(device, role)):
            raise VerifyError(
                f"it belongs to the stream {own!r}, and is noted on another one", node
            )
        if node.target in (*CARRIERS, ops.wait, ops.bring, ops.replicate):
            self._check_streams(node, device)

    def device_of(self, lane: int) -> str | None:
        """The device of a lane; None if no node of it has been visited."""
        return self._devices[lane][1] if lane in self._devices else None

    def _check_streams(self, node: fx.Node, device: str) -> None:
        """Check that the streams that a node names are those of the device where it is."""
        source, target = map(str, node.args[1:3])
        compute, copy = stream_name(device, COMPUTE), stream_name(device, COPY)
        if node.target is ops.wait:
            if (source, target) not in ((compute, copy), (copy, compute)):
                raise VerifyError(f"a wait of this stage is between {compute!r} and {copy!r}", node)
        elif node.target in (ops.bring, ops.replicate):
            if (source, target) != (copy, compute):
                raise VerifyError(
                    f"a parameter is brought on {copy!r}, to be used on {compute!r}", node
                )
        elif target != copy:
            raise VerifyError(f"what this node brings has to go to the stream {copy!r}", node)

    def event(self, node: fx.Node, given: Iterable[Any] = ()) -> Event:
        """The event of a node's work in its lane, which knows what these values know."""
        clocks = (
            each.clock for each in leaves(tuple(given)) if isinstance(each, Known | KnownResults)
        )
        self.events[node] = self.clocks.event(node, self._number[lane_of(node)], clocks)
        return self.events[node]

    def ready(self, node: fx.Node, given: Any, place: Spot) -> Any:
        """Check that values are ready at the place where a node uses them, and belong to the node's
        micro-batch. Returns the values."""
        for value in leaves(given):
            inner = value.value if isinstance(value, KnownPortal) else value
            if isinstance(inner, Known | KnownResults):
                self._check_ready(node, inner, place)
            elif isinstance(inner, KnownState):
                self._check_home(node, inner)
        return given

    def _check_ready(self, node: fx.Node, value: Known | KnownResults, place: Spot) -> None:
        microbatch = node.meta.get(MICROBATCH)
        if None not in (microbatch, value.microbatch) and microbatch != value.microbatch:
            raise VerifyError(
                f"a node of micro-batch {microbatch} is given a value of micro-batch "
                f"{value.microbatch}",
                node,
                value.maker,
            )
        at = value.place
        if STAGE in node.meta and STREAM not in node.meta:
            return  # in a graph without streams, one thread runs all nodes of a rank
        if at == place or at.role is Role.ANYWHERE:
            return
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
        if home is not None and STAGE in node.meta and home.lane != lane_of(node):
            raise VerifyError(
                f"the parameter {state.path} lives in lane {home.lane}, and is used in lane "
                f"{lane_of(node)} without having been brought there",
                node,
            )

    def _find_homes(self) -> None:
        """Note in which lane each parameter of the stages lives: each has one home."""
        for node in self.gm.graph.nodes:
            for path in _stages_run_by(node):
                stage = self.stage(path, node)
                for number, name in stage.parameters.items():
                    own = ParameterHome(lane_of(node), node.meta.get(STAGE), name)
                    if (home := self.homes.setdefault(number, own)).lane != own.lane:
                        raise VerifyError(
                            f"the parameter {name} has two homes, the lanes {home.lane} and "
                            f"{lane_of(node)}: both would add to its gradient at the same time",
                            node,
                        )

    def stage(self, path: str, node: fx.Node) -> StageSummary:
        """What is known of the stage at a path; ``node`` runs it."""
        if path not in self._stages:
            module = attribute(self.gm, path)
            written = writes_to_what_it_is_given(module)
            if written is not None:
                raise VerifyError(
                    f"{path} writes to the memory of its argument {written[1]}, which another "
                    "stage may still use: it has to write to a copy",
                    node,
                )
            self._stages[path] = stage_of(module, path)
        return self._stages[path]

    # ------------------------------------------------------------------------------ what nodes give

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return Known(node.name, None, GIVEN, self.clocks.start, node)
        if node.op == "get_attr":
            return KnownState(str(node.target))
        if node.op == "output":
            given = self.given(node.args[0])
            self.take(given)
            return given
        if node.op == "call_module":
            return run_stage(self, node, str(node.target), node.args)
        known = RULES.get(node.target)
        return _unknown_function(self, node) if known is None else known(self, node)

    def given(self, args: Any) -> Any:
        """What is known of an argument, in which nodes stand for their values."""
        if isinstance(args, fx.Node):
            return self.known[args]
        if isinstance(args, list | tuple):
            return tuple(self.given(each) for each in args)
        if isinstance(args, dict):
            return {key: self.given(each) for key, each in args.items()}
        return args

    def alike(self, key: Any, node: fx.Node, known: Any) -> None:
        """Check that something is the same for all micro-batches: what a stage is given, say."""
        if any(isinstance(leaf, NotKnown) for leaf in leaves(known)):
            return
        first, before = self._alike.setdefault(key, (node, named(known)))
        if before != named(known):
            raise VerifyError(
                f"micro-batches {first.meta.get(MICROBATCH)} and {node.meta.get(MICROBATCH)} "
                f"are not treated alike: {before} in one, {named(known)} in the other",
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

    def finish(self) -> None:
        """Check what can be checked only once all nodes have been visited."""
        for name, giver in self.given_by.items():
            if name not in self.taken:
                raise VerifyError(f"the stage gives {name}, which nobody uses", giver)
        for blue, uses in self.portals.items():
            moves = sum(node.target is ops.portal_copy for node in uses)
            takers = len(uses) - moves
            if (moves, takers) != (1, 1):
                raise VerifyError(
                    f"a portal is moved and taken out once each, not {moves} and {takers} times",
                    blue,
                )


def lane_of(node: fx.Node) -> int:
    """The lane that runs a node: in a pipeline graph that of its stage, which has its number."""
    lane: int = node.meta.get(LANE, node.meta.get(STAGE, CALLER))
    return lane


def here(node: fx.Node, role: Role = Role.COMPUTE) -> Spot:
    """A place in the lane of a node."""
    return Spot(lane_of(node), role)


def said(value: Known | KnownResults) -> str:
    """A value in words, for messages."""
    own = "" if value.microbatch is None else f" of micro-batch {value.microbatch}"
    return f"{value.what if isinstance(value.what, str) else 'a value'}{own}"


def _needed(at: Spot, place: Spot) -> str:
    if at.lane != place.lane:
        return "a copy to the lane that uses it, between two waits"
    return f"a wait of the {'copy' if place.role is Role.LEAVING else 'compute'} stream"


def _stages_run_by(node: fx.Node) -> Iterator[str]:
    """The path of the stage that a node runs, if it runs one."""
    if node.op == "call_module":
        yield str(node.target)
    elif node.target in (ops.checkpoint, ops.forward):
        (module, *_) = node.args
        assert isinstance(module, fx.Node)
        yield str(module.target)


# ------------------------------------------------------------------------------ rules of all levels


@rule(operator.getitem)
def _getitem(visit: Interpreter, node: fx.Node) -> Any:
    known, index = visit.given(node.args[0]), node.args[1]
    if isinstance(known, NotKnown):
        return NOT_KNOWN
    if isinstance(known, KnownParts):
        assert isinstance(index, int)
        if MICROBATCH in node.meta and node.meta[MICROBATCH] != index:
            raise VerifyError("it takes the part of another micro-batch", node)
        return Known(known.what, index, known.place, known.clock, known.maker)
    if isinstance(known, KnownResults):
        return _result(known, index)
    if isinstance(known, Known):  # an element of a value that is no single tensor
        return replace(known, what=(known.what, index))
    try:
        return known[index]
    except (IndexError, KeyError, TypeError) as error:
        raise VerifyError(f"there is no element {index!r} of {named(known)}", node) from error


def _result(known: KnownResults, index: Any) -> Known:
    names = known.what[1] if isinstance(known.what, tuple) else ()
    what = names[index] if isinstance(index, int) and index < len(names) else (known.what, index)
    return Known(what, known.microbatch, known.place, known.clock, known.maker)


def _unknown_function(visit: Interpreter, node: fx.Node) -> Any:
    """A function that is not of the vocabulary, which a user's pass has added: it computes."""
    given = visit.ready(node, visit.given((node.args, node.kwargs)), here(node))
    visit.take(given)
    clock = visit.event(node, (given,)).clock
    what = (str(node.target), str(named(given)))
    return Known(what, node.meta.get(MICROBATCH), here(node), clock, node)


def run_stage(visit: Interpreter, node: fx.Node, path: str, args: Any) -> Any:
    """A stage runs on values that are ready in its lane. Returns what is known of its results."""
    stage = visit.stage(path, node)
    given = visit.ready(node, visit.given(args), here(node))
    check_taken(visit, node, stage, given)
    visit.alike(("a stage is given", path), node, given)
    event = visit.event(node, given)
    use_parameters(visit, stage, event)
    visit.effects.write(("state", path), event)
    visit.given_by |= dict.fromkeys(stage.gives, node)
    results = KnownResults(
        (path, stage.gives), node.meta.get(MICROBATCH), here(node), event.clock, node
    )
    return _result(results, 0) if len(stage.gives) == 1 else results


def use_parameters(visit: Interpreter, stage: StageSummary, by: Event) -> None:
    """A node reads the parameters of its stage. If they are in shards, they have been gathered."""
    number = by.node.meta.get(STAGE)
    if visit.step.shards.get(number, WHOLE) != WHOLE:
        raise VerifyError(
            f"the parameters of stage {number} are {visit.step.shards[number]}", by.node
        )
    for each, name in stage.parameters.items():
        memory = ("parameter", each)
        visit.effects.names[memory] = f"parameter {name}"
        visit.effects.read(memory, by)


def check_taken(visit: Interpreter, node: fx.Node, stage: StageSummary, given: Any) -> None:
    """Check that a stage is given the values that its arguments are named after."""
    visit.take(given)
    for (name, path), value in zip(stage.takes, given, strict=False):
        if path and isinstance(value, Known) and value.what != ("replica", path):
            raise VerifyError(
                f"the stage takes the parameter {path} here, and is given {value.what}",
                node,
                value.maker,
            )
        is_known = isinstance(value, Known) and isinstance(value.what, str)
        if is_known and value.what != name:
            raise VerifyError(f"the stage takes {name} here, and is given {said(value)}", node)


@rule(ops.scatter)
def _scatter(visit: Interpreter, node: fx.Node) -> Any:
    tensor = node.args[0]
    assert isinstance(tensor, fx.Node)
    is_copied = len(node.args) > 3 and bool(node.args[3])
    memory = ("input", tensor.name)
    visit.effects.names[memory] = f"input {tensor.name}"
    event = visit.event(node, (visit.known[tensor],))
    visit.effects.read(memory, event)
    what = str(tensor.meta.get(ORIGIN, tensor.name))
    return KnownParts(what, GIVEN, event.clock, node, is_copied)


@rule(ops.seeds)
def _seeds(visit: Interpreter, node: fx.Node) -> Any:
    return KnownParts(("seeds",), ANYWHERE, visit.event(node).clock, node)


@rule(ops.loss_weights, ops.weights)
def _weights(visit: Interpreter, node: fx.Node) -> Any:
    return KnownParts((node.name,), ANYWHERE, visit.event(node).clock, node)


@rule(ops.gather)
def _gather(visit: Interpreter, node: fx.Node) -> Any:
    """The parts of an output, of all micro-batches in order, by the lane of the last one."""
    parts = visit.ready(node, visit.given(node.args[0]), here(node))
    check_parts(visit, node, parts)
    clock = visit.event(node, parts).clock
    return Known(node.name, None, here(node), clock, node)


def check_parts(visit: Interpreter, node: fx.Node, parts: Any) -> None:
    """Check that there is one part of each micro-batch, in order, and that all have one name."""
    visit.take(parts)
    for i, part in enumerate(parts):
        for value in leaves(part):
            if isinstance(value, Known) and value.microbatch not in (i, None):
                raise VerifyError(
                    f"{said(value)} stands where that of micro-batch {i} should", node, value.maker
                )
        if not any(isinstance(leaf, NotKnown) for leaf in leaves((part, parts[0]))) and (
            named(part) != named(parts[0])
        ):
            raise VerifyError(
                f"the parts of micro-batches are different values: {named(parts[0])} of "
                f"micro-batch 0, {named(part)} of micro-batch {i}",
                node,
            )


def check_done(node: fx.Node, parts: Any) -> None:
    """Check that a node that runs once is noted with the last micro-batch, if with any, and that
    the compute streams of lanes have the values of all micro-batches."""
    for leaf in leaves(parts):
        if isinstance(leaf, Known) and leaf.place.role is Role.ARRIVING:
            raise VerifyError(f"{said(leaf)} is {leaf.place}", node, leaf.maker, "a wait")
    last = max((p.microbatch or 0 for p in leaves(parts) if isinstance(p, Known)), default=0)
    if node.meta.get(MICROBATCH, last) != last:
        raise VerifyError("it runs when all micro-batches are done", node)


@rule(ops.write_back)
def _write_back(visit: Interpreter, node: fx.Node) -> Any:
    tensor, _, parts = node.args
    assert isinstance(tensor, fx.Node)
    for user in tensor.users:
        known = visit.known.get(user)
        if isinstance(known, KnownParts) and not known.is_copied:
            raise VerifyError(
                f"the input {tensor.name} is written to while stages have views of it: its parts "
                "have to be copies",
                node,
                user,
            )
    given = visit.given(parts)
    check_parts(visit, node, given)
    check_done(node, given)
    visit.effects.write(("input", tensor.name), visit.event(node, given))
    return None


@rule(ops.update_statistics)
def _update_statistics(visit: Interpreter, node: fx.Node) -> Any:
    *buffers, _, parts = node.args
    given = visit.given(parts)
    visit.take(given)
    check_done(node, given)
    event = visit.event(node, given)
    for buffer in buffers:
        if isinstance(buffer, fx.Node):
            memory = ("buffer", id(attribute(visit.gm, str(buffer.target))))
            visit.effects.names[memory] = f"buffer {buffer.target}"
            visit.effects.write(memory, event)
    return None


# ------------------------------------------------------------------------ between lanes, streams


@rule(ops.copy, ops.send)
def _copy(visit: Interpreter, node: fx.Node) -> Any:
    """Values arrive that have left another lane, or that the caller has given."""
    values, source = visit.given(node.args[0]), node.args[1]
    return mapped(lambda value: carried(visit, node, value, str(source)), values)


def carried(visit: Interpreter, node: fx.Node, value: Any, source: str) -> Any:
    """What is known of a value that a link has carried to a node's lane."""
    if isinstance(value, KnownResults):
        value = Known(value.what, value.microbatch, value.place, value.clock, value.maker)
    if not isinstance(value, Known):
        return value
    if source == CALLERS_STREAM:
        visit.ready(node, value, value.place)  # it belongs to the same micro-batch
        if value.place != GIVEN and value.place.role is not Role.ANYWHERE:
            raise VerifyError(f"{said(value)} is {value.place}, and no value of the caller's", node)
    else:
        visit.ready(node, value, Spot(value.place.lane, Role.LEAVING))
        device = visit.device_of(value.place.lane)
        if device is not None and source != (own := stream_name(device, COPY)):
            raise VerifyError(f"{said(value)} leaves on the stream {own!r}", node, value.maker)
        if value.place.lane > lane_of(node) and node.target is ops.copy:
            raise VerifyError(
                f"{said(value)} comes from stage {value.place.lane}, which is no earlier one", node
            )
    return replace(value, place=here(node, Role.ARRIVING), maker=node)


@rule(ops.wait)
def _wait(visit: Interpreter, node: fx.Node) -> Any:
    """Values that have arrived are ready to be used; values that a lane has made, to leave."""
    values, leaves_lane = visit.given(node.args[0]), str(node.args[2]).endswith(COPY)
    before, after = (Role.COMPUTE, Role.LEAVING) if leaves_lane else (Role.ARRIVING, Role.COMPUTE)
    visit.ready(node, values, here(node, before))
    clock = visit.event(node, (values,)).clock
    return mapped(lambda value: _moved_to(value, here(node, after), clock), values)


def _moved_to(known: Any, place: Spot, clock: Clock) -> Any:
    if isinstance(known, KnownPortal):
        return replace(known, value=_moved_to(known.value, place, clock))
    if isinstance(known, KnownResults):
        return replace(known, place=place, clock=clock)
    if not isinstance(known, Known) or known.place.role is Role.ANYWHERE:
        return known
    return replace(known, place=place, clock=clock)


# ------------------------------------------------------------------------ gates of a pipeline graph


@rule(ops.fork)
def _fork(visit: Interpreter, node: fx.Node) -> Any:
    return _of_lane(visit, node), KnownPhony(node)


@rule(ops.join)
def _join(visit: Interpreter, node: fx.Node) -> Any:
    phony = visit.given(node.args[1])
    if not isinstance(phony, KnownPhony):
        raise VerifyError("a join takes the phony of a fork", node)
    fork, (own, stage) = phony.fork, (node.meta.get(MICROBATCH), node.meta.get(STAGE))
    if (fork.meta.get(MICROBATCH), fork.meta.get(STAGE)) != ((own or 0) - 1, stage):
        raise VerifyError(
            "a join makes the backward of its micro-batch come before that of the micro-batch "
            "before it, in the same stage: this is the phony of another one",
            node,
            fork,
        )
    return _of_lane(visit, node)


def _of_lane(visit: Interpreter, node: fx.Node) -> Any:
    """The values that pass a gate, all of which belong to the gate's lane and micro-batch."""
    values = visit.given(node.args[0])
    for value in leaves(values):
        inner = value.value if isinstance(value, KnownPortal) else value
        if isinstance(inner, Known):
            visit.ready(node, inner, Spot(lane_of(node), inner.place.role))
    return values


@rule(ops.checkpoint)
def _checkpoint(visit: Interpreter, node: fx.Node) -> Any:
    module, *args = node.args
    assert isinstance(module, fx.Node)
    return run_stage(visit, node, str(module.target), args), KnownHandle(node)


@rule(ops.recompute)
def _recompute(visit: Interpreter, node: fx.Node) -> Any:
    handle = visit.given(node.args[1])
    cell = node.meta.get(MICROBATCH), node.meta.get(STAGE)
    if not isinstance(handle, KnownHandle) or cell != (
        handle.call.meta.get(MICROBATCH),
        handle.call.meta.get(STAGE),
    ):
        raise VerifyError("it runs the stage of another micro-batch or stage again", node)
    return _of_lane(visit, node)


@rule(ops.portal_blue)
def _portal_blue(visit: Interpreter, node: fx.Node) -> Any:
    (value,) = visit.ready(node, visit.given(node.args), here(node))
    visit.portals[node] = []
    return KnownPortal(value, node) if isinstance(value, Known) else value


@rule(ops.portal_copy)
def _portal_copy(visit: Interpreter, node: fx.Node) -> Any:
    portal, source = visit.given(node.args[0]), str(node.args[1])
    if not isinstance(portal, KnownPortal):
        raise VerifyError("it moves what is no portal", node)
    visit.portals[portal.blue].append(node)
    return replace(portal, value=carried(visit, node, portal.value, source))


@rule(ops.portal_orange)
def _portal_orange(visit: Interpreter, node: fx.Node) -> Any:
    (portal,) = visit.ready(node, visit.given(node.args), here(node))
    if not isinstance(portal, KnownPortal):
        raise VerifyError("it opens what is no portal", node)
    visit.portals[portal.blue].append(node)
    return replace(portal.value, maker=node)


@rule(ops.bring)
def bring(visit: Interpreter, node: fx.Node) -> Any:
    """A parameter is copied to a lane, and the lane's compute stream has waited for it."""
    parameter = visit.given(node.args[0])
    event = visit.event(node)
    if isinstance(parameter, NotKnown):
        return NOT_KNOWN
    if not isinstance(parameter, KnownState):
        raise VerifyError("it brings a parameter", node)
    if isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr":
        memory = ("parameter", id(attribute(visit.gm, parameter.path)))
        visit.effects.names.setdefault(memory, f"parameter {parameter.path}")
        visit.effects.read(memory, event)
    return Known(("replica", parameter.path), None, here(node), event.clock, node)


# ------------------------------------------------------------------------------------ between ranks


@rule(ops.transmit)
def _transmit(visit: Interpreter, node: fx.Node) -> Any:
    given = visit.given(node.args[1])
    visit.take(given)
    visit.exchange.arrivals[edge_of(node)] = given
    return None


@rule(ops.receive, ops.elsewhere)
def _receive(visit: Interpreter, node: fx.Node) -> Any:
    return NOT_KNOWN


@rule(ops.arrived)
def _arrived(visit: Interpreter, node: fx.Node) -> Any:
    if visit.is_one_of_several:
        return NOT_KNOWN
    (received,) = node.all_input_nodes
    sent = visit.exchange.arrivals[edge_of(received)]
    return mapped(lambda value: _moved_to(value, ANYWHERE, visit.clocks.start), sent)


# ----------------------------------------------------------------------------- parameters in shards

_SHARDS: dict[Any, tuple[tuple[str, ...], str]] = {
    ops.unshard: (("in shards", "being let go"), "not gathered yet"),
    ops.unsharded: (("not gathered yet",), WHOLE),
    ops.reduce_scatter: ((WHOLE,), WHOLE),
    ops.reshard: ((WHOLE,), "being let go"),
    ops.resharded: (("being let go",), "in shards"),
}
"""What a node does to the parameters of a stage: the states before it, and the one behind it."""


@rule(*_SHARDS)
def _shards(visit: Interpreter, node: fx.Node) -> Any:
    number = node.args[1]
    assert isinstance(number, int)
    before, after = _SHARDS[node.target]
    state = visit.step.shards.get(number, "in shards")
    if state not in before:
        raise VerifyError(f"the parameters of stage {number} are {state}", node)
    visit.event(node)
    visit.step.shards[number] = after
