"""The page of a report, in a headless Chromium: what a reader sees and can do."""

import itertools
import shutil

import pytest
import torch

import fxpipe
from tests.zoo import UNet

webdriver = pytest.importorskip("selenium.webdriver")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(DRIVER is None, reason="no chromedriver: see .ci/run")

WIDTHS = [500, 1000, 1800]  # of the window
# In the order of the page: what has to be one below the other.
BLOCKS = "h1, nav, body > section > *"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "out.html"
    with fxpipe.compile(
        UNet(),
        ["cpu"] * 4,
        chunks=8,
        schedule="1f1b",
        example_inputs=(torch.randn(16, 3, 16, 16),),
    ) as pipe:
        pipe.report_html(path)
    return path


@pytest.fixture(scope="module")
def browser(page):
    options = webdriver.ChromeOptions()
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


@pytest.fixture
def opened(browser, page):
    browser.set_window_size(1400, 1000)
    browser.get(page.as_uri())
    return browser


def element(browser, selector):
    return browser.find_element("css selector", selector)


def boxes(browser, selector):
    """The bounding boxes of what can be seen: (left, top, right, bottom)."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.getBoundingClientRect())"
        ".filter(r => r.width && r.height).map(r => [r.left, r.top, r.right, r.bottom])",
        selector,
    )


def column(browser, section, number):
    cells = browser.find_elements("css selector", f"#{section} td:nth-child({number})")
    return [cell.get_attribute("data-value") for cell in cells]


def click(browser, section, head):
    buttons = browser.find_elements("css selector", f"#{section} th button")
    (button,) = [b for b in buttons if b.text == head]
    button.click()
    return 1 + buttons.index(button)


def test_it_opens_from_a_file_without_errors_and_asks_for_nothing_else(opened):
    assert opened.current_url.startswith("file://") and opened.title == "UNet on 4 stages"
    assert opened.get_log("browser") == []
    asked = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert opened.execute_script(asked) == []
    assert len(boxes(opened, ".drawing svg")) == 3


def test_tables_sort_down_and_up_by_a_click(opened):
    number = click(opened, "stages", "parameters")
    up = [float(value) for value in column(opened, "stages", number)]
    assert up == sorted(up) and len(set(up)) > 1
    click(opened, "stages", "parameters")
    assert [float(value) for value in column(opened, "stages", number)] == up[::-1]
    assert element(opened, f"#stages th:nth-child({number})").get_attribute("aria-sort") == (
        "descending"
    )
    number = click(opened, "values-sent", "value")
    names = column(opened, "values-sent", number)
    assert names == sorted(names) and len(names) > 4


@pytest.mark.parametrize("section", ["stage-graph", "pipeline-graph", "training-step-and-memory"])
def test_drawings_fit_and_zoom(opened, section):
    before = boxes(opened, f"#{section} .drawing svg")[0]
    frame = boxes(opened, f"#{section} .drawing")[0]
    assert before[2] <= frame[2] + 1, "all of it can be seen"
    opened.execute_script(
        "const zoom = document.querySelector(arguments[0]); zoom.value = 4;"
        "zoom.dispatchEvent(new Event('input'))",
        f"#{section} input",
    )
    after = boxes(opened, f"#{section} .drawing svg")[0]
    assert after[2] - after[0] == pytest.approx(4 * (before[2] - before[0]), rel=0.01)
    assert after[3] - after[1] == pytest.approx(4 * (before[3] - before[1]), rel=0.01)
    assert boxes(opened, f"#{section} .drawing")[0][2] == frame[2], "it scrolls in its frame"


LETTERS = """
return [...document.querySelectorAll(".drawing text")].map(
  (text) => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_letters_of_drawings_can_be_read(opened, width):
    opened.set_window_size(width, 1000)
    assert min(opened.execute_script(LETTERS)) >= 7, "pixels"


def test_on_a_narrow_screen_a_table_has_a_line_for_each_cell(opened):
    opened.set_window_size(500, 1000)
    frame, cells = boxes(opened, "#stages .table")[0], boxes(opened, "#stages td")
    assert all(cell[0] >= frame[0] - 1 and cell[2] <= frame[2] + 1 for cell in cells)
    assert all(below[1] >= above[3] - 1 for above, below in itertools.pairwise(cells))


def test_long_names_on_a_narrow_screen_are_broken_and_the_words_beside_them_are_not(opened):
    opened.set_window_size(500, 1000)
    heights = """
        document.querySelector("h1").textContent = "A".repeat(80);
        const cells = [...document.querySelectorAll("#stages tbody tr:first-child td")];
        cells.find((cell) => cell.classList.contains("words")).textContent = "layers.".repeat(30);
        return cells.map((cell) => getComputedStyle(cell, "::before").height);
    """
    assert len(set(opened.execute_script(heights))) == 1, "one line each"
    overflow = "const e = document.querySelector('h1'); return e.scrollWidth - e.clientWidth"
    assert opened.execute_script(overflow) <= 0


def point_at(browser, selector):
    browser.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new Event('pointerenter'))", selector
    )


