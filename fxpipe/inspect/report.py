"""The report: the time, the memory and the traffic of each stage, as text for a terminal, with
advice on what limits the speed."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Table
from torch import fx

from fxpipe import ops
from fxpipe.inspect.batch_statistics import caution
from fxpipe.inspect.step_work import StepWork
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, GAP, STAGE, stage_nodes
from fxpipe.ir.text import human_bytes, human_time, optimality
from fxpipe.planning.search import Choice
from fxpipe.runtime.checkpointing.regions import regions_in
from fxpipe.runtime.microbatch import rows_of_each
from fxpipe.schedule import Timeline
from passes.common.skips import SkipLayout
from passes.partition.pieces import Piece, pieces

UNEVEN = 1.2  # if the slowest stage takes so many times the mean, the report says what limits it
USUAL = 4  # the report says what the bubble would be with this usual number of chunks per stage
WORTH = 0.1  # ... if that would shrink the bubble by at least this fraction of all lanes' time


@dataclass(frozen=True)
class Report:
    """A summary of a pipeline: a table of its stages, and lines below it. ``str`` of it is text for
    a terminal.

    Times are estimates, in seconds, for the forward and backward of one mini-batch; bytes are for
    one mini-batch too. A stage is idle while its lane waits in the predicted training step.

    Args:
        model_graph: the traced model, its nodes labelled with their stages.
        devices, costs: the name of the device, and the cost, of each stage.
        contain: what is in each stage, in words.
        layout: the values that travel between stages.
        chunks: the number of micro-batches.
        was_chosen: whether the compiler has chosen the number of micro-batches, and not the user.
        placement: the lane of each stage.
        step: a function that predicts the training step, or the call without one, for a number of
            micro-batches; it gives None if the schedule cannot run.
        knows_other_sizes: whether times are known for micro-batches of other sizes.
        rows_given: the number of rows in the mini-batch; None if it is not known.
        notes: what the check whether micro-batches change any result has to say, in sentences.
        refused_sizes: the sizes of micro-batches, in rows, that the model does not take.
        memory: the bytes that each lane may take; None: no limit that is known.
        optimizer: the optimizer whose states are counted as memory, in words.
        unknown_loss: why the cut could not count what the loss saves; "" if it could, or if memory
            has not decided where the cut is.
        training: whether there are training steps; if not, times are those of a call.
        choice: what has been chosen by prediction; or why nothing could be predicted.
        compiled: the backend that compiles the stages and the stages that it leaves as they are, in
            lines of text.
        checkpoints: the modes of the stages, in words; "" where all activations are kept.
        chunks_given: the number of micro-batches that the user has given; None: none.
        aside: what is to be said first, if the last call was an evaluation between training steps.
    """

    model_graph: fx.GraphModule
    devices: Sequence[str]
    costs: Sequence[Cost]
    contain: Sequence[str]
    layout: SkipLayout
    chunks: int
    was_chosen: bool
    placement: Sequence[int]
    step: Callable[[int], Timeline | None]
    knows_other_sizes: bool = True
    rows_given: int | None = None
    notes: Sequence[str] = ()
    refused_sizes: Collection[int] = ()
    compiled: Sequence[str] = ()
    memory: Sequence[float | None] = ()
    optimizer: str = ""
    unknown_loss: str = ""
    training: bool = True
    choice: Choice | str | None = None
    checkpoints: str = ""
    chunks_given: int | None = None
    aside: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of the columns. Without training, what a stage keeps are outputs."""
        kept = "activations" if self.training else "outputs"
        return (
            *("stage", "device", "time", "share", "idle"),
            *("parameters", kept, "receives", "sends"),
        )

    @property
    def rows(self) -> list[list[tuple[float | str, str]]]:
        """The rows of the table. Each cell is a pair: the value, by which to sort, and its text."""
        total = sum(self._work.stages)
        idle = self._idle
        rows = []
        each = zip(self.devices, self.costs, self._work.stages, strict=True)
        for i, (device, cost, seconds) in enumerate(each):
            waits = idle[self.placement[i]] if idle else None
            sizes = (
                cost.param_bytes,
                cost.activation_bytes,
                sum(hop.bytes for hop in self.layout.hops if hop.target == i),
                sum(hop.bytes for hop in self.layout.hops if hop.source == i),
            )
            row: list[tuple[float | str, str]] = [(i, str(i)), (device, device)]
            row.append((seconds, human_time(seconds)))
            share = seconds / (total or 1)
            row.append((share, f"{share:.0%}"))
            row.append((-1, "") if waits is None else (waits, f"{waits:.0%}"))
            row += [(size, human_bytes(size)) for size in sizes]
            rows.append(row)
        return rows

    @cached_property
    def timeline(self) -> Timeline | None:
        """The predicted training step; None if the schedule cannot run."""
        return self.step(self.chunks)

    @cached_property
    def _work(self) -> StepWork:
        """How long the stages work in the predicted step, the last one with the loss."""
        return StepWork.of(self.timeline, self.costs, self.placement)

    @property
    def _idle(self) -> list[float]:
        """The fraction of the step in which each lane waits; empty if no step is predicted."""
        if self.timeline is None:
            return []
        whole = self.timeline.makespan
        return [1 - busy / whole if whole else 0.0 for busy in self.timeline.busy]

    @property
    def lines(self) -> list[str]:
        """The lines below the table: what is in each stage, facts about the whole pipeline, and
        then advice."""
        return [*(f"stage {i}: {said}" for i, said in enumerate(self.contain)), *self.facts]

    @property
    def facts(self) -> list[str]:
        """The lines below the table, without those that say what is in each stage."""
        chosen = ""
        if self.was_chosen:
            is_searched = isinstance(self.choice, Choice)
            chosen = " (chosen)" if is_searched else ' (the default; chunks="auto" chooses)'
        said = "no training step: its schedule cannot run"
        if self.timeline is not None:
            said = f"bubble {self.timeline.bubble:.0%} of all lanes' time (predicted, "
            said += f"{self.timeline.name})"
        several = f"{self.chunks} micro-batch{'es' * (self.chunks != 1)}"
        lines = [*filter(None, [self.aside]), f"{several}{chosen}, {said}"]
        if self.chunks < (self.chunks_given or 0) and self.rows_given is not None:
            rows = f"{self.rows_given} row{'s' * (self.rows_given != 1)}"
            lines.append(
                f"chunks={self.chunks_given} is given, and the mini-batch of {rows} is cut into "
                f"{several}"
            )
        if isinstance(self.choice, str):
            lines.append(f"nothing has been chosen by prediction: {self.choice}")
        elif self.choice is not None:
            lines += self.choice.lines
        if self.checkpoints:
            lines.append(f"activations that are not kept (checkpoint): {self.checkpoints}")
        lines += self._memory
        if self.refused_sizes:
            rows = " or ".join(map(str, sorted(self.refused_sizes)))
            lines.append(
                f"the model takes no micro-batch of {rows} row{'s' * (rows != '1')}: a batch that "
                "would have one is cut into fewer micro-batches"
            )
        if GAP in self.model_graph.meta:
            is_limited = any(limit is not None for limit in self.memory)
            lines.append(optimality(self.model_graph.meta[GAP], is_limited=is_limited))
        lines += [f"meaning: {note}" for note in self.notes]
        lines += self.compiled
        lines += [f"skip {hop}" for hop in self.layout.skips]
        lines += [f"shared parameter {hop}" for hop in self.layout.brought]
        lines += [f"shared parameter {said}" for said in _shared_in_place(self.model_graph)]
        lines += [
            f"{node} is checkpointed by the model" for node in _checkpointed(self.model_graph)
        ]
        lines += [f"advice: {line}" for line in self._advice]
        return lines

    @property
    def _memory(self) -> list[str]:
        """A line that says how much memory each lane needs in the predicted step, and has."""
        if self.timeline is None or not self.timeline.peak_memory:
            return []
        limits = self.memory or (None,) * len(self.timeline.peak_memory)
        held = [
            human_bytes(round(most)) + ("" if limit is None else f" of {human_bytes(round(limit))}")
            for most, limit in zip(self.timeline.peak_memory, limits, strict=True)
        ]
        said = f", with the states of {self.optimizer}" * bool(self.optimizer)
        if not self.training:
            said = ", without gradients"
        lines = [f"memory of the lanes (predicted{said}): {', '.join(held)}"]
        if self.training and self.chunks > 1:
            lines.append(
                "the table is for the whole mini-batch; a lane holds the activations of some "
                "micro-batches at a time, and its memory is what it holds at the most"
            )
        if self.timeline.host_memory:
            on_host = human_bytes(round(self.timeline.host_memory))
            lines.append(f"activations that wait in the host's memory (predicted): {on_host}")
        if self.unknown_loss:
            lines.append(f"the cut has not counted what the loss saves: {self.unknown_loss}")
        return lines

    def _more_chunks(self, wanted: int) -> int:
        """The wanted number of micro-batches, or the largest number below it that the rows of the
        mini-batch allow."""
        if self.rows_given is None:
            return wanted
        counts = range(min(wanted, self.rows_given), 1, -1)
        refused, rows = {*self.refused_sizes}, self.rows_given
        return next((n for n in counts if not refused & {*rows_of_each(rows, n)}), 1)

    @property
    def _advice(self) -> list[str]:
        more = self._more_chunks(USUAL * len(self.costs))
        then = self.step(more) if more > self.chunks else None
        found = advice(self.model_graph, self._work)
        is_fastest = self.was_chosen and isinstance(self.choice, Choice)
        if then is not None and self.timeline is not None and not is_fastest:
            more_chunks = bubble_advice(self.timeline.bubble, then.bubble, more)
            if more_chunks and not self.knows_other_sizes:
                more_chunks = [f"{more_chunks[0]}, if stages take time in proportion to the rows"]
            warned = caution(self.model_graph, self.rows_given, self.chunks, more)
            found += [*more_chunks, *([warned] if more_chunks and warned else [])]
        return found

    def __str__(self) -> str:
        table = Table(title="stages", title_justify="left")
        for column in self.columns:
            is_word = column in ("stage", "device")
            table.add_column(column, justify="left" if is_word else "right")
        for row in self.rows:
            table.add_row(*(text for _, text in row))
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        console.print(table)
        for line in self.lines:
            console.print(line, soft_wrap=True, highlight=False)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text


