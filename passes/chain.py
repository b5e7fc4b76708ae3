"""The chain: which passes lead from the traced model to the graphs that run, in which order.

::

    model graph ─ alias ─ ... ─ partition ─ ... ─ split ─ stage graph ─┬─ microbatch ─ ... ─ verify
                                                                       │         pipeline graph
                                                                       └─ step
                                                                             step graph

The order is written here and nowhere else: the compiler, plans, the command line, the tests and the
documentation read it. ``print(fxpipe.default_chain())`` shows it, and users edit it::

    chain = fxpipe.default_chain().before("split", Mine()).after("step", Other()).without("verify")
    fxpipe.compile(model, devices, passes=chain)
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import fx, nn

from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.text import summary
from fxpipe.runtime.compiled_stage import CompiledStages
from fxpipe.runtime.microbatch import Dims
from fxpipe.schedule import Schedule
from passes.cost.all_microbatches import AllMicrobatches
from passes.cost.analytic import ADAM, AnalyticCost
from passes.cost.choice import Costs, cost_pass
from passes.partition.partition import Partition
from passes.to_pipeline.checkpoint import Checkpoint
from passes.to_pipeline.compiled import Compiled
from passes.to_pipeline.copies import Copies
from passes.to_pipeline.dependencies import Dependencies
from passes.to_pipeline.microbatch import Microbatch
from passes.to_pipeline.portals import Portals
from passes.to_pipeline.streams import Streams
from passes.to_pipeline.verify import Verify
from passes.to_stages.alias import Alias
from passes.to_stages.batch_norm import DeferredBatchNorm
from passes.to_stages.devices import Devices
from passes.to_stages.free import Free
from passes.to_stages.inputs import WrittenInputs
from passes.to_stages.random import Random
from passes.to_stages.rows import Rows
from passes.to_stages.shared import Shared
from passes.to_stages.split import Split
from passes.to_stages.tied import Tied
from passes.to_step.defer import Defer
from passes.to_step.step import Step

WIDTH = 100  # of a chain that is printed


class Pass(Protocol):
    """A named function from a graph module to a graph module that computes the same."""

    @property
    def name(self) -> str:
        """The name it is listed under."""

    def __call__(self, gm: fx.GraphModule, /) -> fx.GraphModule:
        """Rewrite. The module given may be changed in place and returned."""


class Level(StrEnum):
    """What kind of graph it is that a pass takes or gives."""

    MODEL = "model"
    STAGE = "stage"
    PIPELINE = "pipeline"
    STEP = "step"


# ---------------------------------------------------------------- what passes are made from


@dataclass(frozen=True)
class ToStages:
    """What is known when a model graph is lowered to a stage graph.

    Args:
        inputs: the model's, one for each placeholder.
        in_dims: the batch dimension of each input; None for one that all micro-batches share.
        devices: the names of the devices, one for each stage.
        partition: the pass that gives each node its stage; None as long as nothing is cut.
        outputs: the pass that finds the batch dimensions of the outputs; None if nobody needs them.
        chunks: how many micro-batches the costs and the rows are for.
        chunks_asked_for: how many micro-batches the user has asked for, if any.
        traced_chunks: None for a graph that takes any batch size. For one that was traced with a
            single micro-batch: how many of these there are in a mini-batch.
        costs, spec, optimizer_states, measured_on: what a node costs, for the pass "cost".
        deferred_batch_norm: whether running statistics are updated once for each mini-batch.
        places: for each stage the process that runs it, if there are several; see pass "tied".
    """

    leads_to: ClassVar[Level] = Level.STAGE
    inputs: tuple[Any, ...]
    in_dims: tuple[int | None, ...]
    devices: tuple[str, ...] = ()
    partition: Pass | None = None
    outputs: Pass | None = None
    chunks: int = 1
    chunks_asked_for: int | None = None
    traced_chunks: int | None = None
    costs: Costs = "analytic"
    spec: DeviceSpec = CPU_CORE
    optimizer_states: float = ADAM
    measured_on: torch.device | None = None
    deferred_batch_norm: bool = False
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class ToPipeline:
    """What is known when a stage graph is unrolled over ``chunks`` micro-batches.

    ``loss_weight``: the module that gives the weight of a micro-batch's loss, if an output has it.
    ``out_dims``: for each node that the stage graph returns, in order, the batch dimension of its
    tensors. ``compiled`` makes compiled stages; None: stages run as they are. The others are those
    of :func:`fxpipe.compile`, and of :class:`ToStages`.
    """

    leads_to: ClassVar[Level] = Level.PIPELINE
    devices: tuple[str, ...]
    chunks: int
    in_dims: tuple[int | None, ...]
    out_dims: tuple[Dims, ...]
    checkpoint: str = "never"
    checkpoint_segments: int = 1
    loss_weight: nn.Module | None = None
    compiled: CompiledStages | None = None


@dataclass(frozen=True)
class ToStep:
    """What is known when a stage graph becomes a training step; see :class:`passes.Step`, and
    :class:`ToPipeline` for ``compiled``."""

    leads_to: ClassVar[Level] = Level.STEP
    loss: nn.Module
    schedule: Schedule
    devices: tuple[str, ...]
    in_dims: tuple[int | None, ...]
    targets: tuple[bool, ...] = ()
    checkpoint: str = "never"
    checkpoint_segments: int = 1
    summed: bool = False
    loss_weight: nn.Module | None = None
    weighs_inputs: bool = False
    compiled: CompiledStages | None = None


Context = ToStages | ToPipeline | ToStep
C = TypeVar("C", ToStages, ToPipeline, ToStep)


# ------------------------------------------------------------------------------------- the list


def _always(context: Any) -> bool:
    """Whether a pass applies to which nothing else is said."""
    return True


@dataclass(frozen=True)
class Entry(Generic[C]):
    """One pass of a chain.

    Args:
        name: what it is called in the chain.
        make: makes the pass, from what is known of the compilation.
        source, target: the level of the graph that it takes, and of the one that it gives.
        about: the class of the pass, whose documentation says what it does; or a sentence.
        needs: the names of passes that have to come before it, as it reads what they note.
        applies: whether it is run; ``when`` says the same for people.
        leads_to: the graph that is being made when it runs: "stage", "pipeline" or "step".
    """

    name: str
    make: Callable[[C], Pass] = field(repr=False)
    source: Level
    target: Level
    about: type | str = field(repr=False)
    needs: tuple[str, ...] = ()
    applies: Callable[[C], bool] = field(default=_always, repr=False)
    when: str = ""
    leads_to: Level = Level.STAGE

    @property
    def summary(self) -> str:
        """What the pass does, in one sentence, and when it runs."""
        if isinstance(self.about, str):
            said = self.about
        elif self.about.__module__.startswith("passes."):
            said = summary(sys.modules[self.about.__module__]).partition(": ")[2]
        else:
            said = summary(self.about)
        said = said[:1].upper() + said[1:]
        return f"{said} Runs only {self.when}." if self.when else said

    @property
    def levels(self) -> str:
        """``model``, or ``model → stage`` for a pass that leads from one level to the next."""
        return self.source if self.source == self.target else f"{self.source} → {self.target}"


def _own_entry(own: Pass | Entry[Any], level: Level, leads_to: Level) -> Entry[Any]:
    """Make the chain's entry for a pass that a user has written."""
    if isinstance(own, Entry):
        return replace(own, leads_to=leads_to)
    if isinstance(own, type) or not callable(own):
        raise TypeError(
            f"{own!r} is no pass: give an object with a name that is called with a graph module "
            "and returns one, or a passes.chain.Entry, which makes it from what is known then"
        )
    name = getattr(own, "name", None) or getattr(own, "__name__", type(own).__name__)
    about = own if hasattr(own, "__name__") else type(own)
    return Entry(str(name), _AsItIs(own), level, level, about=_said_of(about), leads_to=leads_to)


