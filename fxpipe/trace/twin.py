"""The twin of a model: a copy of its structure, which is run and traced in the model's place.

::

    model                               twin
    layer ─┬─ weight ──────────────────  weight     another Parameter, in the same memory
           ├─ running_mean               running_mean, with memory of its own
           ├─ hooks, lists, dicts        hooks, lists, dicts: copies
           └─ config                     config: the very same object

While a model is compiled, its modules lose their hooks, are put into evaluation mode, get fake
tensors in place of parameters, and have their buffers written to. All of that is done to the twin,
so that another thread may run the model, or train it, at the same time. When the graph is there,
:meth:`Twin.restore` puts the model's own modules and tensors into it.

The twin has the structure of the model: what is one object in the model (a tied weight, a module
under two names, ``self.x`` that is ``self.y[0]``) is one object in the twin. Objects that lead to a
module or to a tensor of the model are copied too, so that they lead to the twin's: methods bound to
a module, partial functions, closures, lists, objects with attributes.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import SHARDED_STATE, memory_number, plain_class
from fxpipe.ir.hooks import RECORDING
from fxpipe.runtime.state import STATEFUL, in_slots
from fxpipe.trace.global_values import GlobalValues
from fxpipe.trace.left_behind import LeftBehind
from fxpipe.trace.outer import ASSIGNED
from fxpipe.trace.premises import Reads, state_of
from fxpipe.trace.snapshots import content_of

_MODELS: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
"""The models of all twins that are alive."""

_LONG = 4096  # a longer container is data: it is not searched for modules
_FAR = 100_000  # the most objects that are searched
_CONTAINERS = dict, list, set, deque, tuple
_WITHOUT_ATTRIBUTES = dict, list, set, deque, tuple, defaultdict
# Types of containers that a twin always gets copies of, since the forward may write to them.
_OWN = dict, OrderedDict, defaultdict, list, set, deque
# Types of objects that lead to no module and no tensor of a model.
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType),
    *(torch.dtype, torch.device, torch.Size, fx.Graph),
)


def model_of(module: nn.Module) -> nn.Module:
    """The model that a module is the twin of; the module itself if it is no twin."""
    return _MODELS.get(module, module)


class Twin:
    """The twin of a model.

    Parameters of the twin share memory with the model's, so a forward that writes to a parameter
    writes to the model's, too, until the write is undone (``isolation.parameters_put_back``). A
    function that reaches a module of the model by other ways than those above, such as a global
    variable of the file that defines its class, reaches the model's.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        copies = _CopiedObjects()
        for tensor, other in _tensors(modules):
            copies.add(tensor, other)
        bare = [(module, _bare(module)) for module in modules]
        for old, new in bare:
            copies.add(old, new)
        attributes: list[Any] = [vars(module) for module in modules]
        copies.mark(attributes, containers=True)
        for old, new in bare:
            copies.fill(new, old)
        self.model: nn.Module = copies.of(model)
        if self.model is not model:
            _MODELS[self.model] = model
        if model in RECORDING:
            RECORDING[self.model] = RECORDING[model]
        STATEFUL.update(new for old, new in bare if old in STATEFUL)
        self.global_values = GlobalValues.of(model)  # ahead of all runs, which may change some
        self._pairs = bare
        # Only this way round is kept: a model has tens of thousands of dicts for hooks.
        self._back = copies.reversed()

    def restore(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Put the model's modules and tensors in place of the twin's into a graph module; return
        it."""
        for part in [m for m in gm.modules() if m not in self._back]:
            self._back.mark([vars(part)])
            for key, value in list(vars(part).items()):
                if isinstance(value, dict) and key in ("_parameters", "_buffers", "_modules"):
                    value.update({name: self._back.of(each) for name, each in value.items()})
                elif (other := self._back.of(value)) is not value:
                    vars(part)[key] = other
        return gm

    def original(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function with the model's modules and tensors in place of the twin's, wherever
        its closure or its bound arguments lead to them."""
        self._back.mark([function])
        found: Callable[..., Any] = self._back.of(function)
        return found

    def tensors(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors of the twin, as those of the model."""
        return [self._back.of(tensor) for tensor in tensors]

    def learned(self) -> None:
        """Record for the model what the trace has learned about the twin: which hooks record the
        model's outputs, which modules compute with a state that they change, and to which
        variables around it the model itself assigns."""
        model = model_of(self.model)
        if self.model in RECORDING:
            RECORDING[model] = RECORDING[self.model]
        else:
            RECORDING.pop(model, None)
        STATEFUL.update(old for old, new in self._pairs if new in STATEFUL)
        self.global_values.leave_out(ASSIGNED.get(self.model, set()))

    def left(self, left: Iterable[LeftBehind]) -> list[LeftBehind]:
        """What code of the twin's has changed, as what that of the model changes."""
        return [replace(each, thing=self._back.of(each.thing)) for each in left]

    def settled(
        self, attributes: Mapping[tuple[nn.Module, str], Any]
    ) -> dict[tuple[nn.Module, str], Any]:
        """Values of attributes of the twin, as those of attributes of the model."""
        models = {new: old for old, new in self._pairs}
        return {(models.get(m, m), name): value for (m, name), value in attributes.items()}

    def reads(self, reads: Reads) -> Reads:
        """The attributes that the trace has read of the twin, as attributes of the model, with
        their states in the model. An attribute that the trace has assigned before it was read is
        left out."""
        models = {new: old for old, new in self._pairs}
        return {
            (models.get(module, module), name): state_of(models.get(module, module), name)
            for (module, name), state in reads.items()
            if state_of(module, name) == state
        }


class _CopiedObjects:
    """Copies of objects, by the ids of the originals."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any]] = {}  # the original is kept, or its id might be reused
        self._leading: dict[int, Any] = {}  # marked objects, by id: they lead to one with a copy

    def add(self, old: Any, new: Any) -> None:
        """Record that ``new`` is the copy of ``old``."""
        self._of[id(old)] = old, new

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._of

    def reversed(self) -> _CopiedObjects:
        """The same pairs the other way round: the originals count as copies of the copies."""
        back = _CopiedObjects()
        for old, new in list(self._of.values()):
            back.add(new, old)
        return back

    def mark(self, roots: list[Any], *, containers: bool = False) -> None:
        """Search all objects that can be reached from ``roots``, and mark those that have to be
        copied since they lead to an object that has a copy.

        With ``containers`` all lists, dicts and sets in the roots, and those nested in these, are
        marked too: the forward of a model may write to them.
        """
        leading: list[Any] = _containers(roots) if containers else []
        always = {id(value) for value in leading}
        users: dict[int, list[Any]] = {}
        seen = {id(value) for value in roots}
        front = list(roots)
        for value in front:  # the list grows while it is walked
            for part in _parts(value):
                if id(part) in self._of:
                    leading.append(value)
                elif not (isinstance(part, _LEAVES) or _is_empty(part)):
                    users.setdefault(id(part), []).append(value)
                    if id(part) not in seen and len(seen) < _FAR:
                        seen.add(id(part))
                        front.append(part)
        for value in leading:  # this one grows, too
            if id(value) in self._leading or not (id(value) in always or _can_be_copied(value)):
                continue
            self._leading[id(value)] = value
            leading += users.get(id(value), ())

    def of(self, value: Any) -> Any:
        """The copy of a value, which is made now if it is marked and has none; the value itself if
        it is not to be copied."""
        if id(value) in self._of:
            return self._of[id(value)][1]
        if id(value) not in self._leading:
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, dict | list | set | deque):
            return self._container(value)
        new: Any
        if isinstance(value, tuple):
            parts = map(self.of, value)
            new = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        elif isinstance(value, types.MethodType):
            new = types.MethodType(self.of(value.__func__), self.of(value.__self__))
        elif isinstance(value, partial):
            keywords = {key: self.of(each) for key, each in value.keywords.items()}
            new = partial(self.of(value.func), *map(self.of, value.args), **keywords)
        elif isinstance(value, weakref.ref):
            new = weakref.ref(self.of(value()))
        else:
            new = _bare(value)
            self.add(value, new)  # now, since an object may lead to itself
            self.fill(new, value)
        self.add(value, new)
        return new

    def _container(self, value: Any) -> Any:
        new: Any = copy.copy(value)
        self.add(value, new)
        if _is_empty(value):
            return new
        parts = [self.of(each) for each in _parts_of(value)]
        if isinstance(value, dict):
            dict.clear(new)
            dict.update(new, zip(map(self.of, dict.keys(value)), parts, strict=True))
        else:
            new.clear()
            new.update(parts) if isinstance(value, set) else new.extend(parts)
        self.fill(new, value)
        return new

    def fill(self, new: Any, old: Any) -> None:
        """Give an object the attributes of another one, or the copies of these."""
        attributes = getattr(old, "__dict__", {})
        if attributes:
            own = {k: v for k, v in attributes.items() if not str(k).startswith(SHARDED_STATE)}
            vars(new).update({key: self.of(value) for key, value in own.items()})
        for key, value in in_slots(old).items():
            object.__setattr__(new, key, self.of(value))

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        known = _globals(value)
        scope = value.__globals__
        if any(id(each) in self._of for each in known.values()):
            scope = {**scope, **{name: self.of(each) for name, each in known.items()}}
        closure = cells if value.__closure__ is not None else None
        new = types.FunctionType(value.__code__, scope, value.__name__, None, closure)
        self.add(value, new)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            for each in content_of(old):
                cell.cell_contents = self.of(each)
        new.__defaults__ = value.__defaults__ and tuple(map(self.of, value.__defaults__))
        new.__kwdefaults__ = value.__kwdefaults__ and {
            key: self.of(each) for key, each in value.__kwdefaults__.items()
        }
        new.__qualname__, new.__module__ = value.__qualname__, value.__module__
        new.__doc__, new.__annotations__ = value.__doc__, value.__annotations__
        new.__dict__.update({key: self.of(each) for key, each in value.__dict__.items()})
        return new


def _parts(value: Any) -> Iterator[Any]:
    """The objects that a value leads to directly, as far as copies of them can be put into it."""
    if isinstance(value, (*_LEAVES, Tensor, nn.Module)):
        return
    if isinstance(value, _CONTAINERS):
        if len(value) > _LONG:
            return
        yield from dict.keys(value) if isinstance(value, dict) else ()
        yield from _parts_of(value)
        if type(value) in _WITHOUT_ATTRIBUTES:
            return
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield from content_of(cell)
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from _globals(value).values()
    yield from getattr(value, "__dict__", {}).values()
    yield from in_slots(value).values()


def _is_empty(value: Any) -> bool:
    """Whether a value is a container that leads to nothing, as nearly all of a module's are that
    are for hooks."""
    return type(value) in _OWN and not value and not getattr(value, "__dict__", None)


def _parts_of(container: Any) -> Iterable[Any]:
    """The elements of a container; of a dict, its values."""
    return dict.values(container) if isinstance(container, dict) else container


def _containers(roots: list[Any]) -> list[Any]:
    """The lists, dicts and sets in the given dicts, and those within them."""
    found = list(roots)
    known = {id(value) for value in roots}
    for value in found:  # the list grows while it is walked
        for part in _parts(value):
            if type(part) in _OWN and id(part) not in known:
                known.add(id(part))
                found.append(part)
    return found[len(roots) :]


def _globals(function: types.FunctionType) -> dict[str, Any]:
    """The modules that a function, such as a forward that somebody has given to one module only,
    finds in global variables."""
    scope = function.__globals__
    names = function.__code__.co_names
    return {name: scope[name] for name in names if isinstance(scope.get(name), nn.Module)}


def _can_be_copied(value: Any) -> bool:
    """Whether a copy of an object can be made without calling the user's code. An object with a
    ``__del__`` is not copied: what it does at the end would be done twice."""
    kinds = (types.FunctionType, types.MethodType, partial, weakref.ref, *_CONTAINERS)
    if isinstance(value, kinds):
        return True
    make: Any = type(value).__new__
    return make in (object.__new__, types.SimpleNamespace.__new__) and not hasattr(value, "__del__")


def _bare(value: Any) -> Any:
    """An object of the same class, without attributes."""
    # Not by ``__new__`` of the class: that of fx.GraphModule makes another class.
    made = types.SimpleNamespace if isinstance(value, types.SimpleNamespace) else object
    return made.__new__(plain_class(type(value)))


# ------------------------------------------------------------------------------------------ tensors


def _tensors(modules: list[nn.Module]) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters, buffers and other tensors that are attributes of modules, each with the
    tensor that the twin has in its place. A tensor that is left out is shared with the twin."""
    parameters = [p for m in modules for p in m._parameters.values() if p is not None]
    kept = {memory_number(p) for p in parameters if p.layout == torch.strided}
    memories: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    for tensor in parameters:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor, _alias(tensor)
    for module in modules:
        for tensor in (*module._buffers.values(), *vars(module).values()):
            if not isinstance(tensor, Tensor) or id(tensor) in seen or tensor.requires_grad:
                continue  # if it requires a gradient, this is accumulated in the model's tensor
            seen.add(id(tensor))
            if tensor.is_meta:
                continue  # it has no values that the trace could write to
            if tensor.layout != torch.strided or type(tensor) is not Tensor:
                yield tensor, _with(tensor.detach().clone(), tensor)
            elif memory_number(tensor) not in kept:
                yield tensor, _copied(tensor, memories)
            else:
                yield tensor, _with(tensor.detach(), tensor)


def _alias(parameter: Tensor) -> Tensor:
    """Another parameter in the same memory, with the same attributes, but no gradient or hooks."""
    if type(parameter) is not nn.Parameter or parameter.is_inference():
        return parameter  # no alias can be made of a subclass, or of an inference tensor
    return _with(nn.Parameter(parameter.detach(), parameter.requires_grad), parameter)


def _copied(tensor: Tensor, memories: dict[int, torch.UntypedStorage]) -> Tensor:
    """A copy of a tensor. Copies of tensors that share memory share it, too: ``memories`` has the
    storages that have been copied, by the memory numbers of the originals."""
    number = memory_number(tensor)
    if number not in memories:
        memories[number] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    new.set_(memories[number], tensor.storage_offset(), tensor.size(), tensor.stride())
    return _with(new, tensor)


def _with(new: Tensor, old: Tensor) -> Tensor:
    """``new``, with the Python attributes of ``old``."""
    new.__dict__.update(old.__dict__)
    return new
