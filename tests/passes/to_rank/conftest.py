"""Every rank of a test computes with one intra-op thread, since bits depend on their number."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Ranks, which are threads here, and the single process that they are compared with, compute
    with one intra-op thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
