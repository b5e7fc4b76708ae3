"""The arguments that a call changes: lists, dicts and objects, such as a cache of keys and values.

::

    def forward(self, token, past):            the caller's past    ──┐        ┌──> the same object
        past.keys = torch.cat((past.keys, k))                         copy   refill
        return logits, past                    a copy of it ── graph ─┴────────┘

A graph is a function: it takes the tensors in ``past``, and returns those that are in it
afterwards. So the model always runs with copies of such arguments, while it is checked and traced,
and what the graph returns is put into the caller's own object, as the model would have done it.
Such an object is a state, which goes from call to call. In a pipeline without training its tensors
stay on the stages that use them (:class:`fxpipe.runtime.apart.Apart`).

A graph returns only what the model returns. So an argument that gets new tensors has to be among
the outputs. A change that only moves or drops what was there (``batch.pop("labels")``) needs none
of the graph: it is done again to the caller's own object. An attribute that an object gets in
addition is left out, if the model computes the same where it finds that attribute (it is a property
that is computed once, say); if not, the model is refused.

An object that holds nothing is handed to the model as it is, since a model may ask which object it
is (``mask is NOT_GIVEN``). So nothing may be put into it.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree
from fxpipe.ir.errors import Unsupported, is_itself, is_the_models
from fxpipe.ir.log import warn
from fxpipe.ir.structure import (
    Structure,
    all_parts,
    attributes,
    is_opened,
    leaves,
    map_tensors,
)
from fxpipe.trace.containers import Contents
from fxpipe.trace.errors import may_be_the_models
from fxpipe.trace.example import bound_arguments
from fxpipe.trace.isolation import Args, Kwargs, called, parameters_put_back, untouched
from fxpipe.trace.itself import explain
from fxpipe.trace.snapshots import snapshot

OUTPUT = "output"
_CONTAINERS = list, dict, set, deque


@dataclass(frozen=True)
class WrittenArguments:
    """The arguments that a call changes and returns."""

    places: Mapping[str, str] = field(default_factory=dict)
    """The path of each of them among the arguments, by its path in the output."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """For the path of a tensor, a container or an object that is in one of them after the call and
    was in one of them before: its path before. The call may have written to it, or moved it."""
    moved: Mapping[str, Structure] = field(default_factory=dict)
    """For the path of each other argument that the call changes, without new tensors in it: what it
    is after the call."""
    sets_constants: bool = False
    """Whether something that is no tensor is another one in them after the call: it may depend on
    the sizes of the inputs."""
    number: str = ""
    """The path of a number in one of them that the call changes, and that is a constant of the
    graph; "" if there is none."""

    def __bool__(self) -> bool:
        return bool(self.places or self.moved)

    def states(self, output: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors in these arguments, as an output has them, and its other tensors."""
        every = {path: leaf for path, leaf in leaves(output, OUTPUT) if isinstance(leaf, Tensor)}
        own = {path for place in self.places for path, _ in leaves(_at(output, place), place)}
        found = [leaf for path, leaf in every.items() if path in own]
        return found, [leaf for path, leaf in every.items() if path not in own]

    def given_back(self, output: Any, arguments: Mapping[str, Any]) -> Any:
        """The output with the caller's own objects in it, which get the contents of those that the
        output has in their place.

        Args:
            arguments: the arguments of the call, by name.
        """

        def refilled(made: Any, place: str) -> Any:
            callers = {p: part for p, part, _ in all_parts(_at(arguments, place, ""), place)}
            return _Refill({p: callers.get(was) for p, was in self.origins.items()})(made, place)

        own: dict[int, Any] = {}
        for path, place in self.places.items():
            made = _at(output, path)
            own[id(made)] = refilled(made, place)
        for place, after in self.moved.items():
            refilled(after.hollow(), place)
        parts, spec = pytree.tree_flatten(output, is_leaf=lambda part: id(part) in own)
        return pytree.tree_unflatten([own.get(id(part), part) for part in parts], spec)


def written_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> WrittenArguments:
    """Find out, by a run of the model on copies of the arguments, which of them it changes.

    Raises Unsupported for one that is not returned and gets new tensors, or attributes on which
    later calls depend.
    """
    bound = bound_arguments(model, args, kwargs)
    if not any(True for _ in _mutable(bound)):
        return WrittenArguments()
    tensors, structure = Structure.of((bound.args, bound.kwargs))

    def run(has_gradients: bool) -> WrittenArguments:
        given = [tensor.detach().clone() for tensor in tensors]
        inputs = structure.fill(given)
        before = [*_mutable(bound_arguments(model, *inputs))]
        with torch.set_grad_enabled(has_gradients):
            with untouched(model), parameters_put_back(model):
                output = called(model, *inputs)
                found = _found(type(model).__name__, before, output)
                done = {*found.places.values(), *found.moved}
                if gaining := [each for each in before if each.new and each.path not in done]:
                    output = map_tensors(lambda t: t.detach().clone(), output)  # some are buffers
            if gaining:
                unwritten = {id(own): t for own, t in zip(given, tensors, strict=True)}
                some, named = map_tensors(
                    lambda t: unwritten.get(id(t), t).detach().clone(), inputs
                )
                _refuse_if_they_matter(model, some, named, gaining, output)
        return found

    try:
        return run(False)
    except Unsupported:
        raise
    except Exception as error:
        if not may_be_the_models(error):
            raise
    try:
        return run(True)  # the model may need gradients to run
    except Unsupported:
        raise
    except Exception as error:
        if is_the_models(error):
            explain(model, error)
        raise


