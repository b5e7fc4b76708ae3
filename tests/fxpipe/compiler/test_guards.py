"""What a compiled program depends on: printed, and checked at every call."""

from __future__ import annotations

import math
import types

import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import MLP

TWO = ["cpu", "cpu"]
X = torch.randn(4, 12)


class Scaled(MLP):
    def __init__(self):
        super().__init__()
        self.head = nn.Module()
        self.head.scale = 3

    def forward(self, x, *, flag=False):
        x = super().forward(x) * self.head.scale
        return -x if flag else x


def guards(tracer, *args, prepared=lambda model: None, **kwargs):
    model = Scaled()
    prepared(model)
    with fxpipe.compile(model, TWO, tracer=tracer, chunks=2) as pipe:
        pipe(*args, **kwargs)
        return str(pipe.guards)


def test_an_exported_graph_has_the_sizes_of_all_dimensions_but_the_batchs():
    assert guards("export", X) == (
        "compiled for x: float32 [*, 12], train, no autocast, attributes head.scale = 3"
    )


def test_a_symbolic_graph_has_no_sizes_and_an_argument_that_is_no_tensor_is_a_constant():
    said = guards("symbolic", X, flag=True)
    assert said.startswith(
        "compiled for x: any dtype and shape, such as float32 [*, 12], flag = True, train, no "
        "autocast, attributes "
    )
    assert "head.scale = 3" in said


def test_guards_print_on_one_line_and_in_a_list_too():
    class Config:
        def __repr__(self):
            return 'Config {\n  "size": 100,\n  "layers": 4,\n  "dropout": 0.1\n}'

    class Configured(nn.Linear):
        def __init__(self):
            super().__init__(12, 12)
            self.config = Config()

        def forward(self, x):
            return super().forward(x) if self.config else x

    model = nn.Sequential(Configured(), nn.Tanh())
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(X)
        assert "0.config = Config { " in str(pipe.guards)
        assert "\n" not in str(pipe.guards)
        assert str([pipe.guards]) == f"[<Guards: {pipe.guards}>]"


def test_modes_hooks_and_autocast_are_guards():
    def prepared(model):
        model.layers[1].eval()
        model.layers[2].register_forward_hook(lambda *_: None)

    with torch.autocast("cpu", torch.bfloat16):
        said = guards("symbolic", X, prepared=prepared)
    assert "train but for layers.1, hooks on layers.2, autocast to bfloat16" in said


def test_a_graph_for_one_batch_size_says_so():
    class RowByRow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.a(x)
            return self.b(torch.stack([y[i] * 2 for i in range(x.shape[0])]))

    with fxpipe.compile(RowByRow(), TWO, chunks=2) as pipe:
        pipe(torch.randn(6, 3))
        assert str(pipe.guards).startswith("compiled for x: float32 [6, 3], train")


def test_a_call_for_which_they_do_not_hold_is_compiled_anew():
    model = Scaled()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(X)
        before = pipe.guards
        assert before.hold()
        pipe(torch.randn(7, 12))
        assert pipe.guards is before
        model.head.scale = 4
        assert not before.hold()
        torch.testing.assert_close(pipe(X), model(X))
        assert pipe.guards is not before and "head.scale = 4" in str(pipe.guards)


# ------------------------------------------------------------------ which one a call fails, and how


