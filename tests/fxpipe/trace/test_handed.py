"""Parts of a model that hand something to each other through a Python object run in one stage: in
another one, they would find there what is of a later micro-batch."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.graph import HANDED
from fxpipe.trace import Traced, examine_users_code, trace
from tests.zoo import outputs_of_loop

CHUNKS = 4
TWO = ["cpu"] * 2
LAST: Tensor | None = None
KEPT: dict[str, Tensor] = {}


def x() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def layers(count: int) -> list[nn.Module]:
    return [part for _ in range(count) for part in (nn.Linear(6, 6), nn.Tanh())]


class Enter(nn.Module):
    def __init__(self, side: dict[str, Any]) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):  # so that it is kept whole
            return x
        self.side["h"] = x
        return x + 1


class Leave(Enter):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            return x
        return x + self.side["h"]


class Push(Enter):
    def forward(self, x: Tensor) -> Tensor:
        self.side.setdefault("stack", []).append(x)
        return x + 1


class Pop(Enter):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.side["stack"].pop()


class SetsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        if bool((x > 100).any()):
            return x
        LAST = x
        return x + 1


class ReadsGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            return x
        return x if LAST is None else x + LAST


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + self.calls / 10)


def by_a_dict() -> nn.Module:
    side: dict[str, Any] = {}
    return nn.Sequential(Enter(side), *layers(1), Leave(side), *layers(4))


class Slotted:
    """An object without a dictionary of attributes."""

    __slots__ = ("kept",)
    kept: Any


def by_a_slot() -> nn.Module:
    model, side = nn.Sequential(*layers(6)), Slotted()
    model[0].register_forward_hook(lambda module, args, output: setattr(side, "kept", output))
    model[2].register_forward_hook(lambda module, args, output: output + side.kept)
    return model


def by_a_stack() -> nn.Module:
    side: dict[str, Any] = {}
    return nn.Sequential(Push(side), *layers(1), Pop(side), *layers(4))


def by_a_global_variable() -> nn.Module:
    return nn.Sequential(SetsGlobal(), *layers(1), ReadsGlobal(), *layers(4))


def by_a_module_that_is_called_twice() -> nn.Module:
    counter = Counter()
    return nn.Sequential(counter, *layers(1), counter, *layers(4))


def by_hooks() -> nn.Module:
    model, kept = nn.Sequential(*layers(6)), dict[str, Tensor]()
    model[0].register_forward_hook(lambda module, args, output: kept.update(h=output))
    model[2].register_forward_hook(lambda module, args, output: output + kept["h"])
    return model


def by_hooks_that_set_an_attribute() -> nn.Module:
    model = nn.Sequential(*layers(6))
    model[0].register_forward_hook(lambda module, args, output: setattr(module, "h", output))
    model[2].register_forward_hook(lambda module, args, output: output + model[0].h)
    return model


def by_hooks_that_write_to_a_tensor() -> nn.Module:
    model, kept = nn.Sequential(*layers(6)), torch.zeros(6)
    model[0].register_forward_hook(lambda module, args, output: none_of(kept.copy_(output.sum(0))))
    model[2].register_forward_hook(lambda module, args, output: output + kept)
    return model


def none_of(value: object) -> None:
    """A hook that returns None leaves the output as it is."""


@pytest.mark.parametrize(
    "make",
    [by_a_dict, by_a_stack, by_a_global_variable, by_a_module_that_is_called_twice, by_hooks],
)
def test_what_hands_something_over_is_in_one_stage(make: Callable[[], nn.Module]) -> None:
    model = make()
    pipe = fxpipe.compile(copy.deepcopy(model), TWO, chunks=CHUNKS, check="warn")
    with pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert torch.equal(pipe(x()), torch.cat(outputs_of_loop(model, (x(),), CHUNKS)))


def test_a_cut_between_them_is_refused() -> None:
    words = "hand something to each other through a Python object"
    with pytest.raises(fxpipe.PartitionError, match=words):
        fxpipe.compile(by_hooks(), TWO, chunks=CHUNKS, partition=["1"])(x())


def test_where_no_other_cut_is_left_it_is_said_why() -> None:
    side: dict[str, Any] = {}
    model = nn.Sequential(Enter(side), *layers(3), Leave(side))
    words = "they hand something to each other through a Python object, of which each"
    with pytest.raises(fxpipe.PartitionError, match=words):
        fxpipe.compile(model, TWO, chunks=CHUNKS)(x())


def examined(model: nn.Module) -> Traced:
    traced = trace(model, (x(),))
    examine_users_code(model, (x(),), {}, traced, [0])
    return traced


def handed(model: nn.Module) -> list[str]:
    graph = examined(model).graph_module.graph
    return [node.name for node in graph.nodes if HANDED in node.meta]


def test_hooks_that_only_record_may_be_in_several_stages() -> None:
    model, kept = nn.Sequential(*layers(3)), dict[int, Tensor]()
    for number, module in enumerate(model):
        module.register_forward_hook(
            lambda module, args, output, number=number: kept.update({number: output})
        )
    assert handed(model) == []
    assert kept == {}, "what hooks record while a model is traced is taken out again"


def test_what_hooks_leave_is_noted_with_the_code_that_does_so() -> None:
    model, kept = nn.Sequential(*layers(3)), dict[str, Tensor]()
    model[0].register_forward_hook(lambda module, args, output: kept.update(h=output))
    model[2].register_forward_hook(lambda module, args, output: setattr(model, "h", output))
    in_dict, on_model = examined(model).left
    assert in_dict.thing is kept and in_dict.by == "0 (or a hook on it)"
    assert on_model.thing is model and on_model.names == {"h"}


def test_those_that_hand_something_over_are_known() -> None:
    assert handed(by_hooks()) == ["_0", "_2"]
    assert handed(by_hooks_that_set_an_attribute()) == ["_0", "_2"]
    assert handed(by_a_slot()) == ["_0", "_2"]
    assert handed(by_hooks_that_write_to_a_tensor()) == ["_0", "_2"]


def test_tensors_to_which_hooks_write_are_as_they_were_after_a_trace() -> None:
    model, kept = nn.Sequential(*layers(3)), torch.zeros(6)
    model[0].register_forward_hook(lambda module, args, output: none_of(kept.add_(output.sum(0))))
    (left,) = examined(model).left
    assert left.thing is kept and not kept.any()


def test_they_are_known_where_the_graph_is_from_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        model = by_a_module_that_is_called_twice()
        expected = torch.cat(outputs_of_loop(copy.deepcopy(model), (x(),), CHUNKS))
        pipe = fxpipe.compile(model, TWO, chunks=CHUNKS, check="warn", cache=tmp_path)
        with pipe, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(pipe(x()), expected)


def with_dropout_in_a_hook() -> nn.Module:
    model = nn.Sequential(*layers(4))
    for module in model[0], model[4]:
        module.register_forward_hook(lambda module, args, output: nn.functional.dropout(output))
    return model


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_what_a_hook_draws_depends_on_the_seed_only(checkpoint: str) -> None:
    model, found = with_dropout_in_a_hook(), []
    for devices, modes in (["cpu"], "never"), (TWO, checkpoint):
        own = copy.deepcopy(model)
        with fxpipe.compile(own, devices, chunks=CHUNKS, checkpoint=modes) as pipe:
            pipe.prepare(x())
            torch.manual_seed(0)
            output = pipe(x())
            output.square().sum().backward()
        found.append([output, *(each.grad for each in own.parameters())])
    assert all(map(torch.equal, *found))


@torch.library.custom_op("fxpipe_tests::put", mutates_args=())
def put(x: Tensor) -> Tensor:
    KEPT["x"] = x.clone()
    return x.clone()


@torch.library.custom_op("fxpipe_tests::get", mutates_args=())
def get(x: Tensor) -> Tensor:
    return x + KEPT["x"]


class ByOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(get(self.layers(put(x))))


def test_operators_of_the_users_may_hand_something_over_as_well() -> None:
    for operator in put, get:
        operator.register_fake(torch.empty_like)
    assert handed(ByOperators()) == ["put_default", "get_default"]


class Instances(OrderedDict[str, type]):
    """Makes an object of the class that it is asked for, as tables of transformers do."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Instances(tanh=nn.Tanh)


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool((x > 100).any()) else ACTIVATIONS["tanh"](x)


def test_a_table_that_makes_what_it_is_asked_for_has_what_it_had() -> None:
    with fxpipe.compile(nn.Sequential(Looks(), *layers(2)), TWO, chunks=CHUNKS) as pipe:
        pipe(x())
    assert dict.__getitem__(ACTIVATIONS, "tanh") is nn.Tanh


class OfUnequalRows(nn.Module):
    """Is kept whole, and takes no rows that are all alike."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x[:1]).all()):
            raise ValueError("these rows are all alike")
        return x * 2


def test_a_model_that_takes_no_rows_that_are_alike_is_compiled() -> None:
    model = nn.Sequential(OfUnequalRows(), *layers(2))
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        assert torch.equal(pipe(x()), torch.cat(outputs_of_loop(model, (x(),), 2)))