def _refuse_if_they_matter(
    model: nn.Module, args: Args, kwargs: Kwargs, gaining: Sequence[_Before], output: Any
) -> None:
    """Raise Unsupported if a call with these arguments, which have got attributes in a call before,
    gives them other values or has another output than that call.

    Args:
        gaining: the arguments that have got attributes, as they are after that call.
        output: that of the call.
    """
    before = [*_mutable(bound_arguments(model, args, kwargs))]
    with untouched(model), parameters_put_back(model):
        is_equal = _is_equal(called(model, args, kwargs), output)
    after = {each.path: each.constants for each in before}
    for each in gaining:
        if (others := _differing(each.constants, after[each.path])) or not is_equal:
            raise Unsupported(
                f"{type(model).__name__} makes {(others or each.new)[0]}, a new attribute of an "
                "argument, and goes by it in its next call. A pipeline knows what its graph "
                "returns, and no more: give the argument this attribute ahead of the first call, "
                f"or let the forward return {each.path} as well"
            )
        warn(
            f"{type(model).__name__} makes {each.new[0]}, a new attribute of an argument; a "
            f"pipeline does not: if you read it, let the forward return {each.path} as well"
        )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The paths at which two values differ, or only one of them has something."""
    states = [{path: snapshot(each) for path, each in of.items()} for of in (one, other)]
    return [path for path in {**one, **other} if states[0].get(path) != states[1].get(path)]


def _is_equal(one: Any, other: Any) -> bool:
    """Whether all tensors in two outputs are equal."""
    (ours, _), (theirs, _) = Structure.of(one), Structure.of(other)
    try:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


@contextmanager
def nothing_put_into(model: nn.Module, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """A context for runs of the model in which arguments that hold nothing are the caller's own.

    Raises Unsupported if they have got attributes in it, also where another error has come of that.
    The attributes are taken away again.
    """
    arguments = dict(bound_arguments(model, args, kwargs).arguments)
    empty = [
        (path.removeprefix("."), part)
        for path, part in leaves(arguments)
        if not callable(part) and not isinstance(part, Tensor) and not attributes(part)
    ]
    try:
        yield
    finally:
        filled = [(path, part, attributes(part)) for path, part in empty if attributes(part)]
        for _, part, found in filled:
            for name in found:
                object.__delattr__(part, name)
        error = sys.exception()
        if filled and not (error and is_itself(error)):
            path, part, found = filled[0]
            made = f"{path}.{next(iter(found))}"
            raise Unsupported(
                f"{type(model).__name__} makes {made}, and {path}, a {type(part).__name__}, holds "
                "nothing ahead of the call. Such an object is handed on as it is, so that each run "
                "of the model that compiling takes would put something into it: give it its "
                f"attributes ahead of the call, such as {made} = None"
            ) from error


class _Before:
    """An argument, and what was in it ahead of the call."""

    def __init__(self, path: str, part: Any) -> None:
        self.path, self.part, self._contents = path, part, Contents(part)
        self._leaves = dict(leaves(part, path))
        self._constants = self.constants
        self._parts = self._now()  # they are kept, so that no other object gets the id of one

    def _now(self) -> list[tuple[str, Any]]:
        """Its parts that may be written to, and itself, with their paths."""
        return [
            (path, part)
            for path, part, _ in all_parts(self.part, self.path)
            if isinstance(part, (Tensor, *_CONTAINERS)) or is_opened(part)
        ]

    @property
    def has_changed(self) -> bool:
        """Whether it holds something else now."""
        return self._contents.have_changed()

    @property
    def has_new_tensors(self) -> bool:
        """Whether there are tensors in it that were not in it."""
        known = set(map(id, self._leaves.values()))
        now = (leaf for _, leaf in leaves(self.part))
        return any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in now)

    @property
    def constants(self) -> dict[str, Any]:
        """What is in it now and is no tensor, by the paths; None in place of what has parts."""
        parts = all_parts(self.part, self.path)
        return {
            p: part if leaf else None for p, part, leaf in parts if not isinstance(part, Tensor)
        }

    @property
    def new(self) -> list[str]:
        """The paths of all that is no tensor and has been added to it."""
        return [path for path in self.constants if path not in self._constants]

    @property
    def sets_constants(self) -> bool:
        """Whether something in it that is no tensor is another one now."""
        return bool(_differing(self._constants, self.constants))

    @property
    def origins(self) -> dict[str, str]:
        """For the path of each part that is in it now and has been in it before: the path then."""
        before = {id(part): path for path, part in reversed(self._parts)}
        return {path: before[id(part)] for path, part in self._now() if id(part) in before}

    @property
    def number(self) -> str:
        """The path of a number that is another one now; "" if there is none."""
        for path, now in leaves(self.part, self.path):
            before = self._leaves.get(path)
            if type(now) in (int, float) and type(before) is type(now) and before != now:
                return path
        return ""


def _found(name: str, before: Sequence[_Before], output: Any) -> WrittenArguments:
    parts = [*all_parts(output, OUTPUT)]
    returned = {id(part): path for path, part, _ in reversed(parts)}
    places: dict[str, str] = {}
    origins: dict[str, str] = {}
    moved: dict[str, Structure] = {}
    number, sets_constants = "", False
    for argument in before:
        own = returned.get(id(argument.part))
        if own is not None and (argument.has_changed or argument.has_new_tensors or argument.new):
            places[own] = argument.path
            origins |= argument.origins
            number = number or argument.number
        elif own is None and argument.has_changed:
            if argument.has_new_tensors:
                kind = type(argument.part).__name__
                raise Unsupported(
                    f"{name} puts a tensor into the argument {argument.path}, a {kind}, and does "
                    "not return it: a pipeline knows what its graph returns, and no more. If the "
                    f"caller reads it, let the forward return {argument.path} as well; if not, let "
                    f"the forward write to a copy of its own, {argument.path} = "
                    f"{_copy_of(argument)}"
                )
            moved[argument.path] = Structure.of(argument.part)[1]
            sets_constants |= argument.sets_constants
            origins |= argument.origins
        elif own is None and argument.has_new_tensors:
            warn(
                f"{name} puts a tensor into the argument {argument.path}, a "
                f"{type(argument.part).__name__}, as a new attribute; a pipeline does not: if you "
                "read it, let the forward return it"
            )
    return WrittenArguments(places, origins, moved, sets_constants, number)


def _copy_of(argument: _Before) -> str:
    """Code that copies an argument, but not what is in it."""
    is_container = isinstance(argument.part, dict | list)
    name = type(argument.part).__name__
    return f"{name}({argument.path})" if is_container else f"copy.copy({argument.path})"


def _mutable(bound: inspect.BoundArguments) -> Iterator[_Before]:
    """The outermost parts of arguments that a call could change."""
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            for key, part in value.items():
                yield from _mutable_in(part, f"{name}.{key}")
        else:
            yield from _mutable_in(value, name)


def _mutable_in(value: Any, path: str) -> Iterator[_Before]:
    if isinstance(value, Tensor):
        return
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _mutable_in(part, f"{path}[{i}]")
    elif isinstance(value, _CONTAINERS) or is_opened(value):
        yield _Before(path, value)


def _at(value: Any, path: str, root: str = OUTPUT) -> Any:
    """The part at a path of a value whose own path is ``root``."""
    parts = ((below.removeprefix("."), part) for below, part, _ in all_parts(value, root))
    return next(part for below, part in parts if below == path)


class _Refill:
    """Puts the contents of what a graph has made into the objects of the caller.

    Args:
        origins: by the paths of what has been made: the caller's object that it stands for.
    """

    def __init__(self, origins: Mapping[str, Any]) -> None:
        self._origins = origins
        self._done: dict[int, Any] = {}

    def __call__(self, made: Any, path: str) -> Any:
        """What the caller has after the call at this path, where ``made`` has been made."""
        if id(made) in self._done:
            return self._done[id(made)]
        own = self._origins.get(path)
        own = own if type(own) is type(made) or isinstance(own, Tensor) else None
        if isinstance(made, Tensor):
            return made if own is None else own
        if type(made) is tuple:
            return tuple(self(part, f"{path}[{i}]") for i, part in enumerate(made))
        if not isinstance(made, _CONTAINERS) and not is_opened(made):
            return made
        target = self._done[id(made)] = made if own is None else own
        if isinstance(made, dict):
            parts = {key: self(part, _below(path, key)) for key, part in made.items()}
            target.clear()
            target.update(parts)
        elif isinstance(made, list | deque):
            elements = [self(part, f"{path}[{i}]") for i, part in enumerate(made)]
            target.clear()
            target.extend(elements)
        elif isinstance(made, set):
            elements = list(made)
            target.clear()
            target.update(elements)
        else:
            named = {name: self(part, f"{path}.{name}") for name, part in attributes(made).items()}
            for name in attributes(target).keys() - named.keys():
                object.__delattr__(target, name)
            for name, part in named.items():
                object.__setattr__(target, name, part)
        return target


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
