"""Which dimension of each input is the batch's: what is said, and what the check makes of it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.compiler.outputs import noted_dims
from fxpipe.meaning.asked import Asked
from fxpipe.meaning.call import meaning_of
from fxpipe.meaning.candidates import MOST, candidates
from fxpipe.meaning.check import Verdict
from fxpipe.meaning.errors import BatchError, BatchWarning
from fxpipe.meaning.problem import Problem
from fxpipe.meaning.said import named_inputs
from fxpipe.meaning.trial import Trial
from tests.zoo import MLP


class Takes(nn.Module):
    def forward(self, x, y=None, *, mask=None, **more):
        return x


class Adds(nn.Module):
    def forward(self, x, y):
        return x + y


class Pairs(nn.Module):
    def forward(self, x, y):
        return x @ y.t()


def ways(*args, in_dims=None, **kwargs):
    return candidates(named_inputs(Takes(), args, kwargs, in_dims))


def dims(*args, **kwargs):
    return ways(*args, **kwargs)[0]


def checked(model, *args, in_dims=None, out_dims=None, **kwargs):
    halves = lambda rows: (rows - rows // 2, rows // 2)  # noqa: E731
    return meaning_of(model, args, kwargs, Asked(in_dims, out_dims, sizes=halves))


def t(*shape):
    return torch.zeros(shape)


def test_the_first_dimension_is_the_likeliest_of_every_tensor_in_any_nesting():
    assert dims(t(4, 3), {"a": [t(4), t(4, 2)], "n": 7}, mask=t(4, 1)) == [0, 0, 0, 0]


def test_what_has_no_dimension_or_one_row_for_all_is_shared():
    assert dims(t(4, 3), t(), mask=t(1, 3)) == [0, None, None]
    assert dims(t(1, 3), t(1, 2)) == [0, 0], "all have one row: it is the batch"


def test_the_candidates_in_their_order():
    assert ways(t(4, 3), t(4)) == [
        [0, 0],
        [0, None],  # y may be a table for all rows, that happens to be as large
        [None, 0],
        [1, None],  # time-major
    ]
    assert ways(t(4, 6), t(6, 4)) == [[0, None], [None, 0], [1, 0], [0, 1]]
    cut = [[i for i, dim in enumerate(way) if dim == 0] for way in ways(t(4), t(4), mask=t(4))]
    assert cut == [[0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]]


class TakesMany(nn.Module):
    def forward(self, features):
        return sum(features.values())


def test_of_many_inputs_the_likeliest_candidates_are_listed():
    """Any of them may be shared, and any two: a recommender has hundreds of features."""
    features = {f"f{i}": t(4, 3) for i in range(300)}
    found = candidates(named_inputs(TakesMany(), (features,), {}, None))
    assert len(found) == MOST
    assert found[0] == [0] * 300
    assert found[1] == [0] * 299 + [None]
    assert [1] * 300 in found, "time-major"


def test_a_table_for_all_rows_is_told_from_the_batch_by_the_check():
    class Looks(nn.Module):
        def forward(self, x, *, table):
            return x + table.view(-1)[:3] if table.shape == (5, 3) else x @ table.t() @ "fails"

    model = Looks()
    assert checked(model, t(4, 3), table=t(5, 3)).in_dims == [0, None]
    assert checked(model, t(1, 3), table=t(5, 3)).in_dims == [0, None], "remembered"
    assert checked(Looks(), t(1, 3), table=t(5, 3)).in_dims == [0, None], "a batch of one"
    assert checked(model, t(5, 3), table=t(5, 3)).in_dims == [0, None], "as large as the batch"


def test_a_table_of_which_less_is_needed_is_no_batch():
    class Cuts(nn.Module):
        def forward(self, x, table):
            return x + table[:3, 0]

    assert checked(Cuts(), t(4, 3), t(6, 2)).in_dims == [0, None]


def test_in_dims_say_otherwise():
    assert dims(t(3, 4), t(4, 3), in_dims=(1, 0)) == [1, 0]
    assert dims(t(3, 4), t(5, 4), in_dims=-1) == [1, 1]
    assert dims(t(4, 3), [t(5, 5), t(2, 4)], in_dims=(0, [None, 1])) == [0, None, 1]
    assert dims(t(4, 3), mask=t(3, 3), in_dims={"mask": None}) == [0, None]
    assert dims(t(4, 3), more=t(2, 2), in_dims={"more": {"more": None}}) == [0, None]


def test_several_readings_may_be_right_and_one_is_taken():
    """Each row of x with all of y: x may be cut, or y."""
    meaning = checked(Pairs(), torch.randn(4, 3), torch.randn(5, 3))
    assert (meaning.in_dims, meaning.outputs) == ([0, None], {"output": 0})


class Swapped(Pairs):
    def forward(self, y, x):
        return super().forward(x, y)


class Nodes(nn.Module):
    """Features of the nodes of one graph, (batch, nodes, features)."""

    def forward(self, x, adjacent):
        return adjacent @ x


class Depths(nn.Module):
    """Rays that are looked at in the same depths."""

    def forward(self, rays, depths):
        return (rays[:, None] * depths[None, :, None]).tanh()


class Tables(nn.Module):
    def forward(self, x, table, by):
        return (x + table) * by


@pytest.mark.parametrize(
    ("model", "shapes", "dims"),
    [
        (Pairs(), [(6, 3), (6, 3)], [0, None]),
        (Swapped(), [(6, 3), (6, 3)], [None, 0]),
        (Swapped(), [(8, 3), (6, 3)], [None, 0]),  # the table has another size
        (Nodes(), [(6, 6, 3), (6, 6)], [0, None]),
        (Depths(), [(6, 3), (6,)], [0, None]),
        (Tables(), [(6, 6, 6), (6, 6), (6,)], [0, None, None]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_of_several_right_readings_that_is_taken_whose_outputs_have_the_batch_first(
    model, shapes, dims
):
    meaning = checked(model, *map(torch.randn, shapes))
    assert (meaning.in_dims, meaning.outputs) == (dims, {"output": 0})


def test_outputs_that_have_no_reading_with_the_batch_first_are_read_as_they_can_be():
    class Last(nn.Module):
        def forward(self, x, state):
            return (x.sum(1) + state[0])[None]

    meaning = checked(Last(), torch.randn(5, 4, 3), torch.randn(1, 5, 3))
    assert (meaning.in_dims, meaning.outputs) == ([0, 1], {"output": 1})


class ZeroShot(nn.Module):
    """Scores of images for prompts, of which there may be as many as the batch has images."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Linear(7, 8)

    def forward(self, images, prompts):
        return self.image(images) @ self.text(prompts).T


