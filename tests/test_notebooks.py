"""Every notebook runs from top to bottom, and shows the outputs that are stored in it.

That takes minutes: usually two of them run, and of the others the code is read. What it imports and
calls of fxpipe has to be there, with parameters of these names. ``make long`` runs them all.
"""

import ast
import copy
import functools
import importlib
import inspect
import sys

import pytest

pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from tests.notebooks import NOTEBOOKS, VARIES, differences, is_same, read, run, says_that_it_waits

RUN = {"01-first-pipeline", "03-writing-a-pass"}
"""The notebooks that always run: they call, draw and report a pipeline, and define passes."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if p.stem in RUN else pytest.mark.long) for p in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_shows_what_is_stored_in_it(path):
    assert list(differences(read(path), run(path))) == []


def code_of(path):
    """The cells of a notebook as one module, with the scripts that it keeps in texts."""
    cells = [cell.source for cell in read(path).cells if cell.cell_type == "code"]
    code = "\n\n".join(cells)
    scripts = [
        node.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "\nimport fxpipe\n" in node.value
    ]
    return "\n\n".join([code, *scripts])


def missing(code):
    """What code uses of fxpipe that is not there: names, and parameters of functions."""
    tree, known = ast.parse(code), {}  # the names of fxpipe, and what they are
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_ours(node.module):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if hasattr(module, alias.name):
                    known[alias.asname or alias.name] = getattr(module, alias.name)
                else:
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in filter(lambda alias: is_ours(alias.name), node.names):
                module, root = importlib.import_module(alias.name), alias.name.partition(".")[0]
                known |= {alias.asname: module} if alias.asname else {root: sys.modules[root]}
    for node in ast.walk(tree):
        names = names_of(node)
        if names and names[0] in known and not has(known, names):
            yield ".".join(names)
        if isinstance(node, ast.Call) and has(known, names := names_of(node.func)):
            parameters = inspect.signature(get(known, names)).parameters.values()
            taken = {parameter.name for parameter in parameters}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                for keyword in node.keywords:
                    if keyword.arg and keyword.arg not in taken:
                        yield f"{'.'.join(names)}({keyword.arg}=...)"


def is_ours(module):
    return module.partition(".")[0] in ("fxpipe", "passes")


def names_of(node):
    """The names of ``a.b.c``; none for any other expression."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def get(known, names):
    return functools.reduce(getattr, names[1:], known[names[0]])


def has(known, names):
    if not names or names[0] not in known:
        return False
    try:
        get(known, names)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_uses_of_fxpipe_is_there(path):
    code = code_of(path)
    assert "fxpipe" in code
    assert list(missing(code)) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import fxpipe\nfxpipe.compile(model, devices=[], chunks=4)", []),
        ("import fxpipe\nfxpipe.compiled(model)", ["fxpipe.compiled"]),
        ("import fxpipe\nfxpipe.compile(model, pieces=4)", ["fxpipe.compile(pieces=...)"]),
        ("from fxpipe.schedule import named, nothing", ["fxpipe.schedule.nothing"]),
        ("from passes import chain\nchain.Entry.nothing", ["chain.Entry.nothing"]),
        ("import torch\ntorch.nothing", []),
    ],
)
def test_what_code_uses_that_is_not_there_is_found(code, found):
    assert list(missing(code)) == found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_been_run_from_top_to_bottom(path):
    """Each cell that ends in a call of ``print`` has an output, and none has ended in an error."""
    for cell in read(path).cells:
        if cell.cell_type != "code":
            continue
        assert all(output.output_type != "error" for output in cell.outputs)
        last = ast.parse(cell.source).body[-1]
        if isinstance(last, ast.Expr) and ast.unparse(last).startswith("print("):
            assert cell.outputs


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("loss 2.30, step 4", "loss  2.31,\nstep 4", True),
        ("difference: 0.0", "difference: 0.3", False),
        ("stage 1", "stage 2", False),
        ("relu: stage 0", "tanh: stage 0", False),
        ("1 ms", "1", False),
    ],
)
def test_words_have_to_be_equal_and_numbers_close(one, other, same):
    assert is_same(one, other) is same


def test_a_reader_who_sees_something_else_is_told_which_cell():
    kept = read(NOTEBOOKS[0])
    assert list(differences(kept, kept)) == []
    other = copy.deepcopy(kept)
    number, cell = next((i, cell) for i, cell in enumerate(other.cells) if cell.get("outputs"))
    cell.outputs[0].text = "no"
    (line,) = differences(kept, other)
    assert line.startswith(f"cell {number} shows") and "no" in line
    del cell.outputs[0]
    assert "nothing" in next(differences(kept, other))
    kept.cells[number].metadata["tags"] = [VARIES]
    assert "nothing" in next(differences(kept, other)), "it shows nothing: that is not what varies"


def test_drawings_are_compared_by_their_texts():
    kept = read(NOTEBOOKS[0])
    other = copy.deepcopy(kept)
    drawn = next(
        output.data
        for cell in other.cells
        for output in cell.get("outputs", [])
        if "image/svg+xml" in output.get("data", {})
    )
    drawn["image/svg+xml"] = drawn["image/svg+xml"].replace(">stage 1", ">stage one")
    assert len(list(differences(kept, other))) == 1


def test_the_line_that_a_compilation_takes_long_is_not_kept():
    """Whether there is one depends on how busy the machine is."""

    from nbformat import v4

    def of(text):
        return v4.new_output("stream", name="stderr", text=text)

    line = "UNet: step of 4 micro-batches has taken 20 s so far; verbose=True logs how long each "
    line += "phase takes\n"
    assert [says_that_it_waits(of(text)) for text in (line, line * 2, line + "Error\n")] == [
        *(True, True, False)
    ]
