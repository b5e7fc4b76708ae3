"""The pieces of a model graph that no cut can separate, and how much a heavy one costs a pipeline.

::

    embed ─ lstm ─ head          times 1 18 1: in any number of stages, one takes 90% of the time,
            ────                 and a pipeline is at most 1.1 times as fast as a single device

Pass "partition" names the heaviest piece in its messages, and so does the report. Most pieces are
single nodes. A node that writes to memory forms a piece with the nodes that read it, and a node
that takes a tuple apart with the node that makes it (:func:`passes.partition.problem.together`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from networkx.utils import UnionFind
from torch import fx, nn

from fxpipe.ir._torch import wrap_with_set_grad_enabled
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import ALIAS, COST, HANDED, WHOLE, attribute, stage_nodes
from fxpipe.ir.hooks import has_hooks
from fxpipe.ir.log import warn
from fxpipe.ir.printing import operator_name
from fxpipe.ir.source import model_frame
from fxpipe.runtime.random import unseeded
from passes.common.names import calls_of
from passes.common.values_given import given_values
from passes.partition.problem import together

MOST = 0.75  # if one piece takes a larger part of the time, the user is warned


@dataclass(frozen=True)
class Piece:
    """Nodes that stay in one stage, and the fraction of the model's time that they take."""

    nodes: list[fx.Node]
    share: float

    @property
    def largest(self) -> fx.Node:
        """The node that takes most of the piece's time."""
        return max(self.nodes, key=_seconds)

    @property
    def name(self) -> str:
        """The largest node; the module that it calls, or that it is part of; and the line of the
        model that it is from."""
        node = self.largest
        module, frame = _module(node), model_frame(node.meta.get("stack_trace"))
        called = getattr(module, "module", module)  # a front end may have wrapped it
        is_ours = called is None or type(called).__module__.startswith(("fxpipe.", "torch.fx."))
        within = [f"in {path}" for _, path in [*calls_of(node)][-1:]]
        said = within if is_ours else [type(called).__name__]
        if frame is not None:
            said.append(f"{os.path.basename(frame['file'])}, line {frame['number']}")
        more = f" and {len(self.nodes) - 1} more that stay with it" if len(self.nodes) > 1 else ""
        name = "a block without gradients" if _is_without_gradients(node) else repr(node.name)
        return name + (f" ({', '.join(said)})" if said else "") + more

    @property
    def reason(self) -> tuple[str, str]:
        """Why the piece cannot be cut, and what would help."""
        node = self.largest
        module = _module(node)
        if any(HANDED in each.meta for each in self.nodes) and len(self.nodes) > 1:
            return (
                "they hand something to each other through a Python object, of which each "
                "micro-batch needs its own",
                "let a module return it, and give it to the other one as an argument",
            )
        if ALIAS in node.meta and len(self.nodes) > 1:
            return (
                "they share memory that is written to",
                "write x = x + y where the model writes x += y; what writes to a buffer stays with "
                "what reads it",
            )
        if WHOLE in node.meta:
            why, help = node.meta[WHOLE]
            return why, help
        if module is not None and has_hooks(module):
            return "a module with hooks is called as a whole", "put the hooks on its submodules"
        if module is not None and not isinstance(module, nn.RNNBase) and not any(module.children()):
            return f"{type(module).__name__} is a single layer", "compute it in several parts"
        if module is not None:
            return (
                f"{type(module).__name__} is called as a whole",
                "use several such modules, one after the other, of fewer layers each",
            )
        return f"{operator_name(node)} is a single operation", "compute it in several parts"

    @property
    def is_kept(self) -> bool:
        """Whether it is one for a reason that lies in the model: its memory, its hooks, or what it
        does, and not in that it is an operator or a layer of PyTorch's."""
        if len(self.nodes) > 1 and any(ALIAS in node.meta for node in self.nodes):
            return True
        for node in self.nodes:
            module = _module(node)
            called = getattr(module, "module", module)
            is_own = called is not None and not _is_torchs(called)
            if WHOLE in node.meta or is_own or (module is not None and has_hooks(module)):
                return True
        return False

    @property
    def takes(self) -> str:
        """A clause such as "lstm takes 90% of the time"."""
        return f"{self.name} take{'s' * (len(self.nodes) == 1)} {self.share:.0%} of the time"

    def __str__(self) -> str:
        why, help = self.reason
        return f"{self.takes} in one piece ({why}; {help})"


def _is_without_gradients(node: fx.Node) -> bool:
    """Whether a node is what torch.export makes of a block under ``torch.no_grad()``."""
    return node.target is wrap_with_set_grad_enabled


def heaviest(graph: fx.Graph) -> Piece:
    """The piece of a model graph with costs that takes the most time."""
    work = list(stage_nodes(graph))
    total = sum(map(_seconds, work)) or 1.0
    piece = max(pieces(work), key=lambda nodes: sum(map(_seconds, nodes)))
    return Piece(piece, sum(map(_seconds, piece)) / total)


def pieces(work: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """All nodes of a model graph, in groups whose nodes no cut may separate."""
    own = set(work)
    joined = UnionFind(work)
    for group in together(work):
        joined.union(*(node for node in group if node in own))
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in work:
        found.setdefault(joined[node], []).append(node)
    return list(found.values())


def kept_whole(graph: fx.Graph) -> list[Piece]:
    """The pieces of a model graph that a front end, or the memory that they write to, has made of
    what could have been cut otherwise; PyTorch's own layers, such as a Linear, are not among them.
    """
    work = list(stage_nodes(graph))
    total = sum(map(_seconds, work)) or 1.0
    found = [Piece(nodes, sum(map(_seconds, nodes)) / total) for nodes in pieces(work)]
    return [piece for piece in found if piece.is_kept]


def warn_of_the_heaviest(graph: fx.Graph, stages: int) -> None:
    """Warn the user if a pipeline is of little use, since one piece takes most of the time."""
    piece = heaviest(graph)
    if stages > 1 and piece.share > MOST:
        why, help = piece.reason
        warn(
            f"{stages} stages can be at most {1 / piece.share:.1f} times as fast as one: "
            f"{piece.takes} in one stage, since {why}; {help}",
        )


def _module(node: fx.Node) -> nn.Module | None:
    """The module that a node calls."""
    gm = node.graph.owning_module
    if gm is None:
        return None
    if (found := given_values(node)) is not None:
        called = attribute(gm, str(found[0].target))
    elif node.op == "call_module":
        called = unseeded(gm.get_submodule(str(node.target)))
    else:
        return None
    return called if isinstance(called, nn.Module) else None


def _is_torchs(module: nn.Module) -> bool:
    """Whether a module is a layer of PyTorch's, or one that a pass has made of an operator."""
    return type(module).__module__.startswith(("torch.", "fxpipe.", "passes."))


def _seconds(node: fx.Node) -> float:
    cost: Cost = node.meta.get(COST, Cost())
    return cost.seconds
