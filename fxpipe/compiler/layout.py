"""Where a model has been cut, so that what is traced later is cut alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx, nn

from fxpipe.ir.graph import STAGE, attribute, stage_nodes
from passes.partition.problem import reads_before_writes, together


class Layout:
    """The stages of nodes and of parameters, by their names. Empty as long as nothing is cut.

    Args:
        stages: how many there are.
        labels: the stages of nodes, where the model has been cut already.
    """

    def __init__(self, stages: int, labels: Mapping[str, int] | None = None) -> None:
        self.stages = stages
        self.labels = dict(labels or {})
        self.homes: dict[str, int] = {}  # of parameters

    def learn(self, gm: fx.GraphModule) -> None:
        """Remember how the first model graph has been cut, and where it has its parameters; of
        those that come later, where they have parameters that are new."""
        work = list(stage_nodes(gm.graph))
        if not self.labels:
            self.labels = {node.name: node.meta[STAGE] for node in work}
        for node in work:
            for path in _held(gm, node):
                self.homes.setdefault(path, node.meta[STAGE])

    def forget(self) -> None:
        """The model is about to be cut otherwise."""
        self.labels, self.homes = {}, {}

    def known(self, gm: fx.GraphModule) -> dict[fx.Node, int] | None:
        """A cut by which everything stays where it is; None if there is none.

        Other arguments may lead the model another way. Nodes are known by their names, if that
        makes a cut; else by the parameters that they use, and the others go where they are needed.
        """
        if not self.labels:
            return None
        work = list(stage_nodes(gm.graph))
        by_name = {node: self.labels.get(node.name, -1) for node in work}
        stays = all(
            self.homes.get(path, stage) == stage
            for node, stage in by_name.items()
            for path in _held(gm, node)
        )
        if stays and _is_cut(by_name, self.stages):
            return by_name
        found: dict[fx.Node, int] = {}
        for node in work:
            needed = max((found[n] for n in node.all_input_nodes if n in found), default=0)
            homes = [self.homes[path] for path in _held(gm, node) if path in self.homes]
            found[node] = max([needed, *homes])
        for group in together(work):
            for node in group:
                found[node] = max(found[n] for n in group)
        return found if _is_cut(found, self.stages) else None


def _held(gm: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """The paths of the parameters that a node uses."""
    if node.op == "call_module":
        for name, _ in gm.get_submodule(str(node.target)).named_parameters():
            yield f"{node.target}.{name}"
    for source in node.all_input_nodes:
        path = str(source.target)
        if source.op == "get_attr" and isinstance(attribute(gm, path), nn.Parameter):
            yield path


def _is_cut(labels: Mapping[fx.Node, int], stages: int) -> bool:
    """Whether no stage is empty, none needs a later one, or reads what an earlier one has changed,
    and what belongs together is in one."""
    return (
        set(labels.values()) == set(range(stages))
        and all(labels.get(n, 0) <= labels[node] for node in labels for n in node.all_input_nodes)
        and all(labels[reader] <= labels[writer] for reader, writer in reads_before_writes(labels))
        and all(len({labels[node] for node in group}) == 1 for group in together(list(labels)))
    )
