"""A graph that does something else than the model is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.ir._torch import FakeTensorMode
from fxpipe.trace import TraceError, checks, export, regions, trace
from fxpipe.trace.example import Example
from tests.fxpipe.trace.small import BOTH, MLP, in_a_run, run, x


def test_random_numbers_that_fx_would_freeze_go_to_export() -> None:
    class Jitter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(8)

    assert trace(Jitter(), (x(),)).front_end == "export"


class Detour(nn.Module):
    """Two ways to the same values: one of them without gradients for the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if not isinstance(y, fx.Proxy):
            y = y.detach()
        return self.b(y)


def test_a_symbolic_graph_with_the_same_values_and_other_gradients_is_refused() -> None:
    match = r"symbolic: its graph has a gradient for a\.weight, a\.bias, and the model none"
    with pytest.raises(TraceError, match=match):
        trace(Detour(), (torch.randn(4, 4),), tracer="symbolic")


class Reentrant(MLP):
    """Its checkpoint is of the kind that ``torch.autograd.grad`` does not go through."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.layers[0], x.view_as(x).requires_grad_(), use_reentrant=True)
        return self.layers[2](y)


def test_a_graph_that_loses_gradients_is_refused_and_the_parameters_are_named() -> None:
    def without(model: nn.Module, args: object, kwargs: object) -> fx.GraphModule:
        gm = fx.symbolic_trace(nn.Sequential(model.layers[0], model.layers[2]))
        first = next(node for node in gm.graph.nodes if node.op == "call_module")
        with gm.graph.inserting_after(first):
            detached = gm.graph.call_method("detach", (first,))
        first.replace_all_uses_with(detached, lambda user: user is not detached)
        gm.recompile()
        return gm

    match = r"no gradient for layers\.0\.weight, layers\.0\.bias, and the model has one"
    with pytest.raises(TraceError, match=match):
        trace(Reentrant(), (x(),), tracer=without)


def test_a_graph_with_the_history_of_the_model_needs_no_backward(monkeypatch) -> None:
    """A backward takes more time and memory than all else in the comparison."""

    def backward(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backward was run")

    monkeypatch.setattr(torch.autograd, "backward", backward)
    trace(MLP(), (x(),), tracer="symbolic")


def test_a_custom_tracer_is_used_and_checked() -> None:
    model = MLP()
    traced = trace(model, (x(),), tracer=lambda m, args, kwargs: fx.symbolic_trace(m))
    assert traced.front_end == "custom"
    assert torch.equal(run(traced, x()), model(x()))

    class Defaults(nn.Module):
        def forward(self, x: Tensor, y: int = 3) -> Tensor:
            return x * y

    with pytest.raises(TraceError, match="2 placeholders for 1 input tensors"):
        trace(Defaults(), (x(),), tracer=lambda m, args, kwargs: fx.symbolic_trace(m))
    with pytest.raises(TraceError, match="differs on the example: output: Tensor-likes"):
        trace(model, (x(),), tracer=lambda m, args, kwargs: fx.symbolic_trace(m.layers))
    with pytest.raises(TraceError, match="returned a MLP"):
        trace(model, (x(),), tracer=lambda m, args, kwargs: m)
    with pytest.raises(ValueError, match="tracer is 'dynamo'"):
        trace(model, (x(),), tracer="dynamo")


class Slope(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]


@BOTH
def test_a_model_that_computes_gradients_is_refused_with_the_line(tracer: str) -> None:
    match = rf"{tracer}: it computes gradients within its forward.*\(at .*test_checks.py.*grad\("
    with pytest.raises(TraceError, match=match):
        trace(Slope(), (x(),), tracer=tracer)


class Counting(MLP):
    """Notes the rows that it is run on, with values."""

    rows: list[int] = []  # noqa: RUF012  # a list, as what is in one is not put back

    def forward(self, x: Tensor) -> Tensor:
        if in_a_run(x):
            Counting.rows.append(x.shape[0])
        return super().forward(x)


@BOTH
def test_the_model_is_run_on_few_rows_however_many_the_example_has(tracer: str) -> None:
    Counting.rows.clear()
    trace(Counting(), (x(512),), tracer=tracer)
    assert Counting.rows == [2, 1], "two rows, and one with a history"


@BOTH
def test_hooks_of_the_models_own_on_gradients_are_not_lost(tracer: str) -> None:
    class Clipped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            if not isinstance(y, fx.Proxy) and y.requires_grad:
                y.register_hook(lambda gradient: gradient * 100)
            return self.layers[2](y)

    with pytest.raises(TraceError, match="another gradient"):
        trace(Clipped(), (x(),), tracer=tracer)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError("no room")])
@BOTH
def test_a_lack_of_memory_is_no_reason_to_try_another_way(tracer: str, error: Exception) -> None:
    class Full(MLP):
        def forward(self, x: Tensor) -> Tensor:
            if not in_a_run(x):
                raise error
            return super().forward(x)

    with pytest.raises(type(error), match="no room"):
        trace(Full(), (x(),), tracer=tracer)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_graph_for_which_memory_runs_out_is_not_a_graph_that_differs(where: str) -> None:
    """Another front end's graph would need as much, and the message would hide the reason."""

    class Exhausts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            if where == "forward":
                raise torch.OutOfMemoryError("no room")
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("no room")

    def exhaust(x: Tensor) -> Tensor:
        return Exhausts.apply(x)

    def exhausting(model: nn.Module, args: object, kwargs: object) -> fx.GraphModule:
        gm = fx.symbolic_trace(model)
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(exhaust, output.args),)
        gm.recompile()
        return gm

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        trace(MLP(), (x(),), tracer=exhausting)


