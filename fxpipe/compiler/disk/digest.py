"""A digest of values: two processes get the same digest only if the values, the modules among them
and the code that these run are the same.

Code of the user is followed: the digest of a function covers its bytecode, its defaults, the values
in its closure and those of the global names that it uses, and so on for the functions and classes
among these. So the code counts that runs, even if the files have been edited since. A package that
has been installed and defines modules of the model is covered by all of its files; any other
installed package by its version.

No digest can be made of an open file, a generator or an object in C. Such a value is refused with
the path to it, since a model that depends on it cannot be told from another one.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import logging
import re
import sys
import threading
import types
import typing
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxpipe.compiler.disk.errors import NotKept
from fxpipe.compiler.disk.versions import (
    Origin,
    origin_of_class,
    origin_of_file,
    origin_of_module,
    package_of,
    source_of_package,
    version_of_package,
)
from fxpipe.ir.hooks import HOOKS
from fxpipe.ir.tensors import memory_of
from fxpipe.ir.text import human_bytes
from fxpipe.runtime.state import OF_MODULES

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, PurePath, type(NotImplemented)),
)
_NOT_LOOKED_INTO = (
    *(logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock())),
    *(threading.Event, threading.Condition, threading.Semaphore),
)
"""The kinds of objects that hold nothing by which a model computes."""
_ABOUT_CLASSES = re.compile(r"__\w+__$|_abc_impl$")
"""The names of what a class has beside functions that says nothing of what these compute:
documentation, annotations..."""
_IN_C = "builtins", "torch._C"
_MOST = 2_000_000  # values
_LARGEST = 2**28  # bytes of a tensor that is a constant of the model
_OF_TYPING = (typing.TypeVar, types.GenericAlias, types.UnionType, type(typing.Any))


class Digest:
    """Collects values; :meth:`hex` is their digest.

    Args:
        model: the model that the values belong to: of the packages that define its modules all
            files count.

    ``functions`` has the functions of the user that have been met, by "module:name".
    """

    def __init__(self, model: nn.Module) -> None:
        self.functions: dict[str, Any] = {}
        self._hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}  # by id; the object is kept, and so its id
        self._memories: dict[int, int] = {}
        self._own = set(model.modules())
        self._modules = {type(module).__module__ for module in self._own}
        self._count = 0

    def hex(self) -> str:
        """The digest of what has been added so far."""
        return self._hash.hexdigest()

    def add(self, path: str, value: Any) -> None:
        """Add a value. ``path`` says where it has been found, for messages.

        Raises NotKept if the value, or a part of it, cannot be digested.
        """
        try:
            self._value(path, value)
        except RecursionError:
            raise NotKept(f"{path} is nested too deeply") from None

    def add_model(self, model: nn.Module) -> None:
        """Add a model: its modules, their modes, hooks and code.

        Of its parameters and buffers the shapes count, and not the values; but for buffers of
        numbers other than real ones, by which a forward may decide. Of other attributes only
        functions count, and what hides an attribute of the class: which others the forward
        reads is known once it has been traced. Of a module that is not in the model, but is met
        on the way, everything counts.
        """
        self.add("model", model)

    def _token(self, *parts: object) -> None:
        self._count += 1
        if self._count > _MOST:
            raise NotKept(f"the model has more than {_MOST:,} parts")
        text = "\x1f".join(map(str, parts))
        self._hash.update(f"{len(text)}:{text};".encode(errors="surrogatepass"))

    def _value(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, Enum):
            self._token("enum", _name(kind), value.name)
            return
        if isinstance(value, _PLAIN):
            plain: Any = next(each for each in _PLAIN if isinstance(value, each))
            self._token(_name(kind), plain.__repr__(value))
            self._additions(path, value)
            return
        if id(value) in self._met:
            self._token("again", self._met[id(value)][0])
            return
        self._met[id(value)] = len(self._met), value
        if isinstance(value, type):
            self._class(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, Tensor):
            self._tensor(path, value, with_values=True)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.ModuleType):
            self._token("module", value.__name__)
        else:
            self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        kind = type(value)
        for kinds, parts in _PARTS:
            if isinstance(value, kinds):
                self._token(_name(kind))
                self._all(path, parts(value))
                self._additions(path, value)
                return
        if isinstance(value, set | frozenset):
            self._token(_name(kind), *sorted(self._plain_text(path, each) for each in value))
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._token(
                "array", value.dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
            )
        elif isinstance(value, re.Pattern):
            self._token("pattern", value.pattern, value.flags)
        elif isinstance(value, _NOT_LOOKED_INTO):
            self._token(_name(kind))
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType):
            self._builtin(path, value)
        elif isinstance(value, _OF_TYPING) or kind.__module__ == "typing":
            self._token("annotation", value)
        elif kind is object:
            self._token("object")
        else:
            self._attributes(path, value)

    def _additions(self, path: str, value: Any) -> None:
        """Add what an object of a subclass of a built-in class has beside the content of that
        class: attributes, and methods of its own."""
        if origin_of_class(type(value)) is not Origin.VERSIONED:
            self._value(path, type(value))
            self._all(path, getattr(value, "__dict__", {}).items())

    def _attributes(self, path: str, value: Any) -> None:
        kind = type(value)
        slots = (vars(each).get("__slots__", ()) for each in kind.__mro__)
        names = [n for each in slots for n in ([each] if isinstance(each, str) else each)]
        own = {n: getattr(value, n) for n in names if n[:2] != "__" and hasattr(value, n)}
        own |= getattr(value, "__dict__", {})
        if _has_state_in_c(kind, len(names)) or not (hasattr(value, "__dict__") or names):
            raise NotKept(f"{path} is a {_name(kind)}, whose content cannot be compared")
        self._token("instance", _name(kind))
        self._value(path, kind)
        self._all(path, own.items())

    def _all(self, path: str, parts: Iterable[tuple[Any, Any]]) -> None:
        for key, part in parts:
            if isinstance(key, str):
                self._token(key)
            else:
                self._value(f"{path} (a key)", key)
            self._value(f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]", part)
        self._token("end")

    def _plain_text(self, path: str, value: Any) -> str:
        if isinstance(value, Enum | type | types.FunctionType):
            return f"{_name(type(value))} {getattr(value, '__qualname__', value)}"
        if isinstance(value, _PLAIN):
            return f"{_name(type(value))} {value!r}"
        if isinstance(value, tuple):
            return f"({', '.join(self._plain_text(path, each) for each in value)})"
        raise NotKept(f"{path} is a set that has a {_name(type(value))}")

    # ---------------------------------------------------------------------------- models, tensors

    def _module(self, path: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise NotKept(f"{path} is compiled to TorchScript")
        self._token("module", module.training)
        self._value(f"the class of {path}", type(module))
        is_torchs = origin_of_class(type(module)) is Origin.VERSIONED
        is_own = module in self._own  # or else one to which an attribute or a global name leads
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            decides = tensor is not None and not tensor.is_floating_point() and not is_torchs
            is_buffer = name in module._buffers
            self._token(name, is_buffer)
            with_values = not is_own or (is_buffer and decides)
            self._tensor(f"{path}.{name}", tensor, with_values=with_values)
        for name, value in vars(module).items():
            is_special = hasattr(type(module), name) or _is_function(value)  # a forward, say
            if name not in OF_MODULES and (is_special or not is_own):
                self._token(name)
                self._value(f"{path}.{name}", value)
        for name in HOOKS:
            hooks = getattr(module, name, None) or {}  # their keys count those of the process
            self._all(f"{path}.{name}", enumerate(hooks.values()))
        self._all(path, module._modules.items())

    def add_tensor(self, path: str, tensor: Tensor) -> None:
        """Add what a tensor is like, and not its values."""
        self._tensor(path, tensor, with_values=False)

    def _tensor(self, path: str, tensor: Tensor | None, with_values: bool) -> None:
        if tensor is None:
            self._token("no tensor")
            return
        is_strided = tensor.layout == torch.strided
        self._token(
            *("tensor", _name(type(tensor)), tuple(tensor.shape), tensor.dtype, tensor.device),
            *(tensor.layout, tensor.requires_grad, tensor.is_inference()),
            *((tensor.stride(), tensor.storage_offset()) if is_strided else ()),
            self._memories.setdefault(memory_of(tensor), len(self._memories)),
        )
        if not with_values or tensor.is_meta:
            return
        if not is_strided or type(tensor) not in (Tensor, nn.Parameter):
            raise NotKept(f"{path} is a constant of the kind {_name(type(tensor))}")
        if tensor.nbytes > _LARGEST:
            raise NotKept(f"{path} is a constant of {human_bytes(tensor.nbytes)}")
        content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self._token(hashlib.sha256(content).hexdigest())

    # ---------------------------------------------------------------------------------------- code

    def _class(self, path: str, kind: type) -> None:
        origin = origin_of_class(kind)
        self._token("class", _name(kind))
        if origin is Origin.VERSIONED:
            return
        if origin is Origin.INSTALLED:
            self._installed(kind.__module__)
            if kind.__module__ not in self._modules:
                return
        for base in kind.__bases__:
            self._value(path, base)
        for name, value in vars(kind).items():
            is_about = _ABOUT_CLASSES.match(name) and not _has_code(value)
            if is_about or isinstance(value, _DESCRIPTORS):
                continue
            if origin is Origin.USERS or _has_code(value) or isinstance(value, _PLAIN):
                self._token(name)
                self._value(f"{kind.__qualname__}.{name}", value)

    def _installed(self, module: str) -> None:
        """Add the package of a module: all of its files if the model's modules are of it."""
        package = package_of(module)
        defines = any(package_of(each) == package for each in self._modules)
        self._token("package", package, version_of_package(package))
        if defines:
            self._token(source_of_package(package))

    def _builtin(self, path: str, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None) or _name(type(owner))
        self._token("builtin", module, getattr(value, "__qualname__", value))
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self._value(path, owner)
        package = package_of(module)
        if package in sys.modules and origin_of_module(package) is not Origin.VERSIONED:
            self._token(version_of_package(package))

    def _function(self, path: str, function: types.FunctionType) -> None:
        code, name = function.__code__, f"{function.__module__}:{function.__qualname__}"
        origin = origin_of_file(code.co_filename)
        self._token("function", name)
        cells = [each for cell in function.__closure__ or () for each in _content(cell)]
        if origin is Origin.VERSIONED:  # it may wrap a function of the user's
            self._all(path, enumerate(each for each in cells if _has_code(each)))
            return
        if origin is Origin.INSTALLED:
            self._installed(function.__module__ or "")
            if function.__module__ not in self._modules:
                self._all(path, enumerate(each for each in cells if _has_code(each)))
                return
        else:
            self.functions[name] = function
        self._code(code)
        self._all(name, enumerate(cells))
        self._all(name, enumerate(function.__defaults__ or ()))
        self._all(name, (function.__kwdefaults__ or {}).items())
        self._all(name, function.__dict__.items())
        scope = function.__globals__
        used = _names_in(code)
        for each in used:
            if each in scope:
                self._global(f"{name} → {each}", each, scope[each], used, origin)
        if origin is Origin.USERS:
            self._imported_within(name, code, scope)

    def _global(self, path: str, name: str, value: Any, used: list[str], origin: Origin) -> None:
        """Add what a function finds under a global name."""
        if isinstance(value, types.ModuleType):
            self._token("module", value.__name__)
            if origin_of_module(value.__name__) is Origin.USERS:
                for each in used:
                    if each in vars(value):
                        self._global(f"{path}.{each}", each, vars(value)[each], used, origin)
        elif origin is Origin.USERS or _has_code(value) or isinstance(value, _PLAIN):
            self._token(name)
            self._value(path, value)

    def _imported_within(self, name: str, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Add the modules that a function of the user's imports itself."""
        for module in _imports_in(code, scope.get("__package__") or ""):
            if origin_of_module(module) is not Origin.USERS:
                continue
            if module not in sys.modules:
                raise NotKept(f"{name} imports {module}, which has not been imported yet")
            used = _names_in(code)
            self._global(f"{name} → {module}", module, sys.modules[module], used, Origin.USERS)

    def _code(self, code: types.CodeType) -> None:
        self._token(
            *(code.co_name, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount),
            *(code.co_flags, code.co_code.hex(), code.co_names, code.co_varnames),
            *(code.co_freevars, code.co_cellvars, code.co_exceptiontable.hex()),
            # Messages name lines of the model.
            *(code.co_filename, code.co_firstlineno, code.co_linetable.hex()),
        )
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self._token(_constant_text(constant))


_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    type(vars(namedtuple("_", "field"))["field"]),  # what it gives follows from ``_fields``
)

