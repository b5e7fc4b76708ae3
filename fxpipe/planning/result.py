"""The result of planning: what a plan says of each stage, and of the whole step."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table

from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.text import human_bytes, human_time, optimality
from fxpipe.schedule import (
    Schedule,
    Timeline,
)
from passes.common.skips import SkipLayout

ROUNDING = 1e-9  # bytes are sums of fractions


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and what it is expected to take for one mini-batch.

    ``lane`` says on which of the devices it is; ``seconds`` are those of computing, and what of its
    links computing cannot hide; ``state_bytes`` are parameters, gradients, optimizer states and
    buffers, and what other stages share with this one; ``activation_bytes`` what is kept for the
    backward of all micro-batches under way.
    """

    index: int
    lane: int
    device: DeviceSpec
    nodes: tuple[str, ...]
    compute_s: float
    link_s: float
    seconds: float
    state_bytes: int
    activation_bytes: int

    @property
    def memory(self) -> int:
        """How many bytes of its device the stage takes: state and activations."""
        return self.state_bytes + self.activation_bytes


@dataclass(frozen=True)
class Plan:
    """The prediction for one mini-batch. ``str`` of it is a table.

    Args:
        devices: one for each lane.
        stages: what each stage does, and where.
        layout: which values travel; bytes are a mini-batch's, one way.
        schedule: the order of a training step; its ``microbatches`` are the chunks.
        timeline: that step, as the simulator plays it.
        gap: the slowest stage is at most this fraction slower than that of any cut that fits.
    """

    devices: tuple[DeviceSpec, ...]
    stages: tuple[PlannedStage, ...]
    layout: SkipLayout
    schedule: Schedule
    timeline: Timeline
    checkpoint: str
    gap: float

    @property
    def chunks(self) -> int:
        """Micro-batches."""
        return self.schedule.microbatches

    @property
    def seconds(self) -> float:
        """How many seconds a training step takes, forward and backward, in the simulator."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The idle part of all devices' time."""
        return self.timeline.bubble

    @property
    def memory(self) -> tuple[float, ...]:
        """The most bytes that each device holds at once."""
        return self.timeline.peak_memory

    @property
    def headroom(self) -> tuple[float, ...]:
        """Bytes of each device that are left."""
        limits = (float("inf") if d.memory is None else d.memory for d in self.devices)
        return tuple(limit - held for limit, held in zip(limits, self.memory, strict=True))

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """Bytes from stage to stage, one way."""
        found: dict[tuple[int, int], int] = {}
        for hop in self.layout.hops:
            if hop.source is not None:
                ends = hop.source, hop.target
                found[ends] = found.get(ends, 0) + hop.bytes
        return dict(sorted(found.items()))

    @property
    def partition(self) -> dict[str, int]:
        """The stage of each node: what ``compile(partition=...)`` takes, to cut so."""
        return {name: stage.index for stage in self.stages for name in stage.nodes}

    @property
    def fits(self) -> bool:
        """Whether every device has the memory that it needs."""
        return all(
            device.memory is None or held <= device.memory * (1 + ROUNDING)
            for device, held in zip(self.devices, self.memory, strict=True)
        )

    def __rich__(self) -> Group:
        table = Table(title="plan", title_justify="left")
        for column in ("stage", "device", "first node"):
            table.add_column(column)
        for column in ("time", "links", "state", "activations", "memory left"):
            table.add_column(column, justify="right")
        has_several = len(self.stages) > len(self.devices)
        for stage in self.stages:
            left = self.headroom[stage.lane]
            table.add_row(
                str(stage.index),
                f"{stage.lane} {stage.device.name}" if has_several else stage.device.name,
                stage.nodes[0],
                human_time(stage.seconds),
                human_time(stage.link_s),
                human_bytes(stage.state_bytes),
                human_bytes(stage.activation_bytes),
                "" if left == float("inf") else _signed_bytes(left),
            )
        return Group(table, *self._lines())

    def _lines(self) -> list[str]:
        lines = [
            f"a step of {self.chunks} micro-batches takes {human_time(self.seconds)} "
            f"({self.schedule.name}), of which {self.bubble:.0%} bubble",
            optimality(self.gap),
            "links: "
            + (
                ", ".join(f"{a} -> {b} {human_bytes(n)}" for (a, b), n in self.links.items())
                or "nothing travels"
            ),
        ]
        if self.checkpoint != "never":
            lines.append(f"checkpoint: {self.checkpoint}")
        return lines

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        console.print(self, soft_wrap=True, highlight=False)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text


def _signed_bytes(count: float) -> str:
    return ("-" if count < 0 else "") + human_bytes(abs(round(count)))
