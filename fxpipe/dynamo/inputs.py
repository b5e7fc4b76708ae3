"""The inputs of the graphs that Dynamo captures: arguments, parameters, buffers, sizes and numbers.

::

    Dynamo's graph                          the model that is compiled
    (weight, s0, x) ─ linear ─ view(s0)     (x) ─ linear (its own weight) ─ view(x.size(0))

In Dynamo's graph parameters, buffers and sizes are inputs. The functions of this module make
parameters and buffers attributes of the graph module again, so that each can be moved to the device
of its stage. They replace sizes by calls of ``size()``, which give the sizes of a micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import rename


@dataclass
class GraphInput:
    """An input of Dynamo's graph.

    Attributes:
        node: the placeholder; None if it has been removed from the graph.
        example: the value of the input in the call that Dynamo has traced.
        path: the name in the model, such as "layers.0.weight", or the name of an argument.
        is_owned: whether the input is an attribute of a module: a parameter, a buffer, or another
            tensor.
        is_number: whether the input is a float, which Dynamo passes as a tensor.
    """

    node: fx.Node | None
    example: Any
    path: str
    is_owned: bool
    is_number: bool

    @staticmethod
    def of(node: fx.Node, example: Any) -> GraphInput:
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        kind = "" if source is None else source.guard_source.name
        items = [user for user in node.users if user.target == "item"]
        is_number = bool(
            getattr(argument, "pass_arg_as_tensor", False) and len(items) == len(node.users)
        )
        for item in items if is_number else ():
            item.replace_all_uses_with(node)
            node.graph.erase_node(item)
        is_owned = isinstance(example, nn.Parameter) or (
            isinstance(example, Tensor) and kind.endswith("NN_MODULE") and not is_number
        )
        name = getattr(source, "name", node.name)
        name = name() if callable(name) else name  # in PyTorch 2.11 ``name`` is a method
        path = within_model(name) if is_owned else _argument(name)
        if not is_owned:
            node.target = path
            rename(node, path)
        return GraphInput(node, example, path, is_owned, is_number)

    @property
    def is_tensor(self) -> bool:
        """Whether the input is a tensor among the arguments of the call."""
        return isinstance(self.example, Tensor) and not (self.is_owned or self.is_number)

    def is_symbolic(self, dim: int) -> bool:
        """Whether the size of dimension ``dim`` is a symbol in the graph, and not a constant."""
        assert self.node is not None
        size = self.node.meta["example_value"].shape[dim]
        return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None

    def value(self, given: Any) -> Any:
        """The value that the pipeline takes for a value that Dynamo passes: an int for a symbolic
        size, a float for a number that is passed as a tensor, and any other value as it is."""
        if isinstance(given, torch.SymInt):
            return int(given)
        return float(given) if self.is_number else given


def within_model(source: str) -> str:
    """The path in the model for Dynamo's name of a tensor: ``a.weight`` for
    ``L['self']._modules['a']._parameters['weight']``."""
    own = re.sub(r"^[LG]\['\w+'\]|\b(_modules|_parameters|_buffers|__dict__)\b", "", source)
    return ".".join(re.findall(r"\w+", own))


def _argument(source: str) -> str:
    """The name of an argument for Dynamo's name of it: ``x`` for ``L['x']``, ``pair_0`` for
    ``L['kwargs']['pair'][0]``, and ``arg_0`` for ``L['args'][0]``."""
    parts = re.findall(r"\w+", source)
    name = "_".join(part for part in parts if part not in ("L", "G", "args", "kwargs"))
    return name if name.isidentifier() else f"arg_{name}"


class Bound:
    """A parameter or buffer of the model, which the graph module holds under the same name."""

    def __init__(self, owner: nn.Module, name: str, tensor: Tensor) -> None:
        self.name = name
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
            self.place: dict[str, Any] = owner._parameters
        else:
            owner.register_buffer(name, tensor)
            self.place = owner._buffers
        self.tensor = tensor

    def stay(self) -> None:
        """Move the model's buffer to the device of its stage. Placing the stages has put a moved
        copy of it into the graph module; the model's buffer takes over the copy's memory."""
        placed = self.place[self.name]
        if placed is not self.tensor:
            self.tensor.data = placed.data
            self.place[self.name] = self.tensor

    def refresh(self, tensor: Tensor) -> None:
        """Put ``tensor``, which Dynamo passes in a call, into the graph module, if the model has
        replaced its parameter or buffer."""
        if tensor is not self.tensor:
            self.tensor = self.place[self.name] = tensor


def bind(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[int, Bound]:
    """Make the inputs that are parameters and buffers attributes of the graph module, under their
    names in the model. Returns the bound tensors, by the indices of their inputs."""
    bound: dict[int, Bound] = {}
    for i, each in enumerate(inputs):
        if each.is_owned and each.node is not None:
            *parents, name = each.path.split(".")
            owner: nn.Module = gm
            path = []
            for parent in parents:
                if parent not in owner._modules:
                    parent = free_name(owner, parent)
                    owner.add_module(parent, nn.Module())
                path.append(parent)
                owner = owner.get_submodule(parent)
            path.append(free_name(owner, name))
            bound[i] = Bound(owner, path[-1], each.example)
            with gm.graph.inserting_before(each.node):
                got = gm.graph.create_node("get_attr", ".".join(path))
            got.meta = {k: v for k, v in each.node.meta.items() if k != "grapharg"}
            each.node.replace_all_uses_with(got)
            gm.graph.erase_node(each.node)
            each.node = None
    return bound


def free_name(owner: nn.Module, name: str) -> str:
    """``name``, with underscores appended until the module has no attribute of that name."""
    while hasattr(owner, name):
        name += "_"
    return name


def read_sizes_from_tensors(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Replace each input that is a size by a ``size()`` call on a tensor input of that size."""
    where: dict[Any, tuple[fx.Node, int]] = {}
    for each in inputs:
        if each.node is not None and each.is_tensor:
            for dim, size in enumerate(each.node.meta["example_value"].shape):
                if isinstance(size, torch.SymInt):
                    where.setdefault(size.node.expr, (each.node, dim))
    for each in inputs:
        number = None if each.node is None else each.node.meta.get("example_value")
        if isinstance(number, torch.SymInt) and number.node.expr in where:
            tensor, dim = where[number.node.expr]
            with gm.graph.inserting_after(tensor):
                own = gm.graph.call_method("size", (tensor, dim))
            assert each.node is not None
            each.node.replace_all_uses_with(own)
            gm.graph.erase_node(each.node)
            each.node = None
