"""What a forward asks about a value is answered as in a real run; ``len(x)`` is a size of the
graph, and no constant."""

from __future__ import annotations

import copy
import functools
import numbers
import sys

import pytest
import torch
from torch import Tensor, fx, is_tensor, nn

import fxpipe
from tests.fxpipe.trace.small import BOTH, MLP


class Scaled(nn.Module):
    """Gives a value for each row, as flows do with their determinants."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.scale = MLP(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        names = ["first", "second"]
        return self.mlp(x) * len(names), self.scale.expand(len(x))


@BOTH
def test_a_batch_of_another_size_is_served_by_the_same_program(tracer: str) -> None:
    model = Scaled()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4, tracer=tracer) as pipe:
        for rows in 16, 13, 5:
            x = torch.randn(rows, 8)
            torch.testing.assert_close(pipe(x), model(x))
        assert len(pipe.compilations) == 1
        assert [len(part) for part in pipe(torch.randn(13, 8))] == [13, 13]


def test_there_is_no_other_len_afterwards() -> None:
    with fxpipe.compile(Scaled(), ["cpu", "cpu"], chunks=4) as pipe:
        pipe(torch.randn(16, 8))
    assert not {"len", "isinstance", "type", "getattr"} & set(globals())


def test_a_module_with_a_len_of_its_own_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "len", lambda value: 2)
    model = Scaled()
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=1) as pipe:
        assert pipe(torch.randn(2, 8))[1].shape == (2,)
    assert globals()["len"]([]) == 2


def swallowed(h):
    try:
        return 1.0 if h.sum() > 1e9 else 2.0
    except Exception:
        return 3.0


def written(h):
    try:
        h[:, 0] = 0.0
    except TypeError:
        return 3.0
    return 2.0


def looped(h):
    try:
        return float(len([element for element in h[0]]))
    except Exception:
        return 9.0


def matched(value):
    match value:
        case Tensor():
            return True
    return False


@functools.singledispatch
def dispatched(value):
    return False


@dispatched.register
def _(value: Tensor):
    return True


INPUTS = {
    "isinstance": lambda m: isinstance(m, Tensor),
    "of several": lambda m: isinstance(m, tuple | Tensor),
    "is_tensor": lambda m: torch.is_tensor(m),
    "by its name": lambda m: is_tensor(m),
    "type": lambda m: type(m) is Tensor,
    "type in": lambda m: type(m) in (Tensor, nn.Parameter),
    "its name": lambda m: type(m).__name__ == "Tensor",
    "issubclass": lambda m: issubclass(type(m), Tensor),
    "hasattr": lambda m: not hasattr(m, "lengths"),
    "getattr": lambda m: getattr(m, "lengths", None) is None,
    "callable": lambda m: not callable(m),
    "what type is else": lambda m: isinstance(int, type) and type[int] and type("A", (), {}),
    "match": matched,
    "singledispatch": dispatched,
    "__class__": lambda m: m.__class__ is Tensor,
    "getattr of its class": lambda m: getattr(m, "__class__") is Tensor,  # noqa: B009
    "number": lambda m: not isinstance(m, numbers.Number),
}
HIDDEN = {
    "isinstance": lambda h: 2.0 if isinstance(h, Tensor) else 3.0,
    "a tuple": lambda h: 3.0 if isinstance(h, list | tuple) else 2.0,
    "type": lambda h: 2.0 if type(h) is Tensor else 3.0,
    "hasattr": lambda h: 3.0 if hasattr(h, "lengths") else 2.0,
    "getattr": lambda h: 2.0 if getattr(h, "lengths", None) is None else 3.0,
    "of a method": lambda h: 2.0 if callable(h.dim) else 3.0,
    "a size": lambda h: 2.0 if isinstance(h.shape[1], int) else 3.0,
    "type of a size": lambda h: 2.0 if type(h.shape[1]) is int else 3.0,
    "match": lambda h: 2.0 if matched(h) else 3.0,
    "singledispatch": lambda h: 2.0 if dispatched(h) else 3.0,
    "__class__": lambda h: 2.0 if h.__class__ is Tensor else 3.0,
    "a call of its class": lambda h: 2.0 if len(h.__class__([1.0, 2.0])) == 2 else 3.0,
    "__class__ of a size": lambda h: 2.0 if h.shape[1].__class__ is int else 3.0,
    "in an error": swallowed,
    "in a write": written,
    "in a loop": looped,
}


class Masked(nn.Module):
    """Scales by its mask if the question is answered so, which a mask of ones hides."""

    def __init__(self, ask):
        super().__init__()
        self.a, self.b, self.ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x, mask):
        h = self.a(x)
        if self.ask(mask):
            h = h * mask
        return self.b(h)


class Hidden(nn.Module):
    """Scales its input by a number that depends on what a hidden value answers: an input of zeros
    hides it."""

    def __init__(self, ask):
        super().__init__()
        self.a, self.b, self.ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x):
        return self.b(x * self.ask(self.a(x)))


def example_of(model, *inputs, tracer="auto"):
    """The pipeline of a model, compiled for an example of ones or zeros, which hides branches."""
    return fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=inputs, tracer=tracer)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("way", INPUTS)
def test_an_input_answers_as_in_a_real_run(way, tracer):
    model = Masked(INPUTS[way])
    with example_of(model, torch.randn(4, 4), torch.ones(4, 4), tracer=tracer) as pipe:
        x, mask = torch.randn(4, 4), torch.tensor([[0.0], [1.0], [0.0], [2.0]]).expand(4, 4)
        torch.testing.assert_close(pipe(x, mask), copy.deepcopy(model)(x, mask))


@pytest.mark.parametrize("way", sorted(HIDDEN.keys() - {"in an error"}))
def test_a_hidden_value_answers_as_in_a_real_run(way):
    model = Hidden(HIDDEN[way])
    alone = copy.deepcopy(model)
    with example_of(model, torch.zeros(4, 4)) as pipe:
        x = torch.randn(4, 4)
        expected = torch.cat([alone(part) for part in x.chunk(2)])
        torch.testing.assert_close(pipe(x), expected)


@pytest.mark.parametrize("way", HIDDEN)
def test_a_symbolic_trace_that_asks_a_hidden_value_is_refused_at_its_line(way):
    pipe = fxpipe.compile(Hidden(HIDDEN[way]), ["cpu"] * 2, chunks=2, tracer="symbolic")
    with pytest.raises(fxpipe.TraceError, match=r"fx does not (know|record) \(at .*test_asked.py:"):
        pipe(torch.randn(4, 4))


def test_a_branch_by_a_value_is_refused_where_the_model_catches_the_error():
    with pytest.raises(fxpipe.TraceError, match=r"export: .* and the model catches the error"):
        example_of(Hidden(swallowed), torch.zeros(4, 4))


class OfItsOwn(nn.Module):
    """Asks its own tensors, and whether it is traced."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.seen = []

    def forward(self, x):
        h = self.a(x)
        if isinstance(self.scale, nn.Parameter) and type(self.scale) is nn.Parameter:
            h = h * self.scale
        if type(self.shift) is Tensor and not isinstance(self.shift, nn.Parameter):
            h = h + self.shift
        return self.b(h) if isinstance(h, Tensor | fx.Proxy) else h