def _shared_in_place(model_graph: fx.GraphModule) -> Iterator[str]:
    """What to say of each parameter that several stages of one device use, so that it is there for
    all of them."""
    for value in model_graph.graph.find_nodes(op="call_function", target=ops.share):
        used = [node.meta[STAGE] for node in (value, *value.users) if STAGE in node.meta]
        first, *others = map(str, sorted(set(used)))
        (parameter,) = value.args
        if others and isinstance(parameter, fx.Node) and parameter.op == "get_attr":
            stages = f"{', '.join([first, *others[:-1]])} and {others[-1]}"
            yield f"{parameter.target}: stages {stages} use it, on one device"


def _checkpointed(gm: fx.GraphModule) -> list[str]:
    """The nodes that run a part of the model which calls ``torch.utils.checkpoint`` itself, with
    their stages, in words."""
    targets = {path for path, _, _ in regions_in(gm)}
    found = []
    for node in stage_nodes(gm.graph):
        modules = (n for n in (node, *node.all_input_nodes) if n.op in ("call_module", "get_attr"))
        # Pass "shared" turns the call_module of a region into an operator whose input is a get_attr
        # of the region. Any other input that is a call_module is another node's call.
        own = (n for n in modules if n is node or n.op == "get_attr")
        if not targets.isdisjoint(str(n.target) for n in own):
            found.append(f"{node.name} (stage {node.meta[STAGE]})")
    return found


