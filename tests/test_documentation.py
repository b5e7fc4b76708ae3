"""The pages of the documentation: their examples run, their messages are those that users get, and
what they name is there.

A page's blocks of Python run one after another. Those of the class ``refused`` have to raise what
the block behind them shows, where an ellipsis stands for any text. Those of the class ``ranks``
need several processes, and those of the class ``others`` another library: they are parsed.
"""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import re
import shlex
import textwrap
from ast import literal_eval, parse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest

import fxpipe
from fxpipe.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.rst"))
TEXTS = {path.name: path.read_text() for path in [ROOT / "README.md", *PAGES]}


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    options: str  # classes
    code: str


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, in order."""
    pattern = r"^\.\. code-block:: (\w+)\n((?:   :\w+:.*\n)*)\n((?:   .*\n|\n)+)"
    for language, options, code in re.findall(pattern, text + "\n", re.MULTILINE):
        yield Block(language, options, textwrap.dedent(code).strip("\n") + "\n")


def is_parsed_only(block: Block) -> bool:
    return "ranks" in block.options or "others" in block.options


def pages_with_code() -> list[Path]:
    return [
        page
        for page in PAGES
        if any(b.language == "python" and not is_parsed_only(b) for b in blocks(page.read_text()))
    ]


def words(text: str) -> str:
    return " ".join(text.split())


def matches(shown: str, message: str) -> bool:
    """Whether a message is the one that is shown, where "…" stands for any text."""
    pattern = ".*".join(map(re.escape, words(shown).split("…")))
    return re.fullmatch(pattern, words(message)) is not None


@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for what an example saves
    names: dict[str, Any] = {"__name__": "__main__"}  # as in a script
    found = [*blocks(page.read_text()), Block("text", "", "")]
    for block, following in pairwise(found):
        if block.language != "python" or is_parsed_only(block):
            continue
        code = compile(block.code, page.name, "exec")
        if "refused" not in block.options:
            exec(code, names)
            continue
        with pytest.raises(Exception) as error:
            exec(code, names)
        message = f"{error.type.__name__}: {error.value}"
        assert matches(following.code, message), message


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_that_need_more_than_is_here_are_python(page):
    for block in blocks(page.read_text()):
        if block.language == "python":
            parse(block.code)


def test_the_code_of_a_pipeline_begins_as_shown():
    page = list(blocks(TEXTS["inspecting.rst"]))
    names: dict[str, Any] = {}
    exec(page[0].code, names)
    (shown,) = (block.code for block in page if block.code.startswith("def forward"))
    assert names["pipe"].code.startswith(shown)


def test_a_message_is_compared_but_for_an_ellipsis():
    assert matches("ValueError: devices … give\na list", "ValueError: devices is 2: give a list")
    assert not matches("ValueError: devices …", "TypeError: devices is 2")


@pytest.mark.parametrize("name", TEXTS)
def test_commands_that_are_named_exist(name):
    """Modules that ``python -m`` runs are there, and the command line takes what is shown."""
    modules = re.findall(r"python -m\s+(tests[\w.]*\w)", TEXTS[name])
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []
    for command in re.findall(r"^\s+\$ fxpipe (.*)$", TEXTS[name], re.MULTILINE):
        arguments = shlex.split(command)
        if arguments == ["--version"]:
            continue
        # With its parent: click keeps a command's help option as its first context had it.
        parent = click.Context(main, **main.context_settings)
        main.commands[arguments[0]].make_context(arguments[0], arguments[1:], parent)


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    paths = re.findall(r"`((?:tests|docs|notebooks|fxpipe|passes)/[\w/.-]+\.\w+)`", TEXTS[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_block_of_options_is_the_signature():
    """It has all options, with the defaults that they have."""
    (shown,) = re.findall(r"```python\n# every option.*?\n(.*?)```", TEXTS["README.md"], re.DOTALL)
    (call,) = parse(shown).body
    options = {keyword.arg: literal_eval(keyword.value) for keyword in call.value.keywords}
    signature = inspect.signature(fxpipe.compile).parameters
    assert options == {name: p.default for name, p in signature.items() if name != "model"}


def test_the_page_of_options_has_each_option_once():
    page = (ROOT / "docs" / "options.rst").read_text()
    named = [name for line in re.findall("^``.*``$", page, re.M) for name in line.split(", ")]
    assert sorted(named) == sorted(
        f"``{name}``" for name in inspect.signature(fxpipe.compile).parameters
    )


def test_the_help_of_compile_fits_on_two_screens():
    shown = pydoc.plain(pydoc.render_doc(fxpipe.compile)).splitlines()
    assert len(shown) <= 100
    assert "pipe = fxpipe.compile(" in "\n".join(shown)