@BOTH
def test_a_parameter_and_a_buffer_answer_as_in_a_real_run(tracer):
    model = OfItsOwn()
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, tracer=tracer, example_inputs=(torch.randn(4, 4),)
    ) as pipe:
        with torch.no_grad():
            model.scale.fill_(3.0), model.shift.fill_(5.0)
        x = torch.randn(4, 4)
        torch.testing.assert_close(pipe(x), copy.deepcopy(model)(x))


def test_a_function_of_another_module_is_answered_too(tmp_path, monkeypatch):
    (tmp_path / "its_helpers.py").write_text(
        "from torch import Tensor\ndef is_given(mask): return isinstance(mask, Tensor)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from its_helpers import is_given

    monkeypatch.setitem(globals(), "is_given", is_given)
    model = Masked(lambda mask: globals()["is_given"](mask))
    x, mask = torch.randn(4, 4), torch.zeros(4, 4)
    with example_of(model, torch.randn(4, 4), torch.ones(4, 4)) as pipe:
        torch.testing.assert_close(pipe(x, mask), model(x, mask))
    assert "isinstance" not in vars(sys.modules["its_helpers"])


AT_A_PROMPT = """
import torch

class Typed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, mask):
        h = self.a(x)
        return self.b(h * mask if isinstance(mask, torch.Tensor) else h)
"""


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<ipython-input-1-2a5f>"])
@pytest.mark.parametrize("scope", [{"__name__": "__main__"}, {}])
def test_code_that_is_in_no_file_is_answered_too(file, scope):
    exec(compile(AT_A_PROMPT, file, "exec"), scope)
    model = scope["Typed"]()
    x, mask = torch.randn(4, 4), torch.zeros(4, 4)
    with example_of(model, torch.randn(4, 4), torch.ones(4, 4)) as pipe:
        torch.testing.assert_close(pipe(x, mask), model(x, mask))
    assert "isinstance" not in scope
