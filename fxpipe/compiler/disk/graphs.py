"""Model graphs as JSON, and back.

::

    {"nodes": [["call_function", "addmm", ["op", "aten", "addmm", "default"], [...], {...}, {...}]],
     "constants": {"lifted_tensor_0": ...},          tensors that the model does not have
     "graphs": {"submod_1": ...},                    regions without gradients, or with autocast
     "regions": {"layers_0_checkpoint": ...},        checkpoints of the model's own
     "unchanging": ["layers.1"]}                     modules that are watched, see Unchanging

What belongs to the model goes by its path in the model. What belongs to neither, such as a module
that a front end has made, cannot be kept.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.compiler.disk.data import packed, packed_tensor, unpacked, unpacked_tensor
from fxpipe.compiler.disk.errors import NotKept, Unusable
from fxpipe.compiler.disk.targets import function_of, method, name_of
from fxpipe.ir.graph import WHOLE
from fxpipe.runtime.checkpointing.options import CheckpointOptions
from fxpipe.runtime.checkpointing.regions import Region, Settings
from fxpipe.trace.containers import Unchanging

_STACK, _MODULES = "stack_trace", "nn_module_stack"
_OPS = "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"

Functions = Mapping[str, Any]
"""Functions of the user's that a graph may call, by "module:name"."""


def packed_graph(gm: fx.GraphModule, model: nn.Module, own: Functions) -> Any:
    """The graph of a graph module as JSON.

    Args:
        model: the model that has been traced, whose modules and tensors the graph uses.

    Raises NotKept for a graph that cannot be kept.
    """
    made: dict[str, dict[str, Any]] = {"constants": {}, "graphs": {}, "regions": {}}
    unchanging: list[str] = []
    nodes = []
    for node in gm.graph.nodes:
        target = node.target
        if node.op in ("get_attr", "call_module"):
            value = operator.attrgetter(target)(gm)
            if _part(model, target) is value:
                pass
            elif isinstance(value, fx.GraphModule):
                made["graphs"][target] = packed_graph(value, model, own)
            elif isinstance(value, Region):
                made["regions"][target] = _packed_region(value, model, own)
            elif isinstance(value, Tensor):
                made["constants"][target] = packed_tensor(value)
            elif isinstance(value, Unchanging) and _part(model, target) is value.module:
                unchanging.append(target)
            else:
                raise NotKept(f"its graph has a {type(value).__name__}, {target}")
        elif node.op == "call_function":
            target = name_of(target, node.args, own)
        elif node.op == "call_method":
            try:
                method(target)
            except Unusable as error:
                raise NotKept(f"its graph has something else than computations: {error}") from None
        args, kwargs = packed(node.args), packed(node.kwargs)
        nodes.append([node.op, node.name, target, args, kwargs, _packed_meta(node)])
    return {"name": type(gm).__name__, "nodes": nodes, "unchanging": unchanging, **made}


def unpacked_graph(
    data: Any, model: nn.Module, own: Functions, *, on_the_model: bool
) -> fx.GraphModule:
    """The graph module that :func:`packed_graph` has made JSON of, with the modules and tensors of
    this model.

    Args:
        on_the_model: whether the graph module gets modules for all paths, as symbolic tracing makes
            it, or an attribute for each path that the graph names.

    Raises Unusable if the graph names what the model does not have, or what it may not name.
    """
    attributes: dict[str, Any] = {name: unpacked_tensor(t) for name, t in data["constants"].items()}
    for name, part in data["graphs"].items():
        attributes[name] = unpacked_graph(part, model, own, on_the_model=False)
    for name, part in data["regions"].items():
        attributes[name] = _unpacked_region(part, model, own, on_the_model)
    made = list(attributes)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, meta in data["nodes"]:
        if op not in _OPS or not str(name).isidentifier():
            raise Unusable(f"it has a node {name!r} of the kind {op!r}")
        given, named = unpacked(args, nodes.__getitem__), unpacked(kwargs, nodes.__getitem__)
        if op == "call_function":
            target = function_of(target, given, own)
        elif op == "call_method":
            target = method(target)
        elif op in ("get_attr", "call_module") and target not in attributes:
            attributes[target] = _part(model, target)
            if not isinstance(attributes[target], Tensor | nn.Module):
                raise Unusable(f"the model has no {target}")
        if op == "call_module" and not isinstance(attributes[target], nn.Module):
            raise Unusable(f"it calls {target}, which is no module")
        nodes[name] = graph.create_node(op, target, given, named, name=name)
        if nodes[name].name != name:
            raise Unusable(f"it has two nodes {name!r}")
        nodes[name].meta = _unpacked_meta(meta, model)
    graph.lint()
    name = str(data["name"])
    gm = (
        _on_the_model(model, graph, {each: attributes[each] for each in made}, name)
        if on_the_model
        else fx.GraphModule(attributes, graph, name)
    )
    for path in data["unchanging"]:
        gm.set_submodule(path, Unchanging(gm.get_submodule(path)))
    return gm


def _on_the_model(
    model: nn.Module, graph: fx.Graph, made: Mapping[str, Any], name: str
) -> fx.GraphModule:
    if any(hasattr(model, each) for each in made):
        raise Unusable(f"the model has a part of its own for one of {', '.join(made)}")
    vars(model).update(made)  # as fx does while it traces, which reads constants from there
    try:
        return fx.GraphModule(model, graph, name)
    finally:
        for each in made:
            del vars(model)[each]


def _packed_region(region: Region, model: nn.Module, own: Functions) -> Any:
    options = region.settings.options
    if options.context_fn is not None:
        raise NotKept("it has a checkpoint with a context_fn")
    return {
        "body": packed_graph(region.body, model, own),
        "options": {each.name: packed(getattr(options, each.name)) for each in fields(options)},
        "reentrant": region.settings.reentrant,
        "given": list(region.given),
    }


def _unpacked_region(data: Any, model: nn.Module, own: Functions, on_the_model: bool) -> Region:
    body = unpacked_graph(data["body"], model, own, on_the_model=on_the_model)
    options = {name: unpacked(value) for name, value in data["options"].items()}
    if options["context_fn"] is not None:
        raise Unusable("it has a checkpoint with a context_fn")
    settings = Settings(CheckpointOptions(**options), bool(data["reentrant"]))
    return Region(body, settings, tuple(map(int, data["given"])))


def _part(model: nn.Module, path: str) -> Any:
    """A module, parameter, buffer or other tensor of a model; None if it has none at this path."""
    owner, _, name = str(path).rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    for table in (module._modules, module._parameters, module._buffers, vars(module)):
        value = table.get(name)
        if isinstance(value, Tensor | nn.Module):
            return value
    return None


def _packed_meta(node: fx.Node) -> Any:
    stack = [
        [packed(key), str(path), kind if isinstance(kind, str) else None]
        for key, (path, kind) in node.meta.get(_MODULES, {}).items()
    ]
    return {
        _STACK: node.meta.get(_STACK),
        _MODULES: stack if _MODULES in node.meta else None,
        WHOLE: packed(node.meta.get(WHOLE)),
    }


def _unpacked_meta(data: Any, model: nn.Module) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    if isinstance(data[_STACK], str):
        meta[_STACK] = data[_STACK]
    if data[_MODULES] is not None:
        meta[_MODULES] = {
            unpacked(key): (str(path), kind or type(_part(model, path) or model))
            for key, path, kind in data[_MODULES]
        }
    if data[WHOLE] is not None:
        meta[WHOLE] = unpacked(data[WHOLE])
    return meta
