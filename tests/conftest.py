import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_and_one_seed():
    """Bits are compared: one intra-op thread everywhere, and the same start for every test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
