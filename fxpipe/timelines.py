"""Timelines of a training step: as predicted from costs, and as measured on the lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from torch import fx

from fxpipe import ops
from fxpipe.graph import ACTION, Cost
from fxpipe.runtime.clock import Mark
from fxpipe.schedule import (
    Action,
    Edge,
    Kind,
    Link,
    Links,
    Memory,
    Schedule,
    Span,
    StageCost,
    Timeline,
    simulate,
)
from passes.skips import SkipLayout

LOSS, LOSS_BACKWARD = "loss", "loss backward"  # what spans are called that are no actions
PCIE = Link(latency=1e-5, bandwidth=1.6e10)  # between devices of which nothing is known


def estimated_costs(costs: Sequence[Cost], chunks: int) -> list[StageCost]:
    """For one micro-batch, from what each stage is estimated to cost for a mini-batch.

    Half of a backward is for the inputs, half for the parameters, as in a matrix product.
    """
    halves = [cost.backward_s / 2 / chunks for cost in costs]
    return [
        StageCost(cost.forward_s / chunks, half, half)
        for cost, half in zip(costs, halves, strict=True)
    ]


def measured_costs(timeline: Timeline, stages: int) -> list[StageCost]:
    """For one micro-batch, the medians of what was measured; the loss is part of the last stage."""
    taken: dict[tuple[int, Kind], list[float]] = {}
    loss: dict[str, list[float]] = {}
    for span in timeline.spans:
        if span.action is not None:
            taken.setdefault((span.action.stage, span.action.kind), []).append(span.seconds)
        else:
            loss.setdefault(span.name, []).append(span.seconds)

    def seconds(stage: int, kind: Kind) -> float:
        own = median(taken.get((stage, kind), [0.0]))
        if stage == stages - 1 and kind is not Kind.WEIGHT_GRAD:
            own += median(loss.get(LOSS if kind is Kind.FORWARD else LOSS_BACKWARD, [0.0]))
        return own

    return [
        StageCost(
            seconds(i, Kind.FORWARD),
            seconds(i, Kind.BACKWARD_INPUT),
            seconds(i, Kind.WEIGHT_GRAD),
            seconds(i, Kind.BACKWARD) or None,
        )
        for i in range(stages)
    ]


def predicted(
    schedule: Schedule,
    costs: Sequence[StageCost],
    layout: SkipLayout,
    devices: Sequence[str],
    memory: Memory | None = None,
) -> Timeline:
    """What the simulator says; ``devices``: one for each stage."""
    sent: Counter[tuple[int, int]] = Counter()  # all values from one stage to another together
    once = []
    for hop in layout.hops:
        if hop.source is not None and hop.once:
            once.append(Edge(hop.source, hop.target, hop.bytes))
        elif hop.source is not None:
            sent[hop.source, hop.target] += hop.bytes
    edges = [Edge(*ends, total / schedule.microbatches) for ends, total in sent.items()]
    lanes = range(len(schedule.lanes))
    where = {schedule.placement[stage]: device for stage, device in enumerate(devices)}
    between = {(a, b): PCIE for a in lanes for b in lanes if where[a] != where[b]}
    return simulate(schedule, costs, Links(edges, between=between, once=once), memory)


def _said(node: fx.Node) -> str:
    if node.target is ops.loss:
        return LOSS
    return LOSS_BACKWARD if node.target is ops.loss_backward else ""


def measured(name: str, lanes: Sequence[str], marks: Sequence[Mark]) -> Timeline:
    """From the marks of a run of a step graph."""
    spans = []
    for mark in marks:
        action: Action | None = mark.node.meta.get(ACTION)
        said = _said(mark.node)
        if action is not None or said:
            spans.append(Span(mark.lane, mark.start, mark.end, action, said))
    begin = min((span.start for span in spans), default=0.0)
    return Timeline(
        name,
        tuple(lanes),
        tuple(
            Span(span.lane, span.start - begin, span.end - begin, span.action, span.name)
            for span in sorted(spans, key=lambda span: (span.start, span.lane))
        ),
    )
