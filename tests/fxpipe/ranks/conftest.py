"""The processes in which tests of ranks run."""

from __future__ import annotations

import pytest

from tests.fxpipe.ranks.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Four processes; they are started once for all tests."""
    processes = Pool()
    yield processes
    processes.close()
