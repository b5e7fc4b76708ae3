"""The cells of a pipeline graph and their gates, to which all passes after "microbatch" add nodes.

A cell is all that stage *j* does for micro-batch *i*: the nodes with that stage and micro-batch::

    ── copy ── wait ── join ──┬── stage ──┬── portal_blue ── wait ── recompute ── fork ──
                              │           │
              entry           └───────────┘                 exit

Entry and exit are chains of gates. A gate is a node that takes and gives all values at once, as one
tuple, so that in the backward no gradient passes it before all gradients have arrived. Each pass
adds a gate of its kind to the chain.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import DEVICE, MICROBATCH, ORIGIN, STAGE, STREAM, VALUE

CARRIERS = (ops.copy, ops.portal_copy)  # the functions that bring values to another cell
GATE = "gate"  # key in the metadata of a gate: how many values pass it (int)

Cell = tuple[int, int]
"""(micro-batch, stage)"""


def cell_of(node: fx.Node) -> Cell | None:
    """The cell that a node belongs to; None for a node that the caller runs."""
    meta = node.meta
    return (meta[MICROBATCH], meta[STAGE]) if STAGE in meta and MICROBATCH in meta else None


def cells(graph: fx.Graph) -> dict[Cell, list[fx.Node]]:
    """The nodes of each cell, in order; the cells in the order of their first nodes."""
    found: dict[Cell, list[fx.Node]] = {}
    for node in graph.nodes:
        if (cell := cell_of(node)) is not None:
            found.setdefault(cell, []).append(node)
    return found


def outgoing(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes among a cell's nodes whose values are used outside the cell."""
    return [n for n in nodes if any(cell_of(user) != cell_of(n) for user in n.users)]


def items(node: fx.Node) -> list[fx.Node]:
    """The ``getitem`` nodes that take elements out of a node's tuple, in the elements' order."""
    taken = [user for user in node.users if user.target is operator.getitem]
    return sorted(taken, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]


class Writer:
    """Adds nodes to a cell: the first behind the node ``after``, each other behind the last one."""

    def __init__(self, cell: Cell, after: fx.Node) -> None:
        self.cell = cell
        self.last = after
        self.added: list[fx.Node] = []

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], name: str) -> fx.Node:
        """Add a node ``<name>_s<stage>_mb<i>`` that calls a function, and return it."""
        microbatch, stage = self.cell
        return self._add("call_function", function, args, f"{name}_s{stage}_mb{microbatch}")

    def _add(self, kind: str, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        """Add a node behind the last one, with the metadata of the cell."""
        graph, meta = self.last.graph, self._meta()
        with graph.inserting_after(self.last):
            self.last = graph.create_node(kind, target, args, name=name)
        self.last.meta = meta
        self.added.append(self.last)
        return self.last

    def _meta(self) -> dict[str, Any]:
        """The metadata of a node that is put behind the last one of a cell: the cell, and the
        device and stream of that last node."""
        microbatch, stage = self.cell
        where = {k: self.last.meta[k] for k in (DEVICE, STREAM) if k in self.last.meta}
        return {STAGE: stage, MICROBATCH: microbatch, **where}

    def attribute(self, target: str) -> fx.Node:
        """Add a ``get_attr`` node for the module at the path ``target``, to be given to a call."""
        name = f"{target.rpartition('.')[2]}_mb{self.cell[0]}_module"
        return self._add("get_attr", target, (), name)

    def module(self, target: str, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
        """Add a call of the module at the path ``target``, with the value of the node ``like``."""
        name = f"{target.rpartition('.')[2]}_mb{self.cell[0]}"
        node = self._add("call_module", target, args, name)
        node.meta |= {k: like.meta[k] for k in (VALUE, ORIGIN) if k in like.meta}
        return node

    def item(self, values: fx.Node, index: int, like: fx.Node) -> fx.Node:
        """Add a node for an element of a tuple, with the name and value of the node ``like``."""
        name = like.meta.get(ORIGIN, like.name)
        item = self.call(operator.getitem, (values, index), name)
        item.meta |= {k: like.meta[k] for k in (VALUE, ORIGIN) if k in like.meta}
        return item

    def gate(
        self,
        function: Callable[..., Any],
        values: Sequence[fx.Node],
        *args: Any,
        uses: Callable[[fx.Node], bool],
    ) -> None:
        """Add a gate: a node ``function(values, *args)``, which gives as many values as it takes.

        A user of a value for which ``uses(user)`` is true takes the gate's value in its place.
        """

        def call(together: Any) -> fx.Node:
            return self.call(function, (together, *args), function.__name__)

        self.through(call, values, uses)

    def through(
        self,
        call: Callable[[Any], fx.Node],
        values: Sequence[fx.Node],
        uses: Callable[[fx.Node], bool],
    ) -> None:
        """Add a gate that may consist of several nodes; ``uses`` is that of :meth:`gate`.

        ``call`` takes the values as one tuple, adds the nodes, and returns the node that gives the
        tuple of all values.
        """
        maker = _maker(values)
        if maker is not None and all(uses(user) for value in values for user in value.users):
            # The values are the whole tuple of another gate, so that tuple itself passes this gate
            # and is taken apart behind it.
            result = call(maker)
            for value in values:
                value.replace_input_with(maker, result)
                self.last.append(value)
                self.last = value
        else:
            result = call(tuple(values))
            for i, value in enumerate(values):
                users = [user for user in value.users if user is not result and uses(user)]
                if users:
                    item = self.item(result, i, value)
                    for user in users:
                        user.replace_input_with(value, item)
        result.meta[GATE] = len(values)


def is_gated(values: Sequence[fx.Node]) -> bool:
    """Whether the values are exactly those of one gate, so that they pass that gate together."""
    return _maker(values) is not None


def _maker(values: Sequence[fx.Node]) -> fx.Node | None:
    makers = {v.args[0] if v.target is operator.getitem else None for v in values}
    maker = makers.pop() if len(makers) == 1 else None
    if not isinstance(maker, fx.Node) or GATE not in maker.meta:
        return None
    in_order = [v.args[1] for v in values] == list(range(maker.meta[GATE]))
    return maker if in_order and set(maker.users) == set(values) else None


def sweep(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove ``getitem`` nodes without users, and bring the module's code up to date."""
    for node in reversed(gm.graph.nodes):
        if node.target is operator.getitem and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm
