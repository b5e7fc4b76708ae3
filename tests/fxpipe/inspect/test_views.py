"""What of a pipeline can be looked at."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.inspect.draw import render_svg
from fxpipe.ir.printing import format_graph
from fxpipe.ops import VOCABULARY
from tests.zoo import MLP, Chain

X = torch.ones(6, 12)
TWO = ["cpu", "cpu"]


def test_the_levels_are_graph_modules_that_lint_copy_and_print():
    pipe = fxpipe.compile(Chain(4, {0: (3,)}), ["cpu"] * 4, chunks=2, example_inputs=(X[:, :3],))
    for gm in (pipe.model_graph, pipe.stage_graph, pipe.graph_module):
        gm.graph.lint()
        twin = copy.deepcopy(gm)
        assert format_graph(twin) == format_graph(gm)
        torch.testing.assert_close(twin(X[:, :3]), pipe.module(X[:, :3]))
    assert pipe.graph is pipe.graph_module.graph
    assert "fork_s0_mb0 = fxpipe_ops_fork(" in pipe.code
    for line in pipe.code.splitlines():
        if "_mb" in line.split("=")[0]:
            assert "# " in line and "mb " in line, "where it belongs is in every such line"
    assert "stage 3, mb 1, cpu/compute" in pipe.code
    assert [(s.index, str(s.device)) for s in pipe.stages] == [(i, "cpu") for i in range(4)]
    assert all(stage.cost.param_bytes == 48 for stage in pipe.stages)
    assert [(h.value, h.source, h.target) for h in pipe.skip_layout.skips] == [("a", 1, 3)]


def test_an_emitted_graph_can_be_traced_again():
    pipe = fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,))
    again = torch.fx.Tracer().trace(pipe.graph_module)
    kept = [n.target for n in again.nodes if n.target in VOCABULARY]
    assert kept == [n.target for n in pipe.graph.nodes if n.target in VOCABULARY]


def test_the_report_says_what_each_stage_holds_and_sends():
    pipe = fxpipe.compile(Chain(4, {0: (3,)}), ["cpu"] * 4, chunks=2, example_inputs=(X[:, :3],))
    text = pipe.report()
    assert "skip a: stage 1 -> stage 3, 72 B" in text
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == 4
    assert all("48 B" in row for row in rows), "parameters: 9 + 3 floats"


def test_drawing_an_unknown_level_is_refused():
    pipe = fxpipe.compile(MLP(), TWO, example_inputs=(X,))
    assert "digraph" in str(pipe.draw("stage"))
    with pytest.raises(ValueError, match='\'models\': give "model", "stage", "pipeline" or "step"'):
        pipe.draw("models")


def test_before_the_first_call_there_is_nothing_to_see():
    with pytest.raises(RuntimeError, match="not compiled yet: call it, or prepare"):
        _ = fxpipe.compile(MLP(), TWO).graph


def test_in_notebooks_things_show_themselves():
    pipe = fxpipe.compile(MLP(), TWO)
    assert pipe._repr_html_() is None, "there is nothing to draw yet: as text"
    pipe(X)
    shown = pipe._repr_html_()
    assert "<svg" in shown and "stage 1" in shown and "bubble" in shown
    assert "<svg" in pipe.stages[0]._repr_svg_()
    assert pipe.timeline()._repr_svg_() == pipe.timeline().draw()
    drawing = pipe.draw("stage")
    assert drawing._repr_mimebundle_() == {"image/svg+xml": render_svg(drawing)}


def test_in_notebooks_what_cannot_be_drawn_is_said(monkeypatch):
    pipe = fxpipe.compile(MLP(), TWO, example_inputs=(X,))
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    assert pipe._repr_html_().startswith("<pre>") and "bubble" in pipe._repr_html_()
    assert pipe.stages[0]._repr_svg_() is None
    assert "install Graphviz" in pipe.draw("stage")._repr_mimebundle_()["text/plain"]


def test_a_step_is_drawn_before_there_has_been_one():
    pipe = fxpipe.compile(MLP(), TWO, chunks=2, schedule="1f1b", example_inputs=(X,))
    before = pipe.draw("step").source
    assert "1F0" in before and "0B1" in before
    with pytest.raises(RuntimeError, match="no training step yet"):
        pipe.step_graph  # noqa: B018


def test_who_asks_for_all_there_is_gets_what_there_is():
    """As debuggers and completions do."""
    with fxpipe.compile(MLP(), ["cpu"] * 2, chunks=2) as pipe:
        assert not hasattr(pipe, "stages") and not hasattr(pipe, "step_graph")
        assert "stages" not in dict(inspect.getmembers(pipe))
        pipe(torch.ones(4, 12))
        assert "stages" in dict(inspect.getmembers(pipe))
        assert getattr(pipe, "step_graph", None) is None


def test_an_evaluation_between_steps_is_not_what_reports_are_about():
    x = torch.randn(16, 4)
    with fxpipe.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        ["cpu"] * 2,
        chunks=4,
        loss_fn=lambda output, target: output.mean(),
    ) as pipe:
        pipe.eval()
        pipe(x[:2])
        assert pipe.chunks == 2, "nothing has been trained yet"
        pipe.train()
        pipe.step(x)
        trained = str(pipe.report()), str(pipe.timeline()), str(pipe.explain())
        pipe.eval()
        assert (str(pipe.report()), str(pipe.timeline()), str(pipe.explain())) == trained
        with torch.no_grad():
            pipe(x[:2])
        for view in pipe.report(), pipe.explain():
            assert "This is about the last call, in eval mode; once pipe.train()" in str(view)
        pipe.train()
        assert (str(pipe.report()), str(pipe.timeline()), str(pipe.explain())) == trained
        pipe(x[:2])
        assert pipe.chunks == 2
        assert str(pipe.report()) == trained[0], "it is the last mini-batch of an epoch, say"
