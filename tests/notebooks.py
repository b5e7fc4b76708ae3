"""Runs the notebooks, and compares what they show with the outputs that are stored in them.

``python -m tests.notebooks`` runs all of them, and stores what they show now; with names behind it,
such as ``07-diffusion``, only these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import click
import nbclient
import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

VARIES = "varies"
"""The tag of cells whose output differs from run to run: something measured, or trained."""

NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
CLOSE = {"rel_tol": 0.05, "abs_tol": 1e-3}  # for numbers, which other processors round otherwise


def read(path: Path) -> NotebookNode:
    """A notebook with its stored outputs."""
    return nbformat.read(path, as_version=4)


def run(path: Path) -> NotebookNode:
    """A notebook with the outputs of a run that is made now."""
    notebook = read(path)
    nbclient.NotebookClient(
        notebook,
        timeout=300,
        coalesce_streams=True,  # text printed in several pieces is one output
        record_timing=False,
        resources={"metadata": {"path": ROOT}},
    ).execute()
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [each for each in cell.outputs if not says_that_it_waits(each)]
    return notebook


def says_that_it_waits(output: NotebookNode) -> bool:
    """Whether an output is only the line that a compilation takes long, as on a busy machine."""
    return output.get("name") == "stderr" and all(
        "verbose=True logs how long each phase takes" in line for line in output.text.splitlines()
    )


def differences(kept: NotebookNode, now: NotebookNode) -> Iterator[str]:
    """A line for each difference that a reader of the two notebooks sees."""
    for number, (before, after) in enumerate(zip(kept.cells, now.cells, strict=True)):
        texts = _texts(before), _texts(after)
        if VARIES in before.metadata.get("tags", []):
            texts = tuple([(kind, "") for kind, _ in shown] for shown in texts)
        for one, other in zip_longest(*texts, fillvalue=("nothing", "")):
            if not is_same(" ".join(one), " ".join(other)):
                yield f"cell {number} shows {other}; stored in it is {one}"


def is_same(one: str, other: str) -> bool:
    """Whether two texts have the same words, and nearly the same numbers."""
    parts = [NUMBER.split(" ".join(text.split())) for text in (one, other)]
    return len(parts[0]) == len(parts[1]) and all(
        math.isclose(float(a), float(b), **CLOSE) if NUMBER.fullmatch(a) else a == b
        for a, b in zip(*parts, strict=True)
    )


def _texts(cell: NotebookNode) -> list[tuple[str, str]]:
    """The kind and the readable text of each output of a cell."""
    found = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            found.append((output.name, output.text))
        elif output.output_type == "error":
            found.append(("error", f"{output.ename}: {output.evalue}"))
        else:
            for kind, content in sorted(output.data.items()):
                is_drawn = "svg" in kind
                words = re.findall(r"<text[^>]*>([^<]*)<", content) if is_drawn else [content]
                found.append((kind, " ".join(words)))
    return found


@click.command()
@click.argument("names", nargs=-1, type=click.Choice([path.stem for path in NOTEBOOKS]))
def main(names: tuple[str, ...]) -> None:
    """Run notebooks, all or those with some NAMES, and store what they show."""
    for path in NOTEBOOKS:
        if names and path.stem not in names:
            continue
        kept, now = read(path), run(path)
        for line in differences(kept, now):
            print(f"{path.name}: {line[:300]}")
        nbformat.write(now, path)


if __name__ == "__main__":
    main()
