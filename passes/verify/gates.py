"""The rules of the gates of a pipeline graph, which order backwards: forks, joins, and the nodes
that run a checkpointed stage again.

::

    micro-batch 0, stage 1    stage_1 ── fork ── phony ─┐
    micro-batch 1, stage 1               join <─────────┘ ── stage_1

In which order autograd then runs the backwards is in :mod:`passes.verify.backward`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from passes.verify.errors import VerifyError
from passes.verify.parts import run_stage
from passes.verify.values import (
    Known,
    KnownHandle,
    KnownPhony,
    KnownPortal,
    leaves,
)
from passes.verify.visit import Visit, rule


@rule(ops.fork)
def _fork(visit: Visit, node: fx.Node) -> Any:
    return _of_lane(visit, node), KnownPhony(node)


@rule(ops.join)
def _join(visit: Visit, node: fx.Node) -> Any:
    phony = visit.given(node.args[1])
    if not isinstance(phony, KnownPhony):
        raise VerifyError("a join takes the phony of a fork", node)
    fork, (own, stage) = phony.fork, (node.meta.get(MICROBATCH), node.meta.get(STAGE))
    if (fork.meta.get(MICROBATCH), fork.meta.get(STAGE)) != ((own or 0) - 1, stage):
        raise VerifyError(
            "a join makes the backward of its micro-batch come before that of the micro-batch "
            "before it, in the same stage: this is the phony of another one",
            node,
            fork,
        )
    return _of_lane(visit, node)


def _of_lane(visit: Visit, node: fx.Node) -> Any:
    """The values that pass a gate, all of which belong to the gate's lane and micro-batch."""
    values = visit.given(node.args[0])
    for value in leaves(values):
        inner = value.value if isinstance(value, KnownPortal) else value
        if isinstance(inner, Known):
            visit.ready(node, inner, visit.here(inner.place.role))
    return values


@rule(ops.checkpoint, ops.selective)
def _checkpoint(visit: Visit, node: fx.Node) -> Any:
    module, *args = node.args
    assert isinstance(module, fx.Node)
    return run_stage(visit, node, str(module.target), args), KnownHandle(node)


@rule(ops.offloaded)
def _offloaded(visit: Visit, node: fx.Node) -> Any:
    module, _, _, *args = node.args
    assert isinstance(module, fx.Node)
    return run_stage(visit, node, str(module.target), args), KnownHandle(node)


@rule(ops.recompute)
def _recompute(visit: Visit, node: fx.Node) -> Any:
    handle = visit.given(node.args[1])
    cell = node.meta.get(MICROBATCH), node.meta.get(STAGE)
    if not isinstance(handle, KnownHandle) or cell != (
        handle.call.meta.get(MICROBATCH),
        handle.call.meta.get(STAGE),
    ):
        raise VerifyError("it runs the stage of another micro-batch or stage again", node)
    return _of_lane(visit, node)
