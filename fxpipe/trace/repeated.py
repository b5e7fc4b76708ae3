"""Layers that repeat are exported once: the other ones get copies of the nodes of the first.

::

    while exporting                                  afterwards

    x ─ begin ─ linear ─ relu ─ end ─ y              x ─ linear(0.weight) ─ relu ─ y
    y ─ again ──────────────────────── z             y ─ linear(1.weight) ─ relu ─ z
        (an operator with the outputs' shapes)           (copies)

The first call of such a layer is exported between two marks. A later call of a layer that cannot do
anything else becomes one operator, which is replaced by copies of the nodes between the marks, with
parameters of its own. That it cannot do anything else follows from this:

- its modules have the same classes, buffers and parameters of the same shapes, and no hooks;
- every attribute that the first layer has read while it was exported has the same value;
- it gets tensors of the same shapes, strides and dtypes, the same numbers and flags, and nothing
  else;
- the nodes of the first layer use no tensors but these arguments and its own, and no others use
  theirs but through what it returns.

The graph as a whole is compared with the model like any other, which shows whether a layer goes by
something outside of the modules, such as a global variable. On "meta", where nothing has values to
compare, layers have to run the same operators (:mod:`fxpipe.trace.operators`). Where something does
not fit, or the graph differs, the model is exported without this.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.exact import exact
from fxpipe.ir.hooks import hooks_of
from fxpipe.ir.structure import Structure
from fxpipe.trace.errors import Refused
from fxpipe.trace.flags import is_flag, read_again
from fxpipe.trace.premises import Attribute, attributes_read, state_of, value_of
from fxpipe.trace.whole import OP, Opaque, standing_in

REPEATED = 3  # from so many layers that are alike on, it is worth it
PARTS = 3  # modules in a layer, with itself: of fewer, hardly any nodes are saved

_NUMBERS = bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat
_PLAIN = bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device


class DoesNotRepeat(Refused):
    """The nodes of a layer cannot be copied for the next one."""


def repeated(model: nn.Module) -> dict[nn.Module, str]:
    """The layers of a model that are like other ones beside them, with their paths. None is within
    another one."""
    found: dict[nn.Module, str] = {}
    owners = _owners(model)
    for path, container in model.named_modules():
        if any(path == outer or path.startswith(f"{outer}.") for outer in found.values()):
            continue
        kinds: dict[Any, list[tuple[nn.Module, str]]] = {}
        counts = Counter(map(type, container.children()))
        for name, child in container.named_children():
            if counts[type(child)] < REPEATED or not _is_by_itself(child, owners):
                continue
            if len(kind := _kind(child)) >= PARTS:
                kinds.setdefault(kind, []).append((child, f"{path}.{name}".removeprefix(".")))
        for each in kinds.values():
            if len(each) >= REPEATED:
                found.update(each)
    return found


def _owners(model: nn.Module) -> dict[int, int]:
    """How many modules have each parameter or buffer, or module, by its id."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            counts[id(value)] = counts.get(id(value), 0) + 1
        for child in module._modules.values():
            counts[id(child)] = counts.get(id(child), 0) + 1
    return counts


def _is_by_itself(layer: nn.Module, owners: Mapping[int, int]) -> bool:
    """Whether no other module has a part of a layer, and none of its modules has hooks, a forward
    of its own, or tensors that are plain attributes."""
    for module in layer.modules():
        own = vars(module)
        if any(hooks_of(module)) or "forward" in own or isinstance(module, torch.jit.ScriptModule):
            return False
        parts = (*module._parameters.values(), *module._buffers.values())
        if any(owners[id(value)] > 1 for value in parts if value is not None):
            return False
        if any(owners[id(child)] > 1 for child in module._modules.values() if child is not None):
            return False
        if any(isinstance(value, Tensor | nn.Module) for value in own.values()):
            return False
        if any(getattr(value, "__dict__", None) for value in parts):
            return False
    return True


def _kind(layer: nn.Module) -> Any:
    """The classes of a layer's modules, and the shapes of their tensors: what layers that are alike
    have in common."""
    return tuple(
        (
            path,
            type(module),
            module.training,
            frozenset(vars(module)),
            *(_tensor(name, value) for name, value in module._parameters.items()),
            *(_tensor(name, value) for name, value in module._buffers.items()),
        )
        for path, module in layer.named_modules()
    )


def _tensor(name: str, tensor: Tensor | None) -> Any:
    if tensor is None:
        return name
    is_dense = tensor.layout == torch.strided
    place = (tensor.stride(), tensor.storage_offset()) if is_dense else id(tensor)
    return name, type(tensor), tuple(tensor.shape), place, *_sort(tensor)


