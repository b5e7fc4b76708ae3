"""What parts of a graph hand to each other through Python objects, and not as values of the graph.

::

    def enter(self, x):                        stage 0    enter(rows 0)   enter(rows 1)
        self.side["h"] = x                     stage 1                    leave(rows 0)
        return x                                                          finds what enter has left
    def leave(self, y):                                                   of rows 1
        return y + self.side["h"]

Modules that are kept whole, functions that are called as they are, and hooks are code of the user's
that runs in the pipeline. Stages run at the same time, and so may find in a shared object what an
earlier stage has left there of a later micro-batch. So the graph is run node by node, as if each
node were a stage of its own: each node takes all samples, and then the next one does. Where this
gives another result than one sample after the other, the nodes that reach what one of them changes
have to stay in one stage, in which one micro-batch comes after the other.

The same run tells which of this code draws random numbers: passes call no hooks, and would not see
a dropout in one, which needs a seed as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir.errors import is_the_models
from fxpipe.ir.graph import DRAWS, HANDED, mutable
from fxpipe.ir.hooks import hooks_of, is_torchs
from fxpipe.runtime.random import HostRandomState, RandomState, seeded_with_the_host
from fxpipe.runtime.state import State, attributes_of, contents_of, same
from fxpipe.runtime.writes import values_put_back, writes_counted
from fxpipe.trace import checks
from fxpipe.trace.example import Example, Traced
from fxpipe.trace.functions import code_of_call
from fxpipe.trace.isolation import parameters_put_back, untouched
from fxpipe.trace.left_behind import LeftBehind
from fxpipe.trace.outer import OuterVariable, assigned_by, names_in, read_by, runs_users_code
from fxpipe.trace.recorders import refers_to
from fxpipe.trace.spread import devices_used
from fxpipe.trace.state import rows_alike
from fxpipe.trace.uneven import uneven

_ROWS = 0, -1  # the rows of which the samples consist


def note(example: Example, tensors: Sequence[Tensor], traced: Traced) -> None:
    """Mark nodes of a graph that hand something to each other through Python objects, by
    ``meta["handed"]``: nodes with a number in common have to stay in one stage. What they change is
    noted as ``traced.left``.

    Args:
        tensors: inputs that the model takes.
    """
    gm = traced.graph_module
    in_graph = {id(buffer) for buffer in gm.buffers()}  # of these, pass "alias" takes care
    pieces = {
        node: piece for node in gm.graph.nodes if (piece := _called(gm, node, in_graph)) is not None
    }
    if not pieces:
        return
    with _as_it_runs(example.model):
        with _put_back(pieces.values()):
            traced.left = _Stepwise(gm, pieces).changed_by(tensors)
        groups = [
            nodes
            for thing in {_key(each.thing): each.thing for each in traced.left}.values()
            if len(nodes := [node for node, piece in pieces.items() if piece.reaches(thing)]) > 1
        ]
        if not groups or _is_alike_in_any_order(example, tensors, gm, pieces):
            return
    for number, nodes in enumerate(groups):
        for node in nodes:
            node.meta[HANDED] = (*node.meta.get(HANDED, ()), number)


@dataclass(frozen=True)
class _Called:
    """The user's code that a node runs: modules and their hooks, or a function."""

    modules: Sequence[nn.Module]
    functions: Sequence[Any]
    said: str
    """The modules and hooks, or the function, in words: for a message about what they change."""
    in_graph: Collection[int] = ()
    """The ids of the buffers that the graph has."""

    @cached_property
    def _reached(self) -> list[Any]:
        """The values that the code reads by names, or that a function refers to."""
        codes = (*self.modules, *self.functions)
        referred = (value for each in self.functions for value in refers_to(each))
        return [
            *referred,
            *(value for code in codes for _, value in read_by(code, but_installed=True)),
        ]

    @cached_property
    def _all_modules(self) -> list[nn.Module]:
        """The modules, and those that the code reaches: it may set their attributes."""
        found = (value for value in self._reached if isinstance(value, nn.Module))
        return list(dict.fromkeys([*self.modules, *(m for each in found for m in each.modules())]))

    @cached_property
    def state(self) -> State:
        """A record of all containers and objects that the code reaches, and of the attributes of
        the modules."""
        state = State(self._all_modules)
        for value in self._reached:
            state.look_into(value)
        return state

    @cached_property
    def things(self) -> list[Any]:
        """The modules, tensors, containers, objects and variables that the code may change."""
        codes = (*self.modules, *self.functions)
        variables = (each for code in codes for each in assigned_by(code, but_installed=True))
        return [*self._all_modules, *self.tensors, *self.state.recorded, *variables]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that the code refers to, and the buffers of its modules that are not in the
        graph."""
        buffers = (b for each in self._all_modules for b in each._buffers.values())
        found = [v for v in (*self._reached, *buffers) if isinstance(v, Tensor)]
        return [
            tensor
            for tensor in {id(tensor): tensor for tensor in found}.values()
            if not isinstance(tensor, nn.Parameter) and id(tensor) not in self.in_graph
        ]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset[str]().union(*map(names_in, (*self.modules, *self.functions)))

    @cached_property
    def _keys(self) -> frozenset[Hashable]:
        return frozenset(map(_key, self.things))

    def reaches(self, thing: Any) -> bool:
        """Whether the code may read, or change, what another piece has changed."""
        is_variable = isinstance(thing, OuterVariable)
        return _key(thing) in self._keys or (is_variable and thing.name in self._names)


def _called(gm: fx.GraphModule, node: fx.Node, in_graph: Collection[int]) -> _Called | None:
    """The user's code that a node runs; None if it runs none."""
    if node.op == "call_module":
        modules = list(gm.get_submodule(str(node.target)).modules())
        hooks = {
            module: found
            for module in modules
            if (found := [hook for hook in _forward_hooks(module) if not is_torchs(hook)])
        }
        own = [m for m in modules if m in hooks or not _is_torchs_or_ours(m)]
        said = f"{node.target}{' (or a hook on it)' if hooks else ''}"
        return _Called(own, [*chain(*hooks.values())], said, in_graph) if own else None
    if node.op == "call_function":
        code = code_of_call(node.target)
        said = getattr(code, "__qualname__", node.name)
        return _Called((), (code,), said, in_graph) if runs_users_code(code) else None
    return None


