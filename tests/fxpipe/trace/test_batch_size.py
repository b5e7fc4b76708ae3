"""A graph is for every batch size, or the model is refused with the line that is not."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.trace import Args, Kwargs, TraceError, trace
from tests.fxpipe.trace.small import MLP, run, x


class Branch(nn.Module):
    """Not for fx: control flow on a size. Export takes it, for the sizes do not vary."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 2 else x


class BranchOnBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 2 else x


def test_control_flow_on_a_fixed_size_goes_to_export() -> None:
    traced = trace(Branch(), (x(),))
    assert traced.front_end == "export"
    for batch in 1, 2, 7:
        assert torch.equal(run(traced, x(batch)), x(batch) * 2)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_control_flow_on_the_batch_size_is_refused(batch: int) -> None:
    with pytest.raises(TraceError) as error:
        trace(BranchOnBatch(), (x(batch),))
    text = str(error.value)
    assert "symbolic: TraceError: symbolically traced" in text
    assert "test_batch_size.py" in text and "if x.shape[0] > 2" in text
    assert "export: it branches on its batch size" in text or "export: its graph differs" in text
    assert "tracer=" in text


def test_a_batch_size_that_is_baked_in_is_refused_with_both_reasons() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[i] * i for i in range(x.shape[0])])

    with pytest.raises(
        TraceError, match=r"(?s)symbolic: .*range\(x.shape\[0\]\).*export: its graph"
    ):
        trace(Loop(), (x(),))


def test_a_size_that_the_model_itself_fixes_is_kept() -> None:
    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(4, 8)

    assert torch.equal(run(trace(View(), (x(),)), x()), x())


def test_an_example_batch_of_one_serves_for_all() -> None:
    traced = trace(MLP(), (x(1),), tracer="export")
    assert run(traced, x(5)).shape == (5, 8)


def test_batch_dims_say_which_dimension_is_the_batch() -> None:
    class Across(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 2 else table @ x

    args = torch.randn(8, 4), torch.randn(8, 8)
    traced = trace(Across(), args, tracer="export", batch_dims=[1, None])
    assert run(traced, torch.randn(8, 6), args[1]).shape == (8, 6)
    with pytest.raises(ValueError, match="1 entries, but the inputs hold 2"):
        trace(Across(), args, batch_dims=[1])


def test_a_branch_beyond_the_batch_is_no_hindrance():
    class Branches(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.contiguous() if x.shape[0] >= 64 else x)

    traced = trace(Branches(), (x(8),))
    assert (traced.front_end, traced.largest_batch) == ("export", 63)
    with pytest.raises(TraceError, match="it branches on its batch size"):
        trace(Branches(), (x(80),))


def test_a_loop_over_parts_of_the_batch_is_named() -> None:
    class InParts(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layers(part) for part in x.split(3)])  # here

    said = r"goes through its rows in a loop: .* right for no fewer than 6 rows \(at .*# here\)"
    with pytest.raises(TraceError, match=said):
        trace(InParts(), (x(8),))


def test_a_model_that_takes_no_larger_batch_is_compared_on_the_example():
    class AtMostFour(nn.Module):
        def forward(self, x):
            if x.shape[0] > 4:
                raise ValueError("too many rows")
            return x * 2

    class FirstRow(nn.Module):  # as good on one row
        def forward(self, x):
            return x[:1].expand_as(x) * 2

    def tracer(model, args, kwargs):
        return fx.symbolic_trace(FirstRow())

    with pytest.raises(TraceError, match="differs on the example: output"):
        trace(AtMostFour(), (torch.randn(4, 3),), tracer=tracer)


class UpToItsRows(nn.Module):
    """A slice up to the number of rows, which is a Python integer: of fewer rows a slice up to the
    example's number of rows is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int(x.shape[0])]


def frozen(model: nn.Module, args: Args, kwargs: Kwargs) -> fx.GraphModule:
    """A tracer of a user's that makes a constant of the batch size."""
    graph = fx.Graph()
    given = graph.placeholder("x")
    linear = graph.call_module("linear", (given,))
    graph.output(graph.call_function(operator.getitem, (linear, slice(None, len(args[0])))))
    return fx.GraphModule(model, graph)


def test_a_constant_of_a_users_tracer_shows_on_more_rows_than_the_example_has() -> None:
    model = UpToItsRows()
    with pytest.raises(TraceError, match="its graph differs at batch size 5"):
        trace(model, (x(4),), tracer=frozen)


def test_a_constant_of_torch_export_is_a_guard() -> None:
    model = UpToItsRows()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="export") as pipe:
        for rows in 4, 16, 10:
            torch.testing.assert_close(pipe(x(rows)), model(x(rows)))
