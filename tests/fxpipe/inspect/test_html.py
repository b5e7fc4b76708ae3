import base64
import re
from html.parser import HTMLParser

import pytest
import torch

import fxpipe
from fxpipe.inspect.html import page_html
from tests.zoo import Chain


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of cells and lists."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], {}
        self.feed(text)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def attributes(self, tag, name):
        return [attrs[name] for found, attrs in self.tags if found == tag and name in attrs]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "out.html"
    with fxpipe.compile(
        Chain(4, {0: (3,)}),
        ["cpu"] * 4,
        chunks=2,
        schedule="1f1b",
        example_inputs=(torch.ones(6, 3),),
    ) as pipe:
        pipe.report_html(path)
        yield pipe, path.read_text()


def test_the_page_has_all_that_the_report_says(written):
    pipe, text = written
    page = Page(text)
    assert page.texts["h1"] == ["Chain on 4 stages"]
    report = pipe.report()
    rows = [line for line in report.splitlines() if line.startswith("│")]
    cells = [cell.strip() for row in rows for cell in row.strip("│").split("│")]
    assert page.texts["td"] == cells
    assert page.texts["button"] == re.findall(r"\w+", report.splitlines()[2])
    assert all(line in report for line in page.texts["li"])
    assert any("skip a: stage 1 -> stage 3" in line for line in page.texts["li"])


def test_every_cell_has_what_its_column_is_sorted_by(written):
    _, text = written
    page = Page(text)
    values = page.attributes("td", "data-value")
    assert len(values) == len(page.texts["td"]) == 4 * 9
    parameters = values[5::9]
    assert parameters == ["48"] * 4, "9 + 3 floats"
    assert sum(float(share) for share in values[3::9]) == pytest.approx(1)


def test_it_has_the_stages_the_timeline_and_the_code(written):
    pipe, text = written
    page = Page(text)
    images = [
        base64.b64decode(source.partition(";base64,")[2]).decode()
        for source in page.attributes("img", "src")
    ]
    assert len(images) == len(page.attributes("img", "alt")) == 2
    assert "stage 3" in images[0] and images[1] == pipe.timeline().draw()
    codes = page.texts["pre"]
    assert "".join(codes).startswith(pipe.code)
    assert page.texts["summary"] == [
        "Pipeline, as code",
        *(f"Stage {i}, as code" for i in range(4)),
    ]


def test_it_needs_no_network_and_has_a_dark_side(written):
    _, text = written
    page = Page(text)
    assert page.attributes("a", "href") == page.attributes("link", "href") == []
    assert page.attributes("script", "src") == []
    assert all(source.startswith("data:") for source in page.attributes("img", "src"))
    assert "http" not in text and "prefers-color-scheme: dark" in text


def test_what_is_text_does_not_become_html():
    page = Page(page_html("a < b & <b>c</b>", "<p>body</p>"))
    assert page.texts["title"] == page.texts["h1"] == ["a < b & <b>c</b>"]
    assert page.texts["p"] == ["body"]
    assert "script" not in page.texts