def _forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _is_torchs_or_ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("torch", "fxpipe")


@contextmanager
def _as_it_runs(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block the model runs with its hooks, as in a pipeline, and is put back at
    its end."""
    hooks = [(table, dict(table)) for module in model.modules() for table in hooks_of(module)]
    with untouched(model), parameters_put_back(model), torch.enable_grad():
        for table, own in hooks:
            table.clear()
            table.update(own)
        yield


@contextmanager
def _put_back(pieces: Iterable[_Called]) -> Iterator[None]:
    """At the end of the ``with`` block everything that these pieces may change is as it was."""
    things = [thing for piece in pieces for thing in piece.things]
    variables = [(each, each.get()) for each in things if isinstance(each, OuterVariable)]
    try:
        with values_put_back(tensor for piece in pieces for tensor in piece.tensors):
            yield
    finally:
        for piece in pieces:
            piece.state.put_back()
        for variable, before in variables:
            variable.set(before)


def _key(thing: Any) -> Hashable:
    return thing.key if isinstance(thing, OuterVariable) else id(thing)


_Contents = list[tuple[Any, Any, int]]


def _contents(thing: Any) -> _Contents:
    """What is in a thing: keys or places, values, and how often these, if tensors, were written."""
    if isinstance(thing, OuterVariable):
        pairs: Any = [("", thing.get())]
    elif isinstance(thing, Tensor):
        pairs = [("", thing)]
    elif isinstance(thing, nn.Module):
        pairs = attributes_of(thing).items()
    else:
        inside = contents_of(thing)
        pairs = inside.items() if isinstance(inside, dict) else enumerate(inside)
    return [(k, v, writes_counted(v) if isinstance(v, Tensor) else 0) for k, v in pairs]


def _are_same(before: _Contents, now: _Contents) -> bool:
    return len(before) == len(now) and all(map(_is_same, before, now))


def _is_same(one: tuple[Any, Any, int], other: tuple[Any, Any, int]) -> bool:
    return same(one[0], other[0]) and same(one[1], other[1]) and one[2] == other[2]


def _names_changed(thing: Any, before: _Contents, now: _Contents) -> frozenset[str]:
    """The names of the attributes of a module that have changed; none for anything else."""
    if not isinstance(thing, nn.Module):
        return frozenset()
    old, new = ({each[0]: each for each in contents} for contents in (before, now))
    names = old.keys() | new.keys()
    return frozenset(n for n in names if not (n in old and n in new and _is_same(old[n], new[n])))


class _Stepwise(fx.Interpreter):
    """Runs a graph node by node, with random numbers that depend on the node only."""

    def __init__(self, gm: fx.GraphModule, pieces: dict[fx.Node, _Called]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.pieces = pieces
        self.numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
        self.devices = devices_used((*gm.parameters(), *gm.buffers()))
        self.draws = self.draws_on_the_host = False

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Begin a run of the graph on copies of these inputs; :meth:`step` runs its nodes."""
        self.env, self.args_iter = {}, iter([tensor.clone() for tensor in tensors])

    def step(self, node: fx.Node) -> None:
        """Run one node, and note whether it draws random numbers, and whether on the host."""
        with seeded_with_the_host(self.numbers[node], self.devices):
            random, host = RandomState(self.devices), HostRandomState()
            self.env[node] = self.run_node(node)
            self.draws, self.draws_on_the_host = random.has_changed, host.has_changed

    def fetch_args_kwargs_from_env(self, node: fx.Node) -> tuple[Any, Any]:
        """The arguments of a node, with lists and dicts that its function may write to."""
        args, kwargs = super().fetch_args_kwargs_from_env(node)
        return mutable(args), mutable(dict(kwargs))

    def changed_by(self, tensors: Sequence[Tensor]) -> list[LeftBehind]:
        """What pieces change in a run on these inputs. Pieces that draw random numbers are marked
        by ``meta["draws"]``."""
        self.start(tensors)
        changed: list[LeftBehind] = []
        for node in self.numbers:
            piece = self.pieces.get(node)
            things = [] if piece is None else piece.things
            before = [_contents(thing) for thing in things]
            self.step(node)
            if piece is not None and (self.draws or self.draws_on_the_host):
                node.meta[DRAWS] = "host" if self.draws_on_the_host else "torch"
            for thing, contents in zip(things, before, strict=True):
                if piece is not None and not _are_same(contents, now := _contents(thing)):
                    names = _names_changed(thing, contents, now)
                    changed.append(LeftBehind(thing, piece.said, names))
        return changed


def _is_alike_in_any_order(
    example: Example, tensors: Sequence[Tensor], gm: fx.GraphModule, pieces: dict[fx.Node, _Called]
) -> bool:
    """Whether several samples give the same one after the other, and node by node."""
    samples = [*(rows_alike(example, tensors, row) for row in _ROWS), uneven(tensors)]

    def sequentially(runs: list[_Stepwise]) -> None:
        for run in runs:
            for node in run.numbers:
                run.step(node)

    def node_by_node(runs: list[_Stepwise]) -> None:
        for node in runs[0].numbers:
            for run in runs:
                run.step(node)

    for some in (samples, samples[:-1]):  # the model may not take the last one
        expected = _outputs(example, some, gm, pieces, sequentially)
        if expected is not None:
            found = _outputs(example, some, gm, pieces, node_by_node)
            return found is not None and not checks.difference(expected, found, 0.0)
    return False


def _outputs(
    example: Example,
    samples: list[list[Tensor]],
    gm: fx.GraphModule,
    pieces: dict[fx.Node, _Called],
    order: Callable[[list[_Stepwise]], None],
) -> list[Any] | None:
    """What the graph gives for each of the samples in this order; None if it raises an error."""
    runs = [_Stepwise(gm, pieces) for _ in samples]
    for run, sample in zip(runs, samples, strict=True):
        run.start(sample)
    with _put_back(pieces.values()):
        try:
            order(runs)
        except Exception as error:
            if not is_the_models(error):
                raise
            return None
        return [run.env[gm.graph.output_node()] for run in runs]
