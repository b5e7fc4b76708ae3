"""What every test runs with: one seed, one number of intra-op threads, one kind of kernels.

``FXPIPE_TEST_THREADS`` is the number of intra-op threads of the test and of each lane (default: 1).
``FXPIPE_TEST_KERNELS=by_shape`` makes matrix kernels round differently for each shape, see
``tests/kernels.py``. PyTorch itself reads ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``, which
choose among the kernels of the CPU. All tests have to pass whatever these four are set to.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path

# Inductor keeps compiled code on disk, and does not tell code for one set of kernels from code for
# another: used with the wrong one, it writes past the end of memory. So each has its own folder.
if kernels_of_cpu := os.environ.get("ATEN_CPU_CAPABILITY"):
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{kernels_of_cpu}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))

# Where tests run side by side, threads of a kernel that wait for each other by spinning take the
# core from the thread that they wait for: minutes become hours. OpenMP reads this variable once,
# when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from functools import partial
from itertools import combinations, groupby

import hypothesis
import pytest
import torch

from fxpipe.runtime import lanes
from tests.kernels import by_shape

# How long an example takes depends on what else the machine does, and no test is about that.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

THREADS = int(os.environ.get("FXPIPE_TEST_THREADS", "1"))


@pytest.fixture(autouse=True, scope="session")
def kernels():
    """The kernels of this CPU or, on request, kernels whose last bits depend on the shape."""
    if os.environ.get("FXPIPE_TEST_KERNELS") != "by_shape":
        yield
        return
    with by_shape():
        yield


@pytest.fixture(autouse=True, scope="session")
def one_number_of_threads():
    """Fixtures of a module are made ahead of those of a test, and tests compare with their bits."""
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def one_seed_and_one_number_of_threads(request, monkeypatch):
    """Tests compare bits: each starts from the same state, whatever ran before it."""
    before = torch.get_num_threads()
    threads = 1 if request.node.get_closest_marker("one_thread") else THREADS
    torch.set_num_threads(threads)
    # Lanes divide the threads of the process among them. Their bits are those of the loop only if a
    # lane computes with as many threads as the loop does.
    monkeypatch.setattr(lanes, "_work", partial(_with_threads, lanes._work, threads))
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def _with_threads(work, wanted, queue, threads, ready):
    """The work of a lane, with as many intra-op threads as the test has."""
    work(queue, threads and wanted, ready)


@pytest.hookimpl(tryfirst=True)  # ahead of the selection by marks
def pytest_collection_modifyitems(items):
    """Which runs of a test with parameters are long, by its marks.

    Of a product of parameters marked ``covering(n)`` as many are not long as have any ``n`` of the
    values together at least once. Of runs marked ``one_in(k)`` every k-th is not long, from the
    first on. A test with both marks has one in k of the runs that the other mark leaves.
    """
    for _, runs in groupby(items, lambda item: item.function):
        marked = list(runs)
        if covering := marked[0].get_closest_marker("covering"):
            _make_long(left_out(marked, *covering.args))
        if one_in := marked[0].get_closest_marker("one_in"):
            rest = [item for item in marked if not item.get_closest_marker("long")]
            _make_long(item for i, item in enumerate(rest) if i % one_in.args[0])


def _make_long(items):
    for item in items:
        item.add_marker(pytest.mark.long)


def left_out(product, together):
    """The items that are not needed for each ``together`` values to be in one of the others. At
    each turn that item is kept which has most that none has had yet and, of several such items, one
    whose values the others have least often."""
    has = {item: set(combinations(_values(item), together)) for item in product}
    lacking = set().union(*has.values())
    uses = Counter()
    while lacking:
        most = max(
            has,
            key=lambda item: (
                len(has[item] & lacking),
                -sum(uses[value] for value in _values(item)),
            ),
        )
        uses.update(_values(most))
        lacking -= has.pop(most)
    return list(has)


def _values(item):
    """The names of an item's parameters, and the identities of their values."""
    return sorted((name, id(value)) for name, value in item.callspec.params.items())
