"""What transfers carry, as far as it is known ahead of any run."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import nn

from fxpipe.ir.graph import CARRIED
from passes import Project
from passes.to_rank.project import edge_of, transfers_of
from tests.passes.to_rank.test_project import TOKENS, step
from tests.zoo import Chain, Tied, after

X = torch.ones(4, 3)
HALVES = [Fraction(1, 2)] * 2


def sizes(gm, rank, parts=HALVES):
    """The transfers of a rank's graph, and the bytes of what they carry."""
    return {
        str(node): None if node.meta[CARRIED] is None else node.meta[CARRIED].sizes(parts)
        for node in transfers_of(Project((0, 1), rank)(gm))
    }


def test_values_and_gradients_have_a_micro_batchs_part_of_the_rows():
    gm = step(Chain(2), ["b"], microbatches=2)
    half, most = 24, 36  # two of the four rows, and three, of three numbers each
    assert sizes(gm, 0, [Fraction(3, 4), Fraction(1, 2)]) == {
        "transmit_wait_s0_mb0_1": (most,),
        "transmit_wait_s0_mb1_1": (half,),
        "receive_wait_s1_mb0_1": (most,),
        "receive_wait_s1_mb1_1": (half,),
        "receive_output": None,  # the loss, which may have any dtype
    }


def test_a_rank_knows_the_same_of_what_it_receives_as_the_sender():
    gm = step(Chain(3, {0: (2,)}), ["b", "c"], microbatches=2)
    graphs = [Project((0, 1, 2), rank)(gm) for rank in range(3)]
    known: dict[object, list[object]] = {}
    for graph in graphs:
        for node in transfers_of(graph):
            known.setdefault(edge_of(node), []).append(node.meta[CARRIED])
    assert all(one == other for one, other in known.values())


def test_a_shared_weight_and_its_gradient_are_as_large_as_the_weight():
    gm = step(Tied(), ["other"], inputs=(TOKENS,), places=(0, 1), microbatches=2)
    found = sizes(gm, 0)
    size = Tied().embed.weight.numel() * 4
    assert found["transmit_embed_weight"] == (size,)
    assert found["receive_wait_s1_mb1_4"] == (size,)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Dropout()

    def forward(self, x):
        return self.b(self.a(x))


def test_seeds_are_a_number_for_each_micro_batch():
    gm = after("microbatch", Drawing(), (X,), ["b"], chunks=2)
    assert sizes(gm, 0)["transmit_seeds"] == (8, 8)


def test_without_a_known_number_of_rows_only_what_does_not_grow_is_known():
    gm = step(Chain(2), ["b"], microbatches=2)
    assert set(sizes(gm, 0, None).values()) == {None}
