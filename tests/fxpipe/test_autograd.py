"""What autograd can do with a model it can do with its pipeline."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import fxpipe
from tests.zoo import MLP, Chain, gradients, loop, loss_of, parts, same

CHECKPOINT = ["never", "except_last", "always"]


class Smooth(nn.Module):
    """Twice differentiable, with a skip over two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        z = torch.sigmoid(self.b(y))
        return torch.sin(self.c(z)) * y + x


def pipeline(checkpoint: str, **options: object) -> tuple[nn.Module, fxpipe.Pipeline]:
    model = Smooth().double()
    pipe = fxpipe.compile(
        model, ["cpu"] * 3, chunks=2, partition=["b", "c"], checkpoint=checkpoint, **options
    )
    return model, pipe


@pytest.mark.parametrize(
    "checkpoint, segments", [*((mode, 1) for mode in CHECKPOINT), ("always", 2)]
)
def test_first_and_second_derivatives_are_right(checkpoint, segments):
    _, pipe = pipeline(checkpoint, checkpoint_segments=segments)
    x = torch.randn(3, 3, dtype=torch.double, requires_grad=True)
    with pipe:
        assert gradcheck(pipe, (x,))
        assert gradgradcheck(pipe, (x,))


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_a_gradient_penalty_trains_as_without_a_pipeline(checkpoint):
    model, pipe = pipeline(checkpoint)
    x = torch.randn(4, 3, dtype=torch.double, requires_grad=True)

    def penalty(run):
        (grad,) = torch.autograd.grad(loss_of(run(x)), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), list(model.parameters()), allow_unused=True)

    with pipe:
        for ours, theirs in zip(penalty(pipe), penalty(model), strict=True):
            if theirs is None or ours is None:  # the last bias has no second derivative
                assert (0 if theirs is None else theirs.abs().max()) == 0
                continue
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_backward_twice_adds_the_same_again(checkpoint):
    model, pipe = pipeline(checkpoint)
    x = torch.randn(4, 3, dtype=torch.double)
    _, expected = loop(model, (x,), 2)
    model.zero_grad()
    with pipe:
        loss = loss_of(pipe(x))
        loss.backward(retain_graph=True)
        assert same([p.grad for p in model.parameters()], expected)
        loss.backward()
    assert same([p.grad for p in model.parameters()], [2 * g for g in expected])


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_gradients_of_a_part_only(checkpoint):
    model, pipe = pipeline(checkpoint)
    x = torch.randn(4, 3, dtype=torch.double)
    _, expected = loop(model, (x,), 2)
    model.zero_grad()
    wanted = list(model.c.parameters())
    with pipe:
        loss = loss_of(pipe(x))
        found = torch.autograd.grad(loss, wanted, retain_graph=True)
        loss.backward(inputs=wanted)
    assert same(list(found), expected[-2:])
    assert same([p.grad for p in model.parameters()], [None] * 4 + expected[-2:])


class Counting(torch.autograd.Function):
    """Counts how often its backward runs."""

    runs: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Counting.runs.append(ctx.name)
        return grad, None


class Partly(nn.Module):
    """A frozen first half, whose backward nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = Counting.apply(self.frozen(x), "frozen")
        return Counting.apply(self.c(Counting.apply(self.b(x), "b")), "c")


@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_gradients_that_nobody_needs_are_neither_computed_nor_sent(checkpoint):
    with fxpipe.compile(
        Partly(), ["cpu"] * 3, chunks=2, partition=["b", "c"], checkpoint=checkpoint
    ) as pipe:
        out = pipe(torch.randn(4, 3))
        Counting.runs.clear()
        out.sum().backward()
    assert sorted(Counting.runs) == ["b", "b", "c", "c"]


def test_a_failed_backward_leaves_a_working_pipeline():
    model, pipe = pipeline("always")
    x = torch.randn(4, 3, dtype=torch.double)
    _, expected = loop(model, (x,), 2)
    model.zero_grad()
    with pipe:
        out = pipe(x)

        def fail(grad):
            raise KeyboardInterrupt

        handle = model.b.weight.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            loss_of(out).backward()
        handle.remove()
        model.zero_grad()
        loss_of(pipe(x)).backward()
    assert same([p.grad for p in model.parameters()], expected)


class LongChain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.weight = length, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(self.length):
            x = torch.sin(x)
        return x


@pytest.fixture
def default_recursion_limit():
    """A library that another test has imported may have raised the limit."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_long_chain_compiles_trains_and_is_freed_within_the_default_recursion_limit(
    checkpoint, default_recursion_limit
):
    model, x = LongChain(1500), torch.randn(4, 2)
    _, expected = loop(model, (x,), 2)
    model.zero_grad()
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint=checkpoint)
    out = pipe(x)
    loss_of(out).backward()
    assert same([model.weight.grad], expected)
    pipe.close()
    gone = weakref.ref(pipe.graph_module)
    del pipe, out
    gc.collect()
    assert gone() is None