def _said_of(documented: Any) -> type | str:
    return documented if isinstance(documented, type) else summary(documented)


@dataclass(frozen=True)
class _AsItIs:
    """Makes a pass that there is already."""

    given: Pass

    def __call__(self, context: Any) -> Pass:
        return self.given


_OUTPUTS = (
    "The pass finds the batch dimension of each output, along which the outputs of micro-batches "
    "are put together."
)


def _to_stages() -> tuple[Entry[ToStages], ...]:
    model, stage = Level.MODEL, Level.STAGE
    return (
        Entry(
            "batch_norm",
            lambda c: DeferredBatchNorm(),
            *(model, model, DeferredBatchNorm),
            applies=lambda c: c.deferred_batch_norm,
            when="with deferred_batch_norm=True",
        ),
        Entry("alias", lambda c: Alias(c.inputs), model, model, Alias),
        Entry(
            "inputs",
            lambda c: WrittenInputs(c.inputs, c.in_dims, c.chunks_asked_for),
            *(model, model, WrittenInputs),
            needs=("alias",),
        ),
        Entry(
            "rows",
            lambda c: Rows(c.inputs, c.in_dims, c.chunks),
            *(model, model, Rows),
            needs=("alias",),
            applies=lambda c: c.traced_chunks is None,
            when="for graphs that take any batch size",
        ),
        Entry(
            "outputs",
            _outputs,
            *(model, model, _OUTPUTS),
            needs=("alias",),
            applies=lambda c: c.outputs is not None,
            when="where the graph is going to run",
        ),
        Entry("cost", _cost, model, model, AnalyticCost, needs=("alias",)),
        Entry(
            "all_microbatches",
            lambda c: AllMicrobatches(c.traced_chunks or 1),
            *(model, model, AllMicrobatches),
            needs=("cost",),
            applies=lambda c: c.traced_chunks is not None,
            when="for graphs that take one batch size",
        ),
        Entry("shared", lambda c: Shared(), model, model, Shared, needs=("alias",)),
        Entry("random", lambda c: Random(), model, model, Random, needs=("alias",)),
        Entry("partition", _partition, model, model, Partition, needs=("alias", "cost")),
        Entry("free", lambda c: Free(), model, model, Free, needs=("partition",)),
        Entry(
            "tied",
            lambda c: Tied(c.devices, c.places),
            *(model, model, Tied),
            needs=("shared", "partition"),
        ),
        Entry("split", lambda c: Split(), model, stage, Split, needs=("partition",)),
        Entry(
            "devices",
            lambda c: Devices(c.inputs[0].device, tuple(map(torch.device, c.devices))),
            *(stage, stage, Devices),
            needs=("split",),
            applies=lambda c: bool(c.inputs),
        ),
    )


