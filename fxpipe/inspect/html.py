"""HTML for the report and the dump: pages that are single files, need no network, and adapt to
light and dark screens."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_STYLE = """
:root { color-scheme: light dark; --added: #d7f0e4; --removed: #fbe0cf; --quiet: #666; }
@media (prefers-color-scheme: dark) {
  :root { --added: #0d4733; --removed: #5c2c0c; --quiet: #aaa; }
}
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.4; }
.diff span { display: block; width: max-content; min-width: 100%; }
.added { background: var(--added); }
.removed { background: var(--removed); }
.place, .same, p span { color: var(--quiet); }
.failed { border-left: 4px solid #d55e00; padding-left: 1em; white-space: pre-wrap; }
.table, .drawing { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid var(--quiet); }
th button { all: unset; cursor: pointer; font-weight: bold; }
th button:focus-visible { outline: 2px solid; }
.drawing img { background: white; display: block; max-width: 100%; }
@media (prefers-color-scheme: dark) {
  .drawing img { filter: invert(0.88) hue-rotate(180deg); }
}
nav a { margin-right: 1em; }
label { color: var(--quiet); }
input[type=range] { vertical-align: middle; width: 16em; }
section { margin-bottom: 1.5em; }
summary { cursor: pointer; }
"""

# The script only sorts tables and zooms drawings: the page can be read without it.
_SCRIPT = """
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const down = head.ariaSort === "ascending";
  for (const other of head.parentNode.children) other.ariaSort = null;
  head.ariaSort = down ? "descending" : "ascending";
  const key = (row) => row.cells[head.cellIndex].dataset.value;
  const order = (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
  const number = (a, b) => key(a) - key(b);
  const rows = [...body.rows], isNumber = rows.every((row) => key(row) !== "" && !isNaN(key(row)));
  rows.sort(isNumber ? number : order);
  body.append(...(down ? rows.reverse() : rows));
}));
document.querySelectorAll("input[type=range]").forEach((zoom) => {
  const image = zoom.closest("section").querySelector("img"), box = image.parentNode;
  const scale = () => {
    const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
    const whole = Math.min(image.naturalWidth, box.clientWidth);
    image.style.maxWidth = "none";
    image.style.width = whole * zoom.value + "px";
    box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
  };
  zoom.addEventListener("input", scale);
});
"""


def page_html(title: str, body: str, script: str = "") -> str:
    """A whole page. ``body`` (HTML) and ``script`` (JavaScript) are not escaped."""
    title = html.escape(title)
    code = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>{body}{code}</body></html>\n"
    )


@dataclass(frozen=True)
class Section:
    """A part of a page: its heading, and its HTML."""

    heading: str
    body: str

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")

    @property
    def html(self) -> str:
        return (
            f'<section id="{self.anchor}"><h2>{html.escape(self.heading)}</h2>{self.body}</section>'
        )


def sections_html(title: str, sections: Sequence[Section]) -> str:
    """A page of sections, with links to them at its top, and with the script that sorts tables and
    zooms drawings."""
    links = "".join(
        f'<a href="#{part.anchor}">{html.escape(part.heading)}</a> ' for part in sections
    )
    body = "\n".join([f"<nav>{links}</nav>", *(part.html for part in sections)])
    return page_html(title, body, _SCRIPT)


def list_html(lines: Iterable[str]) -> str:
    """A list with one item for each line of text."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>"


Row = Sequence[tuple[float | str, str]]
"""A row of a table. Each cell is a pair: the value by which its column is sorted, and its text."""


def table_html(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """A table; a click on the head of a column sorts by it."""
    head = "".join(f'<th><button type="button">{column}</button></th>' for column in columns)
    written = "".join(
        "<tr>{}</tr>".format(
            "".join(
                f'<td data-value="{html.escape(str(value))}">{html.escape(text)}</td>'
                for value, text in row
            )
        )
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{written}</tbody></table>"
    return f'<div class="table">{table}</div>'


def drawing_html(name: str, svg: str) -> str:
    """A drawing with a slider that zooms it."""
    # The SVG is embedded as an image, since ids that two inline SVGs have in common would clash.
    data = base64.b64encode(svg.encode()).decode()
    name = html.escape(name)
    return (
        '<label>zoom <input type="range" min="0.25" max="8" step="0.25" value="1"></label>'
        f'<div class="drawing"><img alt="{name}" src="data:image/svg+xml;base64,{data}"></div>'
    )


def text_html(summary: str, text: str) -> str:
    """A long text that is folded away below its summary until the reader opens it."""
    return (
        f"<details><summary>{html.escape(summary)}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
    )
