"""The layout of Graphviz source as SVG, by a program that is installed."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from typing import Any

import graphviz  # type: ignore[import-untyped]

from fxpipe.schedule.gantt import IN_THE_DARK


class NoLayout(RuntimeError):
    """A drawing cannot be laid out: no program for that is installed, or the program fails."""


class Drawing(graphviz.Source):  # type: ignore[misc]
    """Graphviz source that notebooks show as :func:`render_svg` lays it out."""

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, str]:
        # The method of the base class would show a traceback if ``dot`` is not installed.
        try:
            return {"image/svg+xml": render_svg(self)}
        except NoLayout as error:
            return {"text/plain": str(error)}


def render_svg(source: graphviz.Source) -> str:
    """Lay out a drawing as SVG, by Graphviz's ``dot`` if it is on PATH, else by the same program of
    the package ``graphviz-pure``, which is installed with fxpipe.

    Raises :class:`NoLayout`, a RuntimeError, if there is neither, or if the layout fails.
    """
    program = _program()
    command = [program, f"-K{source.engine}", "-Tsvg"]
    done = subprocess.run(command, input=source.source, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise NoLayout(f"{program} could not lay out the drawing: {done.stderr.strip()}")
    svg: str = done.stdout
    head, begin, body = svg.partition("<svg")
    tag, end, rest = body.partition(">")
    return head + begin + tag + end + IN_THE_DARK + rest


def _program() -> str:
    program = shutil.which("dot") or shutil.which("graphviz-pure") or _installed_by_pip()
    if program is None:
        raise NoLayout(
            "drawings need a program that lays them out: install Graphviz, or "
            "`pip install graphviz-pure`"
        )
    return program


def _installed_by_pip() -> str | None:
    """The program of the package ``graphviz-pure``. pip installs it beside Python's scripts, in a
    folder that is on PATH only if the environment is activated."""
    try:
        files = metadata.files("graphviz-pure") or []
    except metadata.PackageNotFoundError:
        return None
    programs = (str(file.locate()) for file in files if file.stem == "graphviz-pure")
    return next((program for program in programs if shutil.which(program)), None)
