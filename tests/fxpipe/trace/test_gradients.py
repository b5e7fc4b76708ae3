"""Histories and projections tell two backwards apart, and take little memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fxpipe.ir._torch import next_sequence_number
from fxpipe.trace import TraceError, gradients, trace
from fxpipe.trace.example import Example
from fxpipe.trace.gradients import _projected, history_of, projections, without_saved_tensors
from tests.fxpipe.ir.test_autograd import Scaled
from tests.fxpipe.trace.small import in_a_run, x


@pytest.mark.parametrize(
    "same",
    [
        lambda y: y[:],
        lambda y: y.clone(),
        lambda y: y.view(3, 4).expand(3, 4),
        lambda y: y.view(3, 4)[:, 0:4].contiguous().clone(),
    ],
)
def test_nodes_that_hand_the_gradient_on_as_it_is_are_no_part_of_a_history(same) -> None:
    layer, batch = nn.Linear(4, 4), torch.randn(3, 4)
    assert history_of([same(layer(batch))]) == history_of([layer(batch)])


def test_a_reshape_is_one_kind_of_node_whether_it_is_a_view_or_not() -> None:
    layer, batch = nn.Linear(4, 4), torch.randn(3, 4)
    histories = [
        history_of([layer(batch).view(4, 3)]),
        history_of([layer(batch).reshape(4, 3)]),
        history_of([torch.ops.aten._unsafe_view(layer(batch), (4, 3))]),
        history_of([torch.ops.aten._reshape_alias(layer(batch), (4, 3), (3, 1))]),
    ]
    assert all(history == histories[0] for history in histories)


def test_an_expansion_is_no_part_of_a_history_as_a_broadcast_is_none() -> None:
    bias, batch = nn.Parameter(torch.randn(1, 4)), torch.randn(3, 4)
    history = history_of([batch + bias])
    assert history_of([batch + bias.expand(3, 4)]) == history
    assert history_of([batch[:1] + bias]) == history  # of a single row
    assert history_of([batch + bias.detach().expand(3, 4).requires_grad_()]) != history


@pytest.mark.parametrize(
    "other",
    [
        lambda y: y[:2],
        lambda y: y.view(4, 3),
        lambda y: y.double(),
        lambda y: y.detach(),
        lambda y: y * 1,
        lambda y: y[None].expand(2, 3, 4),
    ],
)
def test_whatever_changes_a_gradient_or_its_shape_is_a_part_of_the_history(other) -> None:
    layer, batch = nn.Linear(4, 4), torch.randn(3, 4)
    assert history_of([other(layer(batch))]) != history_of([layer(batch)])


def _attention(repeated=None):
    """The history of an attention of four heads over the keys and values of two."""
    queries, *pairs = (layer(batch).view(3, -1, heads, 4).transpose(1, 2) for layer, heads in USES)
    if repeated is None:
        return history_of([attention(queries, *pairs, enable_gqa=True)])
    return history_of([attention(queries, *map(repeated, pairs))])


attention = nn.functional.scaled_dot_product_attention
batch = torch.randn(3, 5, 8)
USES = (nn.Linear(8, 16), 4), (nn.Linear(8, 8), 2), (nn.Linear(8, 8), 2)


def test_heads_that_are_repeated_for_an_attention_are_what_the_attention_does_itself() -> None:
    def repeated(heads: Tensor) -> Tensor:
        return heads[:, :, None].expand(3, 2, 2, 5, 4).reshape(3, 4, 5, 4)

    assert _attention(repeated) == _attention()


@pytest.mark.parametrize(
    "other",
    [
        lambda heads: heads[:, None].expand(3, 2, 2, 5, 4).reshape(3, 4, 5, 4),
        lambda heads: heads[:, :, None].expand(3, 2, 2, 5, 4).flip(2).reshape(3, 4, 5, 4),
        lambda heads: heads[:, :1, None].expand(3, 1, 4, 5, 4).reshape(3, 4, 5, 4),
    ],
)
def test_heads_that_are_repeated_otherwise_are_a_part_of_the_history(other) -> None:
    assert _attention(other) != _attention()


def test_a_long_history_is_freed_without_a_recursion() -> None:
    y = torch.ones(1, requires_grad=True)
    for _ in range(100_000):
        y = (y * 1).clone()
    results = [y]
    del y
    history_of(results)
    assert not results


def test_a_history_may_be_used_before_its_graph_is_freed() -> None:
    weight = torch.ones(2, requires_grad=True)
    results = [weight * 3]
    history_of(results, lambda history: results[0].sum().backward())
    assert weight.grad is not None and weight.grad.tolist() == [3, 3]
    assert not results


def test_a_graph_without_saved_tensors_has_the_same_history() -> None:
    layer, batch = nn.Linear(4, 4), torch.randn(3, 4)
    y = without_saved_tensors(lambda: layer(batch).sigmoid())
    with pytest.raises(RuntimeError, match="no tensors have been saved"):
        y.sum().backward()
    assert history_of([y]) == history_of([layer(batch).sigmoid()])


def test_an_activation_is_freed_as_soon_as_the_forward_no_longer_needs_it() -> None:
    def run() -> tuple[Tensor, bool]:
        y = torch.randn(3, 4, requires_grad=True).sigmoid()
        memory = StorageWeakRef(y.untyped_storage())
        y = y.sigmoid()
        return y, memory.expired()

    _, is_freed = run()
    assert not is_freed, "an ordinary run keeps it for the backward"
    _, is_freed = without_saved_tensors(run)
    assert is_freed


def _slope(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(y.sigmoid().sum(), y)[0]


@pytest.mark.parametrize("slope", [_slope, torch.func.grad(lambda x: x.sigmoid().sum())])
def test_a_run_with_a_backward_of_its_own_saves_tensors(slope) -> None:
    batch = torch.randn(3, 4)
    assert torch.equal(without_saved_tensors(lambda: slope(batch)), slope(batch))


def test_it_does_so_where_the_error_of_its_backward_is_caught() -> None:
    def run() -> Tensor:
        try:
            return _slope(torch.zeros(2))
        except RuntimeError:
            return torch.zeros(2)

    assert without_saved_tensors(run).tolist() == [0.25, 0.25]


def test_an_error_that_has_nothing_to_do_with_saved_tensors_is_raised_at_once() -> None:
    calls = []

    def run() -> None:
        calls.append(len(calls))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        without_saved_tensors(run)
    assert calls == [0]


class Tied(nn.Module):
    """Uses a weight twice, and once more within a checkpoint whose backward is a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t() + self.bias
        z = checkpoint(lambda y: y.sigmoid() @ self.weight, y, use_reentrant=True)
        return z @ self.weight * self.bias


