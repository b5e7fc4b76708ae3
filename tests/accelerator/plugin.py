"""A plugin for pytest: tests run with the simulated accelerator, and fail if it has seen a race.

python -m pytest -p tests.accelerator.plugin tests/accelerator/pipelines.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.accelerator import sim

sim.load()
if os.environ.get("SIM_STACKS"):
    sim.keep_stacks(True)


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    sim.clear()
    yield
    gc.collect()
    found = sim.races()
    assert not found, f"{len(found)} races, the first ones:\n\n" + "\n".join(found[:3])
