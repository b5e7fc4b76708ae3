"""The rules of nodes that divide a mini-batch, run a stage on a micro-batch, and put the parts of
the micro-batches together.

::

    x ── scatter ──┬── [0] ── stage_0 ── ... ──┬── gather ── output
                   └── [1] ── stage_0 ── ... ──┘
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, ORIGIN, STAGE, UPDATES, attribute
from passes.verify.clocks import Event
from passes.verify.errors import VerifyError
from passes.verify.record import WHOLE
from passes.verify.stages import StageSummary
from passes.verify.values import (
    ANYWHERE,
    GIVEN,
    NOT_KNOWN,
    Known,
    KnownLent,
    KnownParts,
    KnownResults,
    KnownState,
    NotKnown,
    Role,
    leaves,
    named,
)
from passes.verify.visit import PARAMETER, Visit, rule, said


@rule("placeholder")
def _input(visit: Visit, node: fx.Node) -> Any:
    return Known(node.name, None, GIVEN, visit.clocks.start, node)


@rule("get_attr")
def _state(visit: Visit, node: fx.Node) -> Any:
    visit.at(str(node.target), node)
    return KnownState(str(node.target))


@rule("output")
def _output(visit: Visit, node: fx.Node) -> Any:
    given = visit.given(node.args[0])
    visit.take(given)
    return given


@rule(operator.getitem)
def _getitem(visit: Visit, node: fx.Node) -> Any:
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
        what = known.what, index
        return Known(what, known.microbatch, known.place, known.clock, known.maker, known.giver)
    try:
        return known[index]
    except (IndexError, KeyError, TypeError) as error:
        raise VerifyError(f"there is no element {index!r} of {named(known)}", node) from error


def _result(known: KnownResults, index: Any) -> Known:
    names = known.what[1] if isinstance(known.what, tuple) else ()
    what = names[index] if isinstance(index, int) and index < len(names) else (known.what, index)
    return Known(what, known.microbatch, known.place, known.clock, known.maker)


@rule("call_function", "call_method")
def _unknown_function(visit: Visit, node: fx.Node) -> Any:
    """A function that is not of the vocabulary, which a user's pass has added: it computes."""
    given = visit.ready(node, visit.given((node.args, node.kwargs)), visit.here())
    visit.take(given)
    clock = visit.event(node, (given,)).clock
    what = (str(node.target), str(named(given)))
    return Known(what, node.meta.get(MICROBATCH), visit.here(), clock, node)


@rule("call_module")
def _stage(visit: Visit, node: fx.Node) -> Any:
    return run_stage(visit, node, str(node.target), node.args)


def run_stage(visit: Visit, node: fx.Node, path: str, args: Any) -> Any:
    """A stage runs on values that are ready in its lane. Returns what is known of its results."""
    stage = visit.stage(path, node)
    given = visit.ready(node, visit.given(args), visit.here())
    check_taken(visit, node, stage, given)
    visit.alike(("a stage is given", path), node, given)
    event = visit.event(node, given)
    use_parameters(visit, stage, event)
    visit.effects.write(("state", path), event)
    visit.given_by |= dict.fromkeys(stage.gives, node)
    results = KnownResults(
        (path, stage.gives), node.meta.get(MICROBATCH), visit.here(), event.clock, node
    )
    return _result(results, 0) if len(stage.gives) == 1 else results


def use_parameters(visit: Visit, stage: StageSummary, by: Event) -> None:
    """A node reads the parameters of its stage. If they are in shards, they have been gathered."""
    number = by.node.meta.get(STAGE)
    if visit.step.shards.get(number, WHOLE) != WHOLE:
        raise VerifyError(
            f"the parameters of stage {number} are {visit.step.shards[number]}", by.node
        )
    for each in stage.parameters:
        visit.effects.read((PARAMETER, each), by)


def check_taken(visit: Visit, node: fx.Node, stage: StageSummary, given: Any) -> None:
    """Check that a stage is given the values that its arguments are named after."""
    visit.take(given)
    for (name, path), value in zip(stage.takes, given, strict=False):
        if isinstance(value, KnownLent):
            raise VerifyError(
                f"the parameter {value.path} is lent to the stage, and used there without having "
                "been brought there",
                node,
                value.lender,
            )
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
def _scatter(visit: Visit, node: fx.Node) -> Any:
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
def _seeds(visit: Visit, node: fx.Node) -> Any:
    return KnownParts(("seeds",), ANYWHERE, visit.event(node).clock, node)


@rule(ops.loss_weights, ops.weights)
def _weights(visit: Visit, node: fx.Node) -> Any:
    return KnownParts((node.name,), ANYWHERE, visit.event(node).clock, node)


@rule(ops.gather)
def _gather(visit: Visit, node: fx.Node) -> Any:
    """The parts of an output, of all micro-batches in order, by the lane of the last one."""
    parts = visit.ready(node, visit.given(node.args[0]), visit.here())
    check_parts(visit, node, parts)
    clock = visit.event(node, parts).clock
    return Known(node.name, None, visit.here(), clock, node)


def check_parts(visit: Visit, node: fx.Node, parts: Any) -> None:
    """Check that there is one part of each micro-batch, in order, and that all have one name."""
    visit.take(parts)
    first, is_known = named(parts[:1]), NOT_KNOWN not in leaves(parts[:1])
    for i, part in enumerate(parts):
        values = leaves(part)
        for value in values:
            if isinstance(value, Known) and value.microbatch not in (i, None):
                raise VerifyError(
                    f"{said(value)} stands where that of micro-batch {i} should", node, value.maker
                )
        if is_known and NOT_KNOWN not in values and (names := named(part)) != first[0]:
            raise VerifyError(
                f"the parts of micro-batches are different values: {first[0]} of "
                f"micro-batch 0, {names} of micro-batch {i}",
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
def _write_back(visit: Visit, node: fx.Node) -> Any:
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
    _check_updated(node, [str(tensor.meta.get(ORIGIN, tensor.name))], given)
    check_parts(visit, node, given)
    check_done(node, given)
    visit.effects.write(("input", tensor.name), visit.event(node, given))
    return None


def _check_updated(node: fx.Node, updated: list[str], parts: Any) -> None:
    """Check that a node that runs once updates what it is noted to update, by the values that it is
    noted to be given for that."""
    first = leaves(parts[:1])
    if NOT_KNOWN in first:
        return  # of what another rank sends, the graph of one rank knows no names
    given = *updated, *map(_text, first)
    if given != (noted := node.meta.get(UPDATES)):
        raise VerifyError(f"it is noted to be given {noted}, and is given {given}", node)


def _text(value: Any) -> str:
    return str(value.what if isinstance(value, Known) else value)


@rule(ops.update_statistics)
def _update_statistics(visit: Visit, node: fx.Node) -> Any:
    *buffers, _, parts = node.args
    given = visit.given(parts)
    _check_updated(node, [str(each.target) for each in buffers if isinstance(each, fx.Node)], given)
    check_parts(visit, node, given)
    check_done(node, given)
    event = visit.event(node, given)
    for buffer in buffers:
        if isinstance(buffer, fx.Node):
            memory = ("buffer", id(attribute(visit.gm, str(buffer.target))))
            visit.effects.names[memory] = f"buffer {buffer.target}"
            visit.effects.write(memory, event)
    return None