def test_projections_are_those_of_the_gradients_that_a_backward_accumulates() -> None:
    torch.manual_seed(0)
    model, batch, weights = Tied(), torch.randn(3, 4), torch.randn(3, 4)
    leaves = dict(model.named_parameters())
    found = projections([model(batch)], [weights], leaves)
    assert all(leaf.grad is None for leaf in leaves.values())
    model(batch).backward(weights)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        gradient, number, leaf.grad = leaf.grad, found[name], None
        (expected,) = projections([leaf], [gradient], {name: leaf}).values()
        assert number is not None and expected is not None
        assert number.numbers == pytest.approx(expected.numbers, rel=1e-4)


def test_a_function_that_keeps_a_parameter_hands_its_gradient_on_all_the_same() -> None:
    before, factor = (torch.randn(3, requires_grad=True) for _ in range(2))
    output = Scaled.apply(before * 2, factor) * 3
    found = projections([output], [torch.ones(3)], {"before": before, "factor": factor})
    assert found["before"] == _projected(6 * factor.detach())
    assert found["factor"] == _projected(6 * before.detach())


def test_gradients_of_a_tied_weight_are_not_added_up_in_memory() -> None:
    weight = torch.ones(2, requires_grad=True)
    accumulated: list[Tensor | None] = []
    weight.register_post_accumulate_grad_hook(lambda leaf: accumulated.append(leaf.grad))
    found = projections([weight * 2 + weight * 3], [torch.ones(2)], {"weight": weight})
    assert all(gradient is None for gradient in accumulated)
    assert found["weight"] is not None and found["weight"].size == pytest.approx(5 * 2**0.5)