_WITH_CODE = (
    *(types.FunctionType, types.MethodType, type, functools.partial),
    *(staticmethod, classmethod, property, functools.cached_property),
)

_PARTS: tuple[tuple[Any, Callable[[Any], Iterable[tuple[Any, Any]]]], ...] = (
    (Mapping, lambda value: list(value.items())),
    ((list, tuple, deque), lambda value: enumerate(value)),
    (types.MethodType, lambda value: [("function", value.__func__), ("self", value.__self__)]),
    (
        functools.partial,
        lambda value: [("function", value.func), ("args", value.args), ("kw", value.keywords)],
    ),
    ((staticmethod, classmethod), lambda value: [("function", value.__func__)]),
    (property, lambda value: [("get", value.fget), ("set", value.fset)]),
    (functools.cached_property, lambda value: [("function", value.func)]),
    (weakref.ref, lambda value: [("object", value())]),
    (type(functools.cache(len)), lambda value: [("function", value.__wrapped__)]),
)
"""The kinds of objects that are known by their parts, and the function that gives these."""


def _has_code(value: Any) -> bool:
    return isinstance(value, _WITH_CODE)


def _has_state_in_c(kind: type, slots: int) -> bool:
    """Whether objects of a class hold more than their attributes, of which one is for each slot:
    an open file does. It shows by their size, as when Python refuses to pickle them."""
    if any(base.__module__.startswith(_IN_C) for base in kind.__mro__[:-1]):
        return True
    pointers = slots + 2  # to the other attributes, and to weak references
    return bool(kind.__itemsize__) or kind.__basicsize__ > object.__basicsize__ + 8 * pointers


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _content(cell: types.CellType) -> list[Any]:
    """What is in a cell of a closure: nothing, if the variable has not been assigned."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _constant_text(constant: Any) -> str:
    if isinstance(constant, frozenset):
        return f"frozenset {sorted(map(_constant_text, constant))}"
    if isinstance(constant, tuple):
        return f"tuple {[_constant_text(each) for each in constant]}"
    return f"{type(constant).__name__} {constant!r}"


def _names_in(code: types.CodeType) -> list[str]:
    """The names of globals and attributes that code uses, in order."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_names_in(constant))
    return list(found)


def _imports_in(code: types.CodeType, package: str) -> list[str]:
    """The modules that code imports, also in functions within it."""
    found: list[str] = []
    level: Any = 0
    before: list[Any] = [0, 0]
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            level = before[0] if isinstance(before[0], int) else 0
            name = "." * level + str(each.argval)
            found.append(importlib.util.resolve_name(name, package) if level else name)
        if each.opname.startswith("LOAD_"):
            before = [before[1], each.argval]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _imports_in(constant, package)
    return found