def test_a_step_with_a_table_as_large_as_the_batch_pairs_the_rows_with_those_of_the_target():
    torch.manual_seed(0)
    model = ZeroShot()
    by_itself = copy.deepcopy(model)

    def loss(output, target):
        return nn.functional.binary_cross_entropy_with_logits(output.flatten(), target.flatten())

    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, loss_fn=loss) as pipe:
        for batch in (8, 12, 8):
            images, prompts = torch.randn(batch, 6), torch.randn(8, 7)
            target = torch.rand(batch, 8)
            found = pipe.step(images, prompts, target=target)
            whole = loss(by_itself(images, prompts), target)
            whole.backward()
            torch.testing.assert_close(found, whole.detach())
    for one, two in zip(model.parameters(), by_itself.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


class InPairs(nn.Module):
    def forward(self, x, y):
        return (x + y[: 2 * len(x)].view(len(x), 2, -1).sum(1)).softmax(1)


class OfEdges(nn.Module):
    """One graph, whose edges are two rows of numbers of its nodes."""

    def forward(self, x, edges):
        return x.index_add(0, edges[1], x[edges[0]]).softmax(1)


@pytest.mark.parametrize("count", [24, 40])
def test_rows_are_not_said_to_belong_together_where_the_model_does_not_take_them_so(count):
    edges = torch.randint(0, 24, (2, count))
    with pytest.raises(BatchError) as refused:
        checked(OfEdges(), torch.randn(24, 3), edges)
    assert "belong together" not in str(refused.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: checked(InPairs(), t(4, 3), t(8, 3)),
            r"output, \(4, 3\) for 4 rows, depends on which other rows .*; or, if 2 rows of y "
            r"belong together, give it as \(4, 2, 3\) to a module that calls the model with "
            r"y.flatten\(0, 1\)$",
        ),
        (lambda: dims(t(4), t(5), in_dims=0), r"the batch size differs .*: 4 in x \(4,\), 5 in y"),
        (lambda: dims(t(4), t(4), in_dims=(0,)), r"1 entries for 2 arguments \(x, y\)"),
        (lambda: dims(t(4), in_dims={"z": 0}), "names 'z', but the arguments are x"),
        (lambda: dims(t(4), in_dims=1), r"dimension 1 of x is the batch, but its shape is \(4,\)"),
        (lambda: dims([t(4), t(4)], in_dims=((0,),)), r"does not fit x, a list of 0, 1"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(BatchError, match=message):
        call()


def test_what_the_model_itself_says_of_its_inputs_is_not_hidden():
    with pytest.raises(RuntimeError, match=r"broadcast a dimension of length 5|size of tensor a"):
        fxpipe.compile(Adds(), ["cpu"], chunks=2)(t(4, 3), t(5, 3))


@dataclass
class Pair:
    mean: object
    rest: object


torch.export.register_dataclass(Pair)


class Gives(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def found(function, out_dims=None, check=True):
    with fxpipe.compile(Gives(function), ["cpu"], chunks=2, out_dims=out_dims, check=check) as pipe:
        pipe.prepare(torch.ones(4, 6))
        return noted_dims(pipe.model_graph)


def test_the_dimension_that_grows_with_the_batch_is_the_outputs():
    assert found(lambda x: (x, x.t(), x.flatten(), x[:, :, None])) == [0, 1, 0, 0]


def test_a_node_that_gives_several_tensors_has_several_dimensions():
    assert found(lambda x: x.t().chunk(2, 0)) == [(1, 1)]


def test_an_output_without_elements_is_given_as_it_is():
    """An empty cache, say."""
    assert found(lambda x: (x, x.detach().flatten()[:0])) == [0, "any"]


def test_an_output_without_batch_is_a_mean_a_sum_or_refused():
    assert found(lambda x: [x, x.sum(0), x.mean(0)]) == [0, "sum", None]
    with pytest.raises(BatchError, match=r"output\[1\] has shape \(6,\) whatever .*check=\"warn\""):
        found(lambda x: [x, x.amax(0)])
    with pytest.warns(BatchWarning, match=r"output\[1\] has shape \(6,\) whatever"):
        assert found(lambda x: [x, x.amax(0)], check="warn") == [0, None]
    with pytest.warns(BatchWarning, match=r"output\[1\] is added up, but it is something else"):
        assert found(lambda x: [x, x.amax(0)], [0, "sum"], check="warn") == [0, "sum"]
    assert found(lambda x: {"a": x, "b": x.amax(0)}, {"b": None}, check=False) == [0, None]


def test_out_dims_are_those_of_the_models_own_structure():
    assert found(lambda x: Pair(x.mean(0), x), out_dims=(None, 0)) == [(None, 0)]


@pytest.mark.parametrize(
    ("function", "out_dims", "message"),
    [
        (lambda x: x @ x.t(), None, r"dimensions \[0, 1\] of output, \(7, 7\) for 7 rows, all"),
        (lambda x: x * 1, 2, r"out_dims says that dimension 2 of output is the batch, but"),
        (
            lambda x: x * 1,
            1,
            r"dimension 1 of output is the batch, but its size, 6, does not",
        ),
        (lambda x: [x, x * 1], [0], r"\[0\] does not fit output, a .*list of 0, 1"),
    ],
)
def test_impossible_outputs_are_refused(function, out_dims, message):
    with pytest.raises(BatchError, match=message):
        found(function, out_dims)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"in_dims": "x"}, "in_dims is 'x': give a dimension for all arguments, a tuple"),
        ({"in_dims": ("0",)}, "in_dims says '0' for x, which is a tensor: give the dimension"),
        ({"in_dims": 2}, "in_dims says that dimension 2 of x is the batch, but its shape is"),
        ({"out_dims": (0, 0)}, r"out_dims says \(0, 0\) for output, which is a tensor"),
        ({"out_dims": 3}, "out_dims says that dimension 3 of output is the batch, but its"),
    ],
)
def test_dims_that_do_not_fit(dims, message):
    with pytest.raises(BatchError, match=message):
        fxpipe.compile(MLP(), ["cpu"], **dims).prepare(torch.randn(4, 12))


