"""A check of values that only raises does not stand in the way of a trace."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.trace import TraceError, conditions, trace
from tests.fxpipe.trace.small import run, x


class Classifier(nn.Module):
    """As libraries check labels, masks and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.strict = True

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if self.strict and (ids.max() >= 10 or ids.min() < 0):
            message = f"ids between 0 and 9, not {ids.max()}"
            raise ValueError(message)
        if not mask.any():
            raise RuntimeError("nothing is attended to")
        return self.second(self.first(self.embedding(ids).mean(1)) * mask)


def inputs(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.arange(rows * 3).view(rows, 3) % 10, torch.ones(rows, 1)


def test_the_model_is_compiled_whole_as_if_nothing_were_checked() -> None:
    model = Classifier()
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2)
    parts = zip(*(each.chunk(2) for each in inputs()), strict=True)
    assert torch.equal(pipe(*inputs()), torch.cat([model(*part) for part in parts]))
    assert len(pipe.stages) == 2


@pytest.mark.parametrize(
    ("ids", "mask", "line"),
    [
        (torch.full((4, 3), 9), torch.zeros(4, 1), "if not mask.any"),
        (torch.full((4, 3), -1), torch.ones(4, 1), "ids.min() < 0"),
    ],
)
def test_what_the_model_would_refuse_the_graph_refuses_and_names_the_line(
    ids: Tensor, mask: Tensor, line: str
) -> None:
    traced = trace(Classifier(), inputs())
    with pytest.raises(RuntimeError) as error:
        run(traced, ids, mask)
    assert "a check of the model's own has failed" in str(error.value)
    assert line in str(error.value)


def test_a_branch_that_does_not_only_raise_is_not_a_check() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                if x.shape[0] > 100:
                    return x
                raise ValueError
            return x * 2

    class Returning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e9:
                return x
            return x * 2

    class Several(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if all([x[0].sum() > 0, x[1].sum() > 0]):  # one of them may be, and nothing is wrong
                raise ValueError
            return x * 2

    class Between(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if 1 < x.sum() < 2:
                raise ValueError
            return x * 2

    for model in (Branching(), Returning(), Several(), Between()):
        with pytest.raises(TraceError, match="depends on the values of tensors"):
            trace(model, (-x().abs(),))


ASSERTS = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        assert x.abs().sum() > 0 and x.abs().max() < 100, "a sensible x"
        return x * 2
"""


def test_an_assertion_is_a_check_in_which_each_part_decides(tmp_path) -> None:
    file = tmp_path / "asserts.py"  # not in this file, whose assertions pytest rewrites
    file.write_text(ASSERTS)
    names: dict = {}
    exec(compile(ASSERTS, str(file), "exec"), names)
    traced = trace(names["Model"](), (x(),))
    assert torch.equal(run(traced, x(3)), x(3) * 2)
    for wrong in (torch.zeros(3, 8), torch.full((3, 8), 100.0)):
        with pytest.raises(RuntimeError, match=r"asserts\.py:6: assert x\.abs"):
            run(traced, wrong)


@pytest.mark.parametrize(
    ("test", "part", "expected"),
    [
        ("a", "a", True),
        ("not a", "a", False),
        ("a or b", "a", True),
        ("a or b", "b", True),
        ("a and b", "a", None),  # b decides
        ("a and b", "b", True),
        ("not (a and b)", "a", False),
        ("not (a or b)", "a", None),
        ("not (a or b)", "b", False),
        ("c or (a and not b)", "b", False),
        ("f(a)", "a", None),  # decided within f
        ("a < b < c", "a", None),  # in two steps
    ],
)
def test_which_value_of_a_part_makes_a_condition_true(
    test: str, part: str, expected: bool | None
) -> None:
    expression = ast.parse(test, mode="eval").body
    names = [n for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id == part]
    (name,) = names
    place = name.lineno, name.end_lineno, name.col_offset, name.end_col_offset
    assert conditions._decides(expression, place, True) is expected


class Asserts(nn.Module):
    """As models do that are to be traced by fx."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[1] == 3, "three columns")
        torch._assert((x < 100).all(), "small numbers")
        return self.second(self.first(x))


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_an_assertion_by_a_function_is_one_in_the_graph(tracer: str) -> None:
    model, rows = Asserts(), torch.randn(4, 3)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        assert torch.equal(pipe(rows), torch.cat([model(part) for part in rows.chunk(2)]))
        assert len(pipe.stages) == 2
        with pytest.raises(RuntimeError, match="a check of the model's own has failed"):
            pipe(rows + 1000)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("message", [(), ("ids out of range",)])
def test_an_assertion_that_does_not_wait_is_kept(tracer: str, message: tuple) -> None:
    class Model(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            torch._assert_async((ids < 10).all(), *message)
            return ids * 2

    traced = trace(Model(), (inputs()[0],), tracer=tracer)
    assert torch.equal(run(traced, inputs()[0]), inputs()[0] * 2)
    with pytest.raises(RuntimeError, match=message[0] if message else "Expected Tensor"):
        run(traced, inputs()[0] + 1)


def test_a_model_that_asserts_is_taken_from_the_cache(tmp_path: Path) -> None:
    for state in "kept", "from the cache":
        with fxpipe.compile(Asserts(), ["cpu"], chunks=2, cache=tmp_path) as pipe:
            pipe(torch.randn(4, 3))
            assert state in str(pipe.compilations)
