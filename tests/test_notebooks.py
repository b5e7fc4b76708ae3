"""Every notebook runs from top to bottom, and shows the outputs that are stored in it."""

import copy

import pytest

pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

from tests.notebooks import NOTEBOOKS, VARIES, differences, is_same, read, run, says_that_it_waits


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_stored_in_it(path):
    assert list(differences(read(path), run(path))) == []


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