class Options(nn.Module):
    """Takes optional arguments of several kinds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scales = {"low": [1.0, 2.0]}
        self.config = types.SimpleNamespace(doubled=False)

    def forward(self, x, mask=None, *, flag=True, box=None):
        x = self.linear(x) * self.scales["low"][1]
        x = x + x if self.config.doubled else x
        x = x if mask is None else x * mask
        return x if flag else -x


ROWS = torch.randn(4, 6)


def failure(change=lambda model: None, args=(ROWS,), tracer="export", **kwargs):
    model = Options()
    options = {"tracer": tracer, "dynamic": True, "example_inputs": (ROWS,)}
    with fxpipe.compile(model, TWO, chunks=2, **options) as pipe:
        guards = pipe.guards
        assert guards.failure(ROWS) == "", "they hold for the call that was compiled"
        change(model)
        return guards.failure(*args, **kwargs)


def test_it_says_which_size_or_dtype_has_changed():
    assert failure(args=(torch.randn(9, 6),)) == "", "the batch may have any size"
    narrow = failure(args=(torch.randn(8, 5),))
    assert narrow.startswith("shape of x: (4, 6) → (8, 5) (dimension 1 has to be 6: ")
    assert narrow.endswith('x = self.linear(x) * self.scales["low"][1])'), "the line that fixes it"
    assert failure(args=(torch.randn(4, 6, 1),)) == "shape of x: (4, 6) → (4, 6, 1)"
    assert failure(args=(ROWS.double(),)) == "dtype of x: float32 → float64"
    assert failure(args=(torch.randn(4, 3, 6),), tracer="symbolic") == ""


def test_it_says_which_arguments_are_given_or_are_others():
    assert failure(mask=None) == "arguments: x → x, mask"
    assert failure(mask=ROWS) == "arguments: x → x, mask"
    assert failure(args=([ROWS],)) == "arguments: x are nested otherwise"
    with fxpipe.compile(Options(), TWO, example_inputs=(ROWS,), example_kwargs={"flag": 1}) as pipe:
        assert pipe.guards.failure(ROWS, flag=1) == ""
        assert pipe.guards.failure(ROWS, flag=True) == "flag: 1 → True"
    with pytest.raises(TypeError, match=r"Options.forward\(\)"):
        failure(no_such=1)


def test_it_says_which_mode_hook_or_module_has_changed():
    assert failure(lambda model: model.eval()) == "mode of the model: train → eval"
    assert failure(lambda model: model.linear.eval()) == "mode of linear: train → eval"
    hook = nn.Module.register_forward_hook
    assert failure(lambda model: hook(model.linear, print)) == "hooks on linear: none → some"
    replaced = failure(lambda model: setattr(model, "linear", nn.Linear(6, 6)))
    assert replaced == "modules: some have been added, removed or replaced"


def test_it_says_which_attribute_has_changed_down_to_the_part():
    assert failure(lambda m: m.scales["low"].__setitem__(1, 3.0)) == "scales['low'][1]: 2.0 → 3.0"
    assert failure(lambda m: vars(m.config).update(doubled=True)) == "config.doubled: False → True"
    grown = failure(lambda m: m.scales["low"].append(5.0))
    assert grown == "scales['low']: [1.0, 2.0] → [1.0, 2.0, 5.0]"


def test_it_says_that_parameters_have_other_shapes():
    def widened(model):
        model.linear.weight.data = torch.randn(7, 6)

    assert failure(widened) == "shapes of parameters have changed"


def test_it_says_what_autocast_has_changed():
    pipe = fxpipe.compile(Options(), TWO, example_inputs=(ROWS,))
    with pipe, torch.autocast("cpu", torch.bfloat16):
        assert pipe.guards.failure(ROWS) == "no autocast → autocast to bfloat16"


def test_it_says_that_a_batch_is_too_large():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(self.a(x)) if x.shape[0] < 6 else self.b(self.a(x)) * 2

    with fxpipe.compile(Halves(), TWO, chunks=2, example_inputs=(ROWS,)) as pipe:
        assert "at most 5 rows" in str(pipe.guards)
        assert pipe.guards.failure(torch.randn(7, 6)) == "rows: at most 5 → 7"


def test_each_guard_says_what_it_expects():
    with fxpipe.compile(
        Options(), TWO, example_inputs=(ROWS,), example_kwargs={"flag": False}, tracer="export"
    ) as pipe:
        said = [(guard.kind, str(guard)) for guard in pipe.guards]
    assert said[:5] == [
        ("arguments", ""),
        ("shape", "x: float32 [*, 6]"),
        ("constant", "flag = False"),
        ("modules", "train"),
        ("autocast", "no autocast"),
    ]
    (kind, state) = said[5]
    assert kind == "state" and "scales = {'low': [1.0, 2.0]}" in state


# --------------------------------------------------------------------- which calls share a program


class Box:
    def __init__(self, value, scale=2.0):
        self.value, self.scale = value, scale


def test_calls_that_differ_in_how_arguments_are_given_only_share_a_program():
    with fxpipe.compile(Options(), TWO, chunks=2) as pipe:
        pipe(ROWS)
        pipe(x=torch.randn(9, 6))
        assert len(pipe.all_guards) == 1
        pipe(ROWS, mask=None)
        pipe(ROWS, mask=ROWS)
        assert len(pipe.all_guards) == 3
        pipe(ROWS, flag=True)
        pipe(ROWS, flag=1)
        assert len(pipe.all_guards) == 5, "1 is not True"
        pipe(ROWS, box=Box(ROWS))
        pipe(ROWS, box=Box(ROWS, 3.0))
        pipe(ROWS, box=Box(ROWS))
        assert len(pipe.all_guards) == 7, "what is no tensor in an object is a constant, too"


def test_train_and_eval_take_turns_without_being_compiled_again():
    model = Options()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        for _ in range(2):
            for mode in (model.train, model.eval):
                mode()
                pipe(ROWS)
        assert [str(guards).count("eval") for guards in pipe.all_guards] == [0, 1]


def test_a_module_that_comes_to_lie_where_another_lay_is_another():
    holder = nn.Sequential(nn.ReLU(), nn.Linear(6, 6))
    with fxpipe.compile(holder, ["cpu"], chunks=2) as pipe:
        torch.testing.assert_close(pipe(ROWS), holder(ROWS))
        holder[0] = nn.Tanh()
        torch.testing.assert_close(pipe(ROWS), holder(ROWS))
        assert len(pipe.all_guards) == 2


class Doubling(MLP):
    """Doubles its output, as an attribute of its class says: read at the module or by the name of
    the class."""

    at_the_module = by_the_name = False

    def forward(self, x):
        x = super().forward(x)
        x = 2 * x if self.at_the_module else x
        return 2 * x if Doubling.by_the_name else x


def test_an_attribute_of_the_class_is_a_guard_at_the_module_and_by_the_name_of_the_class(
    monkeypatch,
):
    model = Doubling()
    with fxpipe.compile(model, TWO, chunks=2, tracer="symbolic") as pipe:
        before = pipe(X)
        monkeypatch.setattr(Doubling, "at_the_module", True)
        assert torch.equal(pipe(X), 2 * before)
        monkeypatch.setattr(Doubling, "by_the_name", True)
        assert torch.equal(pipe(X), 4 * before)


class Signed(MLP):
    """Goes by the sign of a number, as ``math.copysign`` tells it, and by whether it is NaN."""

    def __init__(self, find):
        super().__init__()
        self.number, self.numbers, self.find = 0.0, [0.0], find

    def forward(self, x, number=0.0, numbers=(0.0,)):
        found = self.find(self, number, numbers)
        return super().forward(x) * (3.0 if math.isnan(found) else math.copysign(1.0, found))


NUMBERS = {
    "an argument": lambda model, number, numbers: number,
    "a part of an argument": lambda model, number, numbers: numbers[0],
    "an attribute": lambda model, number, numbers: model.number,
    "a part of an attribute": lambda model, number, numbers: model.numbers[0],
}


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("place", NUMBERS)
def test_zeros_differ_in_their_sign_and_every_nan_is_the_same(place, tracer):
    model = Signed(NUMBERS[place])
    with fxpipe.compile(model, TWO, chunks=2, tracer=tracer) as pipe:
        for number in (0.0, -0.0, 0.0, -0.0, float("nan"), float("nan"), float("nan")):
            model.number = model.numbers[0] = number
            expected = torch.cat([model(part, number, (number,)) for part in X.chunk(2)])
            torch.testing.assert_close(pipe(X, number, (number,)), expected)
        assert len(pipe.compilations) == 3
