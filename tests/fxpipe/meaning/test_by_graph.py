"""A model that torch.export traces is run on one sample as a whole, its graph on the parts: this
shows at once that the graph is the model's, and that rows are independent. Where it does not, what
is wrong is found out as for any other model."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.alike import keeps_rows_apart, treats_rows_alike
from fxpipe.trace import export, to_be_compared
from tests.fxpipe.trace.small import in_a_run

TWO = ["cpu", "cpu"]


class Stateless(nn.Module):
    """Two layers, and between them what the case is about."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def runs_of(between, x=None):
    """The numbers of rows of the runs of a model, while it is compiled."""
    rows = []

    def noted(h):
        if in_a_run(h) and not h.is_meta:
            rows.append(len(h))
        return between(h)

    x = torch.randn(8, 8) if x is None else x
    model = Stateless(noted)
    with fxpipe.compile(model, TWO, chunks=2, tracer="export") as pipe:
        parts = torch.cat([copy.deepcopy(model)(part) for part in x.chunk(2)])
        del rows[:]
        pipe.prepare(x)
        seen = list(rows)
        torch.testing.assert_close(pipe(x), parts)
    return seen


def test_the_model_is_run_on_two_rows_and_on_one():
    assert runs_of(torch.tanh) == [2, 1]


def test_it_is_run_on_three_rows_if_shapes_do_not_show_that_rows_stay_apart():
    assert runs_of(lambda h: h.t().reshape(8, -1).t()) == [3, 1]


def test_it_is_run_on_two_rows_if_something_is_repeated_for_each_row():
    """The autograd graph of a single row has no node for it, and is compared without that node."""
    token = torch.ones(1, 8, requires_grad=True)
    assert runs_of(lambda h: h + token.expand(h.shape[0], -1)) == [2, 1]


def test_it_is_run_on_four_rows_if_operators_may_tell_rows_apart():
    """And once more with two rows near each other, which are far from each other at first."""
    assert runs_of(lambda h: h + 0 * torch.arange(h.shape[0])[:, None]) == [4, 1, 4, 1]


def test_a_branch_for_a_single_row_is_seen_though_torch_export_does_not_ask_for_it():
    model = Stateless(lambda h: h * 2 if h.shape[0] == 1 else h)
    with (
        fxpipe.compile(model, TWO, chunks=6, tracer="export") as pipe,
        pytest.raises((fxpipe.BatchError, fxpipe.TraceError)),
    ):
        pipe(torch.randn(6, 8))


def test_no_micro_batch_has_one_row_if_the_model_takes_none():
    def several(h):
        if h.shape[0] < 2:
            raise ValueError("at least two rows")
        return h

    model, x = Stateless(several), torch.randn(6, 8)
    with fxpipe.compile(model, TWO, chunks=6, example_inputs=(x,), tracer="export") as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        assert "of 1 row" in pipe.report()


def test_dropout_which_is_replaced_while_rows_are_checked_is_compared_as_it_really_runs():
    assert runs_of(lambda h: F.dropout(h, 0.5) * 0 + h) == [2, 1, 1]


class Normed(Stateless):
    """Has dropout and a batch norm, with the parts that a check replaces."""

    def __init__(self):
        super().__init__(torch.tanh)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        return self.b(self.drop(self.norm(self.a(x))))


def without_dropout(graph):
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.dropout.default)
    node.args = (*node.args[:1], 0.1, True)


def without_statistics(graph):
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    node.args = (*node.args[:5], False, *node.args[6:])


def with_another_momentum(graph):
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    node.args = (*node.args[:6], 0.2, *node.args[7:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_dropout, "its graph differs on the example: output"),
        (without_statistics, "its graph differs on the example: output"),
        (with_another_momentum, "its graph differs on the example: buffers: .*"),
    ],
)
def test_a_graph_that_differs_in_what_is_replaced_is_refused(change, message, monkeypatch):
    monkeypatch.setattr(export, "front_end", changed(change))
    with (
        fxpipe.compile(Normed(), TWO, chunks=2, tracer="export") as pipe,
        pytest.raises(fxpipe.TraceError, match=message),
    ):
        pipe(torch.randn(8, 8))


