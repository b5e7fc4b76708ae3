"""The options of :func:`fxpipe.compile`. They are checked when they are given, so that mistakes are
refused at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.optim.optimizer import Optimizer

from fxpipe.compiler.loss import LossFunction, LossWeightFunction
from fxpipe.compiler.pickled import check_pickled
from fxpipe.compiler.written import COMPILE, WrittenCall
from fxpipe.ir.cost import Cost
from fxpipe.ir.devices import DeviceSpec, spec_of
from fxpipe.ir.given import CalledByName, CalledWithTarget, check_call
from fxpipe.ir.text import kind
from fxpipe.loss_weight import IGNORED, observed, tokens
from fxpipe.meaning.loss import ROWS
from fxpipe.planning.estimates import equal_parts, estimated_costs
from fxpipe.planning.inference import check_training
from fxpipe.planning.limits import Memory, limits_of
from fxpipe.planning.loss import without_values
from fxpipe.planning.optimizer import optimizer_states, optimizer_update
from fxpipe.planning.search import Choice, are_given, leaves_stages_open, number_given
from fxpipe.runtime.compiled.stage import StageBackend
from fxpipe.runtime.microbatch import SUM, rows_of_each
from fxpipe.schedule import (
    AUTO,
    Schedule,
    forwards,
    microbatches_of,
    named,
    placement_of,
    schedule_of,
)
from fxpipe.trace import CustomTracer
from fxpipe.trace.outer import THREAD_LOCAL, thread_local_read_by
from passes import Chain, Checkpoint, Pass
from passes.chain import chain_of
from passes.common import modes
from passes.common.modes import Modes, of_stages
from passes.common.segments import Segments, counts
from passes.cost.analytic import ADAM, ADAMS_UPDATE
from passes.cost.choice import Costs
from passes.cost.update import Update
from passes.partition.automatic import Auto
from passes.partition.partition import Spec

RunPass = Callable[[Pass, fx.GraphModule], fx.GraphModule]
Observer = Callable[[str, fx.GraphModule], RunPass]
"""``observer(title, graph)`` is called when a chain of passes begins; it returns the function that
runs each pass of the chain."""


@dataclass(frozen=True)
class Options:
    """The options of :func:`fxpipe.compile`, with one device for each stage."""

    devices: tuple[torch.device, ...]  # of each stage
    placement: tuple[int, ...]  # the number of each stage's lane
    schedule: str | Schedule
    loss_fn: LossFunction | None
    chunks: int | None
    partition: Spec
    checkpoint: Modes
    checkpoint_segments: Segments
    deferred_batch_norm: bool
    in_dims: Any
    out_dims: Any
    tracer: str | CustomTracer
    passes: Chain
    costs: Costs = "analytic"
    loss_weight: str | LossWeightFunction | None = None
    check: bool | str = True
    observer: Observer | None = None
    stage_backend: StageBackend | None = None
    dynamic: bool | None = None
    verbose: bool = False
    cache: str | os.PathLike[str] | None = None
    memory: tuple[float | None, ...] | None = None  # of each lane; None: what a device has
    optimizer_states: float = ADAM
    optimizer_update: Update = ADAMS_UPDATE
    optimizer: str = ""  # whose states these are, in words; "" if nothing is trained
    example_target: Any = None  # with its tensors on "meta"
    call: WrittenCall = COMPILE
    """The call that has given the options, as text."""
    training: bool = True
    searches_chunks: bool = False  # whether the number of micro-batches is chosen by prediction
    gives_stages: bool = False  # whether the user says how many stages there are
    choice: Choice | str | None = None
    """What has been chosen by prediction; or why nothing can be predicted; None: nothing yet."""

    @staticmethod
    def of(
        devices: Sequence[str | torch.device] | None,
        schedule: str | Schedule,
        stages: int | None,
        *,
        chunks: int | str | None,
        costs: Costs,
        can_measure: bool,
        memory: Memory = None,
        optimizer: str | float | Optimizer | None = None,
        example_target: Any = None,
        training: bool = True,
        **others: Any,
    ) -> Options:
        """Make the options from what has been given to :func:`fxpipe.compile`.

        ``can_measure`` says whether there are example inputs, with which costs can be measured.
        """
        lanes = _devices(devices)
        is_open = chunks == AUTO or (chunks is None and schedule == AUTO)
        number = number_given(chunks)
        check_training(
            training,
            schedule=schedule,
            checkpoint=others["checkpoint"],
            partition=others["partition"],
            optimizer=optimizer,
            loss_fn=others["loss_fn"],
        )
        if not training:
            others["checkpoint"] = "never"
        placement = placement_of(schedule, len(lanes), stages)
        if isinstance(costs, str) and costs == "auto":
            costs = "measured" if can_measure and lanes[0].type != "cpu" else "analytic"
        return Options(
            devices=tuple(lanes[lane] for lane in placement),
            placement=placement,
            schedule=schedule,
            chunks=number,
            searches_chunks=is_open and not isinstance(schedule, Schedule),
            gives_stages=stages is not None,
            costs=costs,
            memory=None if memory is None else limits_of(memory, len(lanes)),
            optimizer_states=optimizer_states(optimizer, ADAM),
            optimizer_update=optimizer_update(optimizer),
            optimizer=_named(optimizer) if training else "",
            example_target=without_values(example_target),
            training=training,
            **others,
        )

    def __getstate__(self) -> dict[str, Any]:
        check_pickled(self.__dict__)
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        # By itself a copy would ask for the state of a pickle, which cannot hold every function.
        return replace(self, **copy.deepcopy(self.__dict__, memo))

    def __post_init__(self) -> None:
        self._check_fit()
        Checkpoint(self.checkpoint, self.checkpoint_segments)  # raises for wrong values
        if self.checkpoint != modes.AUTO:
            of_stages(self.checkpoint, len(self.devices))  # raises for another number of stages
        if self.stage_backend is not None and modes.SELECTIVE in modes.listed(self.checkpoint):
            raise ValueError(
                'checkpoint="selective" keeps what single operators give, and stage_backend makes '
                'one piece of code of all of a stage: give "always", "except_last", "offload" or '
                '"auto", or no stage_backend'
            )
        if isinstance(self.checkpoint_segments, tuple):
            counts(self.checkpoint_segments, "always", len(self.devices))  # the same
        if isinstance(self.loss_fn, type):
            name = self.loss_fn.__name__
            raise TypeError(f"loss_fn is the class {name}: give an instance, {name}()")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(
                f"loss_fn is {kind(self.loss_fn)}: give a function of the output and the target "
                "that returns a scalar tensor"
            )
        if self.loss_fn is not None:
            check_call("loss_fn", self.loss_fn, "output", "target")
            if place := thread_local_read_by(self.loss_fn):
                raise ValueError(f"loss_fn reads {place}, {THREAD_LOCAL}")
        if self.example_target is not None and self.loss_fn is None:
            raise ValueError(
                "example_target is given, but no loss_fn: it says what loss_fn will be called with"
            )
        if self.cache is not None and not isinstance(self.cache, str | os.PathLike):
            raise TypeError(f"cache is {self.cache!r}: give the path of a folder")
        if self.loss_weight is tokens or self.loss_weight is observed:
            name = self.loss_weight.__name__
            given = f"ignore_index={IGNORED}" if self.loss_weight is tokens else ""
            raise TypeError(
                f"loss_weight is fxpipe.loss_weight.{name}, which makes a function that counts: "
                f"call it, as in loss_weight=fxpipe.loss_weight.{name}({given})"
            )
        named = isinstance(self.loss_weight, str) and self.loss_weight in (ROWS, SUM)
        if self.loss_weight is not None and not named and not callable(self.loss_weight):
            raise TypeError(
                f"loss_weight is {self.loss_weight!r}: give a function of the target (of the "
                "model's arguments, by their names, if it returns its loss) that returns a number "
                f"for each micro-batch; or {ROWS!r}, if the loss is a mean over the rows; or "
                f"{SUM!r}, if it is a sum"
            )
        if callable(self.loss_weight) and self.loss_fn is not None:
            check_call("loss_weight", self.loss_weight, "target")
        if callable(self.partition) and not isinstance(self.partition, type):
            check_call("partition", self.partition, "model graph")
        if self.check not in (True, False, "warn"):
            raise ValueError(
                f"check is {self.check!r}: give True, to refuse a pipeline that computes something "
                'else than the model; "warn", to be warned of it; or False, to accept it'
            )
        if self.dynamic not in (True, False, None):
            raise ValueError(
                f"dynamic is {self.dynamic!r}: give True, for programs that take inputs of other "
                "lengths, heights and widths; False, for one program for each shape; or None, for "
                "programs that take others from the second shape on"
            )
        chain_of(self.passes)  # raises for a chain that is none

    def _check_fit(self) -> None:
        """Raise ValueError if the schedule cannot be made for this number of micro-batches or
        stages."""
        chunks = self._chunks
        if isinstance(self.schedule, str) and self.schedule != AUTO and self.chunks is not None:
            stages, lanes = len(self.devices), len(self.lanes)
            named(self.schedule, lanes=lanes, stages=stages, microbatches=chunks)

    @property
    def weighs(self) -> str | LossWeightFunction | None:
        """``loss_weight`` as it is called: with the target, or, of a model that returns its loss,
        with the model's arguments by their names."""
        if not callable(self.loss_weight):
            return self.loss_weight
        called = CalledByName if self.loss_fn is None else CalledWithTarget
        return called("loss_weight", self.loss_weight)

    @property
    def is_open(self) -> bool:
        """Whether the schedule or the number of micro-batches is still to be chosen."""
        return self.choice is None and (self.schedule == AUTO or self.searches_chunks)

    @property
    def leaves_stages_open(self) -> bool:
        """Whether a schedule may have as many stages as it takes: nothing that the user gives is
        for one number of stages."""
        stages = len(self.devices) if self.gives_stages else None
        segments = self.checkpoint_segments
        return leaves_stages_open(self.partition, self.checkpoint, segments, stages)

    @property
    def is_cut_automatic(self) -> bool:
        """Whether the user leaves the cut to a search."""
        spec = self.partition
        return isinstance(spec, Auto) or (isinstance(spec, str) and spec == "auto")

    @property
    def knows_other_sizes(self) -> bool:
        """Whether it is known how long micro-batches of other sizes take, as by estimates. Times
        that were measured, or are given, are for one size, and do not say which part of them does
        not depend on it."""
        return self.costs == "analytic"

    @property
    def has_given_costs(self) -> bool:
        """Whether the user gives the costs, in a dict, a profile or its path."""
        return are_given(self.costs)

    def decided(self, choice: Choice | str) -> Options:
        """The options after something has been chosen, or after it has been found that nothing can
        be."""
        if isinstance(choice, str):
            return replace(self, choice=choice)
        lanes = self.lanes
        placement = placement_of(choice.schedule, len(lanes), choice.stages)
        return replace(
            self,
            devices=tuple(lanes[lane] for lane in placement),
            placement=placement,
            schedule=choice.schedule,
            chunks=self._wanted(choice),
            choice=choice,
        )

    def _wanted(self, choice: Choice) -> int:
        """The number of micro-batches from now on. Where each row is a micro-batch of its own, a
        larger mini-batch may have more, up to the usual number."""
        if isinstance(choice.schedule, Schedule):
            return choice.chunks
        if self.searches_chunks and choice.chunks == (choice.rows or 1):
            return max(choice.chunks, microbatches_of(choice.schedule, None, choice.stages))
        return self.chunks or choice.chunks

    @property
    def names(self) -> tuple[str, ...]:
        """The devices, as text."""
        return tuple(map(str, self.devices))

    @property
    def lanes(self) -> tuple[torch.device, ...]:
        """The device of each lane."""
        return tuple(self.devices[self.placement.index(i)] for i in range(1 + max(self.placement)))

    @property
    def specs(self) -> tuple[DeviceSpec, ...]:
        """The description of each lane's device, without a limit of memory."""
        is_eager = self.stage_backend is None
        return tuple(replace(spec_of(lane), is_eager=is_eager) for lane in self.lanes)

    def schedule_for(
        self, chunks: int, costs: Sequence[Cost], checkpoint: Modes, segments: Segments
    ) -> Schedule:
        """The schedule of a training step with ``chunks`` micro-batches. ``costs`` has each stage's
        cost for a mini-batch, ``checkpoint`` says which micro-batches stages keep, and ``segments``
        in how many segments they recompute the others. If nothing is trained, it has the forwards
        of a call."""
        if not self.training:
            return forwards(self.placement, chunks)
        return schedule_of(
            self.schedule,
            self.placement,
            chunks,
            lambda: estimated_costs(
                costs, chunks, checkpoint, equal_parts(segments, checkpoint, len(costs))
            ),
            whole=self._chunks,
        )

    @property
    def chooses_chunks(self) -> bool:
        """Whether the compiler chooses the number of micro-batches, as neither ``chunks`` nor a
        :class:`~fxpipe.schedule.Schedule` has been given."""
        is_named = self.chunks is None and not isinstance(self.schedule, Schedule)
        return is_named or self.searches_chunks

    @property
    def _chunks(self) -> int:
        """The number of micro-batches of a mini-batch that has at least so many rows."""
        return microbatches_of(self.schedule, self.chunks, len(self.devices))

    def chunks_for(self, batch: int | None, refused: Set[int] = frozenset()) -> int:
        """The number of micro-batches of a mini-batch of ``batch`` rows: the wanted number, or the
        largest one below it with which no micro-batch is empty or of a size in ``refused``, which
        the model does not take."""
        most = min(self._chunks, 1 if batch is None else batch)
        return next(
            (n for n in range(most, 1, -1) if not refused & {*rows_of_each(batch or 0, n)}), 1
        )

    def sizes(self, batch: int, refused: Set[int] = frozenset()) -> tuple[int, ...]:
        """The number of rows of each micro-batch of a mini-batch of ``batch`` rows, none of which
        is among the ``refused`` ones, as far as that is possible."""
        return tuple(rows_of_each(batch, self.chunks_for(batch, refused)))

    def even_chunks_for(self, batch: int) -> list[int]:
        """The numbers of micro-batches, from the wanted one down to 1, that divide ``batch`` rows
        evenly."""
        return [n for n in range(self.chunks_for(batch), 0, -1) if batch % n == 0]


