"""The result of planning: what a plan predicts for each stage, and for the whole step."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from fxpipe.ir.devices import DeviceSpec
from fxpipe.ir.text import human_bytes, human_time, optimality, rendered
from fxpipe.schedule import (
    Schedule,
    Timeline,
)
from passes.common.modes import Modes, is_never
from passes.common.segments import Segments, in_words
from passes.common.skips import SkipLayout

ROUNDING = 1e-9  # sizes within this relative difference are equal: bytes are sums of fractions


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and the time and memory that it is predicted to take for one mini-batch.

    Attributes:
        index: the number of the stage.
        lane: the number of the lane, and of its device, on which the stage is.
        device: the description of the device.
        contains: what is in the stage, in words: the modules, such as "layers.0 to 7".
        nodes: the names of the nodes of the model graph that the stage runs.
        compute_s: the seconds of computing, forward and backward.
        link_s: the seconds that the stage's links are busy with what it sends and receives.
        seconds: the larger of these two, since copies overlap computation.
        state_bytes: the bytes of parameters, gradients, optimizer states and buffers, and of copies
            of parameters that the stage shares with others.
        activation_bytes: the most bytes of saved tensors that are alive at once, for all
            micro-batches whose backward is still to come; without training, of outputs, which are
            kept to the end of the call.
        running_bytes: the bytes that are needed beside those while the step runs: for results,
            gradients and temporary values of the operators that are running, and for values that
            wait to be sent. If a device has several stages, each has an equal part of its bytes.
    """

    index: int
    lane: int
    device: DeviceSpec
    contains: str
    nodes: tuple[str, ...]
    compute_s: float
    link_s: float
    seconds: float
    state_bytes: int
    activation_bytes: int
    running_bytes: int = 0

    @property
    def memory(self) -> int:
        """The bytes that the stage takes on its device, at most."""
        return self.state_bytes + self.activation_bytes + self.running_bytes


@dataclass(frozen=True)
class Plan:
    """The prediction for one mini-batch. ``str`` of it is a table, and lines below it.

    Args:
        devices: the description of each lane's device.
        stages: the stages, in order.
        layout: the values that stages send to each other, with their bytes for a mini-batch, one
            way (without their gradients).
        schedule: the order of a training step; its ``microbatches`` are the chunks.
        timeline: that step, as the simulator predicts it.
        checkpoint: which micro-batches are checkpointed, as :func:`fxpipe.compile` takes it.
        gap: how far the cut can be from optimal: 0.1 says that the slowest stage takes at most 10 %
            longer than the slowest stage of any other cut that fits.
        training: whether a training step is planned; if not, ``schedule`` and ``timeline`` are
            those of a call without a backward.
        checkpoint_segments: in how many segments checkpointed stages are recomputed, as
            :func:`fxpipe.compile` takes it.
    """

    devices: tuple[DeviceSpec, ...]
    stages: tuple[PlannedStage, ...]
    layout: SkipLayout
    schedule: Schedule
    timeline: Timeline
    checkpoint: Modes
    gap: float
    training: bool = True
    checkpoint_segments: Segments = 1

    @property
    def chunks(self) -> int:
        """The number of micro-batches in a mini-batch."""
        return self.schedule.microbatches

    @property
    def seconds(self) -> float:
        """The seconds that a training step, forward and backward, takes in the simulator; without
        training, those of a call."""
        return self.timeline.makespan

    @property
    def bubble(self) -> float:
        """The fraction of all devices' time in which they are idle."""
        return self.timeline.bubble

    @property
    def memory(self) -> tuple[float, ...]:
        """The most bytes that each device holds at any time of the step."""
        return self.timeline.peak_memory

    @property
    def headroom(self) -> tuple[float, ...]:
        """The bytes of each device that stay free: negative where the memory is too small, and
        infinite where the description sets no limit."""
        limits = (float("inf") if d.memory is None else d.memory for d in self.devices)
        return tuple(limit - held for limit, held in zip(limits, self.memory, strict=True))

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """The bytes that one stage sends to another in a mini-batch, without gradients, by pairs
        ``(source, target)``."""
        found: dict[tuple[int, int], int] = {}
        for hop in self.layout.hops:
            if hop.source is not None:
                ends = hop.source, hop.target
                found[ends] = found.get(ends, 0) + hop.bytes
        return dict(sorted(found.items()))

    @property
    def partition(self) -> dict[str, int]:
        """The stage of each node, which ``compile(partition=...)`` takes to cut the model as the
        plan does."""
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
        for column in ("stage", "device"):
            table.add_column(column)
        kept = "activations" if self.training else "outputs"
        for column in ("time", "links", "state", kept, "running", "memory left"):
            table.add_column(column, justify="right")
        has_several = len(self.stages) > len(self.devices)
        for stage in self.stages:
            left = self.headroom[stage.lane]
            table.add_row(
                str(stage.index),
                f"{stage.lane} {stage.device.name}" if has_several else stage.device.name,
                human_time(stage.seconds),
                human_time(stage.link_s),
                human_bytes(stage.state_bytes),
                human_bytes(stage.activation_bytes),
                human_bytes(stage.running_bytes),
                "" if left == float("inf") else _signed_bytes(left),
            )
        return Group(table, *self._lines())

    def _lines(self) -> list[str]:
        lines = [f"stage {stage.index}: {stage.contains}" for stage in self.stages]
        run, work = "step" if self.training else "call", sum(self.timeline.busy)
        lines += [
            f"a {run} of {self.chunks} micro-batches takes {human_time(self.seconds)} "
            f"({self.schedule.name}), bubble {self.bubble:.0%} of all lanes' time; one after the "
            f"other, the stages would take {human_time(work)}"
            + (f", {work / self.seconds:.2f} times as long" if self.seconds else ""),
            optimality(self.gap, is_limited=any(spec.memory is not None for spec in self.devices)),
            "links: "
            + (
                ", ".join(f"{a} -> {b} {human_bytes(n)}" for (a, b), n in self.links.items())
                or "no stage sends anything"
            ),
        ]
        if not is_never(self.checkpoint):
            lines.append(f"checkpoint: {in_words(self.checkpoint, self.checkpoint_segments)}")
        if on_host := round(self.timeline.host_memory):
            lines.append(f"activations that wait in the host's memory: {human_bytes(on_host)}")
        return lines

    def __str__(self) -> str:
        return rendered(self)


def _signed_bytes(count: float) -> str:
    return ("-" if count < 0 else "") + human_bytes(abs(round(count)))
