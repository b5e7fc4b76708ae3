"""Operators are written down, to be compared."""

from __future__ import annotations

import pytest
import torch

from fxpipe.runtime.checkpointing.checkpoint import CheckpointError, checkpoint
from fxpipe.runtime.checkpointing.op_log import OpLog, compared


def test_the_first_difference_is_pointed_at():
    first, second = OpLog(), OpLog()
    x = torch.ones(3)
    with first:
        x.sin().exp()
    with second:
        x.sin().cos()
    lines = [line.split("    #")[0] for line in compared(first, second).splitlines()]
    assert lines == [
        "operators in the forward:",
        "   aten.sin.default(float32[3])",
        "-> aten.exp.default(float32[3])",
        "operators in the recomputation:",
        "   aten.sin.default(float32[3])",
        "-> aten.cos.default(float32[3])",
    ]
    assert first.calls[0][1].split(":")[0].endswith("test_op_log.py")


def test_it_starts_anew_each_time():
    log = OpLog()
    for _ in range(2):
        with log:
            torch.ones(1)
    assert len(log.calls) == 1


def test_a_checkpoint_that_is_debugged_shows_the_operators_of_both_runs():
    runs = []

    def fn(x):
        runs.append(1)
        y = x.sin()
        return y.exp() if len(runs) == 1 else y + 1

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CheckpointError) as caught:
        checkpoint(fn, x, debug=True).sum().backward()
    text = str(caught.value)
    assert "saved 2 tensors, its recomputation 1" in text
    assert "-> aten.exp.default(float32[3])" in text
    assert "-> aten.add.Tensor(float32[3], 1)" in text
