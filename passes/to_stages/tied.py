"""Tied: a parameter that stages on several devices use is sent to each device once for all
micro-batches, and not again with every micro-batch.

::

    before     weight ─ share ─┬─ embed (stage 0)
                               └──────────────────────── head (stage 3)

    after      weight ─ share ─── embed
               weight ─ bring ────────────────── share ─ head
                        (once)

Without this pass the value would travel with each micro-batch, as any value does, and so would its
gradient. A brought value belongs to no micro-batch, like an input without a batch dimension; the
gradients of all micro-batches are summed on its device, and their sum goes back once. So the sum
over all uses is formed in another order than the model's. On one device nothing is brought, and the
bits are the model's.

A brought value takes memory on the device that it is brought to, and so does its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.cost import Cost
from fxpipe.ir.graph import COST, FIRST, HOME, STAGE, VALUE
from fxpipe.ir.tensors import tensor_bytes, tensors_of
from fxpipe.runtime.streams import COMPUTE, COPY, stream_name


@dataclass(frozen=True)
class Tied:
    """Model graph with ``meta["stage"]`` after pass "shared" → the same, with a node "bring" for
    each shared parameter and each stage on another device than the one where the parameter lives.

    Args:
        devices: one for each stage.
        places: for each stage the rank that runs it, if several processes run the pipeline: their
            devices may have the same names. Empty: each name of a device means one place.
    """

    name: ClassVar[str] = "tied"
    devices: tuple[str, ...]
    places: tuple[int, ...] = ()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        has_changed = False
        places: tuple[int | str, ...] = self.places or self.devices
        for value in gm.graph.find_nodes(op="call_function", target=ops.share):
            home = value.meta[STAGE]
            away: dict[int, list[fx.Node]] = {}
            for user in value.users:
                stage = user.meta.get(STAGE, home)  # the caller, who has no stage, takes it at home
                if places[stage] != places[home]:
                    away.setdefault(stage, []).append(user)
            for stage, users in sorted(away.items()):
                own = self._bring(value, stage, users[0])
                for user in users:
                    user.replace_input_with(value, own)
                has_changed = True
        if has_changed:
            gm.recompile()
        return gm

    def _bring(self, value: fx.Node, stage: int, user: fx.Node) -> fx.Node:
        """Add the nodes that bring a shared parameter to a stage, ahead of its first user there.

        Returns the node that gives its value in that stage.
        """
        device = self.devices[stage]
        streams = stream_name(device, COPY), stream_name(device, COMPUTE)
        (parameter,) = value.args
        assert isinstance(parameter, fx.Node)
        if VALUE in value.meta:
            parameter.meta[VALUE] = value.meta[VALUE]
        graph = value.graph
        with graph.inserting_after(parameter):
            brought = graph.create_node(
                "call_function", ops.bring, (parameter, *streams), name=f"{parameter}_s{stage}"
            )
        with graph.inserting_before(user):
            own = graph.create_node(
                "call_function", ops.share, (brought,), name=f"{value}_s{stage}"
            )
        for node in (brought, own):
            node.meta = {**value.meta, COST: Cost(), STAGE: stage}
        brought.meta |= {FIRST: True, HOME: value.meta[STAGE]}
        size = tensor_bytes(value.meta.get(VALUE))
        is_trained = any(t.requires_grad for t in tensors_of(value.meta.get(VALUE)))
        own.meta[COST] = Cost(param_bytes=size, gradient_bytes=size * is_trained)
        return own
