import torch
from expecttest import assert_expected_inline

from passes import Split
from passes.common.skips import Hop, skip_layout
from tests.zoo import Chain, labelled

X = torch.ones(2, 3)
BYTES = 2 * 3 * 4


def layout(model, starts):
    return skip_layout(Split()(labelled(model, (X,), starts)))


def test_a_chain_has_hops_and_no_skips():
    found = layout(Chain(3), ["b", "c"])
    assert found.hops == (
        Hop("x", None, 0, BYTES),
        Hop("a", 0, 1, BYTES),
        Hop("b", 1, 2, BYTES),
    )
    assert found.skips == ()
    assert "no skips" in str(found)


def test_a_value_used_far_away_goes_straight_there():
    found = layout(Chain(4, {0: (3,)}), ["b", "c", "d"])
    # b needs a too, one stage on: the value visits b first, and then d.
    assert found.skips == (Hop("a", 1, 3, BYTES),)
    assert_expected_inline(str(found), """a: stage 1 -> stage 3, 24 B\n""")


def test_a_value_with_three_users_visits_them_in_order_each_once():
    found = layout(Chain(6, {0: (2, 4)}), ["b", "c", "d", "e", "f"])
    assert [(h.source, h.target) for h in found.hops if h.value == "a"] == [(0, 1), (1, 2), (2, 4)]
    assert found.skips == (Hop("a", 2, 4, BYTES),)


def test_an_input_that_only_a_later_stage_needs_goes_straight_to_it():
    class Late(Chain):
        def forward(self, x, y):
            return super().forward(x) + y

    gm = Split()(labelled(Late(3), (X, X), ["b", "c"]))
    assert [h for h in skip_layout(gm).hops if h.value == "y"] == [Hop("y", None, 2, BYTES)]
    assert skip_layout(gm).skips == ()
