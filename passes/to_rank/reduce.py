"""Reduce: the pass sums losses and gradients over replicas of a pipeline, each with its own rows.

::

    before     last backward of stage 0 ─ optimize ─ ... ─ average ─ the loss

    after      last backward of stage 0 ─ reduce ─ ... ─ average ─ total ─ the loss
                                            └┄ (while others are at work) ┄ reduced ─ optimize

A stage's gradients begin to be summed as soon as its backwards are done. The optimizer steps at the
end, so that no stage on the same rank waits for another stage's sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxpipe import ops
from fxpipe.ir.graph import add_input, where

GRADIENTS = "gradients"  # the name of the input through which a step is given its gradients


@dataclass(frozen=True)
class Reduce:
    """Step graph → the same, in which losses and gradients are sums over replicas.

    The graph has one input more, behind the others: the gradients of the step, which know the
    replicas (:class:`fxpipe.runtime.ranks.replicas.Gradients`), or None where there is one replica
    only. A graph without a loss stays as it is: each replica has the output for its own rows.
    """

    name: ClassVar[str] = "reduce"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = gm.graph
        averages = graph.find_nodes(op="call_function", target=ops.average)
        if not averages:
            return gm
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            gradients = add_input(graph, GRADIENTS, None)
        self._weigh(graph, gradients)
        (average,) = averages
        with graph.inserting_after(average):
            total = graph.create_node(
                "call_function", ops.total, (gradients, average), name="loss_total"
            )
        average.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
        self._reduce(graph, gradients)
        gm.recompile()
        return gm

    def _weigh(self, graph: fx.Graph, gradients: fx.Node) -> None:
        """Let the weights of the losses be shares of what all replicas have."""
        for target in (ops.weights, ops.loss_weights):
            for node in graph.find_nodes(op="call_function", target=target):
                node.kwargs = {**node.kwargs, GRADIENTS: gradients}

    def _reduce(self, graph: fx.Graph, gradients: fx.Node) -> None:
        """Begin to sum gradients where optimizers have stepped, and let these step at the end."""
        output = graph.output_node()
        steps = graph.find_nodes(op="call_function", target=ops.optimize)
        for step in steps:
            with graph.inserting_before(step):
                begun = graph.create_node(
                    "call_function",
                    ops.reduce,
                    (gradients, *step.args[1:3]),
                    name=str(step.name).replace("optimize", "reduce"),
                )
            begun.meta = dict(step.meta)
        for step in steps:
            with graph.inserting_before(output):
                ended = graph.create_node(
                    "call_function",
                    ops.reduced,
                    (gradients,),
                    name=str(step.name).replace("optimize", "reduced"),
                )
            ended.meta = where(step)
        for step in steps:
            output.prepend(step)
