"""Cost: the pass estimates the time and the memory that each node of the model graph takes, so that
the cut can balance the stages.

::

    conv  ──  relu  ──  linear            conv:   4.1 ms, 1.2 MB of parameters, 3 MB kept, 2 MB out
                                          relu:   0.2 ms, 0, 2 MB, 2 MB ...

No numbers are computed: nodes run on fake tensors, forward and backward, and the FLOPs and bytes
that they would compute and move are counted. Of several nodes that do the same (the same operator,
shapes, dtypes and settings) only one is run.

Measured and given costs, which replace the times of this pass, are in
:mod:`passes.cost.measured` and :mod:`passes.cost.given`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx, nn

from fxpipe import ops
from fxpipe.ir._torch import pytree
from fxpipe.ir.cost import Cost, batch_bytes
from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from fxpipe.ir.graph import COST, PRODUCTS, SAVED, SAVED_STATE, VALUE, WORKSPACE, stage_nodes
from fxpipe.ir.tensors import tensor_bytes, tensors_of
from passes.common.deferrable import is_deferrable
from passes.cost.update import Update
from passes.cost.work import Runs, Work, microbatches, state_of_node

WORK = "work"  # key of ``node.meta``: the node's :class:`Work`
ADAM = 2  # how many tensors of a parameter's size Adam keeps for it
ADAMS_UPDATE = Update(memory=1.0)
"""What the step of an Adam needs that nobody has asked for. Its time is not counted."""


@dataclass(frozen=True)
class AnalyticCost:
    """Model graph with fake values (pass "alias") → the same, with a :class:`Cost` at each node.

    ``meta["saved"]`` lists the memories of the tensors that a node saves for its backward. A memory
    that several nodes save counts to ``activation_bytes`` of the first of them. Views of parameters
    that other nodes have made are listed by themselves (``meta["saved_state"]``): they take memory
    only where the cut has them come from another device (pass "borders").

    Args:
        device: the description of the device, by which times are estimated.
        optimizer_states: how many tensors of a parameter's size the optimizer keeps for it: 2 for
            Adam, 1 for SGD with momentum.
        chunks: the number of micro-batches. A cost is that of a mini-batch, and so of all of them:
            each reads all weights, makes gradients of them and adds these to those that are there,
            and launches every operator, however few rows it has; and a tensor that is not divided
            among the micro-batches (pass "rows") is computed and saved once for each.
        training: whether there are backwards. If not, they take no time, parameters have no
            gradients and no states of an optimizer, and what a call keeps to its end, in place of
            activations, are its outputs.
    """

    name: ClassVar[str] = "cost"
    device: DeviceSpec = CPU_CORE
    optimizer_states: float = ADAM
    chunks: int = 1
    training: bool = True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        runs = Runs(gm, self.chunks, microbatches(gm.graph), self.training)
        counted: set[int] = set()  # tensors and memories that an earlier node has been charged for
        for node in stage_nodes(gm.graph):
            work = runs.of(node)
            node.meta[WORK] = work
            saved = runs.saved(node, work)
            node.meta[SAVED] = tuple(each for each in saved.items() if each[0] not in runs.state)
            node.meta[SAVED_STATE] = tuple(each for each in saved.items() if each[0] in runs.state)
            node.meta[PRODUCTS] = work.products
            node.meta[WORKSPACE] = replace(work.workspace, is_deferrable=is_deferrable(gm, node))
            tensors = {id(t): t for t in state_of_node(gm, node) if id(t) not in counted}
            memories = {m: size for m, size in node.meta[SAVED] if m not in counted}
            counted.update(tensors, memories)
            trained = {i: t for i, t in tensors.items() if t.requires_grad}
            parameters = [t for t in tensors.values() if isinstance(t, nn.Parameter)]
            gradients = tensor_bytes(list(trained.values())) if self.training else 0
            adding = work.accumulation.seconds(self.device)
            node.meta[COST] = Cost(
                forward_s=work.forward.seconds(self.device),
                backward_s=work.backward.seconds(self.device) + (self.chunks - 1) * adding,
                param_bytes=tensor_bytes(parameters),
                activation_bytes=sum(memories.values()),
                output_bytes=batch_bytes(node),
                flops=work.forward.flops,
                backward_flops=work.backward.flops,
                gradient_bytes=gradients,
                optimizer_bytes=round(gradients * self.optimizer_states),
                buffer_bytes=tensor_bytes(list(tensors.values())) - tensor_bytes(parameters),
                accumulation_s=adding,
                again_s=work.rest.seconds(self.device),
                product_bytes=work.forward.products,
                operators=work.forward.operators,
                trained=len(trained) if self.training else 0,
            )
        return gm


def relative_time(node: fx.Node, device: DeviceSpec, reference: DeviceSpec) -> float:
    """How many times as long a node takes on ``device`` as on ``reference``."""
    work: Work | None = node.meta.get(WORK)
    seconds = 0.0 if work is None else work.seconds(reference)
    return 1.0 if work is None or not seconds else work.seconds(device) / seconds


def edges_to(node: fx.Node) -> Counter[fx.Node]:
    """How many edges of the autograd graph lead from a node to each node that it uses: the number
    of gradients that it gives to each.

    For a parameter that pass "shared" hands to a module the number is not known: it is given as 2,
    which stands for "several".
    """
    work: Work | None = node.meta.get(WORK)
    places = iter(() if work is None else work.edges)
    args: Any = node.args
    found: Counter[fx.Node] = Counter()
    if node.target is ops.call:
        _, values, *args = args
        found.update({value: 2 for value in values.values()})
    for leaf in pytree.tree_leaves((args, node.kwargs)):
        if isinstance(leaf, fx.Node):
            for _ in tensors_of(leaf.meta.get(VALUE)):
                found[leaf] += next(places, 1)
    return found
