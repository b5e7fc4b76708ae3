"""Of the numbers of segments: what may be given, what it means for each stage, and what a stage may
choose."""

from __future__ import annotations

import numpy as np
import pytest

from passes.common.modes import MODES, PARTS, SHARES
from passes.common.segments import NUMBERS, counts, in_words, is_open, segments_of, simplest, ways


def test_all_stages_have_one_number_or_each_has_its_own():
    assert segments_of(3, "always") == 3 and counts(3, "always", 2) == [3, 3]
    assert segments_of([1, np.int64(3)], "always") == (1, 3)
    assert counts((1, 3), "always", 2) == [1, 3]


def test_a_stage_that_is_never_recomputed_has_one_segment_whatever_is_given():
    assert counts(3, ["never", "except_last"], 2) == [1, 3]
    assert counts((2, 4), ["always", "never"], 2) == [2, 1]
    assert counts(3, "never", 2) == [1, 1]
    assert counts(3, ["offload", "always"], 2) == [1, 3]


@pytest.mark.parametrize("given", [0, -1, 1.5, "many", [], [2, 0], [1, None], [[1]], {1: 2}])
def test_other_numbers_are_refused(given):
    with pytest.raises(
        ValueError, match=r"checkpoint_segments is .*: give the number of segments .*, a list with"
    ):
        segments_of(given, "always")


def test_numbers_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="has 3 numbers, and there are 2 stages: give one number"):
        counts((1, 2, 3), "always", 2)


@pytest.mark.parametrize("given", [2, [1, 2]])
@pytest.mark.parametrize("modes", ["never", "offload", ["never", "offload"]])
def test_several_are_refused_where_no_stage_is_recomputed(given, modes):
    with pytest.raises(ValueError, match=r"checkpoint_segments is .*2.*, but checkpoint is .*: g"):
        segments_of(given, modes)


@pytest.mark.parametrize(
    ("segments", "checkpoint", "expected"),
    [
        (None, "auto", True),
        (None, "always", False),
        ("auto", "auto", True),
        ("auto", ["always", "never"], True),
        ("auto", "never", False),
        (2, "auto", False),
    ],
)
def test_the_compiler_chooses_them_where_it_is_asked_to_or_chooses_the_modes(
    segments, checkpoint, expected
):
    assert segments_of(segments, checkpoint) == segments
    assert is_open(segments, checkpoint) == expected
    if expected and checkpoint != "auto":
        with pytest.raises(ValueError, match="the numbers are known once the model has been cut"):
            counts(segments, checkpoint, 2)


def test_a_stage_may_choose_each_mode_with_each_number_but_one_that_keeps_all_has_no_segments():
    found = ways("auto", "auto")
    assert found == [
        ("never", 1),
        *(("selective", number) for number in NUMBERS),
        *((part, 1) for part in PARTS),  # it has the segments that it needs
        *(("except_last", number) for number in NUMBERS),
        *(("always", number) for number in NUMBERS),
    ]
    moving = [(mode, 1) for mode in (*(f"offload {share}" for share in SHARES), "offload")]
    assert ways("auto", "auto", has_host=True) == [found[0], *moving, *found[1:]]
    assert ways("auto", 3) == [(mode, 3) for mode in MODES]
    assert ("selective", 3) not in ways("auto", 3, is_eager=False)
    assert ways("always", 3) == [("always", 3)]
    assert ways("never", "auto") == [("never", "auto")]
    assert ways(("always", "never"), "auto") == [(("always", "never"), n) for n in NUMBERS]


def test_a_stage_that_is_run_again_in_part_has_as_many_segments_as_that_needs():
    modes = ["always 1/2", "always 3/4", "never", "always"]
    assert counts(1, modes, 4) == [2, 4, 1, 1] and simplest([2, 4, 1, 1], modes) == 1
    assert counts(3, modes, 4) == [6, 12, 1, 3] and simplest([6, 12, 1, 3], modes) == 3
    assert in_words("always 1/2", 1) == "always 1/2"
    assert in_words("always 1/2", 4) == "always 1/2 in 4 segments"


def test_what_stages_that_are_recomputed_have_in_common_is_said_once():
    assert simplest([3, 1], ["always", "never"]) == 3
    assert simplest([3, 1], ["always", "except_last"]) == (3, 1)
    assert simplest([1, 1], "never") == 1


@pytest.mark.parametrize(
    ("checkpoint", "segments", "expected"),
    [
        ("always", 1, "always"),
        ("always", 2, "always in 2 segments"),
        (["always", "never"], 2, "always in 2 segments, never"),
        ("always", (1, 2), "always, always in 2 segments"),
        ("auto", None, "auto"),
        ("auto", 2, "auto"),
        (["always", "never"], "auto", "always, never"),
    ],
)
def test_they_can_be_read_with_the_modes(checkpoint, segments, expected):
    assert in_words(checkpoint, segments) == expected
