from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe.meaning.batch import BatchError, input_dims, output_dims
from fxpipe.runtime.microbatch import ANY
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


def dims(*args, in_dims=None, **kwargs):
    return input_dims(Takes(), args, kwargs, in_dims)


def t(*shape):
    return torch.zeros(shape)


def test_the_first_dimension_is_the_batch_of_every_tensor_in_any_nesting():
    assert dims(t(4, 3), {"a": [t(4), t(4, 2)], "n": 7}, mask=t(4, 1)) == [0, 0, 0, 0]


def test_what_has_no_dimension_or_one_row_for_all_is_shared():
    assert dims(t(4, 3), t(), mask=t(1, 3)) == [0, None, None]
    assert dims(t(1, 3), t(1, 2)) == [0, 0], "all have one row: it is the batch"


def test_a_table_for_all_rows_is_found_by_trying_out_another_batch_size():
    class Looks(nn.Module):
        def forward(self, x, *, table):
            return x + table.view(-1)[:3] if table.shape == (5, 3) else x @ table.t() @ "fails"

    model = Looks()
    assert input_dims(model, (t(4, 3),), {"table": t(5, 3)}) == [0, None]
    assert input_dims(model, (t(1, 3),), {"table": t(5, 3)}) == [0, None], "remembered"
    assert input_dims(Looks(), (t(1, 3),), {"table": t(5, 3)}) == [0, None], "a batch of one"
    assert input_dims(model, (t(5, 3),), {"table": t(5, 3)}) == [0, None], "remembered"


def test_one_row_is_for_all_also_if_nothing_can_be_tried_out():
    class Fails(nn.Module):
        def forward(self, x, mask):
            raise RuntimeError

    assert input_dims(Fails(), (t(4, 3), t(1, 3)), {}) == [0, None]


def test_where_no_input_has_a_batch_no_output_needs_one():
    assert found(lambda x: (x, x.sum(0)), in_dim=None) == ["any", "any"]


def test_a_table_of_which_less_is_needed_is_no_batch():
    class Cuts(nn.Module):
        def forward(self, x, table):
            return x + table[:3, 0]

    assert input_dims(Cuts(), (t(4, 3), t(6, 2)), {}) == [0, None]


def test_where_the_model_takes_other_sizes_of_each_nothing_is_guessed():
    with pytest.raises(BatchError, match=r"4 in x \(4, 3\), 5 in y \(5, 3\), and .* of both; give"):
        input_dims(Pairs(), (t(4, 3), t(5, 3)), {})
    assert input_dims(Pairs(), (t(4, 3), t(5, 3)), {}, in_dims=(0, None)) == [0, None]


def test_in_dims_say_otherwise():
    assert dims(t(3, 4), t(4, 3), in_dims=(1, 0)) == [1, 0]
    assert dims(t(3, 4), t(5, 4), in_dims=-1) == [1, 1]
    assert dims(t(4, 3), [t(5, 5), t(2, 4)], in_dims=(0, [None, 1])) == [0, None, 1]
    assert dims(t(4, 3), mask=t(3, 3), in_dims={"mask": None}) == [0, None]
    assert dims(t(4, 3), more=t(2, 2), in_dims={"more": {"more": None}}) == [0, None]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: input_dims(Adds(), (t(4, 3), t(5, 3)), {}),
            r"batch size differs between inputs: 4 in x \(4, 3\), 5 in y \(5, 3\), and the "
            "model takes no other size of either; give in_dims",
        ),
        (
            lambda: input_dims(Adds(), (t(4, 3), t(8, 3)), {}),
            r"share; or, if 2 rows of y belong together, give it as \(4, 2, 3\) to a module that "
            r"calls the model with y.flatten\(0, 1\)$",
        ),
        (lambda: dims(t(4), t(4), in_dims=(0,)), r"1 entries for 2 arguments \(x, y\)"),
        (lambda: dims(t(4), in_dims={"z": 0}), "names 'z', but the arguments are x"),
        (lambda: dims(t(4), in_dims=1), r"dimension 1 of x is the batch, but its shape is \(4,\)"),
        (lambda: dims([t(4), t(4)], in_dims=((0,),)), r"does not fit x, a list of 0, 1"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(BatchError, match=message):
        call()


@dataclass
class Pair:
    mean: object
    rest: object


torch.export.register_dataclass(Pair)


class Gives(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def found(function, out_dims=None, in_dim=0, rebuild=lambda output: output):
    gm = fx.symbolic_trace(Gives(function))
    return output_dims(gm, [torch.ones(4, 6)], [in_dim], out_dims, rebuild)


def test_the_dimension_that_grows_with_the_batch_is_the_outputs():
    assert found(lambda x: (x, x.t(), x.flatten(), x[:, :, None])) == [0, 1, 0, 0]
    assert found(lambda x: x.t(), in_dim=1) == [0]


def test_scalars_are_averaged_and_numbers_must_agree():
    assert found(lambda x: (x.mean(), x.size(1))) == [None, None]


def test_a_node_that_gives_several_tensors_has_several_dimensions():
    assert found(lambda x: x.t().chunk(2, 0)) == [(1, 1)]


def test_an_output_without_elements_is_given_as_it_is():
    """An empty cache, say."""
    assert found(lambda x: (x, x.detach().flatten()[:0])) == [0, ANY]


def test_an_output_without_batch_needs_out_dims():
    with pytest.raises(BatchError, match=r"output\[1\] has shape \(6,\) whatever the batch size"):
        found(lambda x: [x, x.sum(0)])
    assert found(lambda x: [x, x.sum(0)], out_dims=[0, None]) == [0, None]
    assert found(lambda x: {"a": x, "b": x.sum(0)}, out_dims={"b": None}) == [0, None]


def test_out_dims_are_those_of_the_models_own_structure():
    def rebuild(output):
        return Pair(mean=output[1], rest=output[0])

    assert found(lambda x: (x, x.sum(0)), out_dims=(None, 0), rebuild=rebuild) == [0, None]


@pytest.mark.parametrize(
    ("function", "out_dims", "message"),
    [
        (lambda x: x @ x.t(), None, r"dimensions \[0, 1\] of output, \(4, 4\), all depend"),
        (
            lambda x: x,
            2,
            r"out_dims says that dimension 2 of output is the batch, but",
        ),
        (lambda x: [x, x], [0], r"\[0\] does not fit output, a .*list of 0, 1"),
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
