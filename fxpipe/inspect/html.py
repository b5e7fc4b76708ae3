"""Pages of HTML: single files that need no network, for light and dark screens."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping

from fxpipe.inspect.report import Report

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
.drawing img { background: white; display: block; }
"""

# Without it the page can be read as well: it only sorts and zooms.
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
  const image = zoom.closest("section").querySelector("img");
  const scale = () => { image.style.width = image.naturalWidth * zoom.value + "px"; };
  zoom.addEventListener("input", scale);
});
"""


def page_html(title: str, body: str, script: str = "") -> str:
    """A whole page; ``body`` and ``script`` are taken as they are."""
    title = html.escape(title)
    code = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{title}</h1>{body}{code}</body></html>\n"
    )


def report_html(
    title: str, report: Report, drawings: Mapping[str, str], texts: Mapping[str, str]
) -> str:
    """The report, drawings (SVG, by their headings) and texts (by theirs) as one page."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in report.lines)
    sections = [
        f"<section><ul>{lines}</ul>{table_html(report)}</section>",
        *(_drawing(heading, svg) for heading, svg in drawings.items()),
        *(_text(heading, text) for heading, text in texts.items()),
    ]
    return page_html(title, "\n".join(sections), _SCRIPT)


def table_html(report: Report) -> str:
    """The stages; a click on the head of a column sorts by it."""
    head = "".join(f'<th><button type="button">{column}</button></th>' for column in report.columns)
    rows = "".join(
        "<tr>{}</tr>".format(
            "".join(
                f'<td data-value="{html.escape(str(value))}">{html.escape(text)}</td>'
                for value, text in row
            )
        )
        for row in report.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="table">{table}</div>'


def _drawing(heading: str, svg: str) -> str:
    # As an image, so that two drawings that call something the same do not get mixed up.
    data = base64.b64encode(svg.encode()).decode()
    heading = html.escape(heading)
    return (
        f'<section><h2>{heading}</h2><label>zoom <input type="range" min="0.25" max="8" '
        f'step="0.25" value="1"></label><div class="drawing"><img alt="{heading}" '
        f'src="data:image/svg+xml;base64,{data}"></div></section>'
    )


def _text(heading: str, text: str) -> str:
    return (
        f"<section><details><summary>{html.escape(heading)}</summary>"
        f"<pre>{html.escape(text)}</pre></details></section>"
    )
