"""Tracing leaves the model, its weights and the random states as they were."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, fx, nn

from fxpipe.trace import TraceError, trace
from fxpipe.trace.isolation import called, untouched
from tests.fxpipe.trace.small import BOTH, MLP, Noisy, run, x
from tests.zoo import same


@BOTH
def test_tracing_leaves_the_model_and_the_random_states_as_they_were(tracer: str) -> None:
    model = Noisy()
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    buffers = [(b, b.clone(), b._version) for b in model.buffers()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    trace(model, (x(),), tracer=tracer)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    for buffer, (old, value, _) in zip(model.buffers(), buffers, strict=True):
        assert buffer is old and torch.equal(buffer, value)


@BOTH
def test_what_the_model_stores_on_itself_is_put_back(tracer: str) -> None:
    class Remembers(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return super().forward(x)

    model = Remembers()
    trace(model, (x(),), tracer=tracer)
    assert not hasattr(model, "last")


class Averaging(nn.Module):
    """Keeps a mean of what it gives, which is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.mean
        y = self.layers(x)
        self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return y - self.mean, before + 0


@BOTH
def test_a_buffer_that_the_model_puts_another_in_place_of_is_written_to(tracer: str) -> None:
    model, plain = Averaging(), Averaging()
    plain.load_state_dict(model.state_dict())
    own = model.mean
    traced = trace(model, (x(),), tracer=tracer)
    assert model.mean is own and torch.equal(own, torch.zeros(8))
    for batch in 4, 3:
        torch.testing.assert_close(run(traced, x(batch)), plain(x(batch)))
        torch.testing.assert_close(own, plain.mean)
    assert not own.requires_grad


