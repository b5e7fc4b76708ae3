"""Before and after: what each pass of a compilation made of its graph, written to a folder.

::

    dump/
      index.html                    what has been compiled, in order
      00-UNet-stages/               a chain of passes: model graph to stage graph
        index.html                  what each pass changed
        00-traced.txt  .py  .svg    the graph as text, as code, and drawn
        01-alias.txt   ...
      01-UNet-pipeline-of-8/        stage graph to pipeline graph, for 8 micro-batches
"""

from __future__ import annotations

import difflib
import html
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch import fx

from fxpipe.inspect.draw import draw_graph, render_svg
from fxpipe.inspect.html import page_html
from fxpipe.ir.printing import format_code, format_graph
from fxpipe.ir.text import human_time, summary
from passes import Pass

CONTEXT = 2  # lines that are shown around a change


@dataclass(frozen=True)
class Dump:
    """Where to write, as ``compile(dump=...)`` or ``FXPIPE_DUMP`` say.

    Nothing there is overwritten but the index: what is compiled next gets the next number.
    """

    folder: Path

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"dump is {str(self.folder)!r}: give a folder that can be written to ({error})"
            ) from None

    def __call__(self, title: str, gm: fx.GraphModule) -> Trail:
        """A chain of passes begins with this graph."""
        trail = Trail(self._next(title), title, gm)
        _write_index(self.folder, [chain.name for chain in self._chains()])
        return trail

    def _chains(self) -> list[Path]:
        found = [path for path in self.folder.iterdir() if re.match(r"\d+-", path.name)]
        return sorted(found, key=lambda path: (_number(path), path.name))

    def _next(self, title: str) -> Path:
        taken = map(_number, self._chains())
        for number in count(1 + max(taken, default=-1)):
            folder = self.folder / f"{number:02}-{_file_name(title)}"
            try:
                folder.mkdir()
                break
            except FileExistsError:  # made by another process just now
                continue
        return folder


class Changes:
    """Runs passes, one after the other, and tells what each changed: ``sections``, in HTML."""

    is_open = False  # whether the changes are shown at once

    def __init__(self, gm: fx.GraphModule) -> None:
        self.sections: list[str] = []
        self._number = 0
        self._text, self._meta = "", Counter[str]()
        self._record("before", gm, "What the passes begin with.")

    def __call__(self, rewrite: Pass, gm: fx.GraphModule) -> fx.GraphModule:
        name, about = _name(rewrite), summary(type(rewrite))
        begin = time.perf_counter()
        try:
            gm = rewrite(gm)
        except Exception as error:
            said = html.escape(f"{type(error).__name__}: {error}")
            self._add(f"{self._number:02} {name}", about, f'<pre class="failed">{said}</pre>')
            raise
        seconds = time.perf_counter() - begin
        self._record(name, gm, f"{about} Took {human_time(seconds)}.")
        return gm

    def _record(self, name: str, gm: fx.GraphModule, about: str) -> None:
        text, meta = whole_text(gm), _metadata(gm)
        body = [f"<p>{self._links(name, gm, text)} <span>{len(gm.graph.nodes)} nodes</span></p>"]
        if self._number:
            changes = diff_html(self._text, text, self.is_open)
            body += [_metadata_html(self._meta, meta), changes]
        self._add(f"{self._number:02} {name}", about, "".join(body))
        self._text, self._meta = text, meta
        self._number += 1

    def _links(self, name: str, gm: fx.GraphModule, text: str) -> str:
        """To what else there is of it."""
        return ""

    def _add(self, title: str, about: str, body: str) -> None:
        self.sections.append(
            f"<section><h3>{html.escape(title)}</h3><p>{html.escape(about)}</p>{body}</section>"
        )


