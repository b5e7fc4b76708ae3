"""A model may be used by one thread while another thread compiles it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class Net(nn.Module):
    """Weights that are shared, statistics, hooks, an LSTM, and attributes that a forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.first = self.layers[0]
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers[2].weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(self.norm(x)) + self.first(x)
        z, _ = self.rnn(y.unsqueeze(1))
        return self.attention(z).squeeze(1)


class Used:
    """A thread that runs a model, forward and backward, as long as the ``with`` block lasts."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.rounds, self.failed = work, 0, list[BaseException]()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                self.work()
                self.rounds += 1
                time.sleep(0.001)
        except BaseException as error:
            self.failed.append(error)

    def __enter__(self) -> Used:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(60)
        for error in self.failed:
            raise error


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_a_thread_that_runs_a_model_is_undisturbed_while_it_is_compiled(tracer: str) -> None:
    model = Net().eval()
    x = torch.randn(6, 8)
    weight = model.first.weight
    tied, hooked = [], threading.local()
    hooked.times = 0

    def hook(*_: object) -> None:
        hooked.times = getattr(hooked, "times", 0) + 1

    model.layers[1].register_forward_hook(hook)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), weight)

    def work() -> None:
        hooked.times = 0
        y = model(x)
        assert torch.equal(y, expected) and model.first.weight is weight
        (found,) = torch.autograd.grad(y.sum(), weight)
        assert torch.equal(found, gradient)
        assert hooked.times == 1
        assert not torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        tied.append(model.layers[0].weight is model.layers[2].weight)

    with Used(work) as used:
        for _ in range(2):
            pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer, example_inputs=(x,))
    assert used.rounds > 3 and all(tied)
    torch.testing.assert_close(pipe(x), expected)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_what_a_thread_trains_meanwhile_stays(tracer: str) -> None:
    """Gradients, hooks on gradients, and statistics of batch norms are those of the thread."""
    model = Net().train()
    x = torch.randn(6, 8)
    fired = []
    model.norm.weight.register_hook(lambda gradient: fired.append(gradient))

    def work() -> None:
        model(x).square().sum().backward()

    with Used(work) as used:
        for _ in range(2):
            fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer, example_inputs=(x,))
    assert used.rounds == len(fired) == int(model.norm.num_batches_tracked)
    total = torch.stack(fired).sum(0)
    torch.testing.assert_close(model.norm.weight.grad, total)