class Scales(nn.Module):
    """``by`` is for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, by):
        return self.b(self.a(x) * by)


def test_a_tensor_for_all_rows_may_be_as_large_as_the_batch():
    model, by = Scales(), torch.randn(4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for batch in (4, 6, 4):
            x = torch.randn(batch, 4)
            assert torch.equal(pipe(x, by), torch.cat([model(part, by) for part in x.chunk(2)]))


class Columns(nn.Module):
    """Embeds each column of ``static``; its loss is a mean over what has been observed."""

    def __init__(self, returns_output):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, 16) for n in (12, 5))
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 12)
        self.returns_output = returns_output

    def forward(self, batch, target, observed):
        columns = [embed(batch["static"][:, i]) for i, embed in enumerate(self.embeddings)]
        output = self.head(torch.relu(self.b(torch.relu(self.a(batch["x"]) + sum(columns)))))
        loss = ((output - target).square() * observed).sum() / observed.sum()
        return (loss, output) if self.returns_output else loss


@pytest.mark.one_in(2)
@pytest.mark.parametrize("returns_output", [True, False])
def test_what_no_output_depends_on_is_not_the_batch_because_a_loss_is_no_mean(returns_output):
    """The columns of a sample that has each of them twice are as good as one half of it."""
    torch.manual_seed(0)
    columns = torch.stack([torch.randint(0, n, (32,)) for n in (12, 5)], 1)
    batch = {"x": torch.randn(32, 8), "static": columns}
    observed = (torch.rand(32, 12) > 0.3).float()
    with fxpipe.compile(Columns(returns_output), ["cpu"] * 2, chunks=4) as pipe:
        with pytest.warns(fxpipe.BatchWarning, match="neither a mean over the rows nor a sum"):
            pipe.step(batch, torch.randn(32, 12), observed)
        assert len(pipe.losses) == 4
        assert "is cut into 4 micro-batches" in str(pipe.explain())


def test_another_way_has_to_give_an_output_that_depends_on_the_rows():
    exact = {"trials": [Trial((1, 3), "mixed", [], {}, [])]}
    joined = Verdict(**exact, outputs={"loss": None, "y": 0})
    averaged = Verdict(**exact, outputs={"loss": None, "y": None})
    same = Verdict(**exact, outputs={"loss": None, "y": None}, same={"loss", "y"})
    loss = Problem("loss", "differs", is_scalar=True)
    likeliest = Verdict(**exact, outputs={"y": 0}, problems=[loss])
    wrong = Verdict(**exact, problems=[Problem("y", "differs")])
    assert joined.is_better_than(likeliest) and not averaged.is_better_than(likeliest)
    assert averaged.is_better_than(wrong) and not same.is_better_than(wrong)
    assert not likeliest.is_better_than(wrong)


class OfPairs(nn.Module):
    """Makes its batch size a constant."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.stack([self.b(torch.tanh(self.a(x[i]))) for i in range(len(x))])