def _sort(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.requires_grad


@dataclass
class _Layer:
    """The first call of a layer, which is exported."""

    module: nn.Module
    path: str
    key: str
    inputs: Structure
    given: Any
    outputs: Structure | None = None
    like: list[Tensor] = field(default_factory=list)
    reads: list[Attribute] = field(default_factory=list)
    """The attributes that its forward has read, but for ``forward`` itself, for which a stand-in
    is there."""


@dataclass(frozen=True)
class _Like:
    """An operator that stands for something, with outputs like these tensors."""

    tensors: Sequence[Tensor]

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in self.tensors
        ]

    def node(self, graph: fx.Graph, key: str, inputs: Sequence[fx.Node]) -> fx.Node:
        raise DoesNotRepeat(f"a call of {key} is within a region")


class Repeated:
    """The layers that are exported, and those that get copies of their nodes.

    Args:
        model: the model.
        layers: those that repeat, with their paths.
        calls: gets the operators of this export, by their keys.
        operators: what each call of a layer runs, if that has to be the same; None if not.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[nn.Module, str],
        calls: MutableMapping[str, Opaque],
        operators: Mapping[str, Hashable] | None = None,
    ) -> None:
        self.model, self.layers, self.calls, self.operators = model, layers, calls, operators
        self._kinds = {layer: _kind(layer) for layer in layers}
        self._first: list[_Layer] = []
        self._again: dict[str, tuple[_Layer, str]] = {}
        self._inside = False

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Inside the ``with`` block, the first calls of layers are marked in the graph, and later
        ones become operators."""
        if not self.layers:
            yield
            return
        with attributes_read(self.model) as self._reads, standing_in(self.layers, self._call):
            yield

    def _call(
        self, module: nn.Module, forward: Callable[..., Any], key: str, args: Any, kwargs: Any
    ) -> Any:
        tensors, inputs = Structure.of((args, kwargs))
        if self._inside or not tensors or not _is_plain(tensors, inputs):
            return forward(*args, **kwargs)
        given = _given(tensors)
        for layer in self._first:
            if (
                layer.given == given
                and _fit(layer.inputs, inputs)
                and self._is_alike(module, layer)
                and self._runs_alike(key, layer.key)
            ):
                self._read_alike(module, layer)
                name = f"again {key}"
                self._again[name] = layer, self.layers[module]
                assert layer.outputs is not None
                return layer.outputs.fill(self._operator(name, tensors, layer.like))
        layer = _Layer(module, self.layers[module], key, inputs, given)
        begun = self._operator(f"begin {key}", tensors, tensors)
        some, named = inputs.fill(begun)
        self._inside = True
        try:
            results, outputs = Structure.of(forward(*some, **named))
        finally:
            self._inside = False
        if not results or not _is_plain(results, outputs):
            raise DoesNotRepeat(f"{layer.path} gives what is no tensor")
        layer.outputs, layer.like = outputs, list(results)
        own = set(module.modules())
        layer.reads = [(m, name) for m, name in self._reads if m in own and name != "forward"]
        self._first.append(layer)
        return outputs.fill(self._operator(f"end {key}", results, results))

    def _operator(
        self, key: str, tensors: Sequence[Tensor], like: Sequence[Tensor]
    ) -> list[Tensor]:
        self.calls[key] = _Like(like)
        made: list[Tensor] = OP(list(tensors), key)
        return made

    def _is_alike(self, module: nn.Module, layer: _Layer) -> bool:
        if self._kinds[module] != self._kinds[layer.module]:
            return False
        return all(
            state_of(other, name) == self._reads[own, name]
            for own, other, name in self._pairs(module, layer)
        )

    def _runs_alike(self, key: str, first: str) -> bool:
        """Whether two calls run the same operators, where that has been noted."""
        known = self.operators
        return known is None or (key in known and known[key] == known.get(first))

    def _pairs(self, module: nn.Module, layer: _Layer) -> list[tuple[nn.Module, nn.Module, str]]:
        """The attributes that a layer has read: its module, that of the other layer, the name."""
        other = dict(zip(layer.module.modules(), module.modules(), strict=True))
        return [(own, other[own], name) for own, name in layer.reads]

    def _read_alike(self, module: nn.Module, layer: _Layer) -> None:
        """Read the attributes of a layer that its forward would have read: what is read while a
        model is traced becomes a guard."""
        for _, other, name in self._pairs(module, layer):
            if is_flag(name):
                read_again(other, name)
            elif not isinstance(value_of(other, name), property):  # what it reads is read by itself
                getattr(other, name, None)

    def copied(self, graph: fx.Graph, attributes: MutableMapping[str, Any]) -> None:
        """Take the marks out of an exported graph, and put copies of the nodes between them in the
        place of the operators. ``attributes``: those that the graph reads, by their paths.

        Raises :class:`DoesNotRepeat` where nodes use, or are used by, what a copy could not.
        """
        nodes = {node.args[1]: node for node in graph.find_nodes(op="call_function", target=OP)}
        names = [f"{mark} {layer.key}" for layer in self._first for mark in ("begin", "end")]
        for name in (*names, *self._again):
            if name not in nodes:  # it may have other effects than its outputs
                raise DoesNotRepeat(f"{name}: nothing uses its outputs")
        bodies = {id(layer): _Body.of(graph, nodes, layer) for layer in self._first}
        for key, (layer, path) in self._again.items():
            bodies[id(layer)].copy_to(nodes[key], path, self.model, attributes)
        for body in bodies.values():
            body.unmark()


