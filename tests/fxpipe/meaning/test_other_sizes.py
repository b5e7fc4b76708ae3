"""What a loss means is found out with inputs and target of one step, whatever the pipeline has been
compiled with, and what has been called before."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning

TWO = ["cpu"] * 2
ROWS = 8


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def total_by_length(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / output.shape[1]


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.argmax(-1).flatten(), reduction="sum")


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 3, 3, 1, 1))


class Branching(nn.Module):
    """Export traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = dense()

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] > 100 else self.layers(x)


def texts(size: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, size, 8)


def pictures(size: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 3, size, size)


def called(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe(x)


def called_without_gradients(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    with torch.no_grad():
        pipe(x)


def evaluated(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe.eval()
    with torch.inference_mode():
        pipe(x)
    pipe.train()


def prepared(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe.prepare(x)


def drawn(pipe: fxpipe.Pipeline, x: Tensor) -> None:
    pipe(x)
    pipe.draw("step")


BEFORE = called, called_without_gradients, evaluated, prepared, drawn


def assert_that_steps_are_the_models(
    pipe: fxpipe.Pipeline, loss_fn: Callable[..., Tensor], x: Tensor, target: Any
) -> None:
    """A loss that is a sum, and its gradients, are those of the whole batch."""
    model = copy.deepcopy(pipe.module)
    for parameter in (*model.parameters(), *pipe.module.parameters()):
        parameter.grad = None
    loss = pipe.step(x, target=target)
    expected = loss_fn(model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)
    for own, other in zip(pipe.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.covering(1)
@pytest.mark.parametrize("loss_fn", [total, total_by_length, entropy])
@pytest.mark.parametrize(
    ("make", "batch", "options"),
    [
        (dense, texts, {}),
        (convolutions, pictures, {}),
        (Branching, texts, {}),
        (Branching, texts, {"dynamic": True}),
    ],
)
def test_a_sum_is_one_at_another_size_than_that_of_the_example(make, batch, options, loss_fn):
    torch.manual_seed(0)
    given = {"example_inputs": (batch(16),), "loss_fn": loss_fn, "chunks": 4, **options}
    for more in ({}, {"example_target": batch(16)}):
        with fxpipe.compile(make(), TWO, **given, **more) as pipe:
            for size, rows in ((24, 8), (16, 8), (20, 12), (12, 3)):
                x, target = batch(size, rows), batch(size, rows)
                assert_that_steps_are_the_models(pipe, loss_fn, x, target)


@pytest.mark.parametrize("before", BEFORE)
def test_a_sum_is_one_at_another_size_than_that_of_an_earlier_call(before):
    torch.manual_seed(0)
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=total) as pipe:
        before(pipe, texts(16))
        for size, rows in ((24, 8), (16, 8), (20, 5)):
            assert_that_steps_are_the_models(pipe, total, texts(size, rows), texts(size, rows))


def test_autocast_changes_nothing_of_that():
    torch.manual_seed(0)
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=total) as pipe:
        pipe(texts(16))
        x, target = texts(24), texts(24)
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = pipe.step(x, target=target), total(pipe.module(x), target)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-2)


def of_parts(output: Tensor, target: Any) -> Tensor:
    y, mask = target.values() if isinstance(target, dict) else target
    return ((output - y).square() * mask).sum()


@pytest.mark.parametrize("kind", [tuple, lambda pair: dict(zip("ab", pair, strict=True))])
def test_so_it_is_with_a_target_of_several_tensors(kind):
    torch.manual_seed(0)
    example = (texts(16),)
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=of_parts, example_inputs=example) as pipe:
        for size, rows in ((24, 8), (16, 8), (20, 3)):
            target = kind((texts(size, rows), (texts(size, rows) > 0).float()))
            assert_that_steps_are_the_models(pipe, of_parts, texts(size, rows), target)


def of_a_list(output: Tensor, target: list[Tensor]) -> Tensor:
    pairs = zip(output, target, strict=True)
    return torch.stack([(own[: len(other)] - other).square().sum() for own, other in pairs]).sum()


def test_so_it_is_with_a_target_that_is_a_list_of_rows():
    torch.manual_seed(0)
    example = (texts(16),)
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=of_a_list, example_inputs=example) as pipe:
        for size, rows in ((24, 8), (16, 8), (20, 8)):
            target = [torch.randn(size - i, 8) for i in range(rows)]
            assert_that_steps_are_the_models(pipe, of_a_list, texts(size, rows), target)


def test_a_loss_weight_that_contradicts_a_sum_is_refused_at_another_size():
    def lengths(target: Tensor) -> int:
        return target.numel()

    with (
        fxpipe.compile(
            dense(), TWO, chunks=4, loss_fn=total, loss_weight=lengths, example_inputs=(texts(16),)
        ) as pipe,
        pytest.raises(fxpipe.BatchError, match="loss_fn is a sum over the rows"),
    ):
        pipe.step(texts(24), target=texts(24))