class Trail(Changes):
    """Changes that are written to a folder, with all graphs in full."""

    is_open = True

    def __init__(self, folder: Path, title: str, gm: fx.GraphModule) -> None:
        self._folder, self._title = folder, title
        super().__init__(gm)

    def _links(self, name: str, gm: fx.GraphModule, text: str) -> str:
        stem = f"{self._number:02}-{_file_name(name)}"
        files = {f"{stem}.txt": text, f"{stem}.py": whole_code(gm)}
        if self._number == 0 or text != self._text:
            files |= _drawing(f"{stem}.svg", gm)
        for file, content in files.items():
            (self._folder / file).write_text(content, encoding="utf-8")
        return " ".join(f'<a href="{file}">{file}</a>' for file in files)

    def _add(self, title: str, about: str, body: str) -> None:
        super()._add(title, about, body)
        up = '<p><a href="../index.html">all</a></p>'
        page = page_html(self._title, up + "".join(self.sections))
        (self._folder / "index.html").write_text(page, encoding="utf-8")


class Story:
    """All chains of passes of a compilation, kept as HTML."""

    def __init__(self) -> None:
        self.chains: dict[str, Changes] = {}

    def __call__(self, title: str, gm: fx.GraphModule) -> Changes:
        """A chain of passes begins with this graph."""
        self.chains[title] = Changes(gm)
        return self.chains[title]


def _file_name(words: str) -> str:
    return re.sub(r"[^0-9A-Za-z_]+", "-", words)


def _number(chain: Path) -> int:
    return int(chain.name.partition("-")[0])


def _name(rewrite: Pass) -> str:
    return str(getattr(rewrite, "name", type(rewrite).__name__))


# -------------------------------------------------------------------------------- a graph, written


def whole_text(gm: fx.GraphModule) -> str:
    """:func:`fxpipe.ir.printing.format_graph` of a graph and of those that it calls, each once."""
    return "\n".join(f"{head}{format_graph(part)}" for head, part in _parts(gm))


def whole_code(gm: fx.GraphModule) -> str:
    """The generated Python of a graph, and of those that it calls."""
    return "\n\n".join(
        f"{f'# {head}' if head else ''}{format_code(part)}" for head, part in _parts(gm)
    )


def _parts(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    for path, part in gm.named_modules():
        if isinstance(part, fx.GraphModule):
            yield f"{path}:\n" if path else "", part


def _drawing(file: str, gm: fx.GraphModule) -> dict[str, str]:
    try:
        return {file: render_svg(draw_graph(gm))}
    except RuntimeError:  # no Graphviz here: the text says the same
        return {}


def _metadata(gm: fx.GraphModule) -> Counter[str]:
    """How many nodes have which metadata."""
    return Counter(
        key
        for _, part in _parts(gm)
        for node in part.graph.nodes
        for key, value in node.meta.items()
        if value is not None
    )


# --------------------------------------------------------------------------------------- the pages


def diff_html(before: str, after: str, is_open: bool = True) -> str:
    """What is in one text and not in the other, as HTML."""
    lines = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=CONTEXT)
    )[2:]
    if not lines:
        return '<p class="same">The text is the same.</p>'
    kinds = {"+": "added", "-": "removed", "@": "place"}
    counts = Counter(line[0] for line in lines)
    shown = "".join(
        f'<span class="{kinds.get(line[0], "kept")}">{html.escape(line)}</span>' for line in lines
    )
    said = f"lines: {counts['+']} added, {counts['-']} removed"
    opened = " open" if is_open else ""
    return f'<details{opened}><summary>{said}</summary><pre class="diff">{shown}</pre></details>'


def _metadata_html(before: Counter[str], after: Counter[str]) -> str:
    changes = [
        f"{html.escape(key)} at {after[key]} nodes (before: {before[key]})"
        for key in sorted({*before, *after})
        if before[key] != after[key]
    ]
    return f"<p>Metadata: {', '.join(changes)}.</p>" if changes else ""


def _write_index(folder: Path, chains: list[str]) -> None:
    rows = "".join(
        f'<li><a href="{html.escape(name)}/index.html">{html.escape(name)}</a></li>'
        for name in chains
    )
    page = page_html("What has been compiled", f"<ul>{rows}</ul>")
    (folder / "index.html").write_text(page, encoding="utf-8")


def dump_of(given: str | os.PathLike[str] | None) -> Dump | None:
    """What is asked for, by an argument or else by ``FXPIPE_DUMP``; None if nothing is."""
    folder = os.environ.get("FXPIPE_DUMP") if given is None else os.fspath(given)
    return Dump(Path(folder)) if folder else None
