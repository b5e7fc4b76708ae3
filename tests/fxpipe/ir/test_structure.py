"""Values are taken apart into tensors and what is around them, and put together again."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from fxpipe.ir.structure import Structure, children, leaves


class Layer:
    def __init__(self, keys: Tensor, owner: Any) -> None:
        self.keys, self.values, self.owner = keys, [keys, keys + 1], owner
        self.length, self.kind, self.module = 3, Tensor, nn.Linear(1, 1)


class Cache:
    def __init__(self, count: int) -> None:
        self.layers = [Layer(torch.ones(i + 1), self) for i in range(count)]


@dataclass(slots=True)
class Slots:
    mean: Tensor
    name: str = "a"


def test_containers_and_objects_have_parts_and_all_else_has_none() -> None:
    one = torch.ones(1)
    assert children({"a": one, 2: 3}) == {"a": one, 2: 3}
    assert children([one, None]) == {0: one, 1: None}
    assert children(Slots(one)) == {"mean": one, "name": "a"}
    assert [children(value) for value in (one, None, 1, "a", len, Tensor, nn.Linear(1, 1))] == (
        [None] * 7
    )


def test_every_leaf_has_a_path_and_circles_end() -> None:
    paths = [path for path, _ in leaves({"past": Cache(1), "n": (1, 2)}, "output")]
    layer = "output.past.layers[0]"
    assert paths == [
        *(f"{layer}.{name}" for name in ("keys", "values[0]", "values[1]")),
        *(f"{layer}.{name}" for name in ("length", "kind", "module")),
        "output.n[0]",
        "output.n[1]",
    ]


def test_a_value_is_filled_with_other_tensors() -> None:
    value = {"past": Cache(2), "slots": Slots(torch.zeros(3)), "tuple": (None, torch.zeros(2), 5)}
    tensors, structure = Structure.of(value)
    assert structure.opens_objects
    assert [tuple(t.shape) for t in tensors] == [(1,), (1,), (2,), (2,), (3,), (2,)]
    again = structure.fill([t + 10 for t in tensors])
    assert again["past"] is not value["past"]
    one, two = again["past"].layers
    assert one.keys is one.values[0] and one.keys.tolist() == [11], "shared as it was"
    assert two.values[1].tolist() == [12, 12]
    assert one.owner is again["past"], "objects point to the new ones"
    assert one.module is value["past"].layers[0].module and one.kind is Tensor
    assert again["slots"].mean.tolist() == [10] * 3 and again["slots"].name == "a"
    assert again["tuple"][0] is None and again["tuple"][2] == 5


def test_an_object_without_tensors_is_a_copy_each_time_since_it_may_get_some() -> None:
    empty = Cache(0)
    tensors, structure = Structure.of({"past": empty})
    first, second = structure.fill(tensors)["past"], structure.fill(tensors)["past"]
    first.layers.append(torch.ones(1))
    assert not empty.layers and not second.layers
    assert not structure.fill(tensors)["past"].layers


def test_an_object_without_tensors_that_cannot_be_copied_is_shared() -> None:
    class Lock:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    lock = Lock()
    assert Structure.of([lock])[1].fill([])[0] is lock


def test_a_structure_does_not_keep_tensors_alive() -> None:
    _, structure = Structure.of(Cache(1))
    (part,) = structure.parts
    assert not any(isinstance(leaf, Tensor) for _, leaf in leaves(part.value))


def test_what_pytree_knows_is_left_to_it() -> None:
    value = {"a": [torch.ones(1), None, "text"]}
    tensors, structure = Structure.of(value)
    assert not structure.opens_objects
    assert structure.spec == pytree.tree_structure(value)
    same = structure.fill(tensors)
    assert same == value and same["a"][0] is tensors[0]


def test_a_type_that_looks_at_what_it_is_made_of_is_taken_apart_too() -> None:
    """A packed sequence wants its sizes to be on the CPU."""
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    tensors, structure = Structure.of({"x": packed})
    assert structure.paths() == [".x[0]", ".x[1]"]
    assert structure.constants() == [None, None]
    again = structure.fill(tensors)["x"]
    assert type(again) is type(packed) and torch.equal(again.batch_sizes, packed.batch_sizes)


def test_a_shape_within_an_object_follows_what_it_is_filled_with() -> None:
    """As it is traced, a shape has sizes that are symbols in it."""
    symbol = ShapeEnv().create_unbacked_symint()
    layer = Layer(torch.ones(2), None)
    layer.shape = torch.Size([symbol, 4])
    found, structure = Structure.of(layer)
    assert structure.paths() == [".keys", ".values[1]", ".shape[0]"] and found[2] is symbol
    again = structure.fill([torch.zeros(2), torch.zeros(2), 5])
    assert type(again.shape) is torch.Size and again.shape == (5, 4)


def test_a_shape_is_built_again_as_one() -> None:
    """PyTorch's own pytree makes a tuple of it, which has no ``numel()``."""
    given = {"size": torch.Size([2, 3]), "x": torch.ones(1)}
    tensors, structure = Structure.of(given)
    again = structure.fill(tensors)
    assert type(again["size"]) is torch.Size and again["size"].numel() == 6
    assert structure.fits(Structure.of(again)[1])


def test_a_shape_with_symbols_follows_what_it_is_filled_with() -> None:
    symbol = ShapeEnv().create_unbacked_symint()
    found, structure = Structure.of((torch.Size([symbol, 4]),))
    assert structure.paths() == ["[0][0]"] and found == [symbol]
    (again,) = structure.fill([5])
    assert type(again) is torch.Size and again == (5, 4)