def _is_plain(tensors: Sequence[Any], structure: Structure) -> bool:
    """Whether values consist of dense tensors, and of numbers and the like: no symbolic sizes are
    among them, and no objects, which may change from one call to the next."""
    is_dense = all(isinstance(each, Tensor) and each.layout == torch.strided for each in tensors)
    others = structure.without_tensors()
    is_constant = all(isinstance(each, _PLAIN) for each in others) and not structure.opens_objects
    return is_dense and is_constant


def _fit(one: Structure, other: Structure) -> bool:
    """Whether two structures of plain values are equal, with equal constants."""
    return one.fits(other) and all(
        type(ours) is type(theirs) and exact(ours) == exact(theirs)
        for ours, theirs in zip(one.without_tensors(), other.without_tensors(), strict=True)
    )


def _given(tensors: Sequence[Tensor]) -> Any:
    """What can be said of tensors without their values; which of them are one and the same."""
    first = {id(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}
    return [
        (str(tuple(t.shape)), str(t.stride()), str(t.storage_offset()), first[id(t)], *_sort(t))
        for t in tensors
    ]


@dataclass(frozen=True)
class _Body:
    """The nodes of a layer, between its marks."""

    layer: _Layer
    begin: fx.Node
    end: fx.Node
    nodes: list[fx.Node]
    entries: dict[fx.Node, int]
    """The nodes that stand for the layer's inputs, and which inputs these are."""

    @staticmethod
    def of(graph: fx.Graph, marks: Mapping[Any, fx.Node], layer: _Layer) -> _Body:
        begin, end = marks[f"begin {layer.key}"], marks[f"end {layer.key}"]
        entries: dict[fx.Node, Any] = {node: node.args[1] for node in begin.users}
        nodes: list[fx.Node] = []
        node = begin.next
        while node is not end:
            if node not in entries and node.op != "placeholder":
                nodes.append(node)
            node = node.next
        inside = {*nodes, *entries, end}
        for node in nodes:
            if node.op == "get_attr":
                continue
            for user in node.users:
                if user not in inside:
                    raise DoesNotRepeat(f"{user} uses what is computed within {layer.path}")
            for used in node.all_input_nodes:
                is_same = used.op == "get_attr" or isinstance(used.meta.get("val"), _NUMBERS)
                if used not in inside and not is_same:
                    raise DoesNotRepeat(f"{layer.path} uses {used}, which it is not given")
        return _Body(layer, begin, end, nodes, entries)

    def copy_to(
        self, again: fx.Node, path: str, model: nn.Module, attributes: MutableMapping[str, Any]
    ) -> None:
        """Put a copy in the place of an operator that stands for the layer at ``path``."""
        graph = again.graph
        inputs: Any = again.args[0]
        copies: dict[fx.Node, fx.Node] = {
            node: inputs[number] for node, number in self.entries.items()
        }

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = node
                target = str(node.target)
                if node.op == "get_attr" and target.startswith(f"{self.layer.path}."):
                    other = path + target.removeprefix(self.layer.path)
                    attributes[other] = operator.attrgetter(other)(model)
                    copies[node] = graph.create_node("get_attr", other)
                    copies[node].meta = self._meta(node, path)
                elif isinstance(attributes.get(target), fx.GraphModule) and node.op == "get_attr":
                    raise DoesNotRepeat(f"{self.layer.path} has a region of its own")
            return copies[node]

        with graph.inserting_before(again):
            for node in self.nodes:
                if node.op == "get_attr":
                    copied(node)
                    continue
                for used in node.all_input_nodes:
                    copied(used)
                copies[node] = graph.node_copy(node, copied)
                copies[node].meta = self._meta(node, path)
            results: Any = self.end.args[0]
            for user in list(again.users):
                user.replace_all_uses_with(copied(results[user.args[1]]))
                graph.erase_node(user)
        graph.erase_node(again)

    def _meta(self, node: fx.Node, path: str) -> dict[str, Any]:
        """The metadata of a copy, with the names of the modules of its own layer."""
        own = self.layer.path
        stack = {}
        for key, (module, kind) in node.meta.get("nn_module_stack", {}).items():
            if module == own or module.startswith(f"{own}."):
                module = path + module.removeprefix(own)
                key = f"{key}@{path}"
            stack[key] = module, kind
        return {**node.meta, "nn_module_stack": stack} if stack else dict(node.meta)

    def unmark(self) -> None:
        """Take the marks out of the graph."""
        for mark in (self.begin, self.end):
            values: Any = mark.args[0]
            for user in list(mark.users):
                user.replace_all_uses_with(values[user.args[1]])
                mark.graph.erase_node(user)
            mark.graph.erase_node(mark)