def test_pytorch_warns_of_no_sizes_that_the_user_has_not_given():
    with fxpipe.compile(convolutions(), TWO, chunks=4, loss_fn=F.mse_loss) as pipe:
        for size in (16, 24):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                pipe.step(pictures(size), target=pictures(size))


@pytest.mark.parametrize("sizes", [((16, 8), (3, 16)), ((16, 8), (2, 16)), ((5, 8), (16, 9))])
def test_fewer_rows_of_another_length_are_taken(sizes):
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=F.mse_loss) as pipe:
        for rows, size in sizes:
            x, target = texts(size, rows), texts(size, rows)
            loss = pipe.step(x, target=target)
            torch.testing.assert_close(loss, F.mse_loss(pipe.module(x), target).detach())


# ------------------------------------------------------------------------------ padding comes later


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def ids(rows: int, size: int, padded: bool) -> Tensor:
    found = torch.randint(1, 8, (rows, size))
    lengths = torch.arange(rows) % size + 1 if padded else torch.full((rows,), size)
    found[torch.arange(size) >= lengths[:, None]] = 0
    return found


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "batches",
    [
        ((16, 8, False), (16, 8, True)),
        ((16, 8, False), (16, 12, True), (16, 9, True)),
        ((16, 8, False), (7, 12, True)),
        ((16, 8, True),),
    ],
)
@pytest.mark.parametrize("has_example", [False, True])
def test_padding_is_told_of_at_any_length(batches, has_example):
    torch.manual_seed(0)
    options = {"example_inputs": (ids(16, 6, False),)} if has_example else {}
    with (
        fxpipe.compile(embedded(), TWO, chunks=4, loss_fn=ignoring, **options) as pipe,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for rows, size, padded in batches:
            pipe.step(ids(rows, size, False), target=ids(rows, size, padded))
            assert any(issubclass(each.category, BatchWarning) for each in caught) == padded
    (said,) = (str(each.message) for each in caught)
    assert "loss_weight=fxpipe.loss_weight.tokens(ignore_index=0)" in said


# ------------------------------------------------------------ a check that fails by its own fault


def test_a_sum_that_asks_for_gradients_is_not_taken_for_a_mean():
    def with_a_penalty(output: Tensor, target: Tensor) -> Tensor:
        loss = total(output, target)
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        return loss + slope.square().sum()

    torch.manual_seed(0)
    x, target = texts(16), texts(16)
    for weight in (None, "sum"):
        options = {"loss_fn": with_a_penalty, "loss_weight": weight}
        with fxpipe.compile(dense(), TWO, chunks=4, **options) as pipe:
            assert_that_steps_are_the_models(pipe, with_a_penalty, x, target)


def test_a_sum_whose_first_step_has_raised_an_error_is_one_in_the_next_step():
    is_mended = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if not is_mended:
            raise KeyError("labels")
        return total(output, target)

    torch.manual_seed(0)
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=loss_fn) as pipe:
        with pytest.raises(KeyError, match="labels"):
            pipe.step(texts(16), target=texts(16))
        is_mended = True
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_that_steps_are_the_models(pipe, loss_fn, texts(16), texts(16))


def test_a_sum_of_a_model_that_is_loaded_later_is_one():
    """Nothing is checked, as the user says so; but it is found out what the loss is."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = dense()
    options = {"check": False, "example_inputs": (texts(16),), "loss_fn": total}
    with fxpipe.compile(model, TWO, chunks=4, **options) as pipe:
        x, target = texts(24), texts(24)
        with pytest.raises(RuntimeError, match='on the device "meta"'):
            pipe.step(x, target=target)
        pipe.load(dense().state_dict())
        assert_that_steps_are_the_models(pipe, total, x, target)


def test_a_sum_is_one_after_the_step_has_been_drawn():
    torch.manual_seed(0)
    with fxpipe.compile(dense(), TWO, chunks=4, loss_fn=total) as pipe:
        pipe(texts(16))
        pipe.draw("step")
        assert "taken for a mean" not in str(pipe.explain())
        assert_that_steps_are_the_models(pipe, total, texts(16), texts(16))


class Reshaped(nn.Module):
    """Reshapes where it should transpose, so that rows are mixed if there are several steps."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        rows, steps, _ = x.shape
        h = self.a(x).reshape(steps, rows, 8)
        return self.b(h.cumsum(0).reshape(rows, steps, 8))


def test_what_one_step_means_says_nothing_of_several():
    model = Reshaped()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        one = torch.randn(6, 1, 4)
        torch.testing.assert_close(pipe(one), model(one))
        with pytest.raises(fxpipe.BatchError):
            pipe(torch.randn(6, 3, 4))


def test_a_size_of_one_that_grows_compiles_once_more():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        for steps in 1, 3, 5, 2, 1:
            pipe(torch.randn(6, steps, 4))
        assert len(pipe.compilations) == 2
