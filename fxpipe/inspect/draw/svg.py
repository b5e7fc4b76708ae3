"""The layout of Graphviz source as SVG, by a program that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from typing import Any

import graphviz  # type: ignore[import-untyped]


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
    """Lay out a drawing as SVG, by Graphviz's ``dot`` if it is installed, else by
    ``graphviz-pure``.

    Raises :class:`NoLayout`, a RuntimeError, if neither is installed, or if the layout fails.
    """
    program = _program()
    command = [program, f"-K{source.engine}", "-Tsvg"]
    done = subprocess.run(command, input=source.source, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise NoLayout(f"{program} could not lay out the drawing: {done.stderr.strip()}")
    svg: str = done.stdout
    return svg


def _program() -> str:
    # The wheel graphviz-pure installs its program beside Python's scripts, a folder that is not on
    # PATH unless the environment is activated.
    beside = sysconfig.get_path("scripts")
    program = (
        shutil.which("dot")
        or shutil.which("graphviz-pure")
        or shutil.which("graphviz-pure", path=beside)
    )
    if program is None:
        raise NoLayout(
            "drawings need a program that lays them out: install Graphviz, or "
            "`pip install graphviz-pure`"
        )
    return program
