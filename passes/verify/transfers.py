"""Proves that the graphs that pass "project" gives for all ranks can run together, and that what
they exchange is what each of them needs.

::

    rank 0     transmit (0, 1) number 0 ──────── transmit (0, 1) number 1
                      │                                 │
    rank 1     receive (0, 1) number 0  ──────── receive (0, 1) number 1

1. The transfers of an edge have the same numbers, in the same order, at both of its ends, and
   transfers of the same number carry the same value, alike in shape and dtype.
2. If every rank stops at each transfer until the other rank comes to it, all ranks come to their
   ends. In a real run ranks wait less: a receive does not stop a rank, only the first use of the
   received value does.
3. Each rank's graph keeps the promises of its nodes (:mod:`passes.verify.interpret`), given what
   the other ranks really send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import CARRIED, ORIGIN
from fxpipe.ir.printing import format_node
from fxpipe.runtime.ranks.transport import Edge
from passes.to_rank.project import edge_of, transfers_of
from passes.verify.interpret import check_end, follow
from passes.verify.record import Exchange
from passes.verify.verify import meaning_of
from passes.verify.visit import Visit


class TransferError(ValueError):
    """The graphs of ranks do not fit together; the message names transfers and their ranks."""


def verify(graphs: Sequence[fx.GraphModule]) -> None:
    """Check the graphs of all ranks, in the order of the ranks.

    Raises :class:`TransferError` for the first edge whose ends differ, or for ranks that wait for
    each other in a circle, and :class:`~passes.verify.errors.VerifyError` for a node that is given
    something else than it needs.
    """
    programs = [list(transfers_of(gm)) for gm in graphs]
    _check_edges(programs)
    _check_runs(programs)
    _check_values(graphs)


def meaning_of_ranks(graphs: Sequence[fx.GraphModule]) -> list[Any]:
    """What the graph of each rank computes, given what the other ranks send: see
    :func:`passes.verify.verify.meaning`."""
    return [meaning_of(visit) for visit in _followed(graphs)]


def _check_values(graphs: Sequence[fx.GraphModule]) -> None:
    for visit in _followed(graphs):
        check_end(visit)


def _followed(graphs: Sequence[fx.GraphModule]) -> list[Visit]:
    """Follow the values of all ranks together: what one transmits, another receives."""
    exchange = Exchange()
    visits = [Visit(gm, exchange) for gm in graphs]
    waiting: dict[int, fx.Node] = {}
    running = {rank: follow(visit) for rank, visit in enumerate(visits)}
    while running:
        before = len(exchange.arrivals)
        waiting = {rank: node for rank, run in running.items() if (node := next(run, None))}
        is_stuck = len(waiting) == len(running) and len(exchange.arrivals) == before
        if is_stuck:
            rank, node = min(waiting.items())
            raise TransferError(f"{_said(rank, node)}: no rank sends what this one waits for")
        running = {rank: running[rank] for rank in waiting}
    return visits


def _check_edges(programs: Sequence[Sequence[fx.Node]]) -> None:
    for rank, program in enumerate(programs):
        for node in program:
            edge, _ = edge_of(node)
            end = 0 if node.target is ops.transmit else 1
            if edge[end] != rank or not 0 <= edge[1 - end] < len(programs) or edge[0] == edge[1]:
                raise TransferError(f"{_said(rank, node)}: this is no edge of rank {rank}")
    for edge in sorted({edge_of(node)[0] for program in programs for node in program}):
        _check_edge(edge, *(_at(programs[rank], edge) for rank in edge))


def _at(program: Sequence[fx.Node], edge: Edge) -> list[fx.Node]:
    return [node for node in program if edge_of(node)[0] == edge]


def _check_edge(edge: Edge, sent: Sequence[fx.Node], received: Sequence[fx.Node]) -> None:
    """Check that the k-th transmit of an edge is its k-th receive."""
    source, target = edge
    for number, (transmit, receive) in enumerate(zip(sent, received, strict=False)):
        pair = f"{_said(source, transmit)}; {_said(target, receive)}"
        if edge_of(transmit)[1] != number or edge_of(receive)[1] != number:
            raise TransferError(f"these come as number {number} of the edge {edge}: {pair}")
        if transmit.meta.get(ORIGIN) != receive.meta.get(ORIGIN):
            raise TransferError(f"the two ends mean different values: {pair}")
        both = [end.meta.get(CARRIED) for end in (transmit, receive)]
        if both[0] != both[1]:
            raise TransferError(f"the two ends differ in shapes or dtypes, {both}: {pair}")
    if len(sent) != len(received):
        rank, longer, kind = (
            (source, sent, "receives") if len(sent) > len(received) else (target, received, "sends")
        )
        alone = longer[min(len(sent), len(received))]
        raise TransferError(f"{_said(rank, alone)}: the other rank {kind} nothing for it")


def _check_runs(programs: Sequence[Sequence[fx.Node]]) -> None:
    """Let all ranks run; each stops at a transfer until the other end has come to it."""
    places = [0] * len(programs)
    going = list(range(len(programs)))  # ranks whose next transfer has not been looked at
    while going:
        rank = going.pop()
        other = _waited_for(programs, places, rank)
        if other is not None and _waited_for(programs, places, other) == rank:
            here, there = (edge_of(programs[r][places[r]]) for r in (rank, other))
            if here == there:
                places[rank] += 1
                places[other] += 1
                going += [rank, other]
    stuck = [rank for rank, place in enumerate(places) if place < len(programs[rank])]
    if stuck:
        raise TransferError(_circle(programs, places, stuck[0]))


def _waited_for(
    programs: Sequence[Sequence[fx.Node]], places: Sequence[int], rank: int
) -> int | None:
    """The rank that the next transfer of a rank needs; None if the rank is done."""
    if places[rank] == len(programs[rank]):
        return None
    source, target = edge_of(programs[rank][places[rank]])[0]
    return target if rank == source else source


def _circle(programs: Sequence[Sequence[fx.Node]], places: Sequence[int], rank: int) -> str:
    met: list[int] = []
    while rank not in met:
        met.append(rank)
        other = _waited_for(programs, places, rank)
        assert other is not None
        rank = other
    circle = met[met.index(rank) :]
    waits = [_said(each, programs[each][places[each]]) for each in circle]
    return "ranks wait for each other in a circle: " + "; ".join(waits)


def _said(rank: int, node: fx.Node) -> str:
    return f"rank {rank}, {format_node(node)}"
