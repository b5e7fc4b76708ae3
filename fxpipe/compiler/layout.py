"""Where a model has been cut, so that what is traced later is cut alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir.graph import STAGE, attribute, stage_nodes
from fxpipe.runtime.regions import WITHIN
from passes import Partition
from passes.partition.automatic import cut_around
from passes.partition.pieces import warn_of_the_heaviest
from passes.partition.problem import order_of_sums, reads_before_writes, together


class Layout:
    """The stages of nodes and of parameters, by their names. Empty as long as nothing is cut.

    ``stages`` is how many there are.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.labels: dict[str, int] = {}  # of nodes
        self.homes: dict[str, int] = {}  # of parameters
        self.keeps_sums = True

    def learn(self, gm: fx.GraphModule) -> None:
        """Remember how the first model graph has been cut, and where it has its parameters; of
        those that come later, where they have parameters that are new."""
        work = list(stage_nodes(gm.graph))
        if not self.labels:
            self.labels = {node.name: node.meta[STAGE] for node in work}
            # Where a user's own cut sums gradients in another order than the model, so may others.
            self.keeps_sums = _keeps_sums(gm.graph, {node: node.meta[STAGE] for node in work})
        for node in work:
            for path in _held(gm, node):
                self.homes.setdefault(path, node.meta[STAGE])

    def forget(self) -> None:
        """Forget the cut, as the model is about to be cut in another way."""
        self.labels, self.homes = {}, {}

    def known(self, gm: fx.GraphModule) -> dict[fx.Node, int] | None:
        """A cut by which all parameters stay where they are; None if there is none.

        Other arguments, or another mode, may lead the model another way. Nodes are known by their
        names, if that makes a cut; else the model is cut anew around its parameters. Gradients are
        summed in the order of this graph, which may not be that of the one that was cut first.
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
    """Model graph → the same, with ``meta["stage"]``: cut as the model has been cut before, if
    there is such a cut, so that its parameters stay on their devices; else as asked for.

    Args:
        layout: where the model has been cut; it learns of this cut.
        partition: cuts as asked for.
        before_moving: called before a model that has been cut is cut otherwise.
    """

    name: ClassVar[str] = "partition"
    layout: Layout
    partition: Partition
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
    """The paths of the parameters that a node uses, but for those that others give it."""
    if node.op == "call_module":
        for name, _ in gm.get_submodule(str(node.target)).named_parameters():
            path = f"{node.target}.{name}"
            yield path.rpartition(WITHIN)[2]  # in the model, whatever region has it
    for source in node.all_input_nodes:
        path = str(source.target)
        if source.op != "get_attr":
            continue
        value = attribute(gm, path)
        if isinstance(value, nn.Parameter):
            yield path
        elif isinstance(value, nn.Module):
            given = node.args[1] if node.target is ops.call else {}
            assert isinstance(given, Mapping)
            for name, _ in value.named_parameters():
                if name not in given:
                    yield f"{path}.{name}".rpartition(WITHIN)[2]


def _is_cut(labels: Mapping[fx.Node, int], stages: int) -> bool:
    """Whether no stage is empty, none needs a later one, or reads what an earlier one has changed,
    and what belongs together is in one."""
    return (
        set(labels.values()) == set(range(stages))
        and all(labels.get(n, 0) <= labels[node] for node in labels for n in node.all_input_nodes)
        and all(labels[reader] <= labels[writer] for reader, writer in reads_before_writes(labels))
        and all(len({labels[node] for node in group}) == 1 for group in together(list(labels)))
    )


def _keeps_sums(graph: fx.Graph, labels: Mapping[fx.Node, int]) -> bool:
    """Whether the gradients of a value with several users are summed as the model sums them."""
    return all(labels[a] <= labels[b] for a, b in order_of_sums(graph))
