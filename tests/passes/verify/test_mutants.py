"""Of each kind of graph some mutants, each of which is refused or computes the same.

The whole run is ``python -m tests.passes.verify.mutants``.
"""

from __future__ import annotations

import pytest

from fxpipe.ir.graph import LANE, MICROBATCH, STAGE
from passes import VerifyError
from passes.verify.transfers import verify
from tests.passes.verify.graphs import pipeline_graph, rank_graphs, step_graph
from tests.passes.verify.mutants import TRANSFERS, Mutant, mutants, verdict, verdict_of_ranks

GRAPHS = {
    "a pipeline with skips, checkpointed": lambda: pipeline_graph("U-Net", "always"),
    "a pipeline in segments with a tied weight": lambda: pipeline_graph("tied", "except_last", 2),
    "a pipeline with running statistics": lambda: pipeline_graph("batch norm"),
    "a pipeline that writes to its input": lambda: pipeline_graph("writing"),
    "a pipeline with two of all": lambda: pipeline_graph("several", "except_last"),
    "a step with two of all": lambda: step_graph("several"),
    "a step with a tied weight": lambda: step_graph("tied", "1f1b", "always"),
    "a pipeline with results of products": lambda: pipeline_graph("U-Net", "selective"),
    "a step with results of products": lambda: step_graph("U-Net", "1f1b", "selective"),
    "a pipeline with activations on the host": lambda: pipeline_graph("U-Net", "offload"),
    "a step with activations on the host": lambda: step_graph("U-Net", "gpipe", "offload"),
    "a step in halves with skips": lambda: step_graph("U-Net", "zb_h1"),
    "a step with several stages in a lane": lambda: step_graph(
        "batch norm", "interleaved_1f1b", "except_last", 2, 4, 2
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_mutant_is_refused_or_computes_the_same(name):
    gm = GRAPHS[name]()
    found: dict[str, list[str]] = {}
    for what, node, mutant in mutants(gm, each=13):
        found.setdefault(verdict(gm, mutant), []).append(f"{what}: {node}")
    assert "missed" not in found, found["missed"]
    assert len(found["refused"]) > 9


@pytest.mark.parametrize(
    "schedule, ranks", [("1f1b", 4), ("zbv", 2)], ids=["a stage a rank", "two stages a rank"]
)
def test_every_mutant_of_what_ranks_exchange_is_refused_or_computes_the_same(schedule, ranks):
    parts = rank_graphs("tied", schedule, "except_last", 4, ranks)
    found: dict[str, list[str]] = {}
    for rank, gm in enumerate(parts):
        for what, node, mutant in mutants(gm, TRANSFERS, each=13):
            said = verdict_of_ranks(parts, rank, mutant)
            found.setdefault(said, []).append(f"{what}: rank {rank}, {node}")
    assert "missed" not in found, found["missed"]
    assert len(found["refused"]) > 9


@pytest.mark.parametrize("key", [STAGE, MICROBATCH, LANE])
@pytest.mark.parametrize("function", TRANSFERS)
def test_a_transfer_that_is_noted_in_another_cell_or_lane_is_refused(function, key):
    parts = rank_graphs("U-Net", "1f1b", "never", 3, 4)
    mutant = Mutant(parts[1])
    node = next(node for node in mutant.graph.nodes if node.target is function)
    node.meta = node.meta | {key: node.meta[key] + 1}
    with pytest.raises(VerifyError):
        verify([parts[0], mutant, *parts[2:]])
