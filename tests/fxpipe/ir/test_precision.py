"""Products of float32 while a model is checked: in full precision, and as the user has set it
afterwards."""

import threading

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.precision import full_precision, users_precision, uses_tf32
from passes.cost.timer import HostTimer

BACKENDS = torch.backends
KINDS = {
    "all": BACKENDS,
    "cuda": BACKENDS.cudnn,
    "cuda.matmul": BACKENDS.cuda.matmul,
    "cudnn.conv": BACKENDS.cudnn.conv,
    "cudnn.rnn": BACKENDS.cudnn.rnn,
    "mkldnn.matmul": BACKENDS.mkldnn.matmul,
}


def settings():
    """All settings of the precision of float32, those of older versions of PyTorch among them."""
    found = {name: kind.fp32_precision for name, kind in KINDS.items()}
    older = {
        "matmul": torch.get_float32_matmul_precision,
        "allow_tf32": lambda: BACKENDS.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: BACKENDS.cudnn.allow_tf32,
    }
    for name, read in older.items():
        try:
            found[name] = read()
        except RuntimeError:  # PyTorch refuses if the two ways to set it do not agree
            found[name] = "refused"
    return found


@pytest.fixture(autouse=True)
def put_back():
    """Sets what is the default of PyTorch after each test."""
    yield
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    BACKENDS.fp32_precision = BACKENDS.cudnn.fp32_precision = "none"
    BACKENDS.mkldnn.matmul.fp32_precision = BACKENDS.cuda.matmul.fp32_precision = "none"
    BACKENDS.cudnn.conv.fp32_precision = BACKENDS.cudnn.rnn.fp32_precision = "tf32"


def nothing():
    pass


def matmul_high():
    torch.set_float32_matmul_precision("high")


def matmul_medium():
    torch.set_float32_matmul_precision("medium")


def cudnn_off():
    BACKENDS.cudnn.allow_tf32 = False


def all_tf32():
    BACKENDS.fp32_precision = "tf32"


def convolutions_alone():
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


def both_ways():
    torch.set_float32_matmul_precision("high")
    BACKENDS.cuda.matmul.fp32_precision = "ieee"


WAYS = nothing, matmul_high, matmul_medium, cudnn_off, all_tf32, convolutions_alone, both_ways


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_precision_is_full_within_and_as_it_was_afterwards(way):
    way()
    before = settings()

    with full_precision():
        within = settings()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    assert {within[name] for name in KINDS} == {"ieee"}
    assert (within["matmul"], within["allow_tf32"], within["cudnn.allow_tf32"]) == (
        *("highest", False, False),
    )
    assert settings() == before


def test_what_is_inherited_is_inherited_afterwards_too():
    BACKENDS.fp32_precision = "tf32"

    with full_precision():
        pass
    BACKENDS.fp32_precision = "none"

    assert settings()["mkldnn.matmul"] == "none"


def enter_in_another_thread():
    """Let another thread enter the context, and return a function that lets it leave."""
    entered, left = threading.Event(), threading.Event()

    def inside():
        with full_precision():
            entered.set()
            left.wait()

    def leave():
        left.set()
        thread.join()

    thread = threading.Thread(target=inside)
    thread.start()
    entered.wait()
    return leave


def test_the_last_thread_that_leaves_puts_the_settings_back():
    matmul_high()
    before = settings()
    with full_precision():
        leave = enter_in_another_thread()
    assert settings()["matmul"] == "highest"
    leave()

    assert settings() == before


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_for_a_while_it_may_be_as_the_user_has_set_it(way):
    way()
    before = settings()

    with full_precision():
        full = settings()
        with full_precision(), users_precision():
            assert settings() == before
            with full_precision():
                assert settings() == full
            assert settings() == before
        assert settings() == full
    assert settings() == before
    with users_precision():
        assert settings() == before
    assert settings() == before


def test_it_stays_full_while_another_thread_needs_it():
    matmul_high()
    before = settings()
    with full_precision():
        leave = enter_in_another_thread()
        with users_precision():
            assert settings()["matmul"] == "highest"
        leave()
        assert settings()["matmul"] == "highest"
    assert settings() == before


def test_costs_are_measured_in_the_precision_that_the_user_has_set(monkeypatch):
    met, timed = set(), HostTimer.time

    def time(timer, key, run):
        met.add(torch.get_float32_matmul_precision())
        return timed(timer, key, run)

    monkeypatch.setattr(HostTimer, "time", time)
    matmul_high()
    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], chunks=2, costs="measured") as pipe:
        pipe.prepare(torch.randn(4, 4))

    assert met == {"high"}


def test_a_model_is_checked_in_full_precision_and_computes_as_the_user_has_set():
    met = []

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            met.append(torch.get_float32_matmul_precision())
            return self.linear(x)

    matmul_high()
    with fxpipe.compile(Asks(), ["cpu"], chunks=2) as pipe:
        pipe(torch.randn(4, 4))

    assert set(met) == {"highest"}
    assert torch.get_float32_matmul_precision() == "high"


def test_what_the_user_has_set_is_known_within_and_outside():
    matmul_high()
    assert (uses_tf32(is_convolution=False), uses_tf32(is_convolution=True)) == (True, True)
    with full_precision():
        assert uses_tf32(is_convolution=False)

    torch.set_float32_matmul_precision("highest")
    assert (uses_tf32(is_convolution=False), uses_tf32(is_convolution=True)) == (False, True)
