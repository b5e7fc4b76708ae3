"""For which sizes of its inputs an exported graph is right, and how that is shown."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir._torch import CONVOLUTION_KERNEL, KERNELS
from fxpipe.trace import checks, trace
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.other_sizes import DIFFERS, REFUSED, with_proven_sizes
from fxpipe.trace.sizes import Condition, any_kernel
from tests.fxpipe.trace.small import run


def exported(model: nn.Module, *args: Tensor, batch_dims=None) -> Traced:
    return trace(model, args, tracer="export", any_size=True, batch_dims=batch_dims)


def said(traced: Traced) -> list[str]:
    """The conditions that lines of the model have led to; ``i_d`` is dimension d of input i."""
    names = {symbol: f"{i}_{d}" for symbol, (i, d) in traced.sizes.symbols.items()}
    return [each.text(names) for each in traced.sizes.conditions if each.where]


def test_what_code_has_decided_by_a_size_is_a_condition_with_its_line() -> None:
    class Limited(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            assert x.shape[1] <= 9
            return x + y.sum(1, keepdim=True) if y.shape[1] != 3 else x

    traced = exported(Limited(), torch.randn(4, 5), torch.randn(4, 7))
    assert said(traced) == ["0_1 <= 9", "1_1 != 3"]
    (line, *_) = (each.where for each in traced.sizes.conditions if each.where)
    assert line.endswith("assert x.shape[1] <= 9")
    assert set(traced.sizes.free) == {(0, 1), (1, 1)}
    for length, other in (9, 8), (2, 2), (5, 30):
        x, y = torch.randn(6, length), torch.randn(6, other)
        assert traced.sizes.broken([x.shape, y.shape], [3]) is None
        torch.testing.assert_close(run(traced, x, y), Limited()(x, y))
    assert traced.sizes.broken([(6, 10), (6, 7)], [3]) is not None
    assert traced.sizes.broken([(6, 9), (6, 3)], [3]) is not None
    assert traced.sizes.broken([(6, 1), (6, 4)], [3]) is not None, "1 is a constant to torch.export"


def test_a_condition_on_the_batch_size_is_about_the_rows_that_are_given() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] == x.shape[1] else x

    traced = exported(Odd(), torch.randn(8, 5))
    assert said(traced) == ["0_0 != 0_1"]
    assert traced.sizes.broken([(12, 6)], [4, 12]) is None
    assert traced.sizes.broken([(12, 6)], [6, 12]) is not None


def test_a_size_that_the_model_makes_a_constant_is_fixed_by_the_line_that_does() -> None:
    class Fixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    traced = exported(Fixes(), torch.randn(4, 5, 6))
    assert set(traced.sizes.free) == {(0, 1)}
    ((place, line),) = traced.sizes.fixed.items()
    assert place == (0, 2) and line.endswith("return self.linear(x)")


def proven(model: nn.Module, graph_of: nn.Module, *args: Tensor):
    """The sizes that are left free where a graph is another model's, and what pins the others."""
    sizes = exported(model, *args).sizes
    example = Example.of(model, args, {}, None, any_size=True)
    (reference, *_) = checks.references(example)
    graph = fx.symbolic_trace(graph_of)
    traced = Traced(graph, "export", example.binder(), lambda output: output, sizes=sizes)
    found = with_proven_sizes(example, reference, traced)
    return set(found.free), found.fixed