def test_a_batch_norm_takes_no_single_row():
    with fxpipe.compile(Normed(), TWO, chunks=8, tracer="export") as pipe:
        pipe(torch.randn(8, 8))
        assert "of 1 row" in pipe.report()


def test_a_batch_norm_trains_as_in_the_loop_over_micro_batches():
    model, x = Normed(), torch.randn(8, 8)
    model.drop.p = 0.0
    twin = copy.deepcopy(model)
    with fxpipe.compile(model, TWO, chunks=2, tracer="export") as pipe:
        torch.testing.assert_close(pipe(x), torch.cat([twin(part) for part in x.chunk(2)]))
        torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
        assert len(pipe.compilations) == 1
        pipe(x)
        assert len(pipe.compilations) == 1, "what the check has replaced is no premise"


MIXING = {
    "the first fourth last": lambda h: torch.cat([h[h.shape[0] // 4 :], h[: h.shape[0] // 4]]),
    "the first half last": lambda h: torch.cat([h[h.shape[0] // 2 :], h[: h.shape[0] // 2]]),
    "another row": lambda h: h + h.roll(1, 0),
    "the fourth row": lambda h: h * (1 + (torch.arange(h.shape[0]) == 3))[:, None],
    "a mean": lambda h: h - h.mean(0),
    "softmax": lambda h: h.softmax(0),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "attention to earlier rows": lambda h: attention(h[None], is_causal=True)[0],
    "products of rows": lambda h: h @ h.t() @ h,
    "a division by their number": lambda h: h / h.shape[0],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MIXING)
def test_rows_that_are_mixed_are_refused_with_what_the_model_does(name):
    with (
        fxpipe.compile(Stateless(MIXING[name]), TWO, chunks=2, tracer="export") as pipe,
        pytest.raises(fxpipe.BatchError, match="depends on which other rows there are"),
    ):
        pipe(torch.randn(8, 8))


def test_a_loss_that_is_no_mean_is_warned_of():
    with (
        fxpipe.compile(Stateless(lambda h: h.norm()[None].expand(8)), TWO, tracer="export") as pipe,
        pytest.raises(fxpipe.BatchError, match="whatever the batch size"),
    ):
        pipe(torch.randn(8, 8))


def changed(change):
    """torch.export's front end, with a change of its graphs."""
    original = export.front_end

    def front_end(example, strategy=None):
        traced = original(example, strategy)
        change(traced.graph_module.graph)
        traced.graph_module.recompile()
        return traced

    return front_end


def with_another_number(graph):
    node, *_ = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    node.args = node.args[0], node.args[1] * 1.0001


def without_a_gradient(graph):
    node, *_ = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with graph.inserting_after(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    node.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)


def with_a_write(graph):
    node, *_ = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with graph.inserting_after(node):
        count = graph.get_attr("count")
    with graph.inserting_after(count):
        graph.call_function(torch.ops.aten.add_.Tensor, (count, 1))


def for_one_row_only(graph):
    node, *_ = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with graph.inserting_after(node):
        some = graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, 0, 1))
    node.replace_all_uses_with(some, delete_user_cb=lambda user: user is not some)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_another_number, "its graph differs on the example: output"),
        (without_a_gradient, "its graph has no gradient for a.weight, a.bias"),
        (with_a_write, "its graph differs on the example: buffers"),
        (for_one_row_only, "its graph differs on the example: output"),
    ],
)
def test_a_graph_that_is_not_the_models_is_refused(change, message, monkeypatch):
    class Counts(Stateless):
        def __init__(self):
            super().__init__(lambda h: torch.tanh(h) * 3.0)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            return super().forward(x) + 0 * self.count

    monkeypatch.setattr(export, "front_end", changed(change))
    with (
        fxpipe.compile(Counts(), TWO, chunks=2, tracer="export") as pipe,
        pytest.raises(fxpipe.TraceError) as error,
    ):
        pipe(torch.randn(8, 8))
    assert re.search(message, str(error.value)), error.value


def test_the_gradients_are_those_of_the_micro_batches():
    model, x = Stateless(torch.tanh), torch.randn(8, 8, requires_grad=True)
    with fxpipe.compile(model, TWO, chunks=4, tracer="export") as pipe:
        pipe(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()] + [x.grad.clone()]
    model.zero_grad()
    x.grad = None
    for part in reversed(x.chunk(4)):
        model(part).square().sum().backward()
    for one, other in zip(found, [*(p.grad for p in model.parameters()), x.grad], strict=True):
        torch.testing.assert_close(one, other)


def test_what_the_model_reads_is_a_guard():
    class Scaled(Stateless):
        def __init__(self):
            super().__init__(torch.tanh)
            self.scale = 2.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model, x = Scaled(), torch.randn(8, 8)
    with fxpipe.compile(model, TWO, chunks=2, tracer="export") as pipe:
        pipe(x)
        model.scale = 3.0
        torch.testing.assert_close(pipe(x), model(x))


def added_to(h, rows):
    h[rows].add_(1)
    return h


ALIKE = {
    "elements": (lambda h: torch.tanh(h) * 2 + 1, True),
    "a norm of each row": (lambda h: F.layer_norm(h, (8,)), True),
    "softmax of each row": (lambda h: h.softmax(-1), True),
    "all rows": (lambda h: h[:] + 1, True),
    "a table of columns": (lambda h: h + torch.arange(8), True),
    "heads": (lambda h: h.view(h.shape[0], 2, 4).transpose(1, 2).reshape(h.shape[0], 8), True),
    "rows by their number": (lambda h: h * torch.arange(h.shape[0])[:, None], False),
    "some rows, in place": (lambda h: h.mul(1).index_fill_(0, torch.tensor(0), 0.0), False),
    "some rows, by a view": (lambda h: added_to(h.mul(1), slice(1)), False),
    "all rows, in place": (lambda h: added_to(h.mul(1), slice(None)), True),
    "some rows": (lambda h: torch.cat([h[:1], h[1:] * 2]), False),
    "softmax of columns": (lambda h: h.softmax(0), False),
    "the number of rows": (lambda h: h / h.shape[0], False),
    "a mean over rows": (lambda h: h - h.mean(0), False),
    "an order": (lambda h: h.sort(0).values, False),
    "an empty tensor beside": (lambda h: torch.cat([torch.empty(0), h[:, None]], -2)[:, 0], True),
    "an empty tensor ahead of rows": (lambda h: torch.cat([torch.empty(0), h], -2), False),
}


@pytest.mark.parametrize("name", ALIKE)
def test_operators_are_known_that_treat_all_rows_alike(name):
    between, expected = ALIKE[name]
    model, x = Stateless(between), torch.randn(6, 8)
    traced = to_be_compared(model, (x,), {}, "export", [0])
    assert traced is not None
    assert treats_rows_alike(traced.graph_module.graph) == expected


def attention(h, **options):
    return F.scaled_dot_product_attention(h, h, h, **options)


APART = {
    "elements": (lambda h: torch.tanh(h) * 2 + 1, True),
    "a norm of each row": (lambda h: F.layer_norm(h, (8,)), True),
    "heads": (lambda h: h.view(h.shape[0], 2, 4).transpose(1, 2).reshape(h.shape[0], 8), True),
    "attention within a row": (lambda h: attention(h.view(-1, 2, 4)).reshape(-1, 8), True),
    "attention over rows": (lambda h: attention(h[None])[0], False),
    "attention over earlier rows": (lambda h: attention(h[None], is_causal=True)[0], False),
    "products within a row": (lambda h: (h[:, :, None] @ h[:, None]).mean(1), True),
    "products of rows": (lambda h: h @ h.t() @ h, False),
    "differences of rows": (lambda h: (h[:, None] - h).mean(-1).softmax(-1) @ h, False),
    "a norm of pairs": (lambda h: F.group_norm(h.view(h.shape[0], 2, 4), 2).flatten(1), True),
    "a norm of columns": (lambda h: F.group_norm(h.t(), 2).t(), False),
    "without a dimension of size 1": (lambda h: h[:, None].squeeze(1), True),
    "without all dimensions of size 1": (lambda h: h[:, None].squeeze(), False),
    "pieces of columns": (lambda h: h.t().reshape(8, -1).t(), False),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", APART)
def test_operators_are_known_that_keep_rows_apart(name):
    between, expected = APART[name]
    traced = to_be_compared(Stateless(between), (torch.randn(6, 8),), {}, "export", [0])
    assert traced is not None
    graph = traced.graph_module.graph
    assert (treats_rows_alike(graph) and keeps_rows_apart(graph)) == expected