def _outputs(context: ToStages) -> Pass:
    assert context.outputs is not None
    return context.outputs


def _partition(context: ToStages) -> Pass:
    assert context.partition is not None
    return context.partition


def _cost(context: ToStages) -> Pass:
    return cost_pass(
        context.costs,
        context.inputs,
        device=context.measured_on,
        spec=context.spec,
        optimizer_states=context.optimizer_states,
        chunks=context.chunks,
    )


def _to_pipeline() -> tuple[Entry[ToPipeline], ...]:
    stage, pipeline = Level.STAGE, Level.PIPELINE

    def entry(name: str, make: Callable[[ToPipeline], Pass], kind: type) -> Entry[ToPipeline]:
        return Entry(name, make, pipeline, pipeline, kind, ("microbatch",), leads_to=pipeline)

    return (
        Entry(
            "microbatch",
            lambda c: Microbatch(c.chunks, c.in_dims, c.out_dims, c.loss_weight),
            *(stage, pipeline, Microbatch),
            needs=("split", "outputs"),
            leads_to=pipeline,
        ),
        entry("portals", lambda c: Portals(c.devices), Portals),
        entry("copies", lambda c: Copies(c.devices), Copies),
        entry("streams", lambda c: Streams(c.devices), Streams),
        entry("checkpoint", lambda c: Checkpoint(c.checkpoint, c.checkpoint_segments), Checkpoint),
        entry("dependencies", lambda c: Dependencies(), Dependencies),
        entry("verify", lambda c: Verify(), Verify),
        replace(
            entry("compiled", _compiled, Compiled),
            applies=lambda c: c.compiled is not None,
            when="with stage_backend",
        ),
    )


