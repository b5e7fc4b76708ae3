"""Lists, dicts and sets that a part of a model changes: the parts after it see the change, or an
error says that they would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.trace import TraceError, trace
from fxpipe.trace.containers import Contents
from tests.zoo import gradients, loop, loss_of


@fx.wrap
def append(seen: list[Tensor], h: Tensor) -> None:
    seen.append(h * 2)


@fx.wrap
def replace_first(seen: list[Tensor], h: Tensor) -> None:
    seen[0] = h * 2


@fx.wrap
def add_key(seen: dict[str, Tensor], h: Tensor) -> None:
    seen["b"] = h * 2


@fx.wrap
def add_name(names: set[str], h: Tensor) -> Tensor:
    names.add(f"layer {len(names)}")
    return h * len(names)


@fx.wrap
def grown(seen: list[Tensor], h: Tensor) -> list[Tensor]:
    seen.append(h * 2)
    return seen


@fx.wrap
def write(seen: list[Tensor]) -> None:
    seen[0].mul_(2)


@fx.wrap
def summed(seen: list[Tensor]) -> Tensor:
    seen.append(seen[0] * 2)  # nobody reads the list afterwards
    return torch.stack(seen).sum(0)


@fx.wrap
def append_if_long(seen: list[Tensor], h: Tensor) -> Tensor:
    if h.shape[1] > 6:
        seen.append(h)
    return h.relu()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.cache: list[Tensor] = []


class Appends(Layers):
    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        h = self.a(x)
        append(seen, h)
        return self.c(self.b(h).relu()) + seen[0]


class AppendsInALoop(Layers):
    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            append(seen, x)
        return torch.stack(seen).sum(0) * len(seen)


class AppendsToAnAttribute(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.cache = []
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            append(self.cache, x)
        return x + self.cache[0] + self.cache[1]


class Replaces(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        seen = [h]
        replace_first(seen, h)
        return self.c(self.b(h).relu()) + seen[0]


class AddsAKey(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        seen = {"a": h}
        add_key(seen, h)
        return self.c(self.b(h).relu()) + seen["b"]


class AddsNames(Layers):
    def forward(self, x: Tensor) -> Tensor:
        names = {"first"}
        h = add_name(names, self.a(x))
        return self.c(add_name(names, self.b(h)))


class Grows(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        seen = grown([h], h)
        first = len(seen)
        grown(seen, self.b(h))
        return self.c(h) + sum(seen) * first


class Writes(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        seen = [h + 0]
        write(seen)
        return self.c(self.b(h).relu()) + seen[0]


class Sums(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(summed([h, self.b(h)]))


class AppendsIfLong(Layers):
    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        h = self.b(append_if_long(seen, self.a(x)))
        return self.c(h) + sum(seen)


@pytest.mark.filterwarnings("ignore:.* sets cache in its forward", "ignore:The tensor attributes")
@pytest.mark.parametrize(
    "kind",
    [
        *(Appends, AppendsInALoop, AppendsToAnAttribute, Replaces, AddsAKey),
        *(AddsNames, Grows, Writes, Sums),
    ],
)
def test_what_a_wrapped_function_changes_is_changed_in_the_pipeline(kind: type[Layers]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(6, 4)
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


def test_a_wrapped_function_that_reads_a_list_remains_a_node_of_a_symbolic_graph() -> None:
    traced = trace(Lists(), (torch.randn(4, 4),), tracer="symbolic")
    assert "total(h=[a, b])" in traced.graph_module.code.replace(" = ", "=")


@fx.wrap
def total(h: list[Tensor]) -> Tensor:
    return sum(h, torch.zeros(()))


class Lists(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return total(h=[self.a(x), self.b(x)])


def test_a_change_at_other_sizes_than_the_traced_ones_is_an_error() -> None:
    """The function changes nothing in the compilation, and is a node of the graph."""
    model = AppendsIfLong()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        x = torch.randn(4, 5, 4)
        torch.testing.assert_close(pipe(x), model(x))
        with pytest.raises(RuntimeError, match=r"append_if_long changes a list .* let it return"):
            pipe(torch.randn(4, 10, 4))


class AppendsIfLarge(nn.Module):
    """What it does to the list depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, h: Tensor, seen: list[Tensor]) -> Tensor:
        h = self.linear(h)
        if h.abs().max() > 1e3:
            seen.append(h)
        return h.relu()


class AppendsAlways(AppendsIfLarge):
    def forward(self, h: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(h)
        return self.linear(h) if h.abs().max() < 1e3 else h


class Collects(nn.Module):
    def __init__(self, kind: type[AppendsIfLarge], hook: Any = None) -> None:
        super().__init__()
        self.a, self.b = kind(), kind()
        if hook is not None:
            self.a.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        h = self.b(self.a(x, seen), seen)
        return h + sum(seen)


@pytest.mark.parametrize("hook", [None, lambda module, args, output: output * 2])
def test_a_module_that_is_kept_whole_may_not_change_a_list_later(hook: Any) -> None:
    """Kept whole by torch.export as it goes by values, or by symbolic tracing for its hooks."""
    model = Collects(AppendsIfLarge, hook)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        x = torch.randn(4, 4)
        torch.testing.assert_close(pipe(x), model(x))
        with pytest.raises(RuntimeError, match="AppendsIfLarge changes a list"):
            pipe(x * 1e5)


def test_a_module_that_cannot_be_kept_whole_for_a_list_is_refused_with_both_reasons() -> None:
    with pytest.raises(TraceError) as raised:
        trace(Collects(AppendsAlways), (torch.randn(4, 4),))
    text = str(raised.value)
    assert "which way it goes depends on the values of tensors" in text
    assert "AppendsAlways cannot be kept whole: it changes a list" in text
    assert "let it return what is new" in text


class Holder:
    def __init__(self) -> None:
        self.values, self.count = [torch.ones(2)], 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h: None, False),
        (lambda h: setattr(h, "length", 1), False),  # computed once and kept
        (lambda h: setattr(h, "count", 1), True),
        (lambda h: h.values.append(torch.ones(2)), True),
        (lambda h: h.values.clear(), True),
        (lambda h: h.values.insert(0, h.values.pop().clone()), True),
        (lambda h: h.values[0].add_(1), False),  # a write to memory, which a graph does see
    ],
)
def test_contents_tell_a_change_of_an_object(change: Any, expected: bool) -> None:
    holder = Holder()
    contents = Contents(([holder], {"key": {1, 2}}))
    change(holder)
    assert contents.have_changed() == expected


def test_contents_tell_a_change_of_a_set_and_of_a_dict() -> None:
    names, entries = {"a"}, {"x": 1}
    contents = Contents((names, entries))
    names.add("b")
    assert contents.have_changed()
    contents = Contents((names, entries))
    entries["y"] = 2
    assert contents.have_changed()