def lit(browser, section):
    """The titles and texts of what is lit up in a section."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map("
        "(e) => (e.querySelector('title') || e).textContent)",
        f"#{section} .on",
    )


def test_what_a_reader_points_at_lights_up_in_all_pictures(opened):
    point_at(opened, "#stages tr.stage-1")
    assert len(lit(opened, "stages")) == 1
    assert lit(opened, "stage-graph") == ["stage 1"]
    rows = ["cluster_stage_1", *(f"mb {i} stage 1" for i in range(8))]
    assert lit(opened, "pipeline-graph") == rows
    assert len(lit(opened, "training-step-and-memory")) == 1 + 16
    point_at(opened, "#training-step-and-memory .mb-3")
    assert lit(opened, "pipeline-graph") == [f"mb 3 stage {i}" for i in range(4)]
    skips = "[class*=skip-]"
    point_at(opened, f"#values-sent {skips}")
    assert len(lit(opened, "stage-graph")) == 1 and len(lit(opened, "pipeline-graph")) == 8
    opened.execute_script(
        "document.querySelector(arguments[0]).dispatchEvent(new Event('pointerleave'))",
        f"#values-sent {skips}",
    )
    assert "lit" not in element(opened, "body").get_attribute("class")


def test_a_button_copies_the_code(opened):
    element(opened, "#code summary").click()
    opened.execute_script(
        "document.addEventListener('copy', () => window.copied = getSelection().toString())"
    )
    element(opened, "#code .copy").click()
    code = element(opened, "#code pre").text
    assert "def forward" in code
    assert opened.execute_script("return window.copied").strip() == code.strip()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps(opened, width):
    opened.set_window_size(width, 1000)
    for details in opened.find_elements("css selector", "#code > details"):
        details.find_element("css selector", "summary").click()
    found = boxes(opened, BLOCKS)
    assert len(found) > 20
    for above, below in itertools.pairwise(found):
        assert below[1] >= above[3] - 1 or below[0] >= above[2], (above, below)
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert opened.execute_script(overflow) <= 0


@pytest.mark.parametrize("name", ["Stage graph", "Pipeline graph", "timeline"])
def test_no_two_texts_of_a_drawing_overlap(opened, name):
    opened.execute_script(
        "document.body.replaceChildren("
        "document.querySelector(`svg[aria-label='${arguments[0]}']`))",
        name,
    )
    texts = boxes(opened, "svg text")
    assert len(texts) > 8
    for (left, top, right, bottom), (x, y, x2, y2) in itertools.combinations(texts, 2):
        shared = min(right, x2) - max(left, x), min(bottom, y2) - max(top, y)
        assert min(shared) <= 2, "lines of one text touch"


def test_links_lead_to_sections_and_passes_unfold(opened):
    element(opened, "nav a[href='#passes']").click()
    assert opened.current_url.endswith("#passes")
    assert not element(opened, "#passes h3").is_displayed()
    element(opened, "#passes summary").click()
    assert element(opened, "#passes h3").text == "00 before"


def test_dark_and_light_differ_and_both_can_be_read(opened):
    def shades(scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        # System colours are told by a canvas, of which each pixel is red, green, blue and alpha.
        return opened.execute_script(
            "const s = getComputedStyle(document.body), c = document.createElement('canvas');"
            "const shade = (colour) => { const p = c.getContext('2d'); p.fillStyle = colour;"
            "p.fillRect(0, 0, 1, 1); return p.getImageData(0, 0, 1, 1).data[1]; };"
            "return [shade(s.color), matchMedia('(prefers-color-scheme: dark)').matches,"
            "getComputedStyle(document.querySelector('.drawing svg')).filter]"
        )

    assert shades("light") == [0, False, "none"]
    text, is_dark, of_drawings = shades("dark")
    assert text == 255 and is_dark and of_drawings.startswith("invert")