def _named(optimizer: str | float | Optimizer | None) -> str:
    """What the report calls an optimizer."""
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__
    if optimizer is None:
        return "Adam (give optimizer= for another one)"
    if isinstance(optimizer, str):
        return optimizer
    return f"an optimizer that keeps {optimizer:g} tensors for each parameter"


def _devices(devices: Sequence[str | torch.device] | None) -> tuple[torch.device, ...]:
    if devices is None:
        count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        kind = torch.accelerator.current_accelerator()
        if count and kind is not None:
            return tuple(torch.device(kind.type, i) for i in range(count))
        return (torch.device("cpu"),) * 2
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        is_cpu = str(devices).partition(":")[0] == "cpu"
        raise ValueError(
            f"devices is {devices!r}: give a list with one device for each lane, such as "
            + ('["cpu", "cpu"]' if is_cpu else '["cuda:0", "cuda:1"]')
        )
    if not devices:
        raise ValueError("devices is empty: give one device for each lane, at least one")
    return tuple(_device(device, i) for i, device in enumerate(devices))


def _device(given: str | torch.device, position: int) -> torch.device:
    try:
        device = torch.device(given)
    except TypeError:
        raise ValueError(
            f"devices[{position}] is {given!r}, which is no device: give a string, such as "
            '"cuda:0", or a torch.device'
        ) from None
    except RuntimeError as error:
        raise ValueError(
            f"devices[{position}] is {given!r}, which is no device: give the kind of a device that "
            'PyTorch knows and its number, such as "cuda:0", or "cpu"'
        ) from error
    if device.type == "meta":
        raise ValueError(
            f"devices[{position}] is meta, where nothing has values: fxpipe.plan says what a "
            "pipeline would do on devices that are not there"
        )
    if device.type == "cpu":
        return device
    count = torch.get_device_module(device).device_count()
    if device.index is None and count:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    if (device.index or 0) >= count:
        raise ValueError(
            f"devices[{position}] is {device}, but PyTorch sees {count} devices of that type here; "
            '["cpu", "cpu"] makes two lanes on the CPU'
        )
    return device