def test_a_mini_batch_that_is_not_cut_although_that_was_asked_for_is_told_of():
    with (
        fxpipe.compile(OfPairs(), ["cpu"] * 2, chunks=2) as pipe,
        pytest.warns(fxpipe.BatchWarning, match="of 7 rows is one micro-batch, although more"),
    ):
        pipe(torch.randn(7, 4))


@pytest.mark.parametrize("rows, chunks", [(6, 2), (1, 2), (7, 1)])
def test_no_other_one_is(rows, chunks):
    with warnings.catch_warnings(), fxpipe.compile(OfPairs(), ["cpu"] * 2, chunks=chunks) as pipe:
        warnings.simplefilter("error", fxpipe.BatchWarning)
        pipe(torch.randn(rows, 4))


class TimeStep(nn.Module):
    """``t`` is one number for all rows, of shape (1,), or one for each of them."""

    def __init__(self):
        super().__init__()
        self.a, self.emb, self.b = nn.Linear(6, 16), nn.Embedding(10, 16), nn.Linear(16, 6)

    def forward(self, x, t):
        return self.b((self.a(x) + self.emb(t)).relu())


@pytest.mark.parametrize("rows", [4, 8])  # as many rows as micro-batches, and more
def test_one_value_for_all_rows_may_be_one_for_each_of_them_in_another_call(rows):
    model = TimeStep()
    x, one, each = torch.randn(rows, 6), torch.tensor([3]), torch.arange(rows)
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=4)
    for t in (one, each, one, each):
        torch.testing.assert_close(pipe(x, t), model(x, t))
    assert len(pipe.compilations) == 2
