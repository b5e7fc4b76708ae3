"""What smaller micro-batches change in a model with batch norms: in train mode a batch norm
normalises each micro-batch by its own mean and variance."""

from __future__ import annotations

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import stage_nodes
from fxpipe.ir.printing import operator_name
from fxpipe.meaning.stilled import batch_norms

TRAINING = 5
"""The place of the argument ``training`` of ``F.batch_norm`` and of ``aten.batch_norm``."""


def of_the_batch(gm: fx.GraphModule) -> list[str]:
    """The batch norms of a model graph that compute with statistics of the batch: the paths of
    modules, and the names of nodes that call the function."""
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    return batch_norms(gm) + [
        node.name for part in parts for node in stage_nodes(part.graph) if _is_trained(node)
    ]


def _is_trained(node: fx.Node) -> bool:
    if node.target is ops.batch_norm:  # by pass "batch_norm", which takes apart those in train mode
        return True
    name = operator_name(node).removeprefix("aten.").split(".")[0]
    if node.op != "call_function" or name != "batch_norm":
        return False
    given = node.args[TRAINING] if len(node.args) > TRAINING else node.kwargs.get("training")
    return given is True


def caution(gm: fx.GraphModule, rows: int | None, now: int, then: int) -> str:
    """A sentence that says what more micro-batches change in what a model computes; empty where
    they change nothing.

    Args:
        rows: the rows of a mini-batch; None if there is no batch.
        now, then: the number of micro-batches as it is, and as it would be.
    """
    if rows is None or then <= now or not (norms := of_the_batch(gm)):
        return ""
    fewer, more = max(1, rows // then), max(1, rows // now)
    if fewer == more:
        return ""
    named = ", ".join(norms[:2]) + (f" and {len(norms) - 2} more" if len(norms) > 2 else "")
    sentence = (
        f"chunks={then} changes what batch norms in train mode compute ({named}): they normalise "
        f"each micro-batch by its own statistics, which would be those of {_rows(fewer)} in place "
        f"of {more}"
    )
    if fewer == 1:
        return f"{sentence}; the statistics of one row are hardly those of the data"
    return f"{sentence}, and so are less certain"


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"
