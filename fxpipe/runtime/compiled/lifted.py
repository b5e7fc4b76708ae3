"""A stage as a graph that has no tensors of its own: parameters and buffers are inputs.

::

    stage (x)                        lifted (weight, bias, x)

    x ── linear ── y                 weight, bias ─┐
         (weight, bias)              x ────────── linear ── (y,)

So compiled code works on whichever tensors the stage has when it is called: a parameter may be
assigned anew, and the second run of a checkpoint works on copies of the buffers. Inputs and results
are flat: nodes of the graph build nested arguments from their leaves, and flatten nested results.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import (
    FakeTensorMode,
    enable_python_dispatcher,
    pytree,
    version_of,
    wrap_with_autocast,
    wrap_with_set_grad_enabled,
)
from fxpipe.ir.graph import attribute
from fxpipe.ir.hooks import has_hooks
from fxpipe.runtime import shared
from fxpipe.runtime.checkpointing.regions import Region
from fxpipe.runtime.compiled.draws import Draws, is_traced
from fxpipe.runtime.random import Seeded
from fxpipe.runtime.state import STATEFUL

_CONTEXTS = wrap_with_autocast, wrap_with_set_grad_enabled
"""Operators that call a module, one of their arguments, within a context: ``torch.export`` makes
them of ``with torch.no_grad()`` and the like."""
_KEPT = "stack_trace", "nn_module_stack"  # metadata that a compiler may show


class NotLifted(RuntimeError):
    """A stage cannot be lifted, for the reason that the message gives."""


def obstacle(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Why a stage with these modules, each with its name, must not be compiled; None if it may be.
    Such a stage has code that must run in each call, and would run only once, when the stage is
    compiled. The stage itself is the module without a name."""
    for name, module in modules:
        if isinstance(module, Region):
            return f"the model checkpoints {name} itself"
        if module in STATEFUL:
            return f"the forward of {name} changes attributes of the module"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name} is compiled by TorchScript"
        if name and has_hooks(module):
            return f"{name} has hooks"
    return None


class Tensors:
    """The parameters, buffers and constants of a stage, by where the stage keeps them."""

    def __init__(self, stage: fx.GraphModule) -> None:
        self.names: list[str] = []
        self.homes: list[tuple[dict[str, Any], str]] = []
        self._index: dict[tuple[int, str], int] = {}  # positions, by dictionary and name
        known: dict[int, int] = {}  # positions, by the ids of tensors
        for path, home, key in _homes(stage):
            place, tensor = (id(home), key), home[key]
            if place not in self._index:
                self._index[place] = known.setdefault(id(tensor), len(self.homes))
                if known[id(tensor)] == len(self.homes):
                    self.names.append(path)
                    self.homes.append((home, key))
        self._tables = [table for table, _ in self.homes]
        self._keys = [key for _, key in self.homes]

    def now(self) -> list[Tensor]:
        """The tensors that the stage has now."""
        return list(map(operator.getitem, self._tables, self._keys))

    def index(self, home: Mapping[str, Any], key: str) -> int:
        """The position in :meth:`now` of the tensor that a dictionary has under a key."""
        return self._index[id(home), key]

    def looks(self) -> tuple[Any, ...]:
        """Dtype, shape and so on of each tensor: all that compiled code relies on."""
        return tuple(
            (t.dtype, t.shape, t.device, t.requires_grad, t.layout)
            + ((t.stride(),) if t.layout == torch.strided else ())
            for t in self.now()
        )


def _homes(stage: fx.GraphModule) -> Iterator[tuple[str, dict[str, Any], str]]:
    for node in stage.graph.nodes:
        if node.op == "call_module":
            yield from _within(str(node.target), stage.get_submodule(str(node.target)))
        elif node.op == "get_attr":
            target = str(node.target)
            value = attribute(stage, target)
            if isinstance(value, nn.Module):
                yield from _within(target, value)
            elif isinstance(value, Tensor):
                yield (target, *_home(stage, target))


