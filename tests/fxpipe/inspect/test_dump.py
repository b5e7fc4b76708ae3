import html
import re

import pytest
import torch

import fxpipe
from fxpipe.compiler.history import whole_text
from fxpipe.inspect.dump import diff_html
from fxpipe.ir.text import summary
from passes import Random, Step, default_chain
from passes.chain import Level
from tests.zoo import MLP

X = torch.ones(6, 12)
TWO = ["cpu", "cpu"]


def loss_fn(output, target):
    return (output - target).square().mean()


def chains(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def passes_in(folder):
    return [path.stem for path in sorted(folder.glob("*.txt"))]


@pytest.fixture
def dumped(tmp_path):
    with fxpipe.compile(
        MLP(), TWO, chunks=2, example_inputs=(X,), loss_fn=loss_fn, dump=tmp_path / "new" / "dump"
    ) as pipe:
        yield pipe, tmp_path / "new" / "dump"


def test_every_pass_leaves_text_and_code_in_order(dumped):
    _, folder = dumped
    assert chains(folder) == ["00-MLP-stages", "01-MLP-pipeline-of-2-micro-batches"]
    assert passes_in(folder / "00-MLP-stages") == [
        "00-before",
        "01-alias",
        "02-inputs",
        "03-constants",
        "04-rows",
        "05-outputs",
        "06-cost",
        "07-shared",
        "08-random",
        "09-partition",
        "10-checks",
        "11-free",
        "12-tied",
        "13-split",
        "14-borders",
        "15-devices",
    ]
    names = [
        entry.name
        for entry in default_chain().entries
        if entry.leads_to == Level.PIPELINE and entry.when != "with stage_backend"
    ]
    assert passes_in(folder / "01-MLP-pipeline-of-2-micro-batches") == [
        f"{number:02}-{name}" for number, name in enumerate(["before", *names])
    ]
    for text in folder.glob("*/*.txt"):
        compile(text.with_suffix(".py").read_text(), text.name, "exec")


def test_the_last_text_is_of_what_runs(dumped):
    pipe, folder = dumped
    last = max((folder / "01-MLP-pipeline-of-2-micro-batches").glob("*.txt"))
    assert last.read_text() == whole_text(pipe.graph_module)


def test_what_stages_do_is_part_of_the_text(dumped):
    pipe, folder = dumped
    text = (folder / "00-MLP-stages" / "13-split.txt").read_text()
    first, *stages = text.split("\n\n")
    assert len(stages) == 2
    assert not any(
        node.name in first for node in pipe.model_graph.graph.find_nodes(op="call_module")
    )
    assert all(node.name in text for node in pipe.model_graph.graph.find_nodes(op="call_module"))


def test_the_index_shows_what_each_pass_changed(dumped):
    _, folder = dumped
    page = (folder / "00-MLP-stages" / "index.html").read_text()
    sections = dict(re.findall(r"<section><h3>(.*?)</h3>(.*?)</section>", page, re.S))
    assert list(sections) == [
        name.replace("-", " ") for name in passes_in(folder / "00-MLP-stages")
    ]
    assert "The text is the same." in sections["08 random"]
    assert html.escape(summary(Random)) in sections["08 random"]
    cut = sections["09 partition"]
    assert re.search('class="added">.*# stage 0</span>', cut)
    assert "val at" in sections["01 alias"] and "cost at" in sections["06 cost"]
    for link in re.findall('href="([^"]+)"', page):
        assert (folder / "00-MLP-stages" / link).exists()


def test_pages_need_no_network_and_have_a_dark_side(dumped):
    _, folder = dumped
    for page in folder.rglob("index.html"):
        text = page.read_text()
        assert "http" not in text and "<script" not in text
        assert "prefers-color-scheme: dark" in text
    links = re.findall('href="([^"]+)"', (folder / "index.html").read_text())
    assert links == [f"{chain}/index.html" for chain in chains(folder)]


def test_graphs_are_drawn_where_they_change_each_as_what_it_is(tmp_path):
    folder = tmp_path / "small"
    fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,), dump=folder).close()
    drawn = [path.stem for path in sorted((folder / "00-MLP-stages").glob("*.svg"))]
    assert "09-partition" in drawn and "08-random" not in drawn
    assert "<svg" in (folder / "00-MLP-stages" / "09-partition.svg").read_text()
    grid = (folder / "01-MLP-pipeline-of-2-micro-batches" / "04-copies.svg").read_text()
    assert "stage 1 · " in grid and grid.count(">mb 1<") == 2, "a row a stage"


