"""``len(x)`` of a tensor is a size of the graph, and no constant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.fxpipe.trace.small import BOTH, MLP


class Scaled(nn.Module):
    """Gives a value for each row, as flows do with their determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.scale = MLP(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        names = ["first", "second"]
        return self.mlp(x) * len(names), self.scale.expand(len(x))


@BOTH
def test_a_batch_of_another_size_is_served_by_the_same_program(tracer: str) -> None:
    model = Scaled()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, tracer=tracer) as pipe:
        for rows in 16, 13, 5:
            x = torch.randn(rows, 8)
            torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.compilations) == 1
        assert [len(part) for part in pipe(torch.randn(13, 8))] == [13, 13]


def test_there_is_no_other_len_afterwards() -> None:
    with fxpipe.compile(Scaled(), ["cpu", "cpu"], chunks=4) as pipe:
        pipe(torch.randn(16, 8))
    assert "len" not in globals()


def test_a_module_with_a_len_of_its_own_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "len", lambda value: 2)
    model = Scaled()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=1) as pipe:
        assert pipe(torch.randn(2, 8))[1].shape == (2,)
    assert globals()["len"]([]) == 2
