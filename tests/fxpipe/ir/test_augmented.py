"""Tests of augmented assignments to values of a symbolic trace."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxpipe


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x)
        alias = h
        h *= mask
        count = before = x.shape[1]
        count += 1
        return self.last(torch.cat([h, alias], 1)) * (count - before)  # type: ignore[no-any-return]


def test_a_tensor_is_written_to_and_a_number_is_replaced() -> None:
    model, x = _Masked(), torch.randn(8, 6)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=4, tracer="symbolic")
    for mask in (torch.ones(8, 1), torch.rand(8, 1)):
        torch.testing.assert_close(pipe(x, mask), model(x, mask))
