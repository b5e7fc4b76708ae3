"""The layout of a model: where it has been cut into stages, which micro-batches these keep, and in
how many segments they recompute the others. Later traces of it (for another mode, or other
arguments) are cut alike, so that its parameters stay on their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from fxpipe.ir.graph import STAGE, attribute, stage_nodes
from fxpipe.runtime.checkpointing.regions import WITHIN
from passes import Pass
from passes.common.modes import AUTO, Modes
from passes.common.segments import Segments, counts, is_open, simplest
from passes.common.values_given import given_values
from passes.partition.automatic import cut_around
from passes.partition.pieces import warn_of_the_heaviest
from passes.partition.problem import order_of_sums, reads_before_writes, together


class Layout:
    """The stages of the nodes and of the parameters of a model, by name. Both are empty before the
    model is cut for the first time.

    Args:
        stages: the number of stages.
        checkpoint: the checkpoint modes of the stages. For "auto" all activations are kept, unless
            the cut says otherwise (``modes``): without a limit of memory that takes least time.
        segments: their numbers of segments. Where the compiler chooses them, each stage has one,
            unless the cut says otherwise.
    """

    def __init__(self, stages: int, checkpoint: Modes = "never", segments: Segments = None) -> None:
        self.stages = stages
        self.modes: Modes = "never" if checkpoint == AUTO else checkpoint
        self.segments: Segments = 1
        if not is_open(segments, self.modes):
            self.segments = simplest(counts(segments, self.modes, stages), self.modes)
        self.labels: dict[str, int] = {}  # the stages of nodes, by their names
        self.homes: dict[str, int] = {}  # the stages of parameters, by their paths in the model
        self.keeps_sums = True  # whether gradients are summed in the model's order, see ``learn``

    def learn(self, gm: fx.GraphModule) -> None:
        """Remember the cut of a model graph.

        The first graph that is cut decides the stages of nodes, and of the parameters it uses. From
        later ones only the stages of parameters are taken that no earlier graph has used.
        """
        work = list(stage_nodes(gm.graph))
        if not self.labels:
            self.labels = {node.name: node.meta[STAGE] for node in work}
            # A user's cut may sum gradients in another order than the model does; then later cuts
            # need not keep the model's order either.
            self.keeps_sums = _keeps_sums(gm.graph, {node: node.meta[STAGE] for node in work})
        for node in work:
            for path in _held(gm, node):
                self.homes.setdefault(path, node.meta[STAGE])

    def forget(self) -> None:
        """Forget the cut. This is called when the model is about to be cut in another way."""
        self.labels, self.homes = {}, {}

    def known(self, gm: fx.GraphModule) -> dict[fx.Node, int] | None:
        """A cut of this model graph that leaves all parameters in their stages: from nodes to
        stages. None if there is no such cut.

        The graph may differ from the one that was cut first, as other arguments or another mode
        lead through other branches of the model. Each node gets the stage that the node of its name
        had, if that is a valid cut of this graph; else the fastest cut is searched for in which
        each parameter stays where it is. "Valid" includes that gradients are summed in the order of
        this graph.
        """
        by_name = {node: self.labels.get(node.name, -1) for node in stage_nodes(gm.graph)}
        if not self.labels or not by_name:
            return None
        homes = [
            (node, self.homes[path])
            for node in by_name
            for path in _held(gm, node)
            if path in self.homes
        ]
        stays = all(by_name[node] == home for node, home in homes)
        is_ordered = not self.keeps_sums or _keeps_sums(gm.graph, by_name)
        if stays and is_ordered and _is_cut(by_name, self.stages):
            return by_name
        return cut_around(gm.graph, homes, self.stages)


@dataclass(frozen=True)
class CutAlike:
    """Model graph → the same, with ``meta["stage"]`` at each node.

    A model that has been cut before is cut alike, so that its parameters stay on their devices. If
    that is impossible, or if it is the first cut, it is cut as the user has asked.

    Args:
        layout: where the model has been cut before; it learns this cut.
        partition: the pass that cuts as the user has asked.
        before_moving: called before a model that has been cut is cut in another way, which moves
            parameters to other devices.
    """

    name: ClassVar[str] = "partition"
    layout: Layout
    partition: Pass
    before_moving: Callable[[], None]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        known = self.layout.known(gm)
        if known is None:
            if self.layout.labels:
                self.before_moving()
                self.layout.forget()
            gm = self.partition(gm)
            warn_of_the_heaviest(gm.graph, self.layout.stages)
        else:
            for node, stage in known.items():
                node.meta[STAGE] = stage
        self.layout.learn(gm)
        return gm


def _held(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """The paths of the parameters that a node reads itself. Not among them are shared parameters,
    whose values other nodes hand to it."""
    if node.op == "call_module":
        for name, _ in gm.get_submodule(str(node.target)).named_parameters():
            path = f"{node.target}.{name}"
            yield path.rpartition(WITHIN)[2]  # the path in the model, without that of a region
    for source in node.all_input_nodes:
        path = str(source.target)
        if source.op != "get_attr":
            continue
        value = attribute(gm, path)
        if isinstance(value, nn.Parameter):
            yield path
        elif isinstance(value, nn.Module):
            _, given = given_values(node) or (source, {})
            for name, _ in value.named_parameters():
                if name not in given:
                    yield f"{path}.{name}".rpartition(WITHIN)[2]


def _is_cut(labels: Mapping[fx.Node, int], stages: int) -> bool:
    """Whether a labelling of nodes with stages is a valid cut: no stage is empty; no stage needs a
    value from a later one, or reads memory that an earlier one has written to too soon; and nodes
    that have to stay together are in one stage."""
    return (
        set(labels.values()) == set(range(stages))
        and all(labels.get(n, 0) <= labels[node] for node in labels for n in node.all_input_nodes)
        and all(labels[reader] <= labels[writer] for reader, writer in reads_before_writes(labels))
        and all(len({labels[node] for node in group}) == 1 for group in together(list(labels)))
    )


def _keeps_sums(graph: fx.Graph, labels: Mapping[fx.Node, int]) -> bool:
    """Whether, with this cut, the gradients of each value are summed in the model's order: a sum of
    floats depends on its order."""
    return all(labels[a] <= labels[b] for a, b in order_of_sums(graph))
