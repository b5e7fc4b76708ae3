"""The automatic cut of a model graph, which pass "partition" makes as an :class:`Auto` says.

::

    a ─ b ─ c ─ d ─ e ─ f          costs 1 1 2 1 3 1, two stages
    0   0   0   0   1   1          slowest stage 5; also 1 1 2 | 1 3 1: the one that sends less

Of all cuts in which no stage needs a later one, the search takes one whose slowest stage is as fast
as possible, and of these the one that sends the fewest bytes (:mod:`passes.partition.cut`). Cuts
whose slowest stage is within ``slack`` of the fastest count as equally fast. A cut that is
contiguous in the program is easier to read: it is taken if it is as good in time and in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import stage_nodes
from passes.partition.by_name import check_names, check_stage, named
from passes.partition.cut.dag import Machine, prices
from passes.partition.cut.search import EQUAL
from passes.partition.cut.solve import Cut, solve, solve_in_order, tightest
from passes.partition.pieces import heaviest
from passes.partition.problem import OBJECTIVES, CutProblem, PartitionError, problem


@dataclass(frozen=True)
class Auto:
    """The settings of an automatic cut: ``partition=fxpipe.Auto(...)``.

    Args:
        objective: the quantity that the cut balances among the stages: "time", "memory" (all bytes
            held for a mini-batch), "activations" (bytes saved for the backward), "params" or
            "flops".
        slack: by which fraction a cut may be slower than the fastest if it sends fewer bytes. Costs
            are estimates, and a slack of 0.02 may halve the traffic; but most copies overlap with
            computation anyway.
        pins: stages by the names of modules or nodes that have to be in them.
        together: groups of names of modules or nodes; each group stays in one stage.
        devices: for each stage the description of its device, or the name of a known one ("h100").
            Give them if the devices differ, have limits of memory, or slow links. None: the devices
            are alike, and links cost nothing.
        in_order: whether only cuts are allowed that are contiguous in the model's order. These are
            easier to read, and never faster.

    Raises:
        PartitionError: for a value that a setting cannot have.
    """

    objective: str = "time"
    slack: float = 0.0
    pins: Mapping[str, int] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    devices: Sequence[DeviceSpec | str] | None = None
    in_order: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise PartitionError(
                f"objective is {self.objective!r}: give one of {', '.join(map(repr, OBJECTIVES))}"
            )
        if not (isinstance(self.slack, int | float) and self.slack >= 0):
            raise PartitionError(f"slack is {self.slack!r}: give a fraction, 0 or more")
        if not isinstance(self.pins, Mapping):
            raise PartitionError(f"pins is {self.pins!r}: give a dict from names to stages")
        groups = () if isinstance(self.together, str) else self.together
        if not groups == self.together or any(isinstance(names, str) for names in groups):
            raise PartitionError(
                f"together is {self.together!r}: give a list of lists of names, a list for each "
                "group that stays in one stage"
            )

    @property
    def specs(self) -> tuple[DeviceSpec, ...] | None:
        """The descriptions of the devices, if they are given."""
        return None if self.devices is None else tuple(map(DeviceSpec.of, self.devices))


class DoesNotFit(PartitionError):
    """No cut of the model fits into the devices' memory; the message says how many bytes are short,
    and which changes would help."""


def automatic(
    graph: fx.Graph,
    target: Machine,
    spec: Auto,
    devices: Sequence[DeviceSpec] | None = None,
    again: float = 0.0,
) -> tuple[CutProblem, Cut]:
    """The best cut of a model graph, whose nodes have costs, into the stages of a machine.

    ``again`` is the fraction of the forward that checkpointing computes a second time.

    Raises:
        DoesNotFit: if no cut fits into the devices' memory, or puts all pins into their stages.
        PartitionError: if there is no cut for another reason.
    """
    found, target, pins = posed(graph, target, spec, devices, again)
    best = solve(found.dag, target, slack=spec.slack, pins=pins)
    if best is None:
        raise DoesNotFit("the model does not fit into the devices' memory")
    return found, _easier(found, target, spec.slack, pins, best)


def cut_around(
    graph: fx.Graph, homes: Iterable[tuple[fx.Node, int]], stages: int
) -> dict[fx.Node, int] | None:
    """The fastest cut of a model graph that keeps some nodes in given stages; None if there is no
    such cut.

    ``homes``: the nodes that are kept, with their stages.
    """
    found = problem(graph)
    units = dict(zip(found.work, found.home, strict=True))
    pins: dict[int, int] = {}
    for node, stage in homes:
        if pins.setdefault(units[node], stage) != stage:
            return None
    if found.dag.size < stages:
        return None
    best = solve(found.dag, Machine(stages), pins=pins)
    return None if best is None else found.labels(best.stage)


def posed(
    graph: fx.Graph,
    target: Machine,
    spec: Auto,
    devices: Sequence[DeviceSpec] | None,
    again: float,
) -> tuple[CutProblem, Machine, dict[int, int]]:
    """Pose the problem of an automatic cut: the DAG of the nodes, the machine, and the stages of
    the pinned nodes of the DAG.

    Raises PartitionError if the graph has fewer parts than there are stages, or if pins contradict
    each other.
    """
    work = list(stage_nodes(graph))
    groups = [[node for name in names for node in named(work, name)] for names in spec.together]
    found = problem(
        graph,
        spec.objective,
        devices=devices,
        groups=groups,
        recomputed=again,
        in_order=spec.in_order,
    )
    if spec.objective != "time":  # bytes or FLOPs cannot be compared with the seconds of links
        target = replace(target, bandwidth=None, latency=None)
    if found.dag.size < target.stages:
        raise PartitionError(
            f"{target.stages} stages asked for, but the model can be cut into {found.dag.size}, no "
            f"more: it has {len(work)} node{'s' * (len(work) != 1)}, of which those that share "
            f"written memory, or are parts of one result, stay together; {heaviest(graph)}; give "
            f"{found.dag.size} device{'s' * (found.dag.size != 1)}, or fewer"
        )
    return found, target, _pins(found, work, spec.pins, target.stages)


def _easier(
    found: CutProblem, target: Machine, slack: float, pins: Mapping[int, int], best: Cut
) -> Cut:
    """The best cut that is contiguous in the program, if it is as good as ``best``; else ``best``.
    A contiguous cut is easier to read."""
    limit = max(best.bound * (1 + slack), best.prices.slowest) * (1 + EQUAL)
    stage = solve_in_order(found.dag, target, slack=slack, pins=pins, enough=limit)
    if stage is None:
        return best
    contiguous = Cut(stage, prices(found.dag, target, stage), best.bound, best.is_exact)
    is_as_fast = contiguous.prices.slowest <= limit
    is_as_small = contiguous.prices.sent <= best.prices.sent * (1 + slack)
    return contiguous if is_as_fast and is_as_small else best


def _pins(
    found: CutProblem, work: Sequence[fx.Node], names: Mapping[str, int], stages: int
) -> dict[int, int]:
    position = {node: i for i, node in enumerate(work)}
    told: dict[fx.Node, str] = {}
    check_names(names)
    names = {name: check_stage("pins", name, stage, stages) for name, stage in names.items()}
    for name in sorted(names, key=len):
        told.update(dict.fromkeys(named(work, name), name))
    pins: dict[int, str] = {}
    for node, name in told.items():
        other = pins.setdefault(found.home[position[node]], name)
        if names[name] != names[other]:
            raise PartitionError(
                f"pins puts {other!r} into stage {names[other]} and {name!r} into stage "
                f"{names[name]}, but they share written memory, are parts of one result, or are to "
                "stay together: pin them to one stage"
            )
    return {unit: names[name] for unit, name in pins.items()}


def shortage(found: CutProblem, target: Machine, pins: Mapping[int, int]) -> str:
    """A sentence that says which devices have too little memory, and how many bytes are short, for
    the cut in which the fullest device is least full.

    Raises :class:`PartitionError` if no cut puts all pins into their stages.
    """
    assert target.memory is not None
    stage = tightest(found.dag, target, pins=pins)
    if stage is None:
        raise PartitionError(
            "no cut puts all pins into their stages and something into each of the "
            f"{target.stages}: give fewer pins, or other ones"
        )
    need = prices(found.dag, target, stage).memory
    short = [
        f"device {s} needs {n:,.0f} bytes and has {m:,.0f}, {math.ceil(n - m):,} short"
        for s, (n, m) in enumerate(zip(need, target.memory, strict=True))
        if n > m
    ]
    return "the model does not fit into the devices' memory; cut for memory alone, " + (
        "; ".join(short) or "it might, but no such cut has been found"
    )
