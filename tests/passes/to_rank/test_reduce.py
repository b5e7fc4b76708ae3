"""Losses and gradients become sums over replicas."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxpipe import ops
from fxpipe.runtime.lanes import run_inline
from fxpipe.runtime.program import lower
from passes import Reduce
from passes.verify.transfers import verify
from tests.passes.to_rank.test_project import X, projected, step, text
from tests.zoo import Chain, gradients, same

NEW = ops.weights, ops.reduce, ops.optimize, ops.average, ops.total, ops.reduced


def lines(gm):
    """The inputs and the output of a graph, and the nodes that have to do with replicas."""
    nodes = [n for n in gm.graph.nodes if n.op in ("placeholder", "output") or n.target in NEW]
    names = {f"{node.name} =" if node.op != "output" else "return" for node in nodes}
    names |= {f"{node.name}:" for node in nodes if node.op == "placeholder"}
    kept = [line for line in text(gm).splitlines() if any(line.startswith(n) for n in names)]
    return "\n".join(kept)


def test_gradients_of_a_stage_begin_to_be_summed_after_its_backwards_and_step_at_the_end():
    gm = Reduce()(step(Chain(2), ["b"], microbatches=2))
    assert_expected_inline(
        lines(gm),
        """\
x: input
scale: input = None
optimizer: input = None
gradients: input = None
weights = weights(x_parts, 0, gradients=gradients)
reduce_s1_mb1 = reduce(gradients, stage_1_mb1_module_1, ())
reduce_s0_mb1 = reduce(gradients, stage_0_mb1_module_1, ())
loss_all = average((loss_value_s1_mb0, loss_value_s1_mb1), weights)
loss_total = total(gradients, loss_all)
reduced_s1_mb1 = reduced(gradients)
reduced_s0_mb1 = reduced(gradients)
optimize_s1_mb1 = optimize(optimizer, stage_1_mb1_module_1, ())
optimize_s0_mb1 = optimize(optimizer, stage_0_mb1_module_1, ())
return (loss_total, (loss_value_s1_mb0, loss_value_s1_mb1))""",
    )
    verify(projected(gm, (0, 1)))


def test_without_replicas_the_graph_computes_what_it_did():
    model = Chain(3)
    gm = step(model, ["b", "c"], microbatches=2)
    found = []
    for each in (gm, Reduce()(gm)):
        model.zero_grad()
        count = len(each.graph.find_nodes(op="placeholder"))
        with torch.no_grad():
            found.append(run_inline(lower(each), [X, *[None] * (count - 1)]))
        found.append(gradients(model))
    assert same(found[0], found[2]) and same(found[1], found[3])