class Scaled(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * x.shape[1] + y.sum(1, keepdim=True)


def test_a_graph_is_right_for_the_sizes_at_which_it_gives_what_the_model_gives() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 5 + y.sum(1, keepdim=True)

    inputs = torch.randn(4, 5), torch.randn(4, 7)
    assert proven(Scaled(), Scaled(), *inputs) == ({(0, 1), (1, 1)}, {})
    assert proven(Scaled(), Frozen(), *inputs) == ({(1, 1)}, {(0, 1): DIFFERS})


def test_a_size_is_pinned_where_the_model_refuses_every_other() -> None:
    class Five(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.shape[1]

    class OnlyFive(Five):
        """Takes five columns, for a reason that no export sees."""

        def forward(self, x: Tensor) -> Tensor:
            if x.stride(0) != 5:
                raise ValueError("only five")
            return x * 5

    x = torch.randn(4, 5)
    sizes = exported(Five(), x).sizes
    example = Example.of(OnlyFive(), (x,), {}, None, any_size=True)
    graph = fx.symbolic_trace(Five())
    traced = Traced(graph, "export", example.binder(), lambda output: output, sizes=sizes)
    found = with_proven_sizes(example, checks.references(example)[0], traced)
    assert not found.free and found.fixed == {(0, 1): REFUSED}


def test_a_size_that_takes_part_in_very_many_conditions_is_made_a_constant() -> None:
    class Compares(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            odd = [n for n in range(2, 30) if x.shape[1] % n]
            return x * len(odd) + y.sum(1, keepdim=True)

    traced = exported(Compares(), torch.randn(4, 31), torch.randn(4, 5))
    assert set(traced.sizes.free) == {(1, 1)}
    reason = traced.sizes.fixed[0, 1]
    assert reason.startswith("it takes part in more than 20 conditions, at ")
    assert reason.endswith("odd = [n for n in range(2, 30) if x.shape[1] % n]")


def test_where_nothing_is_compared_no_size_but_the_batchs_varies() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.randn(6, 5, 4)
    traced = trace(model, (x,), tracer="export", any_size=True, check=False)
    assert traced.sizes is None or not traced.sizes.free


@pytest.mark.parametrize(
    ("relation", "text"),
    [
        ("-a + b <= 0", "b <= a"),
        ("a - b <= 0", "a <= b"),
        ("-a <= -5", "a >= 5"),
        ("2*a - 3 < b", "2*a < b + 3"),
        ("Ne(a*b, 6)", "a*b != 6"),
        ("Eq(Mod(a, 4), 0)", "Mod(a, 4) == 0"),
        ("Eq(a, 1) | Eq(a, b)", "a == 1 or a == b"),
    ],
)
def test_a_condition_is_printed_as_python_code(relation: str, text: str) -> None:
    a, b = sympy.symbols("s1 s2", integer=True, positive=True)
    condition = Condition(sympy.sympify(relation, {"a": a, "b": b}))
    assert condition.text({a: "a", b: "b"}) == text


@pytest.mark.parametrize("any_size", [False, True])
def test_which_kernel_a_convolution_takes_is_no_condition(any_size: bool) -> None:
    """oneDNN serves from 16 pictures on: 5 frames for each of 2, 3 or 4 rows are as many or fewer.
    Both kernels give the same tensors."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3, padding=1)

        def forward(self, video: Tensor) -> Tensor:
            return self.conv(video.flatten(0, 1)).unflatten(0, video.shape[:2])

    model, video = Frames(), torch.randn(4, 5, 2, 6, 6)
    traced = trace(model, (video,), tracer="export", any_size=any_size)
    assert not [text for text in said(traced) if "16" in text]
    assert traced.largest_batch > 1000
    for rows in 2, 3, 4, 9:
        video = torch.randn(rows, 5, 2, 6, 6)
        assert traced.sizes.broken([video.shape], [2, rows]) is None
        torch.testing.assert_close(run(traced, video), model(video))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="export") as pipe:
        pipe(torch.randn(4, 5, 2, 6, 6))
        pipe(torch.randn(3, 5, 2, 6, 6))
        assert len(pipe.compilations) == 1, "it is for batches of any size"


class _ChannelsLast(nn.Module):
    """A convolution of sequences or pictures that have their channels last, as in a ConvNeXt. It is
    given a view, and gives one."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.conv = {1: nn.Conv1d, 2: nn.Conv2d}[dims](4, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.movedim(-1, 1)).movedim(1, -1)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_convolution_of_a_view_gives_no_condition_where_all_kernels_give_the_same_strides(
    dims: int,
) -> None:
    """With 16 rows or more oneDNN serves, and micro-batches have fewer."""
    model, x = _ChannelsLast(dims), torch.randn(16, *[10] * dims, 4)
    traced = trace(model, (x,), tracer="export", any_size=True)
    assert not [text for text in said(traced) if "16" in text]
    for rows in 2, 16, 40:
        x = torch.randn(rows, *[11] * dims, 4)
        found, expected = run(traced, x), model(x)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
    with fxpipe.compile(model, ["cpu"], chunks=4, tracer="export") as pipe:
        for size in 10, 11, 12:
            pipe(torch.randn(16, *[size] * dims, 4))
        assert len(pipe.compilations) == 2, "the second is for any size of sequences or pictures"


@pytest.mark.parametrize("by_name", [False, True])
def test_the_kernel_of_a_convolution_is_chosen_by_arguments_by_position_or_by_name(
    by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch 2.11 gives all of them by name, and 2.13 the first two by position."""
    chosen: list[tuple[int, ...]] = []

    def original(input: Tensor, weight: Tensor, **_: object) -> None:
        chosen.append(tuple(input.shape))

    monkeypatch.setattr(KERNELS, CONVOLUTION_KERNEL, original)
    x, weight = torch.ones(2, 3, 4), torch.ones(5, 3, 1)
    with any_kernel():
        choose = getattr(KERNELS, CONVOLUTION_KERNEL)
        if by_name:
            choose(input=x, weight=weight, bias=None)
        else:
            choose(x, weight, bias=None)
    assert chosen == [(2, 3, 4)]
