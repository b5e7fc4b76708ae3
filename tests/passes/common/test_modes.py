"""Of the checkpoint modes: who runs again, how much that is, and what keeps less."""

from __future__ import annotations

import pytest

from fxpipe.schedule import named
from passes.common.modes import (
    MODES,
    alive,
    is_checkpointed,
    is_never,
    milder,
    modes_of,
    of_stages,
    recomputed,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_what_is_recomputed_is_the_micro_batches_that_keep_nothing(mode, chunks):
    again = sum(is_checkpointed(mode, i, chunks) for i in range(chunks))
    assert recomputed(mode, chunks) == again / chunks


def test_milder_modes_keep_less():
    for mode in MODES:
        for other in milder(mode):
            assert recomputed(other, 4) > recomputed(mode, 4)
    assert not milder("always")
    assert milder(["never", "except_last"]) == ("except_last", "always")
    assert milder(["always", "never"]) == ("always",)
    assert not milder(["always", "always"])


def test_all_stages_have_one_mode_or_each_has_its_own():
    assert modes_of("always") == "always" and of_stages("always", 2) == ["always", "always"]
    assert modes_of(["never", "always"]) == ("never", "always")
    assert of_stages(("never", "always"), 2) == ["never", "always"]
    assert is_never("never") and is_never(["never", "never"]) and not is_never(["never", "always"])


@pytest.mark.parametrize(
    "given", ["sometimes", ["never", "sometimes"], [], None, 1, ["never", None]]
)
def test_other_modes_are_refused(given):
    with pytest.raises(
        ValueError, match=r"checkpoint is .*: give 'never', 'except_last', 'always', a list"
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
