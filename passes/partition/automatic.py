"""The automatic cut of a model graph, which pass "partition" makes as an :class:`Auto` says.

::

    a ─ b ─ c ─ d ─ e ─ f          costs 1 1 2 1 3 1, two stages
    0   0   0   0   1   1          slowest stage 5; also 1 1 2 | 1 3 1: the one that sends less

The objective, in this order, over all cuts in which no stage needs a later one:

1. The slowest stage takes at most ``1 + slack`` times as long as that of the fastest cut; cuts
   within this limit count as equally fast, since costs are estimates.
2. As few stages as possible have next to nothing to do, which is less than a hundredth of what each
   would take if all took the same. (Where one operation takes most of the time, all cuts around it
   are equally fast, and the one that sends least leaves all other work to one stage.)
3. The cut divides no module below a depth of nesting that is as small as possible: a cut between
   layers comes ahead of one between the parts of a layer, and this ahead of any other.
4. It divides as few modules as possible.
5. It sends the fewest bytes.
6. It is contiguous in the program, which is easier to read, if that costs nothing of the above.

The search (:mod:`passes.partition.cut`) is exact for graphs that are small or narrow enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from torch import fx

from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import stage_nodes
from fxpipe.ir.text import too_little
from passes.partition.by_name import check_names, check_stage, named
from passes.partition.cut.bounds import lower_bound
from passes.partition.cut.dag import Dag, Machine, prices
from passes.partition.cut.search import EQUAL
from passes.partition.cut.solve import Cut, Effort, solve, solve_in_order, tightest
from passes.partition.modules import at_boundaries, between_modules, outweighing
from passes.partition.pieces import heaviest
from passes.partition.problem import OBJECTIVES, CutProblem, PartitionError, problem

SLACK = 0.02
"""Cuts whose slowest stages differ by less than this fraction count as equally fast."""

IDLE = 0.01
"""A stage that takes less than this fraction of an even share has next to nothing to do."""


@dataclass(frozen=True)
class Auto:
    """The settings of an automatic cut: ``partition=fxpipe.Auto(...)``.

    Args:
        objective: the quantity that the cut balances among the stages: "time", "memory" (all bytes
            held for a mini-batch), "activations" (bytes saved for the backward), "params" or
            "flops".
        slack: by which fraction a cut may be slower than the fastest one if it divides fewer
            modules, or sends fewer bytes. Costs are estimates, and a slack of 0.02 may halve the
            traffic. With 0 it is the fastest cut.
        pins: stages by the names of modules or nodes that have to be in them.
        together: groups of names of modules or nodes; each group stays in one stage.
        devices: for each stage the description of its device, or the name of a known one ("h100").
            Give them if the devices differ, have limits of memory, or slow links. None: the devices
            are alike, and links cost nothing.
        in_order: whether only cuts are allowed that are contiguous in the model's order. These are
            easier to read, and never faster.
        boundaries: where cuts are allowed: at the begin and at the end of each module whose path,
            or the end of it, is one of these. A ``*`` stands for one name: ``["layers.*"]`` allows
            cuts between layers only. None: cuts are allowed everywhere.

    Raises:
        PartitionError: for a value that a setting cannot have.
    """

    objective: str = "time"
    slack: float = SLACK
    pins: Mapping[str, int] = field(default_factory=dict)
    together: Sequence[Sequence[str]] = ()
    devices: Sequence[DeviceSpec | str] | None = None
    in_order: bool = False
    boundaries: Sequence[str] | None = None

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
        names = self.boundaries
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise PartitionError(
                f"boundaries is {names!r}: give a list of paths of modules, such as "
                '["model.layers.*"]'
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
    effort: Effort | None = None,
    limit: float = math.inf,
) -> tuple[CutProblem, Cut]:
    """The best cut of a model graph, whose nodes have costs, into the stages of a machine.

    ``effort`` limits the search; None: as :func:`~passes.partition.cut.solve.solve` does. Cuts
    whose slowest stage takes more than ``limit`` seconds are not considered.

    Raises:
        DoesNotFit: if no cut fits into the devices' memory, or none within the limit does.
        PartitionError: if there is no cut for another reason.
    """
    found, target, pins = posed(graph, target, spec, devices)
    best = solve(found.dag, target, slack=spec.slack, pins=pins, effort=effort, limit=limit)
    if best is None and limit == math.inf and np.isinf(np.asarray(target.memory)).all():
        raise _no_room_for_pins(target)
    if best is None:
        raise DoesNotFit("the model does not fit into the devices' memory")
    if effort is not None and not effort.is_readable:
        return found, best
    within = min(_limit(best, spec.slack), limit)
    for small, home in between_modules(found):
        cut = _within(small, target, _moved(pins, home), within, effort)
        if cut is not None and cut.prices.idle <= best.prices.idle:
            stage = tuple(cut.stage[h] for h in home)
            return found, replace(best, stage=stage, prices=prices(found.dag, target, stage))
    return found, _easier(found.dag, target, spec.slack, pins, best, within)


def _limit(best: Cut, slack: float) -> float:
    """The seconds that the slowest stage of a cut may take, to count as equally fast: so many more
    than for the fastest cut that is known."""
    within = best.bound * (1 + slack)
    return within if best.prices.slowest <= within else best.prices.slowest * (1 + slack)


def _within(
    dag: Dag,
    target: Machine,
    pins: Mapping[int, int] | None,
    limit: float,
    effort: Effort | None,
) -> Cut | None:
    """The cut that is liked best of those whose slowest stage takes at most ``limit`` seconds; None
    if there is none, or if the pins contradict each other."""
    if pins is None:
        return None
    bound = lower_bound(dag, target)
    slack = max(0.0, limit / bound - 1) if bound > 0 else 0.0
    most = limit * (1 + EQUAL)
    best = solve(dag, target, slack=slack, pins=pins, limit=most, effort=effort)
    return None if best is None else _easier(dag, target, slack, pins, best, limit)


def _moved(pins: Mapping[int, int], home: Sequence[int]) -> dict[int, int] | None:
    """The pins of a contracted DAG; None if one of its nodes would be in two stages."""
    moved: dict[int, int] = {}
    for node, stage in pins.items():
        if moved.setdefault(home[node], stage) != stage:
            return None
    return moved


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
) -> tuple[CutProblem, Machine, dict[int, int]]:
    """Pose the problem of an automatic cut: the DAG of the nodes, the machine, and the stages of
    the pinned nodes of the DAG.

    Raises PartitionError if the graph has fewer parts than there are stages, or if pins contradict
    each other.
    """
    work = list(stage_nodes(graph))
    groups = [[node for name in names for node in named(work, name)] for names in spec.together]
    if spec.boundaries is not None:
        groups += at_boundaries(work, spec.boundaries)
    found = problem(
        graph,
        spec.objective,
        devices=devices,
        groups=groups,
        in_order=spec.in_order,
    )
    if spec.objective != "time":  # bytes or FLOPs cannot be compared with the seconds of links
        target = replace(target, bandwidth=None, latency=None, more=None)
    else:
        target = _with_work_for_all(found.dag, target)
    if found.dag.size < target.stages:
        raise PartitionError(
            f"{target.stages} stages asked for, but the model can be cut into {found.dag.size}, no "
            f"more: it has {len(work)} node{'s' * (len(work) != 1)}, of which those that share "
            "written memory or a Python object that they change, or are parts of one result, stay "
            f"together; {heaviest(graph)}; give "
            + ("1 device" if found.dag.size == 1 else f"{found.dag.size} devices, or fewer")
            + "; a schedule with several stages on each device, such as zbv, needs more of them"
        )
    return found, target, _pins(found, work, spec.pins, target.stages)


def _with_work_for_all(dag: Dag, target: Machine) -> Machine:
    """The machine, of which each stage is to have something to do: this outweighs all modules that
    are divided for it, and all bytes that are sent."""
    share = (dag.weight.sum() + np.asarray(target.more).sum()) / target.stages
    return replace(
        target, idle_below=IDLE * float(share), idle_penalty=dag.size * outweighing(dag.values)
    )


def _easier(
    dag: Dag,
    target: Machine,
    slack: float,
    pins: Mapping[int, int],
    best: Cut,
    limit: float = math.inf,
) -> Cut:
    """The best cut that is contiguous in the program, if it is as good as ``best``; else ``best``.
    A contiguous cut is easier to read."""
    if all(one <= other for one, other in pairwise(best.stage)):
        return best
    limit = min(limit, _limit(best, slack)) * (1 + EQUAL)
    stage = solve_in_order(dag, target, slack=slack, pins=pins, enough=limit, limit=limit)
    if stage is None:
        return best
    contiguous = Cut(stage, prices(dag, target, stage), best.bound, best.is_exact)
    is_as_fast = contiguous.prices.slowest <= limit
    is_as_good = contiguous.prices.penalty <= best.prices.penalty * (
        1 + EQUAL
    ) and contiguous.prices.sent <= best.prices.sent * (1 + EQUAL)
    return contiguous if is_as_fast and is_as_good else best


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


def least_full(found: CutProblem, target: Machine, pins: Mapping[int, int]) -> tuple[int, ...]:
    """The stage of each node, in the cut in which the fullest device is least full.

    Raises :class:`PartitionError` if no cut puts all pins into their stages.
    """
    stage = tightest(found.dag, target, pins=pins)
    if stage is None:
        raise _no_room_for_pins(target)
    return stage


def _no_room_for_pins(target: Machine) -> PartitionError:
    return PartitionError(
        "no cut puts all pins into their stages and something into each of the "
        f"{target.stages}: give fewer pins, or other ones"
    )


def shortage(found: CutProblem, target: Machine, pins: Mapping[int, int]) -> str:
    """A sentence that says which devices have too little memory, and how many bytes are short, for
    the cut in which the fullest device is least full.

    Raises :class:`PartitionError` if no cut puts all pins into their stages.
    """
    assert target.memory is not None
    need = prices(found.dag, target, least_full(found, target, pins)).memory
    short = [
        too_little(f"device {s}", n, m)
        for s, (n, m) in enumerate(zip(need, target.memory, strict=True))
        if n > m
    ]
    return "the model does not fit into the devices' memory; cut for memory alone, " + (
        "; ".join(short) or "it might, but no such cut has been found"
    )
