import pytest
import torch

from fxpipe.cli.factory import Shape, load
from tests.fxpipe.cli.invoke import refused


@pytest.mark.parametrize("name", ["build", "one_tensor", "TWO"])
def test_a_model_and_its_inputs_come_in_several_ways(models, name):
    given = load(f"own_models:{name}", ())
    assert isinstance(given.model, torch.nn.Module)
    assert len(given.args) == 1 and given.args[0].shape[0] in (4, 8)
    assert given.kwargs == {}


def test_a_dict_is_of_keyword_arguments(models):
    given = load("own_models:by_name", ())
    assert given.args == () and list(given.kwargs) == ["x", "scale"]


def test_inputs_on_the_command_line_come_first(models):
    shapes = (Shape((2, 8), "float64"), Shape((3,), "int64"))
    for name in ("Named", "build"):
        args = load(f"own_models:{name}", shapes).args
        assert [(arg.dtype, tuple(arg.shape)) for arg in args] == [
            (torch.float64, (2, 8)),
            (torch.int64, (3,)),
        ]


def test_the_model_is_the_same_every_time(models):
    first, second = (load("own_models:build", ()).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("own_models", "'own_models': give MODULE:FACTORY"),
        (":build", "give MODULE:FACTORY"),
        ("own_models.py:build", "'own_models.py' is a file: give its module, own_models:build"),
        ("./a/b.py:build", "give its module, a.b:build"),
        ("own_modles:build", "there is no module 'own_modles': it is looked for in"),
        ("own_models.sub:build", "there is no module 'own_models.sub'"),
        ("own_models:biuld", "the module 'own_models' has no 'biuld'"),
        ("own_models:nothing", "own_models:nothing gives a dict: it has to give an nn.Module"),
        ("own_models:fails", "own_models:fails failed: ZeroDivisionError: division by zero"),
        ("own_models:needs", "missing 1 required positional argument: 'width'"),
        ("own_models:Named", "gives a model and no inputs"),
        ("own_broken:build", "own_broken cannot be imported: ModuleNotFoundError: No module"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(models, factory, message):
    assert message in refused("compile", factory)


@pytest.mark.parametrize("shape", ["", "8,x", "0,3", "8;3", ":int64"])
def test_sizes_are_numbers(models, shape):
    assert "give sizes, such as 8,3,32,32" in refused(
        "compile", "own_models:Named", "--input", shape
    )


def test_an_unknown_dtype_is_refused(models):
    for dtype in ("float33", "nn"):
        message = refused("compile", "own_models:Named", "--input", f"8,8:{dtype}")
        assert message == f"no dtype {dtype!r} is known: give such as float32 or int64"
