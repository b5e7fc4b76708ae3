"""Compiles the models of the zoo, and writes the table of the documentation, the README's line and
``tests/models/results.md``.

``python -m tests.models.table`` runs all models. Followed by names of models, it runs only these,
and writes nothing.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

import click

from tests.models.compare import CASES, Result, compare
from tests.models.registry import Entry, entries
from tests.models.shapes import OF_SHAPES, Shapes, compare_shapes

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("results.md")
LIBRARIES = "torch", "transformers", "diffusers", "monai"
FAMILIES = ROOT / "docs" / "zoo.inc"
START, END = "<!-- the zoo: written by python -m tests.models.table -->", "<!-- /the zoo -->"


@dataclass(frozen=True)
class Row:
    """The results of one model, by case."""

    name: str
    results: dict[tuple[bool, str], Result]
    errors: dict[tuple[bool, str], str]  # by case: the message that a user gets
    shapes: Shapes | str  # the results on inputs of other sizes, or the message that a user gets

    @property
    def is_good(self) -> bool:
        """Whether the model works in all cases, and on other sizes."""
        return not self.bad and self.takes_shapes

    @property
    def takes_shapes(self) -> bool:
        """Whether the pipeline gives on other sizes what the loop gives."""
        return not isinstance(self.shapes, str) and self.shapes.is_good

    @property
    def says_of_shapes(self) -> str:
        """A sentence that says what went wrong on other sizes."""
        if isinstance(self.shapes, str):
            return self.shapes
        return f"differs by {self.shapes.difference:.1e}"

    @property
    def bad(self) -> list[tuple[bool, str]]:
        """The cases that did not work, or not well enough."""
        return [c for c in CASES if c in self.errors or not self.results[c].is_good]

    def says(self, case: tuple[bool, str]) -> str:
        """A sentence that says what went wrong in a case."""
        if case in self.errors:
            return self.errors[case]
        return f"differs by {self.results[case].difference:.1e}"


def run(name: str) -> Row:
    """Compare one model in all its cases. An error is a result, too."""
    entry, results, errors = entries()[name], {}, {}
    try:
        shapes: Shapes | str = compare_shapes(entry)
    except Exception as error:
        shapes = f"{type(error).__name__}: {error}"
    for case in CASES:
        try:
            has_run = isinstance(shapes, Shapes) and case == OF_SHAPES
            results[case] = shapes.first if has_run else compare(entry, *case)
        except Exception as error:
            errors[case] = f"{type(error).__name__}: {error}"
    return Row(name, results, errors, shapes)


def _quiet() -> None:
    """Silence warnings, of which the libraries give many about their own defaults."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def run_all(names: Iterable[str], workers: int) -> Iterator[Row]:
    """Run models in several processes, and yield their rows in the order of the names."""
    with ProcessPoolExecutor(workers, get_context("spawn"), _quiet) as pool:
        yield from pool.map(run, names)


# ------------------------------------------------------------------------------------------- words


def called(case: tuple[bool, str]) -> str:
    """A case in words."""
    training, mode = case
    return f"{'train' if training else 'eval'}, checkpoint {mode}"


def short(message: str) -> str:
    """A message without this machine's paths, fit for a cell."""
    message = re.sub(r"/\S*/site-packages/", "", message)
    return " ".join(message.split()).replace("|", "\\|")


def line(entry: Entry, row: Row) -> str:
    """A row of the full table."""
    results = row.results.values()
    ends = ", ".join(sorted({result.front_end for result in results}))
    nodes, skips = (max((getattr(r, k) for r in results), default=0) for k in ("nodes", "skips"))
    difference = max((result.difference for result in results), default=0.0)
    seconds = max((result.compile_s for result in results), default=0.0)
    good = f"{len(CASES) - len(row.bad)} of {len(CASES)}"
    apart = f"{difference:.0e}" if difference else "0"
    numbers = (ends, nodes, skips, apart, f"{seconds:.1f}") if results else ("",) * 5
    counts = ("", "")
    if isinstance(row.shapes, Shapes):
        counts = (str(row.shapes.count), str(row.shapes.compilations))
    cells = (entry.name, entry.library, entry.family, *numbers, *counts, good)
    return f"| {' | '.join(map(str, cells))} |"


def failures(rows: Iterable[Row]) -> Iterator[str]:
    """For each message that a user gets, the models and cases that give it."""
    for row in rows:
        by_message: dict[str, list[str]] = {}
        for case in row.bad:
            by_message.setdefault(short(row.says(case)), []).append(called(case))
        for message, cases in by_message.items():
            where = "" if len(cases) == len(CASES) else f" ({'; '.join(cases)})"
            yield f"- **{row.name}**{where}: {message}"
        if not row.takes_shapes:
            yield f"- **{row.name}** (other sizes): {short(row.says_of_shapes)}"