def test_a_second_pipeline_of_the_same_model_gives_the_same():
    model, x = Chain(4), torch.randn(4, 3)
    _, expected = loop(model, (x,), 2)
    model.zero_grad()
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2) as one,
        fxpipe.compile(model, ["cpu"] * 4, chunks=2) as other,
    ):
        for pipe in (one, other, one):
            model.zero_grad()
            loss_of(pipe(x)).backward()
            assert same([p.grad for p in model.parameters()], expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection_may_be_on_while_it_compiles_and_trains():
    model, x = MLP(), torch.randn(4, 12)
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        fxpipe.compile(model, ["cpu"] * 2, chunks=2, checkpoint="always") as pipe,
    ):
        loss_of(pipe(x)).backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            torch.sqrt(pipe(x) * 0 - 1).sum().backward()
    assert all(torch.isfinite(grad).all() for grad in gradients(model))


def fire(block: nn.Module, *_: object) -> None:
    block.fired += 1


class RunAgain(nn.Module):
    """A block that PyTorch's own checkpoint runs again; its hook makes it one node."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.use_reentrant = nn.Linear(4, 4), nn.Linear(4, 4), use_reentrant
        self.fired = 0
        self.register_full_backward_hook(fire)

    def forward(self, x: Tensor) -> Tensor:
        return torchs_checkpoint(self.run, x, use_reentrant=self.use_reentrant)

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": "always"}, {"checkpoint": "always", "checkpoint_segments": 2}],
)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_model_may_have_checkpoints_of_its_own(use_reentrant, options):
    block = functools.partial(RunAgain, use_reentrant)
    model = nn.Sequential(nn.Linear(4, 4), block(), nn.Linear(4, 4), block(), nn.Linear(4, 4))
    reference, x = copy.deepcopy(model), torch.randn(6, 4)
    wanted = loop(reference, (x,), 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, **options) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        assert same((output.detach(), gradients(model)), wanted)
        assert [model[i].fired for i in (1, 3)] == [reference[i].fired for i in (1, 3)] == [3, 3]
    model.zero_grad(), reference.zero_grad()
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, schedule="zb_h1", loss_fn=lambda out, _: out.mean(), **options
    ) as pipe:
        pipe.step(x)
    for part in parts(x, 3):
        reference(part).mean().backward(torch.tensor(1 / 3))
    assert same(gradients(model), gradients(reference))


@pytest.mark.covering(1)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_a_checkpoint_may_be_around_a_pipeline_from_its_first_call_on(checkpoint, use_reentrant):
    model, x = MLP(), torch.randn(6, 12, requires_grad=True)
    wanted = loop(copy.deepcopy(model), (x,), 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        output = torchs_checkpoint(pipe, x, use_reentrant=use_reentrant)
        loss_of(output).backward()
    assert same((output.detach(), gradients(model)), wanted)


def test_gradients_accumulate_over_calls():
    model, x = MLP(), torch.randn(4, 12)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        loss_of(pipe(x)).backward()
        once = gradients(model)
        loss_of(pipe(x)).backward()
    torch.testing.assert_close(gradients(model), [g * 2 for g in once])


def test_gradients_that_a_model_stops_are_stopped():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                target = self.a(x)
            return self.b(x) * target

    model, x = Stops(), torch.randn(4, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        loss_of(pipe(x)).backward()
    assert model.a.weight.grad is None and model.b.weight.grad is not None


def test_sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)

        def forward(self, x):
            return self.head(self.embed(x))

    model, x = Sparse(), torch.randint(9, (6, 2))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        loss_of(pipe(x)).backward()
    grad = model.embed.weight.grad
    assert grad.is_sparse
    model.zero_grad()
    loss_of(model(x)).backward()
    torch.testing.assert_close(grad.to_dense(), model.embed.weight.grad.to_dense())
