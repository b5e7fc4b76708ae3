"""The report: what each stage does, holds and sends, as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console
from rich.table import Table
from torch import fx

from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, GAP, STAGE, stage_nodes
from fxpipe.ir.text import human_bytes, human_time, optimality
from fxpipe.runtime.regions import regions_in
from fxpipe.schedule import Timeline
from passes.common.skips import SkipLayout
from passes.partition.pieces import Piece, pieces

UNEVEN = 1.2  # slowest stage over the mean: above this the report says what limits the cut
USUAL = 4  # micro-batches for each stage
WORTH = 0.1  # of all lanes' time: a smaller bubble that is worth more micro-batches


@dataclass(frozen=True)
class Report:
    """What there is to know of a pipeline. ``str`` of it is for a terminal.

    Times are estimates for one mini-batch, forward and backward; bytes too are a mini-batch's. A
    stage is idle while its lane is, in a training step in the order of the schedule.

    Args:
        devices, costs, placement: one for each stage; a placement is a lane.
        was_chosen: the number of micro-batches was not the user's.
        step: the predicted training step for a number of micro-batches; None if it cannot run.
        notes: what the check of the micro-batches' meaning has to say.
        rows_given: of the mini-batch; None if that is not known.
        refused_sizes: of micro-batches, which the model does not take.
    """

    model_graph: fx.GraphModule
    devices: Sequence[str]
    costs: Sequence[Cost]
    layout: SkipLayout
    chunks: int
    was_chosen: bool
    placement: Sequence[int]
    step: Callable[[int], Timeline | None]
    rows_given: int | None = None
    notes: Sequence[str] = ()
    refused_sizes: Collection[int] = ()

    columns = (
        *("stage", "device", "time", "share", "idle"),
        *("parameters", "activations", "receives", "sends"),
    )

    @property
    def rows(self) -> list[list[tuple[float | str, str]]]:
        """The table: in each cell the number, or word, and how it is written."""
        total = sum(cost.seconds for cost in self.costs)
        idle = self._idle
        rows = []
        for i, (device, cost) in enumerate(zip(self.devices, self.costs, strict=True)):
            seconds = cost.seconds
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

    @property
    def _idle(self) -> list[float]:
        """The part of the step in which each lane waits; empty if there is no step."""
        if self.timeline is None:
            return []
        whole = self.timeline.makespan
        return [1 - busy / whole if whole else 0.0 for busy in self.timeline.busy]

    @property
    def lines(self) -> list[str]:
        """The lines below the table: what holds for the whole pipeline, and advice."""
        chosen = " (chosen: give chunks= to change it)" * self.was_chosen
        said = "no training step: its schedule cannot run"
        if self.timeline is not None:
            said = f"bubble {self.timeline.bubble:.0%} of all lanes' time (predicted, "
            said += f"{self.timeline.name})"
        lines = [f"{self.chunks} micro-batches{chosen}, {said}"]
        if self.refused_sizes:
            rows = " or ".join(map(str, sorted(self.refused_sizes)))
            lines.append(
                f"the model takes no micro-batch of {rows} row{'s' * (rows != '1')}: a batch that "
                "would have such is cut into fewer"
            )
        if GAP in self.model_graph.meta:
            lines.append(optimality(self.model_graph.meta[GAP]))
        lines += [f"meaning: {note}" for note in self.notes]
        lines += [f"skip {hop}" for hop in self.layout.skips]
        lines += [f"brought {hop}" for hop in self.layout.brought]
        lines += [
            f"the model's own checkpoint {path}" for path in _own_checkpoints(self.model_graph)
        ]
        lines += [f"advice: {line}" for line in self._advice]
        return lines

    def _more_chunks(self, wanted: int) -> int:
        """So many micro-batches, or as many as the rows of the mini-batch allow."""
        if self.rows_given is None:
            return wanted
        counts = range(min(wanted, self.rows_given), 1, -1)
        return next((n for n in counts if self.rows_given // n not in self.refused_sizes), 1)

    @property
    def _advice(self) -> list[str]:
        times = [cost.seconds for cost in self.costs]
        more = self._more_chunks(USUAL * len(times))
        then = self.step(more) if more > self.chunks else None
        found = advice(self.model_graph, times)
        if then is not None and self.timeline is not None:
            found += of_the_bubble(self.timeline.bubble, then.bubble, more)
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


def _own_checkpoints(gm: fx.GraphModule) -> list[str]:
    """The nodes that run a part of the model under the model's own checkpoint, with the stages that
    they are in."""
    targets = {path for path, _, _ in regions_in(gm)}
    found = []
    for node in stage_nodes(gm.graph):
        modules = (n for n in (node, *node.all_input_nodes) if n.op in ("call_module", "get_attr"))
        # A call may be of a region that an input gives (pass "shared"); an input is no call.
        own = (n for n in modules if n is node or n.op == "get_attr")
        if not targets.isdisjoint(str(n.target) for n in own):
            found.append(f"{node.name} (stage {node.meta[STAGE]})")
    return found


def advice(gm: fx.GraphModule, times: Sequence[float]) -> list[str]:
    """What limits the cut of a model graph. ``times``: of the stages, for a mini-batch."""
    total, count = sum(times), len(times)
    slowest = max(range(count), key=times.__getitem__)
    if times[slowest] * count < UNEVEN * total or not total:
        return []
    found = f"stage {slowest} takes {times[slowest] / total:.0%} of the time"
    work = [node for node in stage_nodes(gm.graph) if node.meta.get(STAGE) == slowest]
    nodes = max(pieces(work), key=_seconds)
    piece = Piece(nodes, _seconds(nodes) / total)
    if piece.share * count >= UNEVEN:
        why, help = piece.reason
        return [
            f"{found}: the cut is limited by {piece.name}, with {piece.share:.0%} in one piece; no "
            f"cut into {int(1 / piece.share) + 1} stages or more can be even, since {why}; {help}"
        ]
    wish = "" if GAP in gm.meta else '; partition="auto" looks for a more even cut'
    return [
        f"{found}, and all others wait for it; its largest part is {piece.name}, with "
        f"{piece.share:.0%}{wish}"
    ]


def _seconds(nodes: Sequence[fx.Node]) -> float:
    return float(sum(node.meta.get(COST, Cost()).seconds for node in nodes))


def of_the_bubble(now: float, then: float, more: int) -> list[str]:
    """Advice to take ``more`` micro-batches, if that makes the bubble smaller by enough; else
    none."""
    if now - then < WORTH:
        return []
    return [f"with chunks={more} the bubble would be {then:.0%}, in place of {now:.0%}"]
