"""Each wrong call says what was given, what was expected, and what to do: the exact messages are in
``messages.txt``, to be read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import fxpipe
import passes
from tests.bad_input.fuzz import FUZZED, fuzz
from tests.bad_input.table import Entry, answered, entries

CALLS = [entry for entry in entries() if entry.call]


def test_there_are_many():
    assert len(CALLS) >= 100


@pytest.mark.parametrize("entry", CALLS, ids=lambda entry: entry.call)
def test_a_wrong_call_says_what_was_given_and_what_to_do(entry: Entry):
    if "cuda" in entry.call and torch.cuda.is_available():
        pytest.skip("these devices are here")
    assert answered(entry).message == entry.message


@pytest.mark.parametrize("kind", FUZZED)
def test_whatever_is_in_a_file_it_is_refused_with_a_message_or_can_be_used(kind):
    fuzz(kind, inputs=200)


PACKAGES = [Path(package.__file__).parent for package in (fxpipe, passes)]


UNPICKLED = ("torch.load", "pickle.load", "pickle.loads", "Unpickler")


def test_nothing_is_unpickled_from_a_file():
    """A pickle runs code. ``torch.load`` reads tensors only if it is told so; ranks send each other
    pickles, and are processes of one user."""
    found = {
        (path.name, ast.unparse(node))
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(UNPICKLED)
    }
    assert found == {
        ("files.py", "torch.load(path, map_location='cpu', mmap=True, weights_only=True)"),
        ("agreement.py", "pickle.loads(each)"),
        ("transport.py", "pickle.loads(text)"),
    }