class Queue(nn.Module):
    """The last rows that came by, of which no gradient is wanted."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.layers, self.by_data = MLP(), by_data
        self.register_buffer("rows", torch.zeros(12, 8))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        scores = y @ self.rows.clone().t() if x.shape[1] > 2 else y
        places = (self.next + torch.arange(y.shape[0])) % 12
        if self.by_data:
            self.rows.data.index_copy_(0, places, y.detach())
            self.next.data.add_(y.shape[0])
            return scores
        with torch.no_grad():
            self.rows[places] = y
            self.next += y.shape[0]
        return scores


@pytest.mark.parametrize("by_data", [False, True])
def test_what_an_exported_graph_writes_to_buffers_only_is_not_left_out(by_data: bool) -> None:
    model, plain = Queue(by_data), Queue(by_data)
    plain.load_state_dict(model.state_dict())
    traced = trace(model, (x(),))
    assert traced.front_end == "export"
    assert not model.rows.any() and not model.next.any()
    for batch in 5, 3, 6:
        torch.testing.assert_close(run(traced, x(batch)), plain(x(batch)))
        torch.testing.assert_close(model.rows, plain.rows)
        assert model.next == plain.next
    assert "data" not in vars(Tensor), "it is as it was"


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(TraceError, match="run it once"):
        trace(nn.LazyLinear(4), (x(),))


@pytest.mark.parametrize("name", ["graph", "code", "meta"])
def test_a_part_that_is_called_what_graph_modules_have_is_refused_but_further_down(
    name: str,
) -> None:
    model = nn.Module()
    model.add_module(name, nn.Linear(8, 8))
    model.forward = lambda x: getattr(model, name)(x)  # type: ignore[assignment]
    with pytest.raises(TraceError, match=rf"a part that is called '{name}'.* nn.Sequential\("):
        trace(model, (x(),))
    assert torch.equal(run(trace(nn.Sequential(model), (x(),)), x(3)), model(x(3)))


def test_distributions_may_look_at_their_parameters(monkeypatch) -> None:
    # Dynamo, where it has been at work, has left them as lenient as it needs them.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            normal = torch.distributions.Normal(self.mean(x), self.spread(x).exp())
            return -normal.log_prob(y).mean(-1)

    model = Variational()
    traced = trace(model, (x(), x() + 1))
    assert same(run(traced, x(), x() + 1), model(x(), x() + 1))
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)  # as strict as they were


class Scales(MLP):
    """Writes to its weights when it is called for the first time."""

    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                self.layers[0].weight.mul_(2)
            self.done = True
        return super().forward(x)


def test_a_model_that_writes_to_its_weights_once_is_to_be_called_first() -> None:
    model = Scales()
    before = model.layers[0].weight.detach().clone()
    with pytest.raises(TraceError, match=r"layers.0.weight, by .*mul_\(2\)\) when it is first"):
        trace(model, (x(),))
    assert torch.equal(model.layers[0].weight, before) and not model.done
    model(x())
    traced = trace(model, (x(),))
    assert torch.equal(run(traced, x()), model(x()))
    assert torch.equal(model.layers[0].weight, before * 2)


def test_a_model_that_writes_to_its_weights_and_cannot_be_traced_is_told_so() -> None:
    class Keeps(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.layers[0].weight.data.copy_(y.sum() * torch.eye(8))
            return y if y.sum() > 0 else -y

    with pytest.raises(TraceError, match=r"It writes to its parameters: layers.0.weight, by .*eye"):
        trace(Keeps(), (x(),))


def test_a_model_that_writes_to_its_weights_at_every_call_may_and_tracing_does_not() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 4))
    before = model[0].weight.detach().clone()
    ids = torch.arange(6) % 4
    traced = trace(model, (ids,))
    assert torch.equal(model[0].weight, before)
    assert torch.equal(run(traced, ids), model(ids))


class Student(nn.Module):
    """Has a teacher, a moving average of it, that the forward moves."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.head = way, nn.Linear(8, 8)
        self.body, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def move(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            if "data" in self.way:
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            else:
                old.mul_(0.9).add_(new, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if "no_grad" in self.way else nullcontext():
            if "first" in self.way:
                self.move()
            taught = self.teacher(x).detach()
        y = (self.head(self.body(x)) - taught).square().mean(1)
        with torch.no_grad() if "no_grad" in self.way else nullcontext():
            if "last" in self.way:
                self.move()
        return y


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["no_grad first", "no_grad last", "data first", "data last"])
@pytest.mark.parametrize("is_alike", [False, True])
def test_a_teacher_that_the_forward_moves_is_moved_by_the_graph_and_not_by_tracing(
    way: str, is_alike: bool
) -> None:
    model = Student(way)
    if is_alike:  # as is usual at first: then no move shows
        model.teacher.load_state_dict(model.body.state_dict())
    before = copy.deepcopy(model)
    traced = trace(model, (x(),))
    assert same(list(model.parameters()), list(before.parameters()))
    with torch.no_grad():
        for each in model, before:
            each.body.weight.mul_(2)
        for _ in range(2):
            torch.testing.assert_close(run(traced, x()), before(x()))
    torch.testing.assert_close(model.teacher.weight, before.teacher.weight)
    assert not torch.equal(model.teacher.weight, model.body.weight)


def test_a_graph_that_does_not_write_to_the_parameters_is_refused() -> None:
    with pytest.raises(
        TraceError,
        match=r"symbolic: it writes to its parameter teacher.weight \(by .*mul_\(0.9\).*\) while "
        r"it is traced(.|\n)*Update them outside of the forward, after each step; or keep these "
        r"tensors in buffers \(self.register_buffer\)",
    ):
        trace(Student("data last"), (x(),), tracer="symbolic")
    with pytest.raises(
        TraceError, match=r"it writes to the parameters none, the model to teacher.weight, teach"
    ):
        trace(Student("no_grad last"), (x(),), tracer=lambda *given: without_moves(given[0]))


def without_moves(model: nn.Module) -> fx.GraphModule:
    """A graph of a student without the moves of its teacher."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    taught, own = graph.call_module("teacher", (given,)), graph.call_module("body", (given,))
    found = graph.call_function(torch.sub, (graph.call_module("head", (own,)), taught))
    graph.output(graph.call_method("mean", (graph.call_method("square", (found,)), 1)))
    return fx.GraphModule(model, graph)


def test_a_module_that_is_converted_to_what_it_is_already_is_exported() -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.linear = self.linear.to(torch.float32)
            return self.linear(x)

    model = Converts()
    traced = trace(model, (x(),), tracer="export")
    assert torch.equal(run(traced, x()), model(x()))


def test_what_a_model_sets_in_context_variables_is_not_seen_after_it_has_been_called():
    flavour = ContextVar("flavour", default="plain")

    class Sets(nn.Module):
        def forward(self, x):
            flavour.set("sweet")
            return x

    called(Sets(), (torch.ones(1),), {})
    assert flavour.get() == "plain"


def test_entries_are_put_back_in_their_order() -> None:
    """A forward that goes through a dictionary computes in its order."""
    model = nn.Linear(2, 2)
    model.parts, model.same = {"a": 1, "b": 2}, {"a": 1}
    before = dict(vars(model))
    with untouched(model):
        model.parts["a"] = model.parts.pop("a")
        model.same["a"] = 2
        vars(model)["training"] = vars(model).pop("training")
    assert list(model.parts.items()) == [("a", 1), ("b", 2)]
    assert model.same == {"a": 1}
    assert list(vars(model)) == list(before)


def test_a_backward_inside_leaves_the_gradient_of_a_tensor_that_is_no_parameter() -> None:
    model = nn.Linear(4, 4)
    model.scale = torch.ones(4, requires_grad=True)
    model.scale.grad = before = torch.full((4,), 2.0)
    with untouched(model):
        (model(x(2, 4)) * model.scale).sum().backward()
    assert model.scale.grad is before and torch.equal(before, torch.full((4,), 2.0))
