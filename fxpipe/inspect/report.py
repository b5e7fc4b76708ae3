"""The report: what each stage does, holds and sends, as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from torch import fx

from fxpipe.graph import COST, GAP, STAGE, Cost, stage_nodes
from fxpipe.inspect.text import human_bytes, human_time
from passes.skips import SkipLayout

UNEVEN = 1.2  # slowest stage over the mean: above this the report says what limits the cut


def report(
    model_graph: fx.GraphModule,
    devices: Sequence[str],
    costs: Sequence[Cost],
    layout: SkipLayout,
    chunks: int,
    was_chosen: bool,
) -> str:
    """A table of the stages, the skips, and what there is to know about the whole.

    Times are estimates for one mini-batch, forward and backward; bytes too are a mini-batch's.
    ``was_chosen`` says that the number of micro-batches was not the user's.
    """
    times = [cost.forward_s + cost.backward_s for cost in costs]
    table = Table(title="stages", title_justify="left")
    for column in ("stage", "device"):
        table.add_column(column)
    for column in ("time", "share", "parameters", "activations", "receives", "sends"):
        table.add_column(column, justify="right")
    for i, (device, cost, seconds) in enumerate(zip(devices, costs, times, strict=True)):
        table.add_row(
            str(i),
            device,
            human_time(seconds),
            f"{seconds / (sum(times) or 1):.0%}",
            human_bytes(cost.param_bytes),
            human_bytes(cost.activation_bytes),
            human_bytes(sum(hop.bytes for hop in layout.hops if hop.target == i)),
            human_bytes(sum(hop.bytes for hop in layout.hops if hop.source == i)),
        )
    console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
    console.print(table)
    lines = [
        f"{chunks} micro-batches{' (chosen: give chunks= to change it)' * was_chosen}, "
        f"bubble {bubble(times, chunks):.0%} of all lanes' time (predicted)"
    ]
    if GAP in model_graph.meta:
        lines.append(f"the slowest stage is at most {model_graph.meta[GAP]:.1%} from optimal")
    lines += [f"skip {line}" for line in str(layout).splitlines() if layout.skips]
    lines += _advice(model_graph, times)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def bubble(times: Sequence[float], chunks: int) -> float:
    """The idle part of all lanes' time: for equal stages (n - 1) / (m + n - 1)."""
    makespan = (sum(times) + (chunks - 1) * max(times)) / chunks
    return 1 - sum(times) / (len(times) * makespan) if makespan else 0.0


def _advice(model_graph: fx.GraphModule, times: Sequence[float]) -> list[str]:
    mean = sum(times) / len(times)
    slowest = max(range(len(times)), key=times.__getitem__)
    if mean == 0 or times[slowest] < UNEVEN * mean:
        return []
    nodes = [n for n in stage_nodes(model_graph.graph) if n.meta.get(STAGE) == slowest]
    worst = max(nodes, key=lambda n: n.meta[COST].forward_s)
    return [
        f"stage {slowest} takes {times[slowest] / sum(times):.0%} of the time, most of it in "
        f"{worst.name!r}; all others wait for it"
    ]
