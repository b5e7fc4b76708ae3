"""The rules of nodes that gather the parameters of a stage from shards, and let them go again.

::

    unshard ── unsharded ── forwards, backwards ── reduce_scatter ── reshard ── resharded
    in shards    whole ...............................................   in shards
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe import ops
from passes.verify.errors import VerifyError
from passes.verify.record import WHOLE
from passes.verify.visit import Visit, rule

_SHARDS: dict[Any, tuple[tuple[str, ...], str]] = {
    ops.unshard: (("in shards", "being let go"), "not gathered yet"),
    ops.unsharded: (("not gathered yet",), WHOLE),
    ops.reduce_scatter: ((WHOLE,), WHOLE),
    ops.reshard: ((WHOLE,), "being let go"),
    ops.resharded: (("being let go",), "in shards"),
}
"""What a node does to the parameters of a stage: the states before it, and the one behind it."""


@rule(*_SHARDS)
def _shards(visit: Visit, node: fx.Node) -> Any:
    number = node.args[1]
    assert isinstance(number, int)
    before, after = _SHARDS[node.target]
    state = visit.step.shards.get(number, "in shards")
    if state not in before:
        raise VerifyError(f"the parameters of stage {number} are {state}", node)
    visit.event(node)
    visit.step.shards[number] = after
