"""Which lines are said to be the model's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fxpipe
import passes
from fxpipe.ir.source import is_of_a_model

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
        ("my_model.py", True),
    ],
)
def test_a_line_of_the_models_is_not_pytorchs_nor_ours_nor_generated(filename, expected):
    assert is_of_a_model(os.fspath(filename)) is expected
