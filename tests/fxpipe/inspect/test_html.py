from fxpipe.inspect.html import (
    Section,
    drawing_html,
    list_html,
    page_html,
    sections_html,
    table_html,
)
from tests.fxpipe.inspect.parsed import Page


def test_what_is_text_does_not_become_html():
    page = Page(page_html("a < b & <b>c</b>", "<p>body</p>"))
    assert page.texts["title"] == page.texts["h1"] == ["a < b & <b>c</b>"]
    assert page.texts["p"] == ["body"]
    assert "script" not in page.texts


def test_tables_say_what_each_cell_is_sorted_by():
    page = Page(table_html(["a", "b"], [[(1500, "1.5 KiB"), ("x<y", "x<y")]]))
    assert page.texts["button"] == ["a", "b"] and page.texts["td"] == ["1.5 KiB", "x<y"]
    assert page.attributes("td", "data-value") == ["1500", "x<y"]


def test_each_cell_of_a_narrow_screen_says_its_column_and_a_row_what_it_is_about():
    rows = [[(0, "0"), ("a, b", "a, b")], [(1, "1"), ("c", "c")]]
    page = Page(table_html(["n", "has"], rows, words="has", about=["stage-0", ""]))
    assert page.attributes("td", "data-column") == ["n", "has"] * 2
    assert page.attributes("td", "class") == page.attributes("th", "class") * 2 == ["words"] * 2
    assert page.attributes("tr", "class") == ["stage-0"]


def test_the_line_of_a_long_path_is_broken_behind_its_dots():
    path = "encoder.layer.0.attention.output"
    page = table_html(["has"], [[(path, f"{path}, down.2")]], words="has")
    assert ">encoder.<wbr>layer.<wbr>0.<wbr>attention.<wbr>output, down.2</td>" in page


def test_a_drawing_becomes_smaller_only_as_long_as_it_can_be_read():
    head = '<?xml version="1.0"?>\n<!-- drawn -->\n'
    svg = head + '<svg width="75pt" height="30pt" xmlns="http://w3"><g id="node1"/></svg>'
    assert drawing_html("a & b", svg).endswith(
        '<div class="drawing"><svg role="img" aria-label="a &amp; b" '
        'style="width: clamp(70px, 100%, 100px)" width="75pt" height="30pt"><g/></svg></div>'
    )


def test_a_page_links_to_its_sections():
    sections = [Section("What runs", list_html(["a", "b & c"])), Section("Code", "")]
    page = Page(sections_html("t", sections))
    assert page.attributes("a", "href") == ["#what-runs", "#code"]
    assert page.attributes("section", "id") == ["what-runs", "code"]
    assert page.texts["li"] == ["a", "b & c"]
