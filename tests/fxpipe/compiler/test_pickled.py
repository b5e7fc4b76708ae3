"""Pickles of a pipeline: options that they cannot hold are named."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import fxpipe
from tests.zoo import MLP, same

X = torch.ones(6, 12)


def compiled(**options):
    return fxpipe.compile(MLP(), ["cpu"] * 2, **{"chunks": 2, **options})


class Saved:
    """A function that is held together with what it is an attribute of."""

    def __call__(self, output, target):
        return F.mse_loss(output, target)


def local():
    class Loss:
        def __call__(self, output, target):
            return F.mse_loss(output, target)

    return Loss()


def scaled(output, target, *, scale):
    return scale * F.mse_loss(output, target)


LAMBDA = r"<lambda>, which a pickle cannot hold"


@pytest.mark.parametrize("save", [pickle.dumps, lambda pipe: torch.save(pipe, io.BytesIO())])
@pytest.mark.parametrize(
    "options, said",
    [
        ({"loss_fn": lambda a, b: F.mse_loss(a, b)}, rf"loss_fn is the function {LAMBDA}"),
        (
            {"loss_fn": functools.partial(lambda a, b, c: F.mse_loss(a, b), c=1)},
            rf"loss_fn is the function {LAMBDA}",
        ),
        ({"loss_fn": local()}, r"loss_fn is of the class local.<locals>.Loss, which a pickle"),
        (
            {"loss_fn": F.mse_loss, "loss_weight": lambda target: len(target)},
            rf"loss_weight is the function {LAMBDA}",
        ),
        ({"partition": lambda graph: "auto"}, rf"partition is the function {LAMBDA}"),
        (
            {"tracer": lambda model, args, kwargs: torch.fx.symbolic_trace(model)},
            rf"tracer is the function {LAMBDA}",
        ),
    ],
)
def test_an_option_that_a_pickle_cannot_hold_is_named_with_a_way_out(options, said, save):
    with pytest.raises(pickle.PicklingError, match=said) as error:
        save(compiled(**options))
    assert "define it at the top level of a module; or save the weights" in str(error.value)


@pytest.mark.parametrize(
    "loss_fn", [F.mse_loss, torch.nn.MSELoss(), Saved(), functools.partial(scaled, scale=2.0)]
)
def test_what_a_module_has_by_its_name_is_held(loss_fn):
    pipe = compiled(loss_fn=loss_fn)
    twin = pickle.loads(pickle.dumps(pipe))
    assert same(twin.step(X, target=X), pipe.step(X, target=X))


def test_a_copy_needs_no_name():
    pipe = compiled(loss_fn=lambda output, target: F.mse_loss(output, target))
    twin = copy.deepcopy(pipe)
    assert same(twin.step(X, target=X), pipe.step(X, target=X))


def squares():
    return F.mse_loss


class WithCode(pickle.Pickler):
    """Holds functions otherwise than by their names, as cloudpickle does."""

    def reducer_override(self, value):
        if getattr(value, "__name__", "") == "<lambda>":
            return squares, ()
        return NotImplemented

    def dump(self, value):  # in Python, as that of cloudpickle
        super().dump(value)


def test_a_pickler_that_holds_code_is_left_to_do_so():
    pipe, file = compiled(loss_fn=lambda output, target: F.mse_loss(output, target)), io.BytesIO()
    WithCode(file).dump(pipe)
    twin = pickle.loads(file.getvalue())
    assert same(twin.step(X, target=X), pipe.step(X, target=X))