def _compiled(context: ToPipeline | ToStep) -> Pass:
    assert context.compiled is not None
    return Compiled(
        context.compiled, "compiled" if isinstance(context, ToPipeline) else "compiled_step"
    )


def _to_step() -> tuple[Entry[ToStep], ...]:
    return (
        Entry("step", _step, Level.STAGE, Level.STEP, Step, ("split",), leads_to=Level.STEP),
        Entry(
            "compiled_step",
            _compiled,
            *(Level.STEP, Level.STEP, Compiled),
            applies=lambda c: c.compiled is not None,
            when="with stage_backend",
            leads_to=Level.STEP,
        ),
    )


def _step(context: ToStep) -> Pass:
    return Step(
        loss=context.loss,
        schedule=context.schedule,
        devices=context.devices,
        in_dims=context.in_dims,
        targets=context.targets,
        checkpoint=context.checkpoint,
        checkpoint_segments=context.checkpoint_segments,
        summed=context.summed,
        loss_weight=context.loss_weight,
        weighs_inputs=context.weighs_inputs,
        halves=Defer() if context.compiled is None else context.compiled.in_halves,
    )


# ------------------------------------------------------------------------------------ the chain


@dataclass(frozen=True)
class Chain:
    """The passes of a compilation, in order: first those that lead to the stage graph, then those
    from there to the pipeline graph, then those from the stage graph to the step graph.

    A chain does not change: its methods give another one. ``print`` shows it.
    """

    entries: tuple[Entry[Any], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            missing = [name for name in entry.needs if name not in seen]
            if missing:
                raise ValueError(
                    f"the pass {entry.name!r} needs {missing[0]!r} before it: keep "
                    f"{missing[0]!r}, put another pass in its place by "
                    f"replace({missing[0]!r}, ...), or leave {entry.name!r} out first"
                )
            seen.add(entry.name)
        reached = {entry.target for entry in self.entries if entry.source != entry.target}
        for level, name in _LEADING.items():
            if level not in reached:
                raise ValueError(
                    f"no pass leads to the {level} graph: keep {name!r}, or put another pass in "
                    f"its place by replace({name!r}, ...)"
                )

    def before(self, name: str, *passes: Pass | Entry[Any]) -> Chain:
        """The chain with more passes ahead of the one of that name.

        They are given a graph of the level that the named pass takes.

        Raises:
            ValueError: if no pass, or more than one, has the name.
        """
        at = self._place(name)
        named = self.entries[at]
        own = [_own_entry(each, named.source, named.leads_to) for each in passes]
        return Chain((*self.entries[:at], *own, *self.entries[at:]))

    def after(self, name: str, *passes: Pass | Entry[Any]) -> Chain:
        """The chain with more passes behind the one of that name.

        They are given a graph of the level that the named pass gives.

        Raises:
            ValueError: if no pass, or more than one, has the name.
        """
        at = self._place(name)
        named = self.entries[at]
        own = [_own_entry(each, named.target, named.leads_to) for each in passes]
        return Chain((*self.entries[: at + 1], *own, *self.entries[at + 1 :]))

    def without(self, *names: str) -> Chain:
        """The chain without the passes of these names.

        Raises:
            ValueError: if no pass, or more than one, has such a name, or another pass that stays in
                the chain needs it.
        """
        left_out = {self._place(name) for name in names}
        return Chain(tuple(e for i, e in enumerate(self.entries) if i not in left_out))

    def replace(self, name: str, own: Pass | Entry[Any]) -> Chain:
        """The chain with another pass in the place, and under the name, of one.

        It has to take and give graphs of the same levels, and to note what the other notes.

        Raises:
            ValueError: if no pass, or more than one, has the name.
        """
        at = self._place(name)
        old = self.entries[at]
        new = _own_entry(own, old.source, old.leads_to)
        new = replace(new, name=name, source=old.source, target=old.target, needs=old.needs)
        return Chain((*self.entries[:at], new, *self.entries[at + 1 :]))

    def passes(
        self, context: Context, *, since: str | None = None, until: str | None = None
    ) -> Iterator[Pass]:
        """The passes that lead to the graph that ``context`` is for, each made when it is due.

        Args:
            since: the name of the first pass; None: from the beginning.
            until: the name of the pass ahead of which to stop; None: to the end.
        """
        begin = 0 if since is None else self._place(since)
        end = len(self.entries) if until is None else self._place(until)
        for entry in self.entries[begin:end]:
            if entry.leads_to == context.leads_to and entry.applies(context):
                yield entry.make(context)

    def _place(self, name: str) -> int:
        """The index of the entry of that name."""
        places = [i for i, entry in enumerate(self.entries) if entry.name == name]
        if len(places) == 1:
            return places[0]
        if places:
            raise ValueError(
                f"{len(places)} passes of the chain are called {name!r}: give them different names"
            )
        names = [entry.name for entry in self.entries]
        near = difflib.get_close_matches(str(name), names)
        said = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {names}"
        raise ValueError(f"no pass of the chain is called {name!r}: {said}")

    def __str__(self) -> str:
        rows = [("pass", "graph", "what it does")]
        rows += [(entry.name, entry.levels, entry.summary) for entry in self.entries]
        first, second = (2 + max(len(row[i]) for row in rows) for i in (0, 1))
        lines = []
        for name, levels, about in rows:
            width = WIDTH - first - second
            parts = textwrap.wrap(about, width, break_on_hyphens=False) or [""]
            lines.append(f"{name:{first}}{levels:{second}}{parts[0]}".rstrip())
            lines += [" " * (first + second) + part for part in parts[1:]]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        # Entries of the default chain have functions that cannot be pickled: they go by name.
        known = {id(entry): entry.name for entry in default_chain().entries}
        return _restored, ([known.get(id(entry), entry) for entry in self.entries],)


def _restored(entries: Iterable[Entry[Any] | str]) -> Chain:
    known = {entry.name: entry for entry in default_chain().entries}
    return Chain(tuple(known[e] if isinstance(e, str) else e for e in entries))


_LEADING = {Level.STAGE: "split", Level.PIPELINE: "microbatch", Level.STEP: "step"}
_DEFAULT = Chain((*_to_stages(), *_to_pipeline(), *_to_step()))


def default_chain() -> Chain:
    """The chain that :func:`fxpipe.compile` runs, if it is not given another one."""
    return _DEFAULT


def chain_of(passes: Chain | None) -> Chain:
    """The chain that a user has given, or the default one.

    Raises TypeError for what is no chain.
    """
    if passes is not None and not isinstance(passes, Chain):
        raise TypeError(
            f"passes is a {type(passes).__name__}: give a chain, such as "
            'fxpipe.default_chain().before("split", your_pass)'
        )
    return default_chain() if passes is None else passes


def run(passes: Iterable[Pass], gm: fx.GraphModule) -> fx.GraphModule:
    """The graph after these passes, one after the other."""
    for rewrite in passes:
        gm = rewrite(gm)
    return gm
