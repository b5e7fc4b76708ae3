"""The dump of a compilation: the graph before the passes and after each of them, in a folder.

::

    dump/
      index.html                    the chains of passes that have run, in order
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
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from torch import fx

from fxpipe.compiler.history import (
    BEGIN,
    KEPT,
    History,
    Snapshot,
    about,
    name_of,
    parts,
)
from fxpipe.inspect.draw import NoLayout, draw_graph, render_svg
from fxpipe.inspect.html import page_html
from fxpipe.ir.printing import format_code
from passes import Pass

CONTEXT = 2  # so many unchanged lines are shown before and after a change


@dataclass(frozen=True)
class Dump:
    """The folder for dumps, which ``compile(dump=...)`` or the variable ``FXPIPE_DUMP`` names.

    Each chain of passes gets a new numbered folder within it, so that no dump is overwritten; only
    the index is written again.

    Raises ValueError if the folder cannot be made.
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
        """Make a folder for a chain of passes that begins with this graph; returns the function
        that runs these passes and writes to the folder."""
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
            except FileExistsError:  # another process made it just now: take the next number
                continue
        return folder


class Trail:
    """Runs the passes of one chain, and writes the graph after each pass to a folder."""

    def __init__(self, folder: Path, title: str, gm: fx.GraphModule) -> None:
        self._folder, self._title = folder, title
        self._sections: list[str] = []
        self._last: Snapshot | None = None
        self._record(gm, "before", BEGIN)

    def __call__(self, rewrite: Pass, gm: fx.GraphModule) -> fx.GraphModule:
        """Run a pass, and write the graph that it returns. If it raises an error, that is written,
        and raised again."""
        begin = time.perf_counter()
        try:
            gm = rewrite(gm)
        except Exception as error:
            said = html.escape(f"{type(error).__name__}: {error}")
            name = f"{len(self._sections):02} {name_of(rewrite)}"
            about_it = about(rewrite, time.perf_counter() - begin)
            self._add(_section(name, about_it, f'<pre class="failed">{said}</pre>'))
            raise
        self._record(gm, name_of(rewrite), about(rewrite, time.perf_counter() - begin))
        return gm

    def _record(self, gm: fx.GraphModule, name: str, said: str) -> None:
        number, now = len(self._sections), Snapshot.of(gm, name, said)
        links = self._links(number, now, gm)
        self._add(change_html(number, self._last, now, links=links, is_open=True))
        self._last = now

    def _links(self, number: int, now: Snapshot, gm: fx.GraphModule) -> str:
        """Write the graph in full, as text, code and drawing. Returns HTML links to these files.
        A graph whose text the pass has not changed is not drawn again."""
        stem = f"{number:02}-{_file_name(now.name)}"
        files = {f"{stem}.txt": now.text, f"{stem}.py": whole_code(gm)}
        if self._last is None or now.text != self._last.text:
            files |= _drawing(f"{stem}.svg", gm)
        for file, content in files.items():
            (self._folder / file).write_text(content, encoding="utf-8")
        return " ".join(f'<a href="{file}">{file}</a>' for file in files)

    def _add(self, section: str) -> None:
        self._sections.append(section)
        up = '<p><a href="../index.html">all</a></p>'
        page = page_html(self._title, up + "".join(self._sections))
        (self._folder / "index.html").write_text(page, encoding="utf-8")


def _file_name(words: str) -> str:
    return re.sub(r"[^0-9A-Za-z_]+", "-", words)


def _number(chain: Path) -> int:
    return int(chain.name.partition("-")[0])


# --------------------------------------------------------------------------------- files of a graph


def whole_code(gm: fx.GraphModule) -> str:
    """The generated Python of a graph, and of the graphs that it calls."""
    return "\n\n".join(
        f"# {path}:\n{format_code(part)}" if path else format_code(part) for path, part in parts(gm)
    )


def _drawing(file: str, gm: fx.GraphModule) -> dict[str, str]:
    try:
        return {file: render_svg(draw_graph(gm))}
    except NoLayout:  # without Graphviz there is no drawing, but the text says the same
        return {}


# --------------------------------------------------------------------------------------- the pages


def history_html(history: History) -> str:
    """The sections of a page that say what each pass of a chain has changed."""
    if not history.snapshots:
        return (
            f"<p>The graphs are not kept, since one has more than {KEPT} nodes, "
            "with those of the graphs that it calls: compile with "
            "dump= to see them.</p>"
        )
    pairs = zip([None, *history.snapshots], history.snapshots, strict=False)
    return "".join(change_html(number, *pair) for number, pair in enumerate(pairs))


def change_html(
    number: int, before: Snapshot | None, now: Snapshot, *, links: str = "", is_open: bool = False
) -> str:
    """A section of a page that shows what a pass has changed.

    ``before``: the graph before the pass; None for the first graph, which no pass has made.
    ``links``: HTML links to files of the graph. ``is_open``: whether the changed lines are unfolded
    when the page opens.
    """
    body = f"<p>{links} <span>{now.nodes} nodes</span></p>"
    if before is not None:
        body += _metadata_html(before.metadata, now.metadata)
        body += diff_html(before.text, now.text, is_open)
    return _section(f"{number:02} {now.name}", now.about, body)


def _section(title: str, said: str, body: str) -> str:
    return f"<section><h3>{html.escape(title)}</h3><p>{html.escape(said)}</p>{body}</section>"


def diff_html(before: str, after: str, is_open: bool = True) -> str:
    """The lines that differ between two texts, with some lines around them, as HTML."""
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
    """The dump that the argument ``dump=``, or else the variable ``FXPIPE_DUMP``, asks for; None if
    neither is set."""
    if given is not None and not isinstance(given, str | os.PathLike):
        raise TypeError(f"dump is {given!r}: give the path of a folder")
    folder = os.environ.get("FXPIPE_DUMP") if given is None else os.fspath(given)
    return Dump(Path(folder)) if folder else None
