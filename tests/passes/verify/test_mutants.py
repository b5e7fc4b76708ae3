"""Of each kind of graph some mutants, each of which is refused or computes the same.

The whole run is ``python -m tests.passes.verify.mutants``.
"""

from __future__ import annotations

from itertools import islice

import pytest

from tests.passes.verify.graphs import pipeline_graph, step_graph
from tests.passes.verify.mutants import mutants, verdict

GRAPHS = {
    "a pipeline with skips, checkpointed": lambda: pipeline_graph("U-Net", "always"),
    "a pipeline in segments with a tied weight": lambda: pipeline_graph("tied", "except_last", 2),
    "a pipeline with running statistics": lambda: pipeline_graph("batch norm"),
    "a pipeline that writes to its input": lambda: pipeline_graph("writing"),
    "a step with a tied weight": lambda: step_graph("tied", "1f1b", "always"),
    "a step in halves with skips": lambda: step_graph("U-Net", "zb_h1"),
    "a step with several stages in a lane": lambda: step_graph(
        "batch norm", "interleaved_1f1b", "except_last", 2, 4, 2
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_mutant_is_refused_or_computes_the_same(name):
    gm = GRAPHS[name]()
    found: dict[str, list[str]] = {}
    for what, node, mutant in islice(mutants(gm), 0, None, 29):
        found.setdefault(verdict(gm, mutant), []).append(f"{what}: {node}")
    assert "missed" not in found, found["missed"]
    assert len(found["refused"]) > 9
