"""What cannot stand by itself in a graph is one call: sizes that follow from values, and
transforms such as vmap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir._torch import TRANSFORM_BEGINS
from fxpipe.ir.printing import format_graph
from fxpipe.trace import TraceError, trace
from fxpipe.trace.whole import Whole
from tests.zoo import gradients, loop, loss_of, same


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.0)


class Masked(Layers):
    """Works on the words that are there, as many as there are, of all rows together."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = torch.zeros_like(x)
        scale = x.mean()  # of a known size, and needed in between
        y[mask] = self.drop(self.inner(x[mask])) * scale
        return self.last(y) + x.shape[0]


class Loss(Layers):
    """As language models compute it of the words that have a label."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.inner(torch.tanh(self.first(x)))
        logits = self.last(y)
        return y + F.cross_entropy(logits[mask], mask.long()[mask])


class Routed(Layers):
    """A mixture of experts: each has another number of words."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.zeros_like(x)
        for expert, chosen in (self.inner, mask), (self.last, ~mask):
            row, word = torch.where(chosen)
            y.index_put_((row, word), expert(x[row, word]), accumulate=True)
        return y


class Scaled(Layers):
    """By a number, which is read from a tensor."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.inner(x) * mask[..., None] / x.abs().max().item())


def inputs(batch: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(batch)
    return torch.randn(batch, 4, 6), torch.rand(batch, 4) > 0.4


def calls(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Masked, Loss, Routed, Scaled])
def test_sizes_may_follow_from_values_within_a_model(kind: type[nn.Module], checkpoint: str):
    model, given = kind(), inputs()
    expected = loop(model, given, 3)
    model.zero_grad()
    # Without a check of what micro-batching means: three of these models put rows together.
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint, check=False) as pipe:
        output = pipe(*given)
        loss_of(output).backward()
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


class Repeats(Layers):
    """Applies one layer to the words that are there, and again to what comes out."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.zeros_like(x)
        y[mask] = self.inner(torch.tanh(self.inner(torch.tanh(self.inner(x[mask])))))
        return self.last(y)


def test_what_such_a_call_uses_several_times_gets_the_bits_of_the_loop():
    model, given = Repeats(), inputs(8)
    expected = loop(model, given, 4)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe:
        output = pipe(*given)
        loss_of(output).backward()
        assert calls(pipe.model_graph) == ["values_0"]
    assert same([output.detach(), gradients(model)], list(expected))


def test_what_is_of_unknown_size_is_one_call_with_all_that_it_needs():
    gm = trace(Masked(), inputs()).graph_module
    assert calls(gm) == ["values_0"]
    part = gm.get_submodule("values_0")
    assert isinstance(part, Whole)
    assert_expected_inline(
        format_graph(part.module),
        """\
tanh: input
mask: input
inner_weight: input
inner_bias: input
mean: input
zeros_like = aten.zeros_like.default(tanh, pin_memory=False)
index = aten.index.Tensor(tanh, [mask])
linear_1 = aten.linear.default(index, inner_weight, inner_bias)
dropout = aten.dropout.default(linear_1, 0.0, True)
mul = aten.mul.Tensor(dropout, mean)
index_put_ = aten.index_put_.default(zeros_like, [mask], mul)
return [index_put_]
""",
    )
    assert not list(part.parameters()), "it is given them"


def test_all_values_that_a_result_needs_may_be_none():
    model, (x, mask) = Masked(), inputs()
    graph = trace(model, (x, mask))
    none = torch.zeros_like(mask)
    torch.testing.assert_close(graph.rebuild(graph.graph_module(x, none)), model(x, none))


class FilledAhead(Layers):
    """Writes to a view, and then to what a mask of the same memory selects."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.first(x)
        k[:, :3].fill_(0)
        k[k < 0] *= 0.1
        return self.last(k * 2)


class Assembled(Layers):
    """Makes a tensor of parts, before some of its rows are computed again."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 2, 6)
        h[:, 0], h[:, 1] = self.first(x), self.inner(x)
        mask = h.sum(-1) > 0
        h[mask] = self.last(h[mask])
        return h.sum(1)


