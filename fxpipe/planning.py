"""Plan: what a pipeline would be like, without any of its devices."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from torch import fx, nn

import passes as default
from fxpipe.batch import input_dims
from fxpipe.devices import DeviceSpec
from fxpipe.graph import COST, GAP, STAGE
from fxpipe.inspect.report import bubble
from fxpipe.inspect.text import human_bytes, human_time
from fxpipe.trace import CustomTracer, Traced, TraceError, canonical, trace, untouched
from passes.cost import ADAM
from passes.costs import Costs, cost_pass
from passes.cut.bounds import gap, lower_bound
from passes.cut.dag import Machine, Prices, prices
from passes.partition import Spec
from passes.problem import Problem, machine, problem, recomputed
from passes.skips import SkipLayout, skip_layout


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and what it is expected to take for one mini-batch.

    ``seconds`` are those of computing, and of what its links cannot hide; ``state_bytes`` are
    parameters, gradients, optimizer and buffers; ``activation_bytes`` what is kept for the backward
    of all micro-batches that are under way.
    """

    index: int
    device: DeviceSpec
    nodes: tuple[str, ...]
    compute_s: float
    link_s: float
    seconds: float
    state_bytes: int
    activation_bytes: int

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return self.state_bytes + self.activation_bytes

    @property
    def headroom(self) -> float:
        """Bytes of the device that are left."""
        return float("inf") if self.device.memory is None else self.device.memory - self.memory


