"""The rules of nodes that carry values from stream to stream, from lane to lane and from rank to
rank.

::

    lane 0, compute    stage_0 ── wait
    lane 0, copy                   └── copy ──┐ (over the link)
    lane 1, copy                              └── wait
    lane 1, compute                                └── stage_1

A skip's portal is moved in the same way, and is opened in the stage that uses the skip.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import STAGE, attribute
from fxpipe.runtime.streams import CALLER as CALLERS_STREAM
from fxpipe.runtime.streams import COPY, stream_name
from passes.to_rank.project import edge_of
from passes.verify.clocks import Clock, Event
from passes.verify.errors import VerifyError
from passes.verify.values import (
    ANYWHERE,
    GIVEN,
    NOT_KNOWN,
    Known,
    KnownLent,
    KnownPortal,
    KnownResults,
    KnownState,
    NotKnown,
    Role,
    Spot,
    leaves,
    mapped,
)
from passes.verify.visit import PARAMETER, Visit, rule, said


@rule(ops.copy, ops.send)
def _copy(visit: Visit, node: fx.Node) -> Any:
    """Values arrive that have left another lane, or that the caller has given."""
    values, source = visit.given(node.args[0]), node.args[1]
    return mapped(lambda value: carried(visit, node, value, str(source)), values)


def carried(visit: Visit, node: fx.Node, value: Any, source: str) -> Any:
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
        device = visit.places.device_of(value.place.lane)
        if device is not None and source != (own := stream_name(device, COPY)):
            raise VerifyError(f"{said(value)} leaves on the stream {own!r}", node, value.maker)
        if value.place.lane > visit.lane and node.target is ops.copy:
            raise VerifyError(
                f"{said(value)} comes from stage {value.place.lane}, which is no earlier one", node
            )
    return value.at(visit.here(Role.ARRIVING), value.clock, node)


@rule(ops.wait)
def _wait(visit: Visit, node: fx.Node) -> Any:
    """Values that have arrived are ready to be used; values that a lane has made, to leave."""
    values, leaves_lane = visit.given(node.args[0]), str(node.args[2]).endswith(COPY)
    before, after = (Role.COMPUTE, Role.LEAVING) if leaves_lane else (Role.ARRIVING, Role.COMPUTE)
    visit.ready(node, values, visit.here(before))
    clock = visit.event(node, (values,)).clock
    place = visit.here(after)
    return mapped(lambda value: _moved_to(value, place, clock), values)


def _moved_to(known: Any, place: Spot, clock: Clock) -> Any:
    if isinstance(known, Known):
        is_anywhere = known.place.role is Role.ANYWHERE
        return known if is_anywhere else known.at(place, clock, known.maker)
    if isinstance(known, KnownPortal):
        return KnownPortal(_moved_to(known.value, place, clock), known.blue)
    if isinstance(known, KnownResults):
        return KnownResults(known.what, known.microbatch, place, clock, known.maker)
    return known


@rule(ops.portal_blue)
def _portal_blue(visit: Visit, node: fx.Node) -> Any:
    (value,) = visit.ready(node, visit.given(node.args), visit.here())
    visit.portals[node] = []
    return KnownPortal(value, node) if isinstance(value, Known) else value


@rule(ops.portal_copy)
def _portal_copy(visit: Visit, node: fx.Node) -> Any:
    portal, source = visit.given(node.args[0]), str(node.args[1])
    if not isinstance(portal, KnownPortal):
        raise VerifyError("it moves what is no portal", node)
    visit.portals[portal.blue].append(node)
    return KnownPortal(carried(visit, node, portal.value, source), portal.blue)


@rule(ops.portal_orange)
def _portal_orange(visit: Visit, node: fx.Node) -> Any:
    (portal,) = visit.ready(node, visit.given(node.args), visit.here())
    if not isinstance(portal, KnownPortal):
        raise VerifyError("it opens what is no portal", node)
    visit.portals[portal.blue].append(node)
    return portal.value.at(portal.value.place, portal.value.clock, node)


@rule(ops.lend)
def _lend(visit: Visit, node: fx.Node) -> Any:
    """Each stage that uses a parameter is lent a view of it, and none uses the parameter itself,
    whose gradient would be added beside the sum of theirs, in any order."""
    parameter = visit.given(node.args[0])
    if not isinstance(parameter, KnownState):
        raise VerifyError("it lends a parameter", node)
    home = visit.homes.get(id(attribute(visit.gm, parameter.path)))
    if home is not None:
        raise VerifyError(
            f"stage {home.stage} uses the parameter {parameter.path} itself, which is lent: "
            "their gradients would be added in the order in which they come",
            node,
        )
    _read(visit, parameter, visit.event(node))
    return tuple(KnownLent(parameter.path, i, node) for i in range(int(str(node.args[1]))))


@rule(ops.bring)
def bring(visit: Visit, node: fx.Node) -> Any:
    """A parameter is copied to a lane, and the lane's compute stream has waited for it. One that is
    lent has a view for each stage, so that gradients meet at the lender."""
    parameter = visit.given(node.args[0])
    event = visit.event(node)
    if isinstance(parameter, NotKnown):
        return NOT_KNOWN
    if isinstance(parameter, KnownLent):
        _check_lent(visit, parameter, node)
    elif not isinstance(parameter, KnownState):
        raise VerifyError("it brings a parameter", node)
    elif isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr":
        _read(visit, parameter, event)
    return Known(("replica", parameter.path), None, visit.here(), event.clock, node)


def _check_lent(visit: Visit, view: KnownLent, node: fx.Node) -> None:
    """Check that no other stage is brought the same view of a parameter, and that the views, in
    whose order gradients are added up, are those of the stages in their order."""
    views = visit.lent.setdefault(view.lender, {})
    for index, by in views.items():
        if index == view.index:
            raise VerifyError(
                f"another stage is brought the same view of the parameter {view.path}: their "
                "gradients would be added in the order in which they come",
                node,
                by,
            )
        if (index < view.index) != (by.meta[STAGE] < node.meta[STAGE]):
            raise VerifyError(
                f"the views of the parameter {view.path} are not in the order of the stages",
                node,
                by,
            )
    views[view.index] = node


def _read(visit: Visit, parameter: KnownState, event: Event) -> None:
    memory = (PARAMETER, id(attribute(visit.gm, parameter.path)))
    visit.effects.names.setdefault(memory, f"parameter {parameter.path}")
    visit.effects.read(memory, event)


@rule(ops.transmit)
def _transmit(visit: Visit, node: fx.Node) -> Any:
    given = visit.given(node.args[1])
    for value in leaves(given):
        if isinstance(value, Known):
            visit.ready(node, value, value.place)  # it belongs to the same micro-batch
    visit.take(given)
    visit.exchange.arrivals[edge_of(node)] = given
    return None


@rule(ops.receive, ops.elsewhere)
def _receive(visit: Visit, node: fx.Node) -> Any:
    return NOT_KNOWN


@rule(ops.arrived)
def _arrived(visit: Visit, node: fx.Node) -> Any:
    if visit.is_one_of_several:
        return NOT_KNOWN
    (received,) = node.all_input_nodes
    sent = visit.exchange.arrivals[edge_of(received)]
    for value in leaves(sent):
        if isinstance(value, Known):
            visit.ready(node, value, value.place)
            visit.ready(received, value, value.place)
    return mapped(lambda value: _moved_to(value, ANYWHERE, visit.clocks.start), sent)
