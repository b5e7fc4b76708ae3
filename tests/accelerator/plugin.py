"""A plugin for pytest: tests run with the simulated accelerator, and fail if it has seen a race, or
if PyTorch warns that a gradient is computed on another stream than it is accumulated on.

python -m pytest -p tests.accelerator.plugin tests/accelerator/pipelines.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests.accelerator import sim

sim.load()
torch.set_warn_always(True)  # or PyTorch warns once in a process
if os.environ.get("SIM_STACKS"):
    sim.keep_stacks(True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error:The AccumulateGrad node's stream")


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    sim.clear()
    yield
    gc.collect()
    found = sim.races()
    assert not found, f"{len(found)} races, the first ones:\n\n" + "\n".join(found[:3])