def _within(path: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, _ in _named(module):
        yield (f"{path}.{name}", *_home(module, name))


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _home(module: nn.Module, target: str) -> tuple[dict[str, Any], str]:
    """The dictionary in which a module keeps a tensor, and its key there."""
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    holders: tuple[dict[str, Any], ...] = owner._parameters, owner._buffers, vars(owner)
    return next(holder for holder in holders if name in holder), name


# ------------------------------------------------------------------------------------- the graph


def _identifier(name: str) -> str:
    """A name for generated code; the names of modules may begin with a digit."""
    found = re.sub(r"\W", "_", name)
    return f"_{found}" if found[:1].isdigit() else found


class _Named:
    """An object that nodes of a graph call; the name it is given shows in the generated code."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = _identifier(name)
        self.__module__ = __name__


class _CallWithTensors(_Named):
    """Calls a module with values in place of all of its parameters and buffers.

    ``within``: an operator of ``_CONTEXTS``, with the arguments that it takes ahead of the module.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        names: Sequence[str],
        within: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(name)
        self.module, self.names, self.within = module, tuple(names), within

    def __call__(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.names, tensors, strict=True))
        replica, places = shared.replica(self.module, values)
        result = self._run(replica, args, kwargs)
        for owner, name, value in places:
            if owner._buffers.get(name, value) is not value:
                kind = type(owner).__name__
                raise NotLifted(
                    f"the forward of a {kind} replaces its buffer {name!r} by another tensor"
                )
        return result

    def _run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.within is not None:
            return self.within(module, *args, **kwargs)
        if not isinstance(module, Seeded):
            return module(*args, **kwargs)
        seed, *others = args
        if not isinstance(seed, Tensor):
            raise NotLifted(f"the seed of {self.__name__} is no input of the stage")
        if not is_traced(seed):
            return module(int(seed), *others, **kwargs)
        with Draws(seed, module.index):
            return module.function(*others, **kwargs)


class _Fill(_Named):
    """Puts a nested value together from its leaves."""

    def __init__(self, name: str, spec: pytree.TreeSpec) -> None:
        super().__init__(f"{name}_of_leaves")
        self.spec = spec

    def __call__(self, leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self.spec)


class _Leaves(_Named):
    """Flattens the results of a stage, and returns the leaves that vary."""

    def __init__(self, where: Sequence[int]) -> None:
        super().__init__("leaves")
        self.where = tuple(where)

    def __call__(self, results: Any) -> tuple[Any, ...]:
        leaves = pytree.tree_leaves(results)
        return tuple(leaves[i] for i in self.where)


def varies(leaf: Any) -> bool:
    """Whether a leaf of a value is an input or a result of the graph, and no constant in it."""
    is_number = isinstance(leaf, int | torch.SymInt) and not isinstance(leaf, bool)
    return isinstance(leaf, Tensor) or is_number


