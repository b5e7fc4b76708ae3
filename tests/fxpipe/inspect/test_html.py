from fxpipe.inspect.html import Section, list_html, page_html, sections_html, table_html
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


def test_a_page_links_to_its_sections():
    sections = [Section("What runs", list_html(["a", "b & c"])), Section("Code", "")]
    page = Page(sections_html("t", sections))
    assert page.attributes("a", "href") == ["#what-runs", "#code"]
    assert page.attributes("section", "id") == ["what-runs", "code"]
    assert page.texts["li"] == ["a", "b & c"]
