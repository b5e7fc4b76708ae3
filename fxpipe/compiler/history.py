"""What each pass of a compilation made of its graph, kept as text, for the report page.

::

    before     x ─ linear ─ relu                after each pass: the text of the graph, zipped,
    alias      the same, "val" at 3 nodes       and how many nodes have which metadata
    split      x ─ stage_0 ─ stage_1

Passes rewrite graphs in place, so that the graphs themselves cannot be kept. Their text is written
right after each pass, which takes a few percent of the time of a compilation; texts are compared
only when the report page is asked for. No text is kept of graphs that have more than :data:`KEPT`
nodes, with the graphs that they call.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx, nn

from fxpipe.compiler.options import Observer, RunPass
from fxpipe.ir.printing import format_graph
from fxpipe.ir.progress import phase
from fxpipe.ir.text import human_time, summary
from passes import Pass

BEGIN = "What the passes begin with."
KEPT = 2_000
"""The most nodes that a graph, and the graphs that it calls, may have for its text to be kept after
every pass."""


@dataclass(frozen=True)
class Snapshot:
    """A graph after a pass: its text, its size, and how many nodes have which metadata.

    ``name`` is the name of the pass; ``about`` says what it does, and how long that took.
    """

    name: str
    about: str
    nodes: int
    metadata: Counter[str]
    zipped: bytes = field(repr=False)

    @staticmethod
    def of(gm: fx.GraphModule, name: str, about: str) -> Snapshot:
        found = list(parts(gm))
        text = zlib.compress(_text_of(found).encode(), level=1)
        return Snapshot(name, about, len(gm.graph.nodes), _metadata_of(found), text)

    @property
    def text(self) -> str:
        """The graph, a node a line, with the graphs that it calls."""
        return zlib.decompress(self.zipped).decode()


def run_pass(rewrite: Pass, gm: fx.GraphModule) -> fx.GraphModule:
    """Apply a pass to a graph. This is the runner of passes where no observer has been given."""
    return rewrite(gm)


class History:
    """Runs the passes of one chain, one after the other, and keeps a snapshot after each.

    Args:
        title: the model and the graph that the passes lead to, such as "UNet stages".
        gm: the graph that the passes begin with.
        run: a function that runs a pass on a graph, and returns the graph that the pass gives.

    ``snapshots`` is empty if a graph, with those that it calls, had more than :data:`KEPT` nodes.
    """

    def __init__(self, title: str, gm: fx.GraphModule, run: RunPass) -> None:
        self.title, self._run = title, run
        self.snapshots: list[Snapshot] = []
        self._is_kept = True
        self._keep(gm, "before", BEGIN)

    @staticmethod
    def observed(
        model: nn.Module, title: str, gm: fx.GraphModule, observer: Observer | None
    ) -> History:
        """A history whose passes are run by an observer, if there is one, and reported as progress.

        Args:
            title: the graph that the passes lead to, such as "stages".
        """
        title = f"{type(model).__name__} {title}"
        run = run_pass if observer is None else observer(title, gm)

        def reported(rewrite: Pass, gm: fx.GraphModule) -> fx.GraphModule:
            with phase(name_of(rewrite)):
                return run(rewrite, gm)

        return History(title, gm, reported)

    def __call__(self, rewrite: Pass, gm: fx.GraphModule) -> fx.GraphModule:
        """Run a pass."""
        begin = time.perf_counter()
        gm = self._run(rewrite, gm)
        self._keep(gm, name_of(rewrite), about(rewrite, time.perf_counter() - begin))
        return gm

    def _keep(self, gm: fx.GraphModule, name: str, said: str) -> None:
        self._is_kept &= sum(len(part.graph.nodes) for _, part in parts(gm)) <= KEPT
        if self._is_kept:
            with phase("text", quiet=True):
                self.snapshots.append(Snapshot.of(gm, name, said))
        else:
            self.snapshots.clear()


def name_of(rewrite: Pass) -> str:
    """The name of a pass, which may be a plain function."""
    return str(getattr(rewrite, "name", None) or getattr(rewrite, "__name__", type(rewrite)))


def about(rewrite: Pass, seconds: float) -> str:
    """Two sentences: what a pass does, and how long this has taken."""
    documented = rewrite if hasattr(rewrite, "__name__") else type(rewrite)
    return f"{summary(documented)} Took {human_time(seconds)}."


def parts(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """A graph, with an empty path, and the graphs that it calls, with their paths; each once."""
    for path, part in gm.named_modules():
        if isinstance(part, fx.GraphModule):
            yield path, part


def whole_text(gm: fx.GraphModule) -> str:
    """:func:`fxpipe.ir.printing.format_graph` of a graph, and of those that it calls, each once."""
    return _text_of(parts(gm))


def _text_of(found: Iterable[tuple[str, fx.GraphModule]]) -> str:
    return "\n".join(
        f"{path}:\n{format_graph(part)}" if path else format_graph(part) for path, part in found
    )


def _metadata_of(found: Iterable[tuple[str, fx.GraphModule]]) -> Counter[str]:
    """The number of nodes that have each key of metadata, in these graphs."""
    return Counter(
        key
        for _, part in found
        for node in part.graph.nodes
        for key, value in node.meta.items()
        if value is not None
    )
