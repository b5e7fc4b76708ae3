"""Files of drawings, by the program that is installed with fxpipe or by the system's dot."""

from __future__ import annotations

import os

import graphviz
import pytest
import torch

import fxpipe
from fxpipe.inspect.draw import NoLayout
from fxpipe.inspect.draw.svg import Drawing
from tests.zoo import MLP

SOURCE = "digraph {a -> b}"


@pytest.fixture
def no_dot(monkeypatch, tmp_path):
    """An empty folder to work in, and no ``dot`` on PATH."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_drawing_of_a_pipeline_is_written_without_dot(no_dot):
    with fxpipe.compile(MLP(), ["cpu"] * 2, chunks=2, example_inputs=(torch.randn(4, 12),)) as pipe:
        drawing = pipe.draw("stage")
    assert drawing.render("b", format="svg", cleanup=True) == "b.svg"
    assert names(no_dot) == ["b.svg"]
    assert "</svg>" in (no_dot / "b.svg").read_text()


def test_the_source_is_kept_unless_it_is_to_be_cleaned_up(no_dot):
    assert Drawing(SOURCE).render("b") == "b.svg"
    assert names(no_dot) == ["b", "b.svg"]
    assert (no_dot / "b").read_text().strip() == SOURCE


def test_a_file_may_be_named_by_its_ending_and_lie_in_a_folder(no_dot):
    path = Drawing(SOURCE).render(outfile="more/b.png", cleanup=True)
    assert path == os.path.join("more", "b.png")
    assert names(no_dot / "more") == ["b.png"]
    assert (no_dot / "more/b.png").read_bytes().startswith(b"\x89PNG")
    assert Drawing(SOURCE).render("c", directory="other", cleanup=True)
    assert names(no_dot / "other") == ["c.svg"]


def test_what_is_piped_is_bytes_or_text(no_dot):
    drawing = Drawing(SOURCE)
    assert b"</svg>" in drawing.pipe() and b"</svg>" in drawing.pipe("svg")
    assert "</svg>" in drawing.pipe(encoding="utf-8")
    assert drawing.pipe("dot", engine="neato", encoding="utf-8").startswith("digraph")


def test_what_only_dot_makes_is_refused_and_nothing_is_written(no_dot):
    with pytest.raises(
        NoLayout, match=r'"pdf" not recognized.*Graphviz, if it is installed, makes'
    ):
        Drawing(SOURCE).render("b", format="pdf", cleanup=True)
    assert names(no_dot) == []


def test_the_viewer_is_shown_the_file(no_dot, monkeypatch):
    shown = []
    monkeypatch.setattr("graphviz.view", lambda path, quiet: shown.append((str(path), quiet)))
    assert Drawing(SOURCE).view("b", cleanup=True) == "b.svg"
    assert shown == [("b.svg", False)] and names(no_dot) == ["b.svg"]


def test_a_file_that_is_there_is_written_over_unless_that_is_refused(no_dot):
    drawing = Drawing(SOURCE)
    drawing.render("b")
    drawing.render("b")
    with pytest.raises(graphviz.FileExistsError):
        drawing.render("b", raise_if_result_exists=True)
    with pytest.raises(ValueError, match="is the file of the source"):
        drawing.render("b.gv", outfile="b.gv", format="svg")


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
def test_the_dot_of_the_system_makes_all_formats(no_dot, monkeypatch):
    dot = no_dot / "dot"
    dot.write_text('#!/bin/sh\necho "$@"')
    dot.chmod(0o755)
    monkeypatch.setenv("PATH", str(no_dot))
    said = Drawing(SOURCE).pipe("png", "cairo", "gd", neato_no_op=2, encoding="utf-8")
    assert said == "-Kdot -Tpng:cairo:gd -n2\n"