def results_page(rows: list[Row], minutes: float) -> str:
    """The full table."""
    known = entries()
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    text = textwrap.dedent("""\
        # The zoo

        Written by `python -m tests.models.table`. Every model is small, has random weights and no
        dropout, and is compiled for four stages on the CPU with three micro-batches: in train and
        in eval mode, with checkpoint "never" and "always". Outputs, every gradient and every buffer
        are compared with a loop over the micro-batches. With the symbolic front end they have to be
        the same bits; with `torch.export` each may be apart by 1e-5 of the largest value in it (or,
        where all in it are small, of a ten thousandth of the largest in any). Figures are the worst
        of the four cases; s is the time to compile, in CPU seconds.

        In eval mode one pipeline is also called with inputs of other lengths, heights and widths,
        up to two of those that the model takes: "shapes" is how many shapes it was called with, and
        "compiled" how often it was compiled for them.

        """)
    text += f"{libraries}; {minutes:.0f} minutes on two cores.\n\n"
    text += "| model | library | family | front end | nodes | skips | difference | s | shapes "
    text += "| compiled | good |\n"
    text += "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    text += "\n".join(line(known[row.name], row) for row in rows) + "\n"
    across = [
        f"- **{row.name}**: {known[row.name].across}" for row in rows if known[row.name].across
    ]
    if across:
        text += "\n## Where rows see each other\n\n"
        text += 'Refused unless compiled with `check="warn"`, as here: a row of the output depends '
        text += "on which other rows there are, so that it is that of its micro-batch.\n\n"
        text += "\n".join(across) + "\n"
    bad = list(failures(rows))
    if bad:
        text += "\n## What does not work, and what a user is told\n\n" + "\n".join(bad) + "\n"
    return text


def summary(rows: list[Row]) -> str:
    """The README's line on the models."""
    good = sum(row.is_good for row in rows)
    many = f"All {good}" if good == len(rows) else f"{good} of {len(rows)}"
    return (
        f"{many} models of the tests train like this, unchanged, from transformers, diffusers, "
        "MONAI and plain PyTorch.\n"
    )


def families(rows: list[Row]) -> str:
    """The table of the documentation: a line for each family."""
    known = entries()
    good = sum(row.is_good for row in rows)
    text = ".. This file is written by python -m tests.models.table.\n\n"
    if good == len(rows):
        text += f"All {good} work in all cases.\n\n"
    else:
        text += f"{good} of {len(rows)} work in all cases; those that do not are in brackets.\n\n"
    text += ".. list-table::\n   :header-rows: 1\n   :widths: 14 18 68\n\n"
    text += _line("library", "family", "models")
    groups = groupby(rows, lambda row: (known[row.name].library, known[row.name].family))
    for (library, family), members in groups:
        names = (_model(row.name) if row.is_good else f"({_model(row.name)})" for row in members)
        text += _line(library, family, ", ".join(dict.fromkeys(names)))
    reasons = [f"- {row.name}, {reason(row)}" for row in rows if not row.is_good]
    reasons += [
        f'- {row.name}, only with ``check="warn"``: {known[row.name].across}'
        for row in rows
        if known[row.name].across
    ]
    return text + ("\n" + "\n".join(reasons) + "\n" if reasons else "")


def _line(*cells: str) -> str:
    """A line of a list-table."""
    return "   * - " + "\n     - ".join(cells) + "\n"


def reason(row: Row) -> str:
    """In which cases a model does not work, and what the last front end says of it."""
    if not row.bad:
        return f"other sizes: {short(row.says_of_shapes)}"
    said = row.says(row.bad[0]).partition("export: ")[2] or row.says(row.bad[0])
    modes = {training for training, _ in row.bad}
    where = "train mode: " if modes == {True} else "eval mode: " if modes == {False} else ""
    return where + short(said.partition("\nChange")[0])


HEADS = r"(For(?!mer)[A-Z]\w+|LMHeadModel|MTModel|Transformer[23]DModel|(?<=\w{3})Model)$"


def _model(name: str) -> str:
    """A name without what the model is for: BertForMaskedLM is a Bert."""
    return re.sub(HEADS, "", name)


def write(rows: list[Row], minutes: float) -> None:
    """Write the page of results, the table of the documentation, and the README's line."""
    TABLE.write_text(results_page(rows, minutes))
    FAMILIES.write_text(families(rows))
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{START}\n{summary(rows)}{END}{after}")


@click.command()
@click.argument("names", nargs=-1)
@click.option("--workers", default=os.cpu_count() or 1, help="Processes to run at the same time.")
def main(names: tuple[str, ...], workers: int) -> None:
    """Compile the models of the zoo, and write tests/models/results.md, docs/zoo.inc and the line
    of the README."""
    _quiet()
    start, rows, known = time.perf_counter(), [], entries()
    for row in run_all(names or known, workers):
        rows.append(row)
        print(line(known[row.name], row), *failures([row]), sep="\n", flush=True)
    minutes = (time.perf_counter() - start) / 60
    if not names:
        write(rows, minutes)
    print(f"{sum(row.is_good for row in rows)} of {len(rows)} in {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