class FilledBetween(Layers):
    """Reads values of its memory, writes to it, and reads again what is left."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.first(x)
        mean = k[k > 0].sum()
        k[:, :3] = 0
        k[k > 0] *= 2
        return self.last(k) + mean + self.inner(k)


class FilledBehind(Layers):
    """Writes to a view of what it has selected from; a view made ahead sees all of it."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.first(x)
        ahead = k.view(-1, 2, 3)
        k[k < 0] *= 0.1
        k.view(-1, 3, 2)[:, 0] += 1
        return self.last(self.inner(k)) + ahead.flatten(1)


class OfView(Layers):
    """Selects from a view of what is written to before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        k = self.first(x)
        k.add_(1)
        part = k[:, 2:]
        part[part < 0] = 0.5
        total = k.sum(1, keepdim=True)
        k.mul_(2)
        return self.last(k) * total


@pytest.mark.covering(1)
@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("kind", [FilledAhead, Assembled, FilledBetween, FilledBehind, OfView])
def test_in_place_writes_keep_their_place_among_what_depends_on_values(
    kind: type[nn.Module], lanes: int
):
    for seed in range(2):
        torch.manual_seed(seed)
        ends = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()
        model, x = nn.Sequential(*ends[:2], kind(), *ends[2:]), torch.randn(8, 6)
        expected = loop(model, (x,), 4)
        model.zero_grad()
        with fxpipe.compile(model, ["cpu"] * lanes, chunks=4, check=False) as pipe:
            output = pipe(x)
            loss_of(output).backward()
        torch.testing.assert_close(output, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(gradients(model), expected[1])


def test_a_write_ahead_of_one_that_depends_on_values_is_part_of_the_call():
    gm = trace(FilledAhead(), (torch.randn(8, 6),)).graph_module
    part = gm.get_submodule("values_0")
    assert isinstance(part, Whole)
    assert_expected_inline(
        format_graph(part.module),
        """\
x: input
first_weight: input
first_bias: input
linear = aten.linear.default(x, first_weight, first_bias)
slice_2 = aten.slice.Tensor(linear, 1, 0, 3)
fill_ = aten.fill_.Scalar(slice_2, 0)
lt = aten.lt.Scalar(linear, 0)
index = aten.index.Tensor(linear, [lt])
mul_ = aten.mul_.Tensor(index, 0.1)
index_put_ = aten.index_put_.default(linear, [lt], mul_)
return [index_put_]
""",
    )


def test_a_write_that_a_selection_reads_stays_ahead_of_it():
    class Read(Layers):
        def forward(self, x: Tensor) -> Tensor:
            k = self.first(x)
            k[:, 0].fill_(1)
            total = x.new_zeros(6)
            total[0] = k[k > 0].sum()
            return self.last(k) * total

    gm = trace(Read(), (torch.randn(8, 6),)).graph_module
    assert_expected_inline(
        format_graph(gm),
        """\
x: input
first_weight = self.first.weight
first_bias = self.first.bias
last_weight = self.last.weight
last_bias = self.last.bias
linear = aten.linear.default(x, first_weight, first_bias)
select = aten.select.int(linear, 1, 0)
fill_ = aten.fill_.Scalar(select, 1)
new_zeros = aten.new_zeros.default(x, [6], pin_memory=False)
gt = aten.gt.Scalar(linear, 0)
values_0 = values_0(linear, gt)
getitem = values_0[0]
select_1 = aten.select.int(new_zeros, 0, 0)
copy_ = aten.copy_.default(select_1, getitem)
linear_1 = aten.linear.default(linear, last_weight, last_bias)
mul = aten.mul.Tensor(linear_1, new_zeros)
return (mul,)
""",
    )


class WithoutGradients(Layers):
    """Computes distances as PointNet++ samples its points, and writes to what has gradients."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            nearest = torch.full_like(x, 0.5)
            is_nearer = x < nearest
            nearest[is_nearer] = x[is_nearer]
            y[is_nearer] = 0.1
        largest, where = y.max(1)
        return self.last(self.inner(nearest) + y) * largest[:, None] + where[:, None]


