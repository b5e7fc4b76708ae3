"""Of the checkpoint modes: who runs again, how much that is, and what keeps less."""

from __future__ import annotations

import pytest

from passes.common.modes import MODES, is_checkpointed, milder, recomputed


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
