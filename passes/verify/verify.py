"""Verify: the pass proves that a graph keeps the promises of a pipeline, or raises an error that
names the nodes which break one.

::

    interpret    follows each value from node to node, by a rule for each function:
      parts      divide the mini-batch, run stages, put micro-batches together
      links      carry values between streams, lanes and ranks
      gates      order the backwards of a pipeline graph
      shards     gather parameters and let them go
      actions    are the forwards, backwards and optimizers of a training step
    places       finds nodes noted on a lane, device or stream that is not theirs
    effects      finds nodes that use the same memory in no order, by vector clocks
    backward     finds backwards that autograd might run in another order
    transfers    matches what ranks transmit and receive

The pass changes nothing in the graph. It takes pipeline graphs, step graphs and graphs of ranks.
Run it after passes of your own.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import MICROBATCH, STAGE
from passes.verify.backward import check_backward
from passes.verify.interpret import check_end, follow
from passes.verify.values import named
from passes.verify.visit import Visit


@dataclass(frozen=True)
class Verify:
    """Pipeline graph, step graph or graph of one rank → the same.

    Args:
        name: what the pass is called in the chain.
        training: whether autograd may run a backward of the graph.

    Raises :class:`~passes.verify.errors.VerifyError` for the first node that breaks a promise.
    """

    name: str = "verify"
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        with _no_collections():
            visit = _followed(gm)
            check_end(visit)
            if self.training:
                check_backward(gm.graph, visit.cells)
        return gm


@contextmanager
def _no_collections() -> Iterator[None]:
    """A context in which Python looks for no cycles of garbage. The verifier makes none, and what
    it notes for a large graph would else let Python go through all objects of the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def meaning(gm: fx.GraphModule) -> Any:
    """What a graph computes: the nodes that do more than let values wait or travel, each with its
    stage, its micro-batch and the names of what it is given; and for all memory that several nodes
    use the order in which they write to it.

    Two graphs that the verifier accepts and that have the same meaning compute the same. They
    differ only in when values wait and travel, ahead of their uses, and in the order of nodes that
    have nothing to do with each other.
    """
    return meaning_of(_followed(gm))


def meaning_of(visit: Visit) -> Any:
    """What the graph of a visit that is done computes; see :func:`meaning`."""
    said = {
        node: (str(node.target), node.meta.get(STAGE), node.meta.get(MICROBATCH))
        for node in visit.events
    }
    computed = Counter(
        (*said[node], repr(named(visit.given((node.args, node.kwargs)))))
        for node in visit.events
        if node.target is not ops.wait
    )
    writes = {
        memory: [(write and said[write], Counter(map(said.get, reads))) for write, reads in uses]
        for memory, uses in visit.effects.history.items()
    }
    return computed, writes


def _followed(gm: fx.GraphModule) -> Visit:
    """Visit all nodes of a graph by itself, which waits for no other rank."""
    visit = Visit(gm)
    for node in follow(visit):
        raise AssertionError(f"{node} waits for another rank")
    return visit