@pytest.mark.covering(1)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_sizes_may_follow_from_values_where_gradients_are_off(tracer: str, lanes: int):
    model, x = WithoutGradients(), torch.randn(8, 6)
    expected = loop(model, (x,), 4)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * lanes, chunks=4, tracer=tracer, check=False) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    torch.testing.assert_close(output, expected[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), expected[1])


class KeptWithoutGradients(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            return x[mask] * 3


def test_a_size_by_values_where_gradients_are_off_is_refused_with_the_line():
    x, mask = inputs()
    mask[0], mask[1:] = False, True
    with pytest.raises(TraceError, match=r"(?s)export: .*test_regions.py.*x\[mask\] \* 3"):
        fxpipe.compile(KeptWithoutGradients(), ["cpu"]).prepare(x, mask)


class Kept(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x[mask] * 2


def test_a_result_whose_size_follows_from_values_is_refused_with_the_line():
    x, mask = inputs()
    mask[0], mask[1:] = False, True
    with pytest.raises(
        TraceError,
        match=r"(?s)export: .*the size of a tensor, depends on values .*test_regions.py.*x\[mask\]",
    ):
        fxpipe.compile(Kept(), ["cpu"]).prepare(x, mask)


class Counted(Layers):
    """Weighs columns by how often they are a label. The product tells how many counts there are."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return y * torch.bincount(labels, minlength=6)


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_counts_of_which_later_operators_tell_the_number_are_computed_of_values(tracer: str):
    model, x, labels = Counted(), torch.randn(6, 6), torch.tensor([0, 2, 5, 2, 1, 1])
    expected = loop(model, (x, labels), 1)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer) as pipe:
        output = pipe(x, labels)  # all micro-batches share the labels
        loss_of(output).backward()
        part = pipe.model_graph.get_submodule("values_0")
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])
    assert isinstance(part, Whole)
    assert [node.name for node in part.module.graph.nodes] == ["labels", "bincount", "output"]


class Each(Layers):
    """A function of one row, of all rows, for several weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))

        def of_one(weight: Tensor) -> Tensor:
            return torch.vmap(lambda row: self.inner(row @ weight))(x)

        y = torch.vmap(of_one)(self.weights).mean(0)
        return self.last(y) + torch.func.vmap(torch.trace)(y.mT @ y)[:, None, None]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_vmap_is_one_call_whatever_is_within(checkpoint: str):
    model, (x, _) = Each(), inputs()
    assert calls(trace(model, (x,)).graph_module) == ["vmap_0", "vmap_1"]
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


class Slope(Layers):
    """Gives a derivative of a part of itself along its input, by forward-mode differentiation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, slope = torch.func.jvp(lambda x: self.inner(x).tanh(), (x,), (torch.ones_like(x),))
        return self.last(y), slope


@pytest.mark.skipif(
    "jvp" not in TRANSFORM_BEGINS.values(), reason="torch.export does not trace it here"
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_derivative_in_forward_mode_is_one_call(checkpoint: str):
    model, x = Slope(), torch.randn(4, 6)
    assert calls(trace(model, (x,)).graph_module) == ["jvp_0"]
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=2, checkpoint=checkpoint) as pipe:
        found = []
        for call in pipe, model:
            model.zero_grad()
            outputs = call(x)
            sum(each.square().mean() for each in outputs).backward()
            found.append((outputs, [p.grad for p in model.parameters()]))
        torch.testing.assert_close(*found)