class Gained(nn.Module):
    """Computes with a tensor that the user has made of a parameter of another module."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(2, 2), weight.exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def test_a_backward_ends_where_the_graph_of_its_run_does() -> None:
    weight, shared = (torch.ones(2, requires_grad=True) for _ in range(2))
    shared.grad = torch.ones(2)
    model, rows = Gained(weight), torch.ones(3, 2)
    since = next_sequence_number()
    leaves = dict(model.named_parameters())
    found = projections([model(rows) * shared], [torch.ones(3, 2)], leaves, since=since)
    Example.of(model, (rows,), {}, [0]).gradients_of_inputs([rows])
    assert all(found.values()) and weight.grad is None and shared.grad.tolist() == [1, 1]
    model.gain.sum().backward()  # what the user's graph has saved is there
    assert torch.equal(weight.grad, model.gain)


def test_an_exported_graph_with_the_history_of_the_model_needs_no_backward(monkeypatch) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[:]  # an alias in the model, and a slice in the graph

    def backward(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backward was run")

    monkeypatch.setattr(torch.autograd, "backward", backward)
    traced = trace(Sliced(), (x(),), tracer="export")
    assert traced.front_end == "export"


class Restructured(nn.Module):
    """While it is traced it computes the same by other operators."""

    rows: list[int] = []  # noqa: RUF012  # a list, as what is in one is not put back

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        if in_a_run(x):
            Restructured.rows.append(len(x))
            return self.layer(x)
        y = self.layer(x).unsqueeze(0).squeeze(0)
        return y * self.factor + y.detach() * (1 - self.factor)


def test_where_histories_differ_gradients_are_compared_in_the_same_run_of_the_graph() -> None:
    Restructured.rows.clear()
    assert trace(Restructured(), (x(),), tracer="export").front_end == "export"
    assert Restructured.rows == [2, 1, 1], "two rows, one with a history, and one with a backward"


class Deep(nn.Module):
    """Residual layers, of which only tracing tells the operators apart, and one has another factor
    in its gradient."""

    def __init__(self, wrong: int | None = None) -> None:
        super().__init__()
        self.first, self.wrong = nn.Linear(8, 8), wrong
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            y = layer(x).sigmoid()
            if not in_a_run(x):
                y = y.unsqueeze(0).squeeze(0)
                if i == self.wrong:
                    y = y * 2 - y.detach()
            x = x + y
        return x


def test_gradients_of_layers_that_repeat_are_compared_for_the_first_and_the_last(
    monkeypatch,
) -> None:
    seen: list[int] = []

    def recorded(outputs, weights, leaves, **options):
        seen.append(len(leaves))
        return projections(outputs, weights, leaves, **options)

    monkeypatch.setattr("fxpipe.trace.example.projections", recorded)
    trace(Deep(), (x(),), tracer="export")
    assert len(seen) == 2
    assert seen[0] == seen[1] < 40 < len(list(Deep().parameters()))


@pytest.mark.parametrize("wrong", [0, 20, 39])
def test_a_wrong_gradient_of_any_of_the_layers_that_repeat_is_seen(wrong: int) -> None:
    with pytest.raises(TraceError, match="another gradient for"):
        trace(Deep(wrong), (x(),), tracer="export")


class OfTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_all_gradients_are_compared_where_a_user_has_written_one(monkeypatch) -> None:
    """The backward of one layer's weight shows nowhere else."""

    class Custom(Deep):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                weight = layer.weight
                if i == 20 and in_a_run(x):
                    weight = OfTheWeight.apply(weight)
                x = x + nn.functional.linear(x, weight).sigmoid()
            return x

    match = r"another gradient for layers\.20\.weight$"
    with pytest.raises(TraceError, match=match.replace("$", "")):
        trace(Custom(), (x(),), tracer="export")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_memory_is_kept_low_as_a_run_without_saved_tensors_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(gradients, "keep_low", kept.append)
    rows = 2 * gradients.AT_ONCE // (20 * 8 * 4)
    without_saved_tensors(lambda: Wide()(torch.ones(rows, 8)))
    assert 2 <= len(kept) <= 4, "inputs of 19 layers, and results of 20 tanh"
    del kept[:]
    with torch.device("meta"):
        without_saved_tensors(lambda: Wide()(torch.ones(rows, 8)))
    assert not kept


def test_parameters_among_saved_tensors_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(gradients, "keep_low", given.append)
    monkeypatch.setattr(gradients, "AT_ONCE", 2000)
    layer, x = nn.Linear(64, 64), torch.ones(1, 64, requires_grad=True)
    without_saved_tensors(lambda: layer(x))
    assert not given