@dataclass(frozen=True)
class Plan:
    """The prediction for one mini-batch. ``str`` of it is a table.

    Args:
        stages: what each device does.
        layout: which values travel; bytes are a mini-batch's, one way.
        chunks: micro-batches.
        gap: the slowest stage is at most this fraction slower than that of any cut that fits.
    """

    stages: tuple[PlannedStage, ...]
    layout: SkipLayout
    chunks: int
    checkpoint: str
    gap: float

    @property
    def seconds(self) -> float:
        """Of a training step, forward and backward: (chunks + stages - 1) rounds, if all stages
        take the same."""
        times = [stage.seconds for stage in self.stages]
        return (sum(times) + (self.chunks - 1) * max(times)) / self.chunks

    @property
    def bubble(self) -> float:
        """The idle part of all devices' time."""
        return bubble([stage.seconds for stage in self.stages], self.chunks)

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
        return all(stage.headroom >= 0 for stage in self.stages)

    def __rich__(self) -> Group:
        table = Table(title="plan", title_justify="left")
        for column in ("stage", "device", "first node"):
            table.add_column(column)
        for column in ("time", "links", "state", "activations", "memory left"):
            table.add_column(column, justify="right")
        for stage in self.stages:
            left = stage.headroom
            table.add_row(
                str(stage.index),
                stage.device.name,
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
            f"a step of {self.chunks} micro-batches takes {human_time(self.seconds)}, of which "
            f"{self.bubble:.0%} bubble; the slowest stage is at most {self.gap:.1%} from optimal",
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


def plan(
    model: nn.Module,
    devices: Sequence[DeviceSpec | str],
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    chunks: int | None = None,
    partition: Spec = "auto",
    checkpoint: str = "never",
    costs: Costs = "analytic",
    optimizer_states: float = ADAM,
    in_dims: Any = None,
    tracer: str | CustomTracer = "auto",
) -> Plan:
    """What :func:`fxpipe.compile` would make of a model, without any of the devices.

    Nothing is computed: the model and its inputs may be on "meta", and take no memory then.

    Args:
        devices: descriptions, or names of known ones ("h100"), one for each stage.
        costs: "analytic": by the descriptions; "measured": on the device that the model is on,
            which stands for ``devices[0]``; a :class:`Profile` or the path of a saved one; or
            seconds by name of node or module.
        optimizer_states: tensors that the optimizer keeps for each parameter: 2 for Adam.

    The others are those of :func:`fxpipe.compile`.

    Raises:
        DoesNotFit: if no cut fits the devices' memory, saying how much is short, and what helps.
        PartitionError, TraceError, BatchError: as :func:`fxpipe.compile`.
    """
    specs = _specs(devices)
    args, kwargs = canonical(model, example_inputs, example_kwargs or {})
    dims = input_dims(model, args, kwargs, in_dims)
    gm, values = sketch(model, args, kwargs, dims, tracer)
    count = _chunks(chunks, len(specs), values, dims)
    # Every micro-batch launches every operator.
    specs_of_all = tuple(replace(s, launch_s=s.launch_s * count) for s in specs)
    with untouched(model):
        spec = specs_of_all[0]
        gm = cost_pass(costs, tuple(values), spec=spec, optimizer_states=optimizer_states)(gm)
        gm = default.Random()(default.Shared()(gm))
    cut = default.Partition(len(specs), partition, specs_of_all, count, checkpoint)
    gm = cut(gm)
    again = recomputed(checkpoint, count)
    found = problem(gm.graph, devices=specs_of_all, recomputed=again)
    target = machine(specs_of_all, chunks=count, checkpoint=checkpoint)
    return _plan(gm, found, target, specs, count, checkpoint)


def _plan(
    gm: fx.GraphModule,
    found: Problem,
    target: Machine,
    specs: Sequence[DeviceSpec],
    chunks: int,
    checkpoint: str,
) -> Plan:
    stage = [node.meta[STAGE] for node in found.work]
    priced = prices(found.whole, target, stage)
    fixed = [0] * len(specs)
    for node, s in zip(found.work, stage, strict=True):
        fixed[s] += node.meta[COST].fixed_bytes
    return Plan(
        tuple(_stage(i, spec, found, stage, priced, fixed[i]) for i, spec in enumerate(specs)),
        skip_layout(default.Split()(gm)),
        chunks,
        checkpoint,
        gm.meta.get(GAP, gap(priced.slowest, lower_bound(found.dag, target))),
    )


def _stage(
    index: int,
    spec: DeviceSpec,
    found: Problem,
    stage: Sequence[int],
    priced: Prices,
    fixed: int,
) -> PlannedStage:
    return PlannedStage(
        index,
        spec,
        tuple(node.name for node, s in zip(found.work, stage, strict=True) if s == index),
        float(priced.compute[index]),
        float(priced.link[index]),
        float(priced.times[index]),
        fixed,
        round(float(priced.memory[index])) - fixed,
    )


def _specs(devices: Sequence[DeviceSpec | str]) -> tuple[DeviceSpec, ...]:
    if isinstance(devices, str | DeviceSpec) or not devices:
        raise ValueError(
            f"devices is {devices!r}: give a list of DeviceSpec, or of names of known devices, "
            'one for each stage, such as ["h100"] * 4'
        )
    return tuple(d if isinstance(d, DeviceSpec) else DeviceSpec.of(d) for d in devices)


def sketch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: list[int | None],
    tracer: str | CustomTracer,
) -> tuple[fx.GraphModule, list[Any]]:
    """The model graph with fake values, and the inputs; nothing of the model is run or compared."""
    tracers = ["symbolic", "export"] if tracer == "auto" else [tracer]
    for one in tracers:
        try:
            traced: Traced = trace(model, args, kwargs, tracer=one, batch_dims=dims, check=False)
            values = traced.bind(args, kwargs)
            with untouched(model):
                return default.Alias(tuple(values))(traced.graph_module), values
        except Exception:
            if one == tracers[-1]:
                raise
    raise TraceError("no tracer")  # for mypy: the loop returns or raises


def _chunks(
    chunks: int | None, stages: int, values: Sequence[Any], dims: Sequence[int | None]
) -> int:
    batch = next((v.shape[d] for v, d in zip(values, dims, strict=True) if d is not None), None)
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise ValueError(f"chunks is {chunks!r}: give the number of micro-batches, 1 or more")
    wanted = chunks or (4 * stages if stages > 1 else 1)
    return max(1, min(wanted, 1 if batch is None else batch))
