"""The surroundings of every test: one seed, one number of intra-op threads, one kind of kernels.

``FXPIPE_TEST_THREADS`` is the number of intra-op threads, of the test and of each lane (1).
``FXPIPE_TEST_KERNELS=by_shape`` has matrix kernels round differently for each shape, see
``tests/kernels.py``. PyTorch itself reads ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``, which
choose among the kernels of the CPU. The tests hold whatever these are set to.
"""

import os
from functools import partial

import pytest
import torch

from fxpipe.runtime import lanes
from tests.kernels import by_shape

THREADS = int(os.environ.get("FXPIPE_TEST_THREADS", "1"))


@pytest.fixture(autouse=True, scope="session")
def kernels():
    """The CPU's, or such as depend on the shape wherever bits can."""
    if os.environ.get("FXPIPE_TEST_KERNELS") != "by_shape":
        yield
        return
    with by_shape():
        yield


@pytest.fixture(autouse=True)
def one_seed_and_one_number_of_threads(monkeypatch):
    """Bits are compared: every test starts from the same state, whatever ran before it."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    # Lanes share the threads of the process. Bits are the loop's where both have equally many.
    monkeypatch.setattr(lanes, "_work", partial(_with_threads, lanes._work))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def _with_threads(work, queue, threads, ready):
    """The work of a lane, with as many intra-op threads as the test has."""
    work(queue, threads and THREADS, ready)