def advice(gm: fx.GraphModule, work: StepWork) -> list[str]:
    """Advice on an uneven cut, which names the part of the model that limits it; an empty list if
    lanes work about as much as each other."""
    times, lanes = work.of_lanes, len(work.of_lanes)
    total, slowest = sum(times), max(range(lanes), key=times.__getitem__)
    is_uneven = all(of[slowest] * lanes >= UNEVEN * sum(of) for of in (times, work.busy))
    if not total or not is_uneven:
        return []
    own = work.stages_of(slowest)
    stages, are_several = " and ".join(map(str, own)), len(own) > 1
    found = f"stage{'s' * are_several} {stages} take{'s' * (not are_several)} "
    found += f"{times[slowest] / total:.0%} of the time"
    within = [node for node in stage_nodes(gm.graph) if node.meta.get(STAGE) in own]
    nodes = max(pieces(within), key=_seconds)
    of_nodes = _seconds([*stage_nodes(gm.graph)]) or 1.0
    piece = Piece(nodes, _seconds(nodes) / of_nodes * (1 - work.loss / total))
    if piece.share * lanes >= UNEVEN:
        why, help = piece.reason
        parts = "stages" if lanes == len(work.stages) else "lanes"
        return [
            f"{found}: the cut is limited by {piece.name}, with {piece.share:.0%} in one piece; no "
            f"cut into {int(1 / piece.share) + 1} {parts} or more can be even, since {why}; {help}"
        ]
    name, share = piece.name, piece.share
    if len(work.stages) - 1 in own and work.loss > share * total:
        name, share = "the loss", work.loss / total
    wish = "" if GAP in gm.meta else '; partition="auto" looks for a more even cut'
    them, whose = ("them", "their") if are_several else ("it", "its")
    return [
        f"{found}, and all others wait for {them}; {whose} largest part is {name}, with "
        f"{share:.0%}{wish}"
    ]


def _seconds(nodes: Sequence[fx.Node]) -> float:
    return float(sum(node.meta.get(COST, Cost()).seconds for node in nodes))


def bubble_advice(now: float, then: float, more: int) -> list[str]:
    """Advice to take ``more`` micro-batches, as a list of one sentence. The list is empty if the
    bubble would not shrink by enough.

    ``now`` and ``then``: the bubble as it is, and with ``more`` micro-batches, as fractions of all
    lanes' time.
    """
    if now - then < WORTH:
        return []
    return [f"with chunks={more} the bubble would be {then:.0%}, in place of {now:.0%}"]
