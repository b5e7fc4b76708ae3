"""HTML for the report and the dump: pages that are single files, need no network, and adapt to
light and dark screens, wide and narrow ones.

What a drawing or a table shows of a stage, a micro-batch or a skip has a class that says so, such
as ``stage-1``, ``mb-0`` and ``skip-relu``, or, in a drawing of Graphviz's, a title. Where a reader
points at one of them, it lights up everywhere on the page."""

from __future__ import annotations

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
h1 { overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.4; }
.diff span { display: block; width: max-content; min-width: 100%; }
.added { background: var(--added); }
.removed { background: var(--removed); }
.place, .same, p span { color: var(--quiet); }
.failed { border-left: 4px solid #d55e00; padding-left: 1em; white-space: pre-wrap; }
.table, .drawing { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 0.2em 0.6em; text-align: right; border-bottom: 1px solid var(--quiet); }
td { white-space: nowrap; }
td.words, th.words { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th.words { min-width: 9em; }
th button { all: unset; cursor: pointer; font-weight: bold; }
th button:focus-visible { outline: 2px solid; }
@media (max-width: 50em) {
  .table thead { display: none; }
  .table table, .table tbody, .table tr { display: block; }
  .table tr { padding: 0.4em 0; border-bottom: 1px solid var(--quiet); }
  .table td, .table td.words { display: flex; justify-content: space-between; gap: 1em; }
  .table td, .table td.words { align-items: baseline; border: 0; padding: 0; text-align: right; }
  .table td::before { content: attr(data-column); color: var(--quiet); flex: none; }
}
.drawing svg { background: white; display: block; height: auto; }
@media (prefers-color-scheme: dark) {
  .drawing svg { filter: invert(0.88) hue-rotate(180deg); }
}
.lit .about:not(.on) { opacity: 0.25; }
tr.on { background: var(--added); }
.copy { float: right; }
nav a { margin-right: 1em; }
label { color: var(--quiet); }
input[type=range] { vertical-align: middle; width: 16em; }
section { margin-bottom: 1.5em; }
summary { cursor: pointer; }
"""

# The script sorts tables, zooms drawings, copies code, and lights up what the reader points at: the
# page can be read without it.
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
  const drawing = zoom.closest("section").querySelector(".drawing svg"), box = drawing.parentNode;
  const usual = drawing.style.width;
  zoom.addEventListener("input", () => {
    const middle = (box.scrollLeft + box.clientWidth / 2) / box.scrollWidth;
    drawing.style.width = `calc(${zoom.value} * ${usual})`;
    box.scrollLeft = middle * box.scrollWidth - box.clientWidth / 2;
  });
});
document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", (event) => {
  event.preventDefault();
  const text = button.closest("details").querySelector("pre");
  getSelection().selectAllChildren(text);
  document.execCommand("copy");
  getSelection().removeAllRanges();
  button.textContent = "copied";
  setTimeout(() => button.textContent = "copy", 2000);
}));
const keys = (element) => {
  const title = element.querySelector(":scope > title"), said = title ? title.textContent : "";
  const cell = said.match(/^(?:mb (\\d+) )?(?:cluster_)?stage[ _](\\d+)$/);
  const found = [...element.classList].filter((name) => /^(skip|mb|stage)-/.test(name));
  return cell ? [...(cell[1] ? [`mb-${cell[1]}`] : []), `stage-${cell[2]}`, ...found] : found;
};
const about = new Map();
document.querySelectorAll(".drawing g, .drawing text[class], tr[class]").forEach((element) => {
  const own = keys(element);
  if (own.length) about.set(element, own) && element.classList.add("about");
});
const light = (key) => {
  document.body.classList.toggle("lit", key !== undefined);
  about.forEach((own, element) => element.classList.toggle("on", own.includes(key)));
};
about.forEach((own, element) => {
  const kinds = ["skip-", "mb-", "stage-"];
  const first = kinds.flatMap((kind) => own.filter((key) => key.startsWith(kind)))[0];
  element.addEventListener("pointerenter", () => light(first));
  element.addEventListener("pointerleave", () => light(undefined));
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


def table_html(
    columns: Sequence[str],
    rows: Iterable[Row],
    *,
    words: str = "",
    about: Sequence[str] = (),
) -> str:
    """A table; a click on the head of a column sorts by it. On a narrow screen each row is a block
    with a line for each cell.

    Args:
        words: the column that has text of any length, whose lines may be broken: behind the dots
            of a long path, and elsewhere only where a part of it is longer than the line.
        about: what each row is about, such as "stage-1".
    """

    def cell(tag: str, column: str, more: str, text: str) -> str:
        kind = ' class="words"' if column == words else ""
        return f"<{tag}{kind}{more}>{text}</{tag}>"

    head = "".join(
        cell("th", column, "", f'<button type="button">{column}</button>') for column in columns
    )
    written = ""
    for number, row in enumerate(rows):
        cells = "".join(
            cell(
                "td",
                column,
                f' data-column="{column}" data-value="{html.escape(str(value))}"',
                _breakable(html.escape(text)) if column == words else html.escape(text),
            )
            for column, (value, text) in zip(columns, row, strict=True)
        )
        named = f' class="{html.escape(about[number])}"' if about and about[number] else ""
        written += f"<tr{named}>{cells}</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{written}</tbody></table>"
    return f'<div class="table">{table}</div>'


def _breakable(text: str) -> str:
    """Text in HTML of which long words may be broken behind their dots."""
    words = (w.replace(".", ".<wbr>") if len(w) > LONG else w for w in text.split(" "))
    return " ".join(words)


LONG = 24
"""The letters of a word above which it may be broken."""
LEAST = 0.7
"""The scale below which letters of a drawing cannot be read: a narrow screen shows a part of it."""


def drawing_html(name: str, svg: str) -> str:
    """A drawing with a slider that zooms it."""
    drawn = svg[svg.index("<svg") :]
    size, unit = re.search(r'width="([\d.]+)(pt)?"', drawn).groups()  # type: ignore[union-attr]
    width = float(size) * (4 / 3 if unit else 1)  # in pixels
    # Two drawings of a page may have the same ids. Within HTML no namespace is needed.
    drawn = re.sub(r' (id|xmlns|xmlns:xlink)="[^"]*"', "", drawn)
    style = f"width: clamp({LEAST * width:.0f}px, 100%, {width:.0f}px)"
    shown = f'<svg role="img" aria-label="{html.escape(name)}" style="{style}"'
    return (
        '<label>zoom <input type="range" min="0.25" max="8" step="0.25" value="1"></label>'
        f'<div class="drawing">{drawn.replace("<svg", shown, 1)}</div>'
    )


def text_html(summary: str, text: str) -> str:
    """A long text that is folded away below its summary until the reader opens it, with a button
    that copies it."""
    copy = '<button type="button" class="copy">copy</button>'
    return (
        f"<details><summary>{html.escape(summary)}</summary>{copy}"
        f"<pre>{html.escape(text)}</pre></details>"
    )