def test_a_model_that_memory_does_not_suffice_for_is_not_run_with_gradients_as_well() -> None:
    runs = []

    class Full(MLP):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(len(x))
            raise torch.OutOfMemoryError("no room")

    model = Full()
    with pytest.raises(torch.OutOfMemoryError):
        checks.on_the_example(Example.of(model, (x(),), {}, None))
    assert len(runs) == 1


def test_a_lack_of_memory_is_not_explained_by_several_devices(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(checks, "references", full)
    model = MLP()
    with FakeTensorMode():  # no accelerator is needed to be on one
        model.layers[2].weight = nn.Parameter(torch.empty(4, 8, device="cuda:0"))
    with pytest.raises(MemoryError, match="no room"):
        trace(model, (x(),))


def test_a_mistake_in_a_front_end_is_raised_as_it_is(monkeypatch) -> None:
    def wrong(*_: object) -> None:
        raise AttributeError("a bug")

    wrong.__code__ = wrong.__code__.replace(co_filename=checks.__file__)
    monkeypatch.setattr(checks, "_compare", wrong)
    with pytest.raises(AttributeError, match="a bug"):
        trace(MLP(), (x(),))


def test_a_mistake_where_operators_are_enclosed_is_raised_as_it_is(monkeypatch) -> None:
    """It does not mean that sizes depend on values, for which the module would be kept whole."""

    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(-1) > 0].sum(0) + x

    def wrong(*_: object) -> None:
        raise KeyError("a bug")

    wrong.__code__ = wrong.__code__.replace(co_filename=regions.__file__)
    monkeypatch.setattr(export, "enclose_unknown_sizes", wrong)
    with pytest.raises(KeyError, match="a bug"):
        trace(nn.Sequential(Chosen(), nn.Linear(8, 8)), (x(),), tracer="export")


class Masked(nn.Module):
    """Keeps a mask in a buffer, which grows with the longest input so far."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        mask = None if size is None else torch.ones(size, size).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.mask is None or self.mask.shape[0] < n:
            self.mask = torch.ones(n, n).tril()
        return self.last(self.mask[:n, :n] @ self.first(x))


@pytest.mark.parametrize(
    ("size", "does"),
    [
        (None, "makes the buffer 0.mask and 1 more in its forward,"),
        (3, "replaces the buffer 0.mask and 1 more in its forward by one of another shape"),
    ],
    ids=["none", "shorter"],
)
@pytest.mark.parametrize("tracer", ["auto", "symbolic", "export"])
def test_of_a_buffer_that_is_made_in_the_forward_it_is_said_what_to_do(size, does, tracer) -> None:
    model = nn.Sequential(Masked(size), Masked(size))
    long, short = torch.randn(4, 6, 4), torch.randn(4, 5, 4)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer)
    with pytest.raises(TraceError, match=f"{does}.*call the model once ahead of fxpipe.compile"):
        pipe(long)
    assert model[0].mask is None or model[0].mask.shape == (3, 3)
    if tracer == "symbolic":
        return  # it has no sizes, on which the model's condition depends
    model(long)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        for x in long, short:
            torch.testing.assert_close(pipe(x), model(x))


class Last(nn.Module):
    """Keeps its last input in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return self.second(self.first(x))


def test_a_buffer_that_follows_the_rows_is_not_said_to_be_made_by_one_call() -> None:
    with pytest.raises(TraceError, match="dict of nothing in place of dict of last") as caught:
        trace(Last(), (torch.randn(4, 4),))
    assert "once ahead" not in str(caught.value)
