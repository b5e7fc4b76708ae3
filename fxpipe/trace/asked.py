"""What a forward asks about a value by a function that is built into Python.

::

    forward(x, mask):
        if isinstance(mask, torch.Tensor):     a trace has a proxy there, or a tensor without values
            h = h * mask                       of another class: left out, without a word
        return h.expand(len(x))                x ── size(0) ── expand

Python asks the object itself, of which a trace knows nothing. Symbolic tracing has an ``fx.Proxy``
in the place of each value, which is no tensor, and has any attribute; an export has an instance of
a class of PyTorch's own, or a ``SymInt`` for a size. The branch that is then taken is a wrong one,
and nothing tells of it where the example hides the difference, as a mask of ones does. ``len``
makes a number of Python's: symbolic tracing, which has none, would fail, and an export would make a
constant of the batch size.

So the code of a model finds other functions while it is traced. They are put among the globals of
its modules, which hide what is built in: a replacement in ``builtins`` would be called by each of
PyTorch's own lines as well, which ask a million times in one export.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.ir._torch import FakeTensor, FunctionalTensor
from fxpipe.ir.source import is_a_users
from fxpipe.ir.tensors import class_of
from fxpipe.trace.asker import in_this_thread
from fxpipe.trace.errors import Refused
from fxpipe.trace.patches import LOCK, classes_asked, patched


@contextmanager
def questions_answered(model: nn.Module, real: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the ``with`` block, and in this thread, the code of a model that asks for the class,
    the attributes or the length of a value is answered as in a real run; so is ``x.__class__`` of
    what stands for a value in an export (a proxy answers that itself). Whether a value is what
    stands for it in a trace (``isinstance(x, fx.Proxy)``) may be asked as well.

    Args:
        real: for any object, one that is asked in its place: for what stands for a value in a
            trace, an object of the class that the value has in a real run. It may raise an error.
    """
    is_here = in_this_thread()

    def asked(value: Any) -> Any:
        return real(value) if is_here() else value

    def length(value: Any) -> Any:
        is_recorded = isinstance(value, fx.Proxy) or (isinstance(value, Tensor) and value.ndim > 0)
        if is_recorded and is_here():
            return value.size(0)
        return len(value)

    def is_instance(value: Any, kinds: Any) -> bool:
        return isinstance(value, kinds) or isinstance(asked(value), kinds)

    def has_attribute(value: Any, name: str) -> bool:
        subject = asked(value)
        return hasattr(subject, name) or (subject is not value and name in vars(value))

    def attribute(value: Any, name: str, *default: Any) -> Any:
        if name == "__class__":
            return type(asked(value))
        is_there = not default or asked(value) is value or has_attribute(value, name)
        return getattr(value, name, *default) if is_there else default[0]

    def can_be_called(value: Any) -> bool:
        return callable(asked(value))

    def is_tensor(value: Any) -> bool:
        return isinstance(asked(value), Tensor)

    def replace_is_tensor(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return is_tensor

    functions: dict[str, tuple[Any, Any]] = {
        "len": (len, length),
        "isinstance": (isinstance, is_instance),
        "hasattr": (hasattr, has_attribute),
        "getattr": (getattr, attribute),
        "callable": (callable, can_be_called),
        "type": (type, _type_of(asked)),
        "is_tensor": (torch.is_tensor, is_tensor),  # where it is imported by its name
    }
    with LOCK, ExitStack() as stack:
        stack.enter_context(patched(torch, "is_tensor", replace_is_tensor))
        stack.enter_context(classes_asked(_STAND_INS, lambda value: type(asked(value))))
        hidden = [
            (names, name, {name: names[name]} if name in names else {})
            for names in _scopes(model)
            for name, (original, _) in functions.items()
            if names.get(name, vars(builtins).get(name)) is original
        ]
        for names, name, _ in hidden:
            names[name] = functions[name][1]
        try:
            yield
        finally:
            for names, name, own in hidden:
                names.pop(name, None)
                names.update(own)


def _type_of(asked: Callable[[Any], Any]) -> type:
    """What stands for ``type``: called with one object it gives the class of what is asked in its
    place; in all else it is as ``type`` is, also in ``isinstance(kind, type)``."""

    class Meta(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            return type(asked(args[0])) if len(args) == 1 else type(*args, **options)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, type)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, type)

    class Type(type, metaclass=Meta):
        def __class_getitem__(cls, kind: Any) -> Any:
            return type[kind]

    return Type


def _scopes(model: nn.Module) -> list[dict[str, Any]]:
    """The globals of the functions of a model's classes, and of what these globals lead to: of
    functions, classes and modules that are neither PyTorch's nor Python's."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    found: dict[int, dict[str, Any]] = {}
    new: list[Any] = [*kinds, *(each for kind in kinds for each in vars(kind).values())]
    while new:
        scopes = {id(names): names for value in new for names in _globals_of(value)}
        fresh = {key: names for key, names in scopes.items() if key not in found}
        found |= fresh
        new = [value for names in fresh.values() for value in list(names.values())]
    return list(found.values())


def _globals_of(value: Any) -> Iterator[dict[str, Any]]:
    """The globals of a function, a class or a module of a model's; nothing for all else."""
    kind = type(value)  # isinstance() would ask the object, which may be anything
    if kind is FunctionType:
        if is_a_users(value.__code__.co_filename, value.__module__ or ""):
            yield value.__globals__
        return
    module = sys.modules.get(value.__module__) if issubclass(kind, type) else value
    if issubclass(type(module), ModuleType) and _is_a_users(module):
        yield vars(module)


def _is_a_users(module: Any) -> bool:
    """Whether a module may be a user's. One that is typed at a prompt has no file; nor has one that
    is built into Python, which is no user's."""
    if module.__name__ in sys.builtin_module_names:
        return False
    return is_a_users(str(vars(module).get("__file__")), module.__name__)


_TENSOR, _PARAMETER = torch.empty(0), nn.Parameter(torch.empty(0))
_NUMBERS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
_STAND_INS = FakeTensor, FunctionalTensor, *_NUMBERS


def real_of_export(inputs: Sequence[Tensor]) -> Callable[[Any], Any]:
    """A function that gives what is asked in the place of an object of an export: a tensor for one
    without values, a number of Python's for a symbolic one, and for all else the object itself.

    It raises ``Refused`` for a tensor without values where one of the inputs is of a class of its
    own, which what is computed from it may have, too.
    """
    own = {kind.__name__ for kind in map(class_of, inputs) if kind is not Tensor}

    def real(value: Any) -> Any:
        kind = type(value)
        if not issubclass(kind, FakeTensor | FunctionalTensor):
            return _NUMBERS.get(kind, value)
        if isinstance(value, nn.Parameter):
            return _PARAMETER
        if own:
            raise Refused(
                "it asks for the class of a value, and an input is of the class "
                f"{', '.join(sorted(own))}, of which an export knows nothing"
            )
        return _TENSOR

    return real
