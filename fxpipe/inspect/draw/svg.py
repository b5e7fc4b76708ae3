"""The layout of Graphviz source as SVG, by a program that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import graphviz  # type: ignore[import-untyped]

from fxpipe.schedule.gantt import IN_THE_DARK


class NoLayout(RuntimeError):
    """A drawing cannot be laid out: no program for that is installed, or the program fails."""


class Drawing(graphviz.Source):  # type: ignore[misc]
    """Graphviz source that notebooks show as :func:`render_svg` lays it out. Files of it, and what
    ``pipe`` returns, are laid out by the same program, which need not be ``dot``."""

    def __init__(self, source: str, *args: Any, format: str = "svg", **more: Any) -> None:
        super().__init__(source, *args, format=format, **more)

    def pipe(
        self,
        format: str | None = None,
        renderer: str | None = None,
        formatter: str | None = None,
        neato_no_op: bool | int | None = None,
        quiet: bool = False,
        *,
        engine: str | None = None,
        encoding: str | None = None,
    ) -> bytes | str:
        """What the layout program makes of the drawing; the arguments are those of the base class.

        Raises :class:`NoLayout`, a RuntimeError, where no program is installed, or where it does
        not make this format: ``graphviz-pure`` makes SVG and PNG, and no PDF.
        """
        kind = ":".join(filter(None, (format or self.format, renderer, formatter)))
        options = [] if neato_no_op is None else [f"-n{int(neato_no_op)}"]
        made = _laid_out(self.source, kind, engine or self.engine, *options)
        if kind == "svg":
            made = _shown_in_the_dark(made.decode()).encode()
        return made if encoding is None else made.decode(encoding)

    def render(
        self,
        filename: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        view: bool = False,
        cleanup: bool = False,
        format: str | None = None,
        *args: Any,
        quiet_view: bool = False,
        outfile: str | os.PathLike[str] | None = None,
        raise_if_result_exists: bool = False,
        overwrite_source: bool = False,
        **options: Any,
    ) -> str:
        """Write the drawing to a file, and its source beside it; the arguments are those of the
        base class. Returns the path of the file. No file is written where :meth:`pipe` raises."""
        if outfile is not None:
            if directory is None:
                outfile = Path(self.directory, outfile)
            outfile = Path(outfile)
            format = format or outfile.suffix.removeprefix(".") or None
            filename = outfile.with_suffix(".gv") if filename is None else filename
        made = self.pipe(format, *args, **options)
        source = Path(filename or self.filename)
        source = Path(self.directory if directory is None else directory, source)
        named = dict(zip(("renderer", "formatter"), args, strict=False)) | options
        parts = named.get("formatter"), named.get("renderer"), format or self.format
        path = outfile or Path(f"{source}.{'.'.join(filter(None, parts))}")
        if raise_if_result_exists and path.exists():
            raise graphviz.FileExistsError(f"output file exists: {str(path)!r}")
        if path == source and not overwrite_source:
            raise ValueError(f"outfile {str(path)!r} is the file of the source")
        self.save(filename, directory, skip_existing=None)
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
        if cleanup and path != source:
            source.unlink()
        if view or quiet_view:
            graphviz.view(path, quiet=quiet_view)
        return str(path)

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, str]:
        # The method of the base class would show a traceback if no program is installed.
        try:
            return {"image/svg+xml": render_svg(self)}
        except NoLayout as error:
            return {"text/plain": str(error)}


def render_svg(source: graphviz.Source) -> str:
    """Lay out a drawing as SVG, by Graphviz's ``dot`` if it is on PATH, else by the same program of
    the package ``graphviz-pure``, which is installed with fxpipe.

    Raises :class:`NoLayout`, a RuntimeError, if there is neither, or if the layout fails.
    """
    return _shown_in_the_dark(_laid_out(source.source, "svg", source.engine).decode())


def _laid_out(source: str, kind: str, engine: str, *options: str) -> bytes:
    """What the program makes of Graphviz source, in the format ``kind``."""
    program = _program()
    command = [program, f"-K{engine}", f"-T{kind}", *options]
    done = subprocess.run(command, input=source.encode(), capture_output=True)
    if done.returncode:
        raise NoLayout(
            f"{program} could not lay out the drawing: {done.stderr.decode().strip()}"
            + ("" if _has_dot() else "; Graphviz, if it is installed, makes more formats")
        )
    return done.stdout


def _shown_in_the_dark(svg: str) -> str:
    """The drawing with a style for dark screens."""
    head, begin, body = svg.partition("<svg")
    tag, end, rest = body.partition(">")
    return head + begin + tag + end + IN_THE_DARK + rest


def _has_dot() -> bool:
    return shutil.which("dot") is not None


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
