"""What the verifier raises: a promise that a graph breaks, with the nodes that break it."""

from __future__ import annotations

from torch import fx

from fxpipe.ir.printing import format_node


class VerifyError(ValueError):
    """A graph does not keep the promises of a pipeline.

    The message says which promise, shows the node that breaks it and, where the order of two nodes
    is at fault, the other node and the edge that is missing between them.

    ``node`` and ``other`` are these nodes; ``other`` is None where one node alone is at fault.
    """

    def __init__(
        self, promise: str, node: fx.Node, other: fx.Node | None = None, missing: str = ""
    ) -> None:
        super().__init__(f"{promise}:\n{_picture(node, other, missing)}")
        self.node, self.other = node, other


def _picture(node: fx.Node, other: fx.Node | None, missing: str) -> str:
    """The node, below the other one, with the edge between them that is missing.

    ::

            stage_0_mb1 = stage_0(x_s0_mb1)  # stage 0, mb 1, cpu/compute
              ┆ missing: a wait of the copy stream
            copy_s1_mb1 = copy((stage_0_mb1,), ...)  # stage 1, mb 1, cpu/copy
    """
    if other is None:
        return f"    {format_node(node)}"
    edge = f"      ┆ missing: {missing}\n" if missing else ""
    return f"    {format_node(other)}\n{edge}    {format_node(node)}"
