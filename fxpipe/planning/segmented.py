"""Stages that are run again in segments: how long each segment takes, and what a stage keeps then.

::

    stage          a ─ b ─ c ─ d            keeps what a, b, c and d save
    in segments    [a ─ b] ─ [c ─ d]        keeps the inputs of both, and what one of them saves

A search looks at many cuts, which have most of their stages in common, and at several modes for
each stage: a stage is cut into segments once for all of them (:class:`KnownSegments`), and what a
segment needs while it runs is found once (:class:`SegmentedStage`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from torch import fx

from fxpipe.ir.cost import batch_bytes, cost_of, memories_of, state_of
from fxpipe.ir.graph import attribute, is_work
from fxpipe.ir.workspace import StageWorkspace, workspace_of
from fxpipe.planning.estimates import StageMemory
from passes.common.modes import run_again
from passes.to_stages.segments import segmented


@dataclass(frozen=True)
class SegmentedStage:
    """A stage in segments.

    Args:
        gm: a graph module that calls them, one after the other.
    """

    gm: fx.GraphModule
    _workspaces: dict[int, StageWorkspace] = field(default_factory=dict)

    @staticmethod
    def of(stage: fx.GraphModule, count: int) -> SegmentedStage:
        """A stage in so many segments, or in fewer if it has fewer places to cut."""
        return SegmentedStage(segmented(stage, count))

    @cached_property
    def calls(self) -> list[fx.Node]:
        """The calls of the segments, in order."""
        return list(self.gm.graph.find_nodes(op="call_module"))

    @cached_property
    def _nodes(self) -> list[list[fx.Node]]:
        return [list(attribute(self.gm, str(call.target)).graph.nodes) for call in self.calls]

    @cached_property
    def _state(self) -> set[int]:
        return state_of(chain(self.gm.graph.nodes, *self._nodes))

    @cached_property
    def shares(self) -> list[float]:
        """The parts of the stage's forward that the segments take, by the costs of their nodes."""
        own = [cost_of(nodes).forward_s for nodes in self._nodes]
        whole = sum(own)
        return [each / whole if whole else 1 / len(own) for each in own]

    @cached_property
    def _saved(self) -> list[int]:
        """The bytes that each segment saves for its backward."""
        return [cost_of(nodes).activation_bytes for nodes in self._nodes]

    def _workspace(self, number: int) -> StageWorkspace:
        if number not in self._workspaces:
            work = list(filter(is_work, self._nodes[number]))
            self._workspaces[number] = workspace_of(work, self._state)
        return self._workspaces[number]

    def memory(self, stage: StageMemory, mode: str) -> StageMemory:
        """The memory of the stage: of a micro-batch that is recomputed it keeps the inputs of all
        segments, and recomputes the activations of one segment at a time. Of a stage that is run
        again in part, it keeps the activations of its last segments, whose backward comes first.

        Args:
            stage: the memory of the stage as a whole.
            mode: which micro-batches are recomputed.
        """
        number = run_again(mode, len(self.calls))
        again = range(number)
        largest, workspace = -1, StageWorkspace()
        if number:
            heaviest = max(again, key=self._saved.__getitem__)
            largest, workspace = self._saved[heaviest], self._workspace(heaviest)
        if mode == "except_last" and stage.workspace is not None:
            # The last micro-batch goes through the stage as if it were whole, the others by
            # segments.
            workspace = workspace.or_more(stage.workspace)
        received = {node: None for i in again for node in self.calls[i].all_input_nodes}
        inputs = sum(
            batch_bytes(node)
            for node in received
            if not self._state.issuperset(memory for memory, _ in memories_of(node))
        )
        found = replace(stage, inputs=inputs, recomputed=largest, workspace=workspace)
        last = range(number, len(self.calls))
        return self._with_kept(found, largest, workspace, last) if last else found

    def _with_kept(
        self, stage: StageMemory, largest: int, workspace: StageWorkspace, last: Sequence[int]
    ) -> StageMemory:
        """The memory of the stage where it runs its first segments again, of which the largest
        saves so many bytes and has this workspace, and keeps what its last segments save.

        What these keep counts as there all the time. It is not there yet while an earlier segment
        runs forward, and no more in the backward of that one.
        """
        every = (node for i in last for node in self._nodes[i] if is_work(node))
        kept = cost_of(every).activation_bytes
        at_once = max(largest, kept + workspace.kept_inputs)
        workspace = replace(
            workspace,
            again=max(0, workspace.again - kept),
            backward=max(0, workspace.backward - (at_once - largest)),
        )
        later = 0
        for i in reversed(last):
            own = self._workspace(i)
            forward = max(0, own.forward - later)
            backward = max(0, own.backward - later)
            workspace = workspace.or_more(
                replace(own, forward=forward, again=forward, rerun=0, backward=backward)
            )
            later += self._saved[i]
        return replace(stage, recomputed=at_once, workspace=workspace, kept=kept)


@dataclass(frozen=True)
class KnownSegments:
    """The stages in segments that a search has looked at, by the code of the stage, which names
    each node of the model graph, and by the number of segments."""

    _known: dict[tuple[str, int], SegmentedStage] = field(default_factory=dict)

    def of(self, stage: fx.GraphModule, count: int) -> SegmentedStage:
        """A stage in so many segments; see :meth:`SegmentedStage.of`."""
        key = stage.code, count
        if key not in self._known:
            self._known[key] = SegmentedStage.of(stage, count)
        return self._known[key]