class Lifted:
    """The graph of a stage with the stage's tensors as inputs, for arguments of one structure.

    Args:
        args: arguments of the stage; their leaves that do not vary become constants.
        fakes: fake tensors for the graph's inputs: of ``tensors``, and then of those leaves of the
            arguments that vary.
        mode: the fake tensor mode that has made them.

    Raises :class:`NotLifted` for a stage that cannot be such a graph.
    """

    def __init__(
        self,
        stage: fx.GraphModule,
        tensors: Tensors,
        args: Sequence[Any],
        fakes: Sequence[Any],
        mode: FakeTensorMode,
    ) -> None:
        self._stage, self._tensors = stage, tensors
        self._graph = fx.Graph()
        self._lifted: dict[fx.Node, Any] = {}  # by nodes of the stage: nodes here, and constants
        self._given = [self._graph.placeholder(_identifier(name)) for name in tensors.names]
        self._add_inputs(args)
        for node in stage.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._add(node)
        results = fx.map_arg(stage.graph.output_node().args[0], self._lifted.__getitem__)
        self._spec, self._leaves, self._where = self._structure(results, fakes, mode)
        all_vary = len(self._where) == len(self._leaves)
        self._is_one = all_vary and self._spec.is_leaf()
        flat = pytree.tree_structure((0,) * len(self._leaves))
        self._is_tuple = all_vary and self._spec == flat
        self._add_output(results)
        self.graph_module = fx.GraphModule(nn.Module(), self._graph, type(stage).__name__)

    def results(self, outputs: Sequence[Any]) -> Any:
        """Put the outputs of the lifted graph into the structure of the stage's results."""
        if self._is_tuple:  # by far the most frequent cases, where a pytree takes longer
            return tuple(outputs)
        if self._is_one:
            return outputs[0]
        leaves = self._leaves.copy()
        for i, value in zip(self._where, outputs, strict=True):
            leaves[i] = value
        return pytree.tree_unflatten(leaves, self._spec)

    def _add_inputs(self, args: Sequence[Any]) -> None:
        for node, arg in zip(self._stage.graph.find_nodes(op="placeholder"), args, strict=True):
            leaves, spec = pytree.tree_flatten(arg)
            names = [
                node.name if spec.is_leaf() else f"{node.name}_{i}" for i in range(len(leaves))
            ]
            values = [
                self._graph.placeholder(name) if varies(leaf) else leaf
                for name, leaf in zip(names, leaves, strict=True)
            ]
            if spec.is_leaf():
                (self._lifted[node],) = values
            else:
                self._lifted[node] = self._graph.call_function(
                    _Fill(node.name, spec),
                    (values,),
                )

    def _add(self, node: fx.Node) -> None:
        """Add a node of the stage, with the tensors that it needs as arguments."""
        target = str(node.target)
        if node.op == "get_attr":
            value = attribute(self._stage, target)
            if isinstance(value, Tensor):
                self._lifted[node] = self._given[self._tensors.index(*_home(self._stage, target))]
                return
            users = [user for user in node.users if not _calls(user, node)]
            if isinstance(value, nn.Module) and users:
                raise NotLifted(f"{target} is an argument of {users[0].name!r}")
            self._lifted[node] = None if isinstance(value, nn.Module) else value
            return
        if node.op == "call_module":
            made = self._call(node, target, {}, node.args)
        elif _is_call(node):
            module, values, *args = node.args
            assert isinstance(module, fx.Node)
            made = self._call(node, str(module.target), values, args)  # type: ignore[arg-type]
        elif node.target in _CONTEXTS:
            at = _place_of_module(node)
            ahead = fx.map_arg(node.args[:at], self._lifted.__getitem__)
            context: Any = node.target
            within = partial(context, *ahead)
            path = str(node.args[at].target)  # type: ignore[union-attr]
            made = self._call(node, path, {}, node.args[at + 1 :], within)
        else:
            made = self._graph.node_copy(node, self._lifted.__getitem__)
        made.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        self._lifted[node] = made

    def _call(
        self,
        node: fx.Node,
        path: str,
        values: Mapping[str, Any],
        args: Sequence[Any],
        within: Callable[..., Any] | None = None,
    ) -> fx.Node:
        """Add a call of a module. ``values`` take the places of those parameters that they name."""
        module = self._stage.get_submodule(path)
        taken = {
            name: self._given[self._tensors.index(*_home(module, name))]
            for name, _ in _named(module)
        }
        lifted_args, kwargs = fx.map_arg((tuple(args), node.kwargs), self._lifted.__getitem__)
        taken |= fx.map_arg(dict(values), self._lifted.__getitem__)
        return self._graph.create_node(
            "call_function",
            _CallWithTensors(node.name, module, list(taken), within),
            (tuple(taken.values()), *lifted_args),
            kwargs,
            name=node.name,
        )

    def _structure(
        self, results: Any, fakes: Sequence[Any], mode: FakeTensorMode
    ) -> tuple[pytree.TreeSpec, list[Any], list[int]]:
        """The structure of the results, their leaves (constants, and None for what varies), and
        the indices of those that vary."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(fx.map_arg(results, copies.__getitem__))
        tensors = [fake for fake in fakes[: len(self._given)] if isinstance(fake, nn.Parameter)]
        before = [version_of(tensor) for tensor in tensors]
        # Kernels in Python leave sizes symbols of which those in C++ take the numbers.
        with mode, torch.no_grad(), enable_python_dispatcher():
            given = fx.GraphModule(nn.Module(), graph).forward(*fakes)
        for tensor, version in zip(tensors, before, strict=True):
            if version_of(tensor) != version:
                raise NotLifted("its forward writes to a parameter")
        leaves, spec = pytree.tree_flatten(given)
        where = [i for i, leaf in enumerate(leaves) if varies(leaf)]
        others = [i for i, leaf in enumerate(leaves) if not varies(leaf)]
        for leaf in (leaves[i] for i in others):
            if leaf is not None and not isinstance(leaf, bool | float | str | torch.dtype):
                raise NotLifted(f"one of its results is a {type(leaf).__name__}")
        return spec, [leaves[i] if i in others else None for i in range(len(leaves))], where

    def _add_output(self, results: Any) -> None:
        if isinstance(results, tuple | list) and len(results) == len(self._leaves) == len(
            self._where
        ):
            self._graph.output(tuple(results))
            return
        if isinstance(results, fx.Node) and self._spec.is_leaf() and self._where:
            self._graph.output((results,))
            return
        flat = self._graph.call_function(
            _Leaves(self._where),
            (results,),
        )
        count = range(len(self._where))
        items = [self._graph.call_function(operator.getitem, (flat, i)) for i in count]
        self._graph.output(tuple(items))


def _calls(node: fx.Node, module: fx.Node) -> bool:
    """Whether a node calls the module that another node stands for."""
    if node.target in _CONTEXTS:
        return node.args[_place_of_module(node)] is module
    return node.args[0] is module and _is_call(node)


def _place_of_module(node: fx.Node) -> int:
    """The place of the module among the arguments of a node that calls it within a context."""
    return next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node))


def _is_call(node: fx.Node) -> bool:
    """Whether a node calls a module with values for some of its parameters (``fxpipe.ops.call``,
    whose file imports those of the runtime)."""
    named = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
    return named == ("fxpipe.ops", shared.call.__name__)
