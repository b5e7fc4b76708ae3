"""Which lines are said to be the model's."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

import fxpipe
import passes
from fxpipe.ir.source import is_a_models, is_of_a_model, model_frame

TORCH, OURS, PASSES = (Path(each.__file__).parent for each in (torch, fxpipe, passes))


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        (TORCH / "nn" / "modules" / "conv.py", False),
        (TORCH.parent / "torchvision" / "models" / "resnet.py", True),
        (OURS / "api.py", False),
        (OURS / "demo.py", True),  # it has a model
        (OURS.parent / "fxpipe_trials.py", True),
        (PASSES / "alias.py", False),
        ("<eval_with_key>.3", False),
        ("<frozen importlib._bootstrap>", False),
        ("<ipython-input-1-2a5f>", True),
        ("<stdin>", True),
        ("<string>", True),  # run by exec, or by python -c
        ("my_model.py", True),
        (contextlib.__file__, False),
    ],
)
def test_a_line_of_the_models_is_not_pytorchs_nor_ours_nor_generated(filename, expected):
    assert is_of_a_model(os.fspath(filename)) is expected


@pytest.mark.parametrize(
    ("module", "expected"), [("my_model", True), ("torch.export", False), ("fxpipe.trace", False)]
)
def test_a_frame_of_code_in_no_file_is_of_the_module_that_runs_it(module, expected):
    scope = {"__name__": module, "sys": sys}
    exec("frame = sys._getframe()", scope)
    assert is_a_models(scope["frame"]) is expected


def test_the_model_frame_of_a_stack_is_the_innermost_that_is_of_a_model():
    stack = f"""  File "train.py", line 3, in main
    model(x)
  File "my_model.py", line 7, in forward
    return self.a(x)
  File "{TORCH / "nn" / "modules" / "linear.py"}", line 134, in forward
    return F.linear(input, self.weight, self.bias)
"""
    frame = model_frame(stack)
    assert frame.groupdict() == {
        "text": 'File "my_model.py", line 7, in forward\n    return self.a(x)',
        "file": "my_model.py",
        "number": "7",
        "code": "return self.a(x)",
    }
    assert model_frame(None) is None


def test_the_stack_of_a_node_is_text():
    """When PyTorch keeps frames and not text, ``model_frame`` needs no regular expression."""
    linear = torch.nn.Linear(2, 2)
    program = torch.export.export(linear, (torch.ones(1, 2),), strict=False)
    (node,) = (node for node in program.graph.nodes if node.op == "call_function")
    assert isinstance(node.stack_trace, str)
