"""Inputs that have no dimension of their rows are refused with what to give in their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fxpipe
from fxpipe.ir.errors import Unsupported


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.linear = nn.GRU(4, 8), nn.Linear(8, 4)

    def forward(self, given: dict[str, PackedSequence]) -> Tensor:
        return self.linear(self.recurrent(given["x"])[1][-1])


def test_a_packed_sequence_is_refused() -> None:
    lengths = torch.tensor([5, 5, 4, 3, 2, 1])
    packed = pack_padded_sequence(torch.randn(6, 5, 4), lengths, batch_first=True)
    with (
        fxpipe.compile(OfPacked(), ["cpu"] * 2, chunks=3) as pipe,
        pytest.raises(Unsupported, match=r"given is a PackedSequence.*the padded batch and"),
    ):
        pipe({"x": packed})
