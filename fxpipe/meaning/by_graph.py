"""The check of a model together with its graph.

::

    sample: 2 rows ─┬─ model ───────────────────────── whole ┐
                    ├─ model on row 0 ───────┐               ├─ alike?
                    └─ graph on row 1 ───────┴─ put together ┘

If the graph gives on parts what the model gives on the whole, then it is the model's graph, and
rows are independent: the model need not run on all parts for the check, nor model and graph once
more for their comparison. If it does not, either may be the reason. Then nothing is said here, and
both are found out by themselves.

The model itself gets the single row, for which it may have code of its own: torch.export takes for
granted that there are several rows. The graph gets a single row where its operators keep rows
apart (:mod:`fxpipe.meaning.alike`), since it then gives the same for one row as for several. Where
they may mix rows, the sample has three rows, and the graph gets two. Where operators of the graph
do not treat all rows alike, the sample has four rows, as in other checks, and the graph runs on the
single row as well.

Random numbers and statistics of the batch are replaced in these runs, as in other checks, so that a
model that has them is compared with its graph once more, as both really run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from fxpipe.ir.structure import Structure
from fxpipe.meaning.alike import keeps_rows_apart, treats_rows_alike
from fxpipe.meaning.check import Verdict, check_graph, is_joined
from fxpipe.meaning.runs import ModelRuns
from fxpipe.meaning.sample import OF_TWINS, batch_size
from fxpipe.meaning.trial import APART, FEWEST, SIZES, Question
from fxpipe.trace import Traced
from fxpipe.trace.checks import EXPORT_TOLERANCE
from fxpipe.trace.checks import difference as difference_of_graph


class ByGraph:
    """Checks a graph of a model, and the independence of rows, in the same runs.

    Args:
        runs: runs of the model.
        traced: the graph.
        tensors, dims: the tensors of the example, and the batch dimension of each.
    """

    def __init__(
        self,
        runs: ModelRuns,
        traced: Traced,
        tensors: Sequence[Tensor],
        dims: Sequence[int | None],
    ) -> None:
        self.runs, self.traced, self.tensors, self.dims = runs, traced, tensors, dims
        self._graph: ModelRuns | None = None
        has_branches = traced.sizes is None or bool(traced.sizes.conditions)
        graph = traced.graph_module.graph
        self._is_alike = not has_branches and treats_rows_alike(graph)
        self._are_apart = self._is_alike and keeps_rows_apart(graph)
        self._differs = False

    def verdict(self) -> Verdict | None:
        """The verdict if the graph is the model's, and rows are independent; None if one of both
        is not so, or has not been seen."""
        sizes = APART if self._are_apart else FEWEST if self._is_alike else SIZES[0]
        # Where rows are treated alike, the third row of the only sample is far from the others.
        twins = () if self._are_apart else (0,) if self._is_alike else OF_TWINS
        question = Question(
            self._of_the_whole,
            self.tensors,
            self.dims,
            [sizes],
            run_parts=self._of_a_part,
            twins=twins,
            is_void=lambda: self.runs.drew,
        )
        found = check_graph(question)
        if found.trial is None or not found.is_exact or found.slight or found.unclear:
            return None
        if self._differs or not found.trial.has_one_history:
            return None
        runs, graph = self.runs, self._graph
        has_effects = runs.changed or runs.puts_outside or runs.drew
        if runs.said or has_effects or graph is None or graph.drew:
            return None
        return found if is_joined(found.trial, found.outputs) else None

    @property
    def has_effects(self) -> bool:
        """Whether there is more to compare than outputs: random numbers and statistics of the
        batch, which have been replaced, or buffers to which the graph writes."""
        graph = self._graph
        is_still = graph is not None and not graph.changed and not graph.are_stilled
        return self.runs.are_stilled or not is_still

    def _of_the_whole(self, tensors: list[Tensor]) -> tuple[Any, Hashable]:
        found = self.runs.ran(tensors)
        self._structure = Structure.of(found[0])[1]
        return found

    def _of_a_part(self, tensors: list[Tensor], start: int) -> tuple[Any, Hashable]:
        """What the graph gives for the part of a sample that begins at row ``start``; for a single
        row, what the model gives, unless the graph is known to give that."""
        if batch_size(tensors, self.dims) != 1 or (start and self._are_apart):
            return self._of_graph(tensors)
        found = self.runs.ran(tensors)
        if not self._is_alike:
            output, history = self._of_graph(tensors)
            apart = difference_of_graph(found[0], output, EXPORT_TOLERANCE)
            self._differs |= apart is not None or history != found[1]
        return found

    def _of_graph(self, tensors: list[Tensor]) -> tuple[Any, Hashable]:
        if self._graph is None:
            self._graph = self.runs.of_graph(self.traced)
        found = self._graph.ran(tensors)
        self._differs |= not self._structure.fits(Structure.of(found[0])[1])
        return found