def test_each_number_of_micro_batches_each_mode_and_each_step_has_its_own_folder(dumped):
    pipe, folder = dumped
    pipe(X[:1])
    pipe.eval()
    pipe(X)
    pipe(X)
    pipe.step(X, target=torch.zeros_like(pipe(X)))
    assert chains(folder)[2:] == [
        "02-MLP-pipeline-of-1-micro-batches",
        "03-MLP-stages",
        "04-MLP-pipeline-of-2-micro-batches",
        "05-MLP-step-of-2-micro-batches",
    ]
    steps = ["00-before", f"01-{Step.name}", "02-verify_step"]
    assert passes_in(folder / "05-MLP-step-of-2-micro-batches") == steps


def test_what_is_there_is_not_overwritten(tmp_path):
    for _ in range(2):
        fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,), dump=tmp_path).close()
    assert [name[:2] for name in chains(tmp_path)] == ["00", "01", "02", "03"]


def test_the_index_counts_beyond_a_hundred(tmp_path):
    for name in ("99-MLP-stages", "notes"):
        (tmp_path / name).mkdir()
    fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,), dump=tmp_path).close()
    fxpipe.compile(MLP(), TWO, chunks=2, example_inputs=(X,), dump=tmp_path).close()
    page = (tmp_path / "index.html").read_text()
    assert re.findall(r'href="(\d+)-', page) == ["99", "100", "101", "102", "103"]


def test_a_pass_that_fails_is_shown_with_its_error(tmp_path):
    class Broken:
        """Fails. Always."""

        name = "own/broken"

        def __call__(self, gm):
            raise ValueError("no <good>")

    chain = default_chain().before("microbatch", Broken())
    with pytest.raises(ValueError, match="no <good>"):
        fxpipe.compile(MLP(), TWO, example_inputs=(X,), passes=chain, dump=tmp_path)
    page = (tmp_path / "01-MLP-pipeline-of-6-micro-batches" / "index.html").read_text()
    assert "own/broken" in page and "ValueError: no &lt;good&gt;" in page


def test_the_environment_asks_for_it_and_the_argument_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPIPE_DUMP", str(tmp_path / "environment"))
    fxpipe.compile(MLP(), TWO, example_inputs=(X,)).close()
    assert chains(tmp_path / "environment")
    fxpipe.compile(MLP(), TWO, example_inputs=(X,), dump=tmp_path / "argument").close()
    assert len(chains(tmp_path / "environment")) == 2
    assert len(chains(tmp_path / "argument")) == 2


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"dump is .*file': give a folder"):
        fxpipe.compile(MLP(), TWO, dump=tmp_path / "file")


def test_a_diff_marks_lines_and_escapes_them():
    diff = diff_html("a\nb < c\n", "a\nb > c\n")
    assert '<span class="removed">-b &lt; c</span>' in diff
    assert '<span class="added">+b &gt; c</span>' in diff
    assert '<span class="kept"> a</span>' in diff
    assert "lines: 1 added, 1 removed" in diff


def test_a_summary_is_the_first_sentence():
    def documented():
        """Takes a :class:`Cost` and
        ``splits`` it. More is said here.

        And here.
        """

    assert summary(documented) == "Takes a Cost and splits it."
    assert summary(lambda: None) == ""
