"""Partition: the pass gives every node of the model graph the number of its stage, as the user
says or so that the stages are balanced.

::

    a ─ b ─ c ─ d ─ e ─ f          partition=["e"], {"a": 0, "e": 1}, or "auto"
    0   0   0   0   1   1

A user says it by the names of modules and nodes (``passes/partition/by_name.py``). The automatic
cut is in :mod:`passes.partition.automatic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.graph import GAP, STAGE, stage_nodes
from fxpipe.schedule import Schedule
from passes.common.modes import Modes, milder
from passes.common.segments import Segments
from passes.partition.automatic import Auto, DoesNotFit, automatic, least_full, posed, shortage
from passes.partition.by_name import labels_of_mapping, labels_of_starts
from passes.partition.cut.dag import Machine
from passes.partition.cut.solve import Cut, Effort, can_fit
from passes.partition.problem import Beside, CutProblem, PartitionError, machine
from passes.partition.shift import Shift
from passes.partition.ways import Change, ways_out

__all__ = ["Partition", "PartitionError", "Spec"]

Spec = str | Auto | Sequence[str] | Mapping[str, int] | Callable[[fx.GraphModule], Any]
"""How a user says the cut: "auto" or an :class:`Auto`, a list of names that begin stages, a dict
from names to stages, or a function of the model graph that returns one of these."""


def within(spec: Spec, boundaries: Sequence[str] | None) -> Spec:
    """The cut that a user asks for, with these boundaries for an automatic one.

    Raises :class:`PartitionError` if the cut is not automatic, or has boundaries already.
    """
    if boundaries is None:
        return spec
    auto = Auto() if isinstance(spec, str) and spec == "auto" else spec
    if not isinstance(auto, Auto) or auto.boundaries is not None:
        raise PartitionError(
            "boundaries says where an automatic cut may be, and partition says where it is: give "
            'boundaries with partition="auto", or with an Auto that has none'
        )
    return replace(auto, boundaries=boundaries)


@dataclass(frozen=True)
class Partition:
    """Model graph (with costs, if cut automatically) → the same, with ``meta["stage"]``.

    After an automatic cut by time, ``meta["gap"]`` of the graph module says by which fraction its
    slowest stage is slower than the best possible, at most.

    Args:
        stages: the number of stages.
        spec: how the model is cut, as for ``partition`` of :func:`fxpipe.compile`.
        devices: the description of each stage's device, if the devices differ or have limits of
            memory.
        chunks, checkpoint: as for :func:`fxpipe.compile`.
        order: gives, for a number of stages, the schedule of the training step. It decides how many
            micro-batches are under way at the same time, and so what fits into memory. None: all of
            them may be.
        placement: the number of each stage's device, if one device has several stages.
        segments: as ``checkpoint_segments`` of :func:`fxpipe.compile`.
        explains: whether the error for a model that does not fit says how much memory is missing
            and what would help; to find that takes further cuts.
        effort: limits the search for an automatic cut.
        beside: for each way in which stages may keep what their backward needs, the bytes that each
            stage needs beside. Empty: none.
        limit: seconds that the slowest stage of an automatic cut may take for a mini-batch.
        is_tightest: whether an automatic cut is the one whose fullest device is least full, however
            slow it is, and whether it fits or not.
        shift: an automatic cut is what this makes of another one, whether it fits or not.
        loss: gives, for the graph, the seconds that the loss of a mini-batch and its backward take
            in the last stage. None: no time.
        exposed: the part of the time of recomputing that an automatic cut counts: the rest passes
            while a device would wait for others.

    Raises :class:`PartitionError` if there are fewer places to cut than needed, a name is unknown,
    the asked-for stages need each other in a circle, or the devices have too little memory.
    """

    name: ClassVar[str] = "partition"
    stages: int
    spec: Spec = "auto"
    devices: tuple[DeviceSpec, ...] | None = None
    chunks: int = 1
    checkpoint: Modes = "never"
    order: Callable[[int], Schedule | None] | None = None
    placement: tuple[int, ...] | None = None
    explains: bool = True
    segments: Segments = 1
    effort: Effort | None = None
    beside: Beside = ()
    limit: float = math.inf
    is_tightest: bool = False
    shift: Shift | None = None
    loss: Callable[[fx.Graph], float] | None = None
    exposed: float = 1.0

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm.meta.pop(GAP, None)
        if next(stage_nodes(gm.graph), None) is None:
            raise PartitionError(
                f"{self.stages} stages asked for, but the model computes nothing: it returns its "
                "inputs, or constants, as they are"
            )
        is_function = callable(self.spec) and not isinstance(self.spec, type)
        spec = self.spec(gm) if is_function else self.spec  # type: ignore[operator]
        if isinstance(spec, str) and spec == "auto":
            spec = Auto()
        if isinstance(spec, Auto):
            labels = self._automatic(gm, spec)
        elif isinstance(spec, Mapping):
            labels = labels_of_mapping(gm.graph, spec, self.stages)
        elif isinstance(spec, Sequence) and not isinstance(spec, str):
            labels = labels_of_starts(gm.graph, list(spec), self.stages)
        else:
            said = "partition is" if spec is self.spec else "the function partition has returned"
            raise PartitionError(
                f'{said} {spec!r}: give "auto", an Auto, a list of names that begin stages, a dict '
                "from names to stages, or a function of the model graph that returns one of these"
            )
        for node, stage in labels.items():
            node.meta[STAGE] = stage
        return gm

    def _automatic(self, gm: fx.GraphModule, spec: Auto) -> dict[fx.Node, int]:
        if self.devices is None and spec.specs is not None:
            if len(spec.specs) != self.stages:
                raise PartitionError(
                    f"{len(spec.specs)} devices are described, but there are {self.stages} "
                    "stages: describe one for each"
                )
            return replace(self, devices=spec.specs)._automatic(gm, spec)
        if self.is_tightest:
            found, target, pins = posed(gm.graph, self._machine(gm.graph), spec, self.devices)
            return found.labels(least_full(found, target, pins))
        if self.shift:
            found, target, pins = posed(gm.graph, self._machine(gm.graph), spec, self.devices)
            return found.labels(self.shift.apply(found, target, pins))
        try:
            found, cut = self.solved(gm.graph, spec)
        except DoesNotFit as error:
            if not self.explains:
                raise
            short = self.shortage(gm.graph, spec)
            raise DoesNotFit(f"{short}; {self._ways_out(gm.graph, spec)}") from error
        if spec.objective == "time":
            gm.meta[GAP] = cut.gap
        return found.labels(cut.stage)

    def solved(self, graph: fx.Graph, spec: Auto) -> tuple[CutProblem, Cut]:
        """The automatic cut of a model graph with costs."""
        return automatic(graph, self._machine(graph), spec, self.devices, self.effort, self.limit)

    def _machine(self, graph: fx.Graph) -> Machine:
        return machine(
            self.devices or self.stages,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            order=self.order and self.order(self.stages),
            placement=self.placement,
            segments=self.segments,
            beside=self.beside,
            loss=self.loss(graph) if self.loss else 0.0,
            exposed=self.exposed,
        )

    def can_fit(self, graph: fx.Graph, spec: Auto) -> bool:
        """Whether some cut fits into memory; to say so takes less time than the fastest cut."""
        try:
            found, target, pins = posed(graph, self._machine(graph), spec, self.devices)
        except PartitionError:  # the model has fewer nodes than stages
            return False
        return can_fit(found.dag, target, pins, self.effort)

    def shortage(self, graph: fx.Graph, spec: Auto) -> str:
        """A sentence that says how much memory is missing on which device, as
        :func:`passes.partition.automatic.shortage` writes it."""
        return shortage(*posed(graph, self._machine(graph), spec, self.devices))

    def _ways_out(self, graph: fx.Graph, spec: Auto) -> str:
        """A sentence that says which other options, or how many devices, would make the model
        fit."""
        assert self.devices is not None
        devices = self.devices

        def fits(change: Change) -> bool:
            count = change.devices or len(devices)
            wider = (*devices, *devices[-1:] * (count - len(devices)))
            other = replace(
                self,
                stages=count,
                devices=wider,
                placement=self.placement if change.devices is None else None,
                **change.settings,
            )
            return other.can_fit(graph, spec)

        return ways_out(fits, {"checkpoint": milder(self.checkpoint)}, len(devices))
