import re

import pytest
import torch

import fxpipe
from fxpipe.inspect.page import WIDEST
from fxpipe.schedule.gantt import draw
from tests.fxpipe.inspect.parsed import Page
from tests.zoo import Chain

X = torch.ones(6, 3)
HEADINGS = [
    *("Summary", "Stages", "Stage graph", "Pipeline graph", "Training step and memory"),
    *("Values sent", "Passes", "Code"),
]


def compiled(**options):
    return fxpipe.compile(
        Chain(4, {0: (3,)}),
        ["cpu"] * 4,
        chunks=2,
        schedule="1f1b",
        partition=["b", "c", "d"],
        example_inputs=(X,),
        **options,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "out.html"
    with compiled() as pipe:
        pipe.report_html(path)
        yield pipe, path.read_text()


def section(text, heading):
    (body,) = re.findall(rf"<h2>{heading}</h2>(.*?)</section>(?=\n|</body>|<script)", text, re.S)
    return Page(body)


def test_the_page_has_all_sections_and_links_to_them(written):
    _, text = written
    page = Page(text)
    assert page.texts["h1"] == ["Chain on 4 stages"]
    assert page.texts["h2"] == HEADINGS
    assert [link.lstrip("#") for link in page.attributes("a", "href")] == page.attributes(
        "section", "id"
    )


def test_the_summary_and_the_stages_are_those_of_the_report(written):
    pipe, text = written
    report = pipe.report()
    rows = [line for line in report.splitlines() if line.startswith("│")]
    cells = [cell.strip() for row in rows for cell in row.strip("│").split("│")]
    stages = section(text, "Stages")
    shown = [stages.texts["td"][i : i + 10] for i in range(0, 40, 10)]
    assert [cell for row in shown for cell in row[:2] + row[3:]] == cells
    assert [row[2] for row in shown] == [stage.contains for stage in pipe.stages]
    heads = stages.texts["button"]
    assert heads[:2] + heads[3:] == re.findall(r"\w+", report.splitlines()[2])
    lines = section(text, "Summary").texts["li"]
    assert all(line in report for line in lines)
    assert any("skip a: stage 1 -> stage 3" in line for line in lines)


def test_every_cell_has_what_its_column_is_sorted_by(written):
    _, text = written
    stages = section(text, "Stages")
    values = stages.attributes("td", "data-value")
    assert len(values) == len(stages.texts["td"]) == 4 * 10
    assert values[6::10] == ["48"] * 4, "parameters: 9 + 3 floats"
    assert sum(float(share) for share in values[4::10]) == pytest.approx(1)


def drawings(text):
    return dict(re.findall(r'<svg role="img" aria-label="([^"]*)"(.*?)</svg>', text, re.S))


def test_the_drawings_are_those_of_the_pipeline(written):
    pipe, text = written
    found = drawings(text)
    assert list(found) == ["Stage graph", "Pipeline graph", "timeline"]
    assert "stage 3 · cpu" in found["Stage graph"]
    assert found["Pipeline graph"].count(">mb 1<") == 4
    whole = draw([pipe.timeline()], widest=WIDEST)
    assert found["timeline"].partition(">")[2] == whole.partition(">")[2].removesuffix("</svg>\n")
    assert found["timeline"].count("<polygon") == 4, "the memory of each lane"


def test_a_step_that_has_been_measured_is_below_the_predicted_one(tmp_path):
    with compiled(loss_fn=lambda output, _: output.sum()) as pipe:
        pipe.measure(X, rounds=1)
        pipe.report_html(tmp_path / "out.html")
    found = drawings((tmp_path / "out.html").read_text())["timeline"]
    assert 0 < found.index(">1f1b (predicted by measured stages)<") < found.index(">measured<")


def test_what_is_about_a_stage_a_micro_batch_or_a_skip_says_so(written):
    _, text = written
    found = drawings(text)
    assert section(text, "Stages").attributes("tr", "class") == [f"stage-{i}" for i in range(4)]
    assert section(text, "Values sent").attributes("tr", "class") == ["skip-a"]
    assert found["Stage graph"].count("edge skip&#45;a") == 1
    assert found["Pipeline graph"].count("edge skip&#45;a") == 2, "one for each micro-batch"
    assert found["timeline"].count('class="stage-2 mb-1"') == 2, "its forward and its backward"


def test_the_values_that_travel_are_a_table(written):
    _, text = written
    cells = section(text, "Values sent").texts["td"]
    assert [cells[i : i + 5] for i in range(0, len(cells), 5)] == [
        ["x", "caller", "0", "caller", "72 B"],
        ["a", "0", "1", "next stage", "72 B"],
        ["a", "1", "3", "skip", "72 B"],
        ["b", "1", "2", "next stage", "72 B"],
        ["c", "2", "3", "next stage", "72 B"],
    ]


def test_what_each_pass_changed_was_kept_when_it_ran(written):
    _, text = written
    page = Page(text)
    passes = [title.split()[1] for title in page.texts["h3"]]
    assert {"alias", "cost", "partition", "split", "microbatch", "verify"} <= set(passes)
    assert passes.count("before") == 2, "one of stages, one of the pipeline"
    assert "lines: 5 added, 5 removed" in text, "four layers and an addition are given stages"


def test_to_write_the_page_nothing_is_compiled(tmp_path):
    seen = []
    chain = fxpipe.default_chain().before("verify", lambda gm: seen.append(gm) or gm)
    with compiled(passes=chain) as pipe:
        pipe.report_html(tmp_path / "out.html")
        assert len(seen) == 1


def test_what_passes_change_in_a_large_graph_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("fxpipe.compiler.history.KEPT", 30)
    with compiled() as pipe:
        pipe.report_html(tmp_path / "out.html")
    passes = section((tmp_path / "out.html").read_text(), "Passes")
    assert "".join(passes.texts["p"]).count("compile with dump=") == 1
    assert "01 alias" in passes.texts["h3"] and "01 microbatch" not in passes.texts["h3"]


def test_the_code_of_all_is_there(written):
    pipe, text = written
    code = section(text, "Code")
    assert code.texts["summary"] == ["pipeline", *(f"stage {i}" for i in range(4))]
    assert "".join(code.texts["pre"]).startswith(pipe.code)


def test_memory_is_drawn_where_activations_are_checkpointed(tmp_path):
    with compiled(checkpoint="always") as pipe:
        pipe.report_html(tmp_path / "out.html")
        step = pipe.timeline()
    drawn = drawings((tmp_path / "out.html").read_text())["timeline"]
    most = max(step.peak_memory)
    assert drawn.count(f">{most:.3g} B<") >= len(step.lanes), "the scale of each lane ends with it"


def test_it_needs_no_network_and_has_a_dark_side(written):
    _, text = written
    page = Page(text)
    assert all(link.startswith("#") for link in page.attributes("a", "href"))
    assert page.attributes("link", "href") == page.attributes("script", "src") == []
    assert page.attributes("img", "src") == []
    assert "http" not in text and "prefers-color-scheme: dark" in text
