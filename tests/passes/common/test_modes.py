"""Of the checkpoint modes: who runs again, how much that is, and what keeps less."""

from __future__ import annotations

from fractions import Fraction

import pytest

from fxpipe.schedule import named
from passes.common.modes import (
    MODES,
    OFFLOAD,
    PARTS,
    again,
    alive,
    away,
    choices,
    is_checkpointed,
    is_never,
    milder,
    modes_of,
    moved,
    of_segment,
    of_stages,
    offloaded,
    recomputed,
    recomputing_less,
    run_again,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_what_is_recomputed_is_the_micro_batches_that_keep_nothing(mode, chunks):
    again = sum(is_checkpointed(mode, i, chunks) for i in range(chunks))
    assert recomputed(mode, chunks) == again / chunks


def test_milder_modes_compute_more_again():
    for mode in MODES:
        for other in milder(mode):
            assert MODES.index(other) > MODES.index(mode)
    assert not milder("always")
    assert milder("never") == ("selective", "except_last", "always")
    assert milder(["never", "except_last"]) == ("except_last", "always")
    assert milder(["always", "never"]) == ("always",)
    assert not milder(["always", "always"])


def test_all_stages_have_one_mode_or_each_has_its_own():
    assert modes_of("always") == "always" and of_stages("always", 2) == ["always", "always"]
    assert modes_of(["never", "always"]) == ("never", "always")
    assert of_stages(("never", "always"), 2) == ["never", "always"]
    assert is_never("never") and is_never(["never", "never"]) and not is_never(["never", "always"])


@pytest.mark.parametrize(
    "given",
    ["sometimes", ["never", "sometimes"], [], None, 1, ["never", None]]
    + [f"offload {part}" for part in ("0", "3/2", "-1/2", "half", "1/0")]
    + ["always 2", "except_last 1/2", "selective 1/2", "never 1/2"],
)
def test_other_modes_are_refused(given):
    with pytest.raises(
        ValueError,
        match=r"checkpoint is .*: give 'never', .*, .always 1/2., .offload 1/2. or another part",
    ):
        modes_of(given)


def test_modes_of_another_number_of_stages_are_refused():
    with pytest.raises(ValueError, match="checkpoint has 3 modes, and there are 2 stages: give"):
        of_stages(["never", "always", "never"], 2)


@pytest.mark.parametrize("order", [None, named("1f1b", lanes=2, microbatches=4)])
def test_of_each_stage_so_many_micro_batches_are_alive_as_its_mode_says(order):
    apart = [alive(mode, 4, 2, order) for mode in ("always", "never")]
    both = alive(["always", "never"], 4, 2, order)
    assert both == tuple([apart[0][i][0], apart[1][i][1]] for i in range(2))
    halved, inputs = alive(["always", "never"], 4, 2, order, segments=[2, 1])
    assert halved == [both[0][0] / 2, both[0][1]], "each stage has segments of its own"
    assert inputs == [both[1][0] * 2, both[1][1]], "each segment has inputs"
    (kept, _), _ = alive(["except_last", "never"], 4, 2, order)
    (parted, _), _ = alive(["except_last", "never"], 4, 2, order, segments=[4, 1])
    assert (kept, parted) == (2, 1.25), "the last micro-batch is kept whole, none is recomputed so"


def test_a_stage_whose_activations_are_on_the_host_recomputes_nothing():
    assert recomputed(OFFLOAD, 4) == 0 and away(OFFLOAD, 4) == 4
    assert not any(is_checkpointed(OFFLOAD, i, 4) for i in range(4))
    assert offloaded(["never", OFFLOAD, "always"], 3) == {1}
    assert recomputing_less(OFFLOAD) == ("never",) and not milder(OFFLOAD)


def test_the_host_is_a_way_out_only_where_there_is_one():
    moving = tuple(f"offload {part}" for part in ("1/4", "1/2", "3/4"))
    assert choices("auto") == MODES
    assert choices("auto", has_host=True) == ("never", *moving, OFFLOAD, *choices("auto")[1:])
    assert choices("auto", is_eager=False) == ("never", "except_last", "always")
    assert choices("always", has_host=True) == ("always",)


def test_parts_that_are_run_again_are_tried_where_stages_may_be_cut_in_segments():
    assert choices("auto", has_parts=True) == (
        "never",
        "selective",
        *PARTS,
        "except_last",
        "always",
    )
    assert choices("always", has_parts=True) == ("always",)


def test_modes_are_known_that_recompute_less():
    assert recomputing_less("never") == ()
    assert recomputing_less("selective") == ("never",)
    assert recomputing_less("always 1/4") == ("never", "selective")
    assert recomputing_less("always 1/2") == ("never", "selective", "always 1/4")
    assert recomputing_less("except_last") == ("never", "selective", *PARTS)
    assert recomputing_less("always") == ("never", "selective", *PARTS, "except_last")


@pytest.mark.parametrize("order", [None, named("gpipe", lanes=2, microbatches=4)])
def test_of_activations_that_move_two_micro_batches_are_on_the_device(order):
    assert alive(OFFLOAD, 4, 2, order) == ([2, 2], [0, 0])
    assert alive(OFFLOAD, 1, 2) == ([1, 1], [0, 0])


@pytest.mark.parametrize("order", [None, named("gpipe", lanes=2, microbatches=4)])
def test_of_activations_of_which_a_part_moves_the_rest_is_on_the_device(order):
    assert [moved(mode) for mode in ("offload", "offload 1/4", "never")] == [1.0, 0.25, 0.0]
    assert modes_of(("offload 1/4", "never")) == ("offload 1/4", "never")
    assert alive("offload 1/4", 4, 2, order) == ([0.25 * 2 + 0.75 * 4] * 2, [0, 0])
    assert away("offload 1/4", 4) == 4 and offloaded(["offload 1/4", "never"], 2) == {0}


def test_of_a_stage_that_is_run_again_in_part_the_first_segments_are():
    assert again("always") == 1 and again("always 1/2") == Fraction(1, 2) and again("never") == 0
    assert [of_segment("always 3/4", i, 4) for i in range(4)] == ["always"] * 3 + ["never"]
    assert (
        of_segment("except_last", 1, 2) == "except_last" and of_segment("always", 0, 1) == "always"
    )
    assert run_again("always 1/4", 2) == 1, "a stage with fewer places to cut has fewer segments"
    assert recomputed("always 1/4", 4) == 0.25 and away("always 1/4", 4) == 4
    assert milder("always 1/2") == ("always",) and "always" not in milder("always")
    assert milder("selective") == ("except_last", "always")
    # One of four segments is run again, one at a time: the rest is there all the time.
    assert alive("always 1/4", 4, 1, segments=[4]) == ([0.25 * 1 + 0.75 * 4], [4.0])


def test_where_fewer_are_alive_none_is_gained_by_moving_them():
    order = named("1f1b", lanes=2, microbatches=4)
    assert alive(OFFLOAD, 4, 2, order)[0] == alive("never", 4, 2, order)[0] == [2, 1]
