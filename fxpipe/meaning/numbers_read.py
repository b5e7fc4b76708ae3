"""Numbers, texts and functions that a loss reads, which may change long after the loss has been
checked.

::

    beta = 0.0                                  def loss_fn(output, x):
    first mini-batch    mean + 0.0 * sum            ...
    a later one         mean + 0.5 * sum            return mse + beta * mu.square().sum()

The check of the first mini-batch sees a plain mean over the rows. Once such a number is another
one, the loss is to be checked again. A schedule may move it a little in each step, so that only a
number that is no longer zero, or has changed by a factor of two, counts: checks then grow in number
as a logarithm does. A text (``reduction="sum"``), or a function in the place of another, counts as
another number.
"""

from __future__ import annotations

import functools
import math
import numbers
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn

from fxpipe.ir.source import is_of_a_model, is_ours
from fxpipe.runtime.state import slots_of

MOST = 256
"""How many numbers of a loss are looked at, those that are nearest to it."""
_LINKS = 512
"""How many objects are followed to find them."""
_FEW = 32
"""How many elements a list or dict of numbers has at most, and letters a text."""
_KINDS = 256
"""How many texts or functions are told apart, so that one which changes in each step costs no more
checks than that."""

_COUNT = "num_batches_tracked"
"""The buffer in which a batch norm counts its calls. It computes with that only without momentum,
for its running statistics."""
_TEXTS = 8
"""How many texts that are given in one place are told apart."""
_LARGER = math.ldexp(1.0, _KINDS)
_SEQUENCES = list, tuple, deque, set, frozenset
_CONTAINERS = nn.ModuleList, nn.ModuleDict, nn.Sequential

Getter = Callable[[], Any]
_Child = tuple[Any, Getter]  # a value, and what gives the value that is in its place by then


class NumbersRead:
    """The numbers that functions and modules can read: attributes, properties, globals, variables
    of closures, default arguments, entries of dicts, lists and sets, and tensors of one real
    number; with short texts and functions in these places. It is known by the names in their code
    which attributes and globals they read.

    Args:
        roots: the functions and modules.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._collect()

    def values(self) -> list[float | None]:
        """The numbers as they are now, each None where there is no number any more."""
        if any(get() is not value for value, get in self._links):
            self._collect()
        return [read() for read in self._reads]

    def _collect(self) -> None:
        walk = WalkToNumbers.of(self._roots)
        self._links, self._reads = walk.links, walk.reads


class NumberWatch:
    """Tells when numbers have changed so much that what reads them is to be checked again.

    A number that goes to and fro has its values checked once.

    Args:
        values: the numbers with which the first check is made.
    """

    def __init__(self, values: Sequence[float | None]) -> None:
        self._values = self._checked = list(values)
        self._seen = {sizes_of(values)}

    def is_new(self, values: Sequence[float | None]) -> bool:
        """Whether the numbers are to be checked, which is taken as done then."""
        if values == self._values:
            return False
        self._values = list(values)
        checked = self._checked
        if len(values) == len(checked) and not any(map(_has_moved, values, checked)):
            return False
        self._checked, sizes = self._values, sizes_of(values)
        is_new = sizes not in self._seen
        self._seen.add(sizes)
        return is_new

    def forget(self) -> None:
        """Take the numbers as they are for the only ones that have been checked."""
        self._checked, self._seen = self._values, {sizes_of(self._values)}


def _has_moved(now: float | None, before: float | None) -> bool:
    """Whether a number is no longer zero, or another one by a factor of two."""
    if now == before:
        return False
    one, two = _size(now), _size(before)
    if now is None or before is None or one is None or two is None or not one[0] == two[0] != 0:
        return one != two
    return not 0.5 < now / before < 2


def sizes_of(values: Sequence[float | None]) -> tuple[Any, ...]:
    """The signs and orders of magnitude of numbers: where these are equal, one check is enough."""
    return tuple(map(_size, values))


def _size(value: float | None) -> tuple[int, int] | None:
    """The sign and the order of magnitude of a number, a sign of 0 for one that has none."""
    if value is None:
        return None
    if not math.isfinite(value):
        return (0, 1)
    if not value:
        return (0, 0)
    return (1 if value > 0 else -1, math.frexp(value)[1])


class WalkToNumbers:
    """A walk from functions and modules to all that they read, nearest first.

    Args:
        names: those of the attributes and globals that are read, to which the walk adds the ones
            of the code that it meets.
        most: how many objects are followed, and how many numbers are looked at.
        but: objects that are not followed where they are met.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        names: set[str],
        most: tuple[int, int] = (_LINKS, MOST),
        but: Sequence[Any] = (),
    ) -> None:
        self.names = names
        self.links: list[_Child] = []
        self.reads: list[Getter] = []
        self.met: list[Any] = [*roots]
        """Whatever is read, each object as often as it has been met."""
        self._seen: set[int] = set(map(id, but))
        self._left = deque(roots)
        while self._left and len(self.links) < most[0] and len(self.reads) < most[1]:
            for value, get in self._children(self._left.popleft()):
                self._meet(value, get)

    @staticmethod
    def of(
        roots: Sequence[Any], most: tuple[int, int] = (_LINKS, MOST), but: Sequence[Any] = ()
    ) -> WalkToNumbers:
        """A walk that knows all the names in the code that it meets: code that is met late may name
        what an object that is met early has."""
        names: set[str] = set()
        while True:
            known = len(names)
            walk = WalkToNumbers(roots, names, most, but)
            if len(names) == known:
                return walk

    def _meet(self, value: Any, get: Getter) -> None:
        """Take note of a value: it is a number, or may lead to some."""
        self.met.append(value)
        if is_number(value) or value is None or _is_text(value) or isinstance(value, Enum):
            self.reads.append(lambda: _number(get()))
            return
        if isinstance(value, types.FunctionType):
            self.reads.append(lambda: _number(get()))
        if is_real_number(value):
            self.reads.append(TensorRead(get))
        elif id(value) not in self._seen and _may_lead_on(value):
            self._seen.add(id(value))
            self._left.append(value)
            if get() is value:  # else it is made anew whenever it is asked for
                self.links.append((value, get))

    def _children(self, value: Any) -> Iterator[_Child]:
        if isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, types.MethodType):
            yield value.__func__, lambda: value.__func__
            yield value.__self__, lambda: value.__self__
        elif isinstance(value, functools.partial):
            yield value.func, lambda: value.func
            yield from _entries(value.keywords)
            yield from _elements(value.args)
        elif isinstance(value, Mapping):
            # A key that is not there yet may be asked for.
            self.links.append((_some(value), lambda: _some(value)))
            self.reads.append(lambda: _number(_keys(value)))
            yield from _entries(value, self.names)
        elif isinstance(value, property):
            yield value.fget, lambda: value.fget
        elif isinstance(value, _SEQUENCES):
            self.links.append((len(value), lambda: len(value)))
            yield from _elements([*value], lambda: [*value])
        elif isinstance(value, types.ModuleType | type):
            yield from self._attributes(value)
        else:
            yield from self._of_object(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[_Child]:
        self._read_names(function.__code__)
        names = function.__code__.co_freevars
        for _, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, functools.partial(_contents, cell)
            except ValueError:  # a variable that is not set yet
                continue
        yield from _elements(function.__defaults__ or (), lambda: function.__defaults__ or ())
        yield from _entries(function.__kwdefaults__ or {})
        yield from self._attributes(function)
        if _is_a_users(function.__code__.co_filename):
            known = function.__globals__
            for name in self._names_in(function.__code__) & known.keys():
                yield known[name], functools.partial(known.get, name)

    def _of_object(self, value: Any) -> Iterator[_Child]:
        yield from self._attributes(value)
        if isinstance(value, nn.Module):
            for name, buffer in value._buffers.items():
                if name in self.names and name != _COUNT:
                    yield buffer, functools.partial(value._buffers.get, name)
            for name, module in value.named_children():
                if name in self.names or isinstance(value, _CONTAINERS):
                    yield module, functools.partial(value._modules.get, name)
        for kind in type(value).__mro__:
            if kind not in (object, nn.Module):
                yield from self._of_class(value, kind)

    def _of_class(self, value: Any, kind: type) -> Iterator[_Child]:
        """What an object has by one of its classes."""
        for name, member in [*vars(kind).items()]:
            if is_number(member) and name in self.names and name not in attributes_of(value):
                yield member, functools.partial(getattr, value, name, None)
            elif name in ("__call__", "forward") or name in self.names:
                yield member, functools.partial(vars(kind).get, name)

    def _attributes(self, value: Any) -> Iterator[_Child]:
        """The attributes of an object, a class or a Python module that are read."""
        found = attributes_of(value)
        for name in [name for name in found if name in self.names and name != "training"]:
            yield found[name], functools.partial(found.get, name)
        for name in slots_of(value):
            if name in self.names and hasattr(value, name):
                yield getattr(value, name), functools.partial(getattr, value, name, None)

    def _read_names(self, code: types.CodeType) -> None:
        self.names |= self._names_in(code)

    def _names_in(self, code: types.CodeType) -> set[str]:
        """The names in code, and in the functions within it, with strings, which may be keys."""
        inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
        texts = {each for each in code.co_consts if isinstance(each, str)}
        return {*code.co_names, *texts}.union(*map(self._names_in, inner))


class TensorRead:
    """Reads a tensor of one number. The host does not wait for an accelerator unless the tensor has
    been written to; and where it is written to all the time, more and more rarely."""

    def __init__(self, get: Getter) -> None:
        self._get = get
        self._state: tuple[int, int | None] | None = None  # the tensor, and its version
        self._number: float | None = None
        self._looks, self._patience, self._is_old = 0, 1, True

    def __call__(self) -> float | None:
        tensor = self._get()
        if not isinstance(tensor, Tensor) or tensor.numel() != 1 or tensor.is_meta:
            return None
        if tensor.is_cpu:
            return float(tensor.item())
        state = id(tensor), _version(tensor)
        self._is_old |= state != self._state
        self._state, self._looks = state, self._looks + 1
        if self._is_old and self._looks >= self._patience:
            self._number, self._is_old = float(tensor.item()), False
            self._patience *= 2 if self._looks < 2 * self._patience else 1
            self._looks = 0
        return self._number


class ModelNumbers:
    """The numbers that a model reads, where its graph is the same for all of them: its buffers of
    one real number each, and such tensors among the inputs of a call.

    Args:
        values: the inputs of the call with which the model has been checked.
        is_cut: for each of them whether it is cut into micro-batches; others may follow.
    """

    def __init__(self, model: nn.Module, values: Sequence[Any], is_cut: Sequence[bool]) -> None:
        self._buffers = buffers_read(model)
        given = zip(values, is_cut, strict=False)
        self._places = [i for i, (v, cut) in enumerate(given) if _is_fraction(v) and not cut]
        self.watch = NumberWatch(self.read(values))

    def read(self, values: Sequence[Any]) -> list[float | None]:
        """The numbers as they are now, with the inputs of a call."""
        self.now = [read() for read in self._buffers]
        self.now += numbers_in([values[place] for place in self._places])
        return self.now


def buffers_read(model: nn.Module) -> list[TensorRead]:
    """What reads the buffers of a model that are one real number each."""
    return [
        TensorRead(functools.partial(module._buffers.get, name))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if is_real_number(buffer) and name != _COUNT
    ][:MOST]


def is_number(value: Any) -> bool:
    """Whether a value is a real number of Python's or NumPy's, or a flag."""
    return isinstance(value, numbers.Real)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _FEW


def is_real_number(value: Any) -> bool:
    """Whether a value is a tensor of one real number, or of an integer, that is not trained."""
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    return is_one and not value.requires_grad and not value.is_meta


def numbers_in(values: Sequence[Any]) -> list[float | None]:
    """The numbers among values that are given in a call: Python's, and tensors of one real number
    on the CPU, as the host cannot wait for an accelerator in each call. The check takes tensors of
    other numbers than those that are given, and of ones of up to one in place of zero."""
    return [
        (_number(value.item()) or 1.0) if isinstance(value, Tensor) else _number(value)
        for value in values
        if is_number(value) or (_is_fraction(value) and value.is_cpu)
    ]


class TextsGiven:
    """The texts, and the members of enumerations, that are given with each mini-batch: a number
    that stands for each of them. Where there are many different ones in the same place, names of
    files, say, these are data, and none of them counts any more."""

    def __init__(self) -> None:
        self._met: dict[int, dict[str, int]] = {}  # by their places

    def numbers_in(self, values: Sequence[Any]) -> list[float | None]:
        """What stands for the texts among values, in their order."""
        texts = [str(v) for v in values if isinstance(v, str | Enum) and not is_number(v)]
        return [self._number(place, text) for place, text in enumerate(texts[:MOST])]

    def _number(self, place: int, text: str) -> float | None:
        met = self._met.setdefault(place, {})
        if len(met) <= _TEXTS:
            met.setdefault(text, len(met))
        return math.ldexp(1.0, met[text]) if len(met) <= _TEXTS else None


def switches_in(values: Sequence[Any]) -> list[Any]:
    """What may say what to compute among the values within an object that is given: real numbers,
    flags and texts. Integers are places and sizes as a rule, others in each mini-batch."""
    return [value for value in values if isinstance(value, float | bool | str | Enum)]


def _is_fraction(value: Any) -> bool:
    """Whether a value is a tensor of one number that is no integer. One that is, such as the time
    of a diffusion step, is another one in each call."""
    return is_real_number(value) and bool(value.is_floating_point())


def _number(value: Any) -> float | None:
    """The number that a value is, or one that stands for a text, for what a function does, or for
    any larger tensor in the place of None: others have another order of magnitude."""
    if isinstance(value, Tensor):
        return _LARGER if value.numel() != 1 else None
    if isinstance(value, types.FunctionType):
        code = value.__code__
        read = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        value = f"{code.co_code!r} {code.co_names} {read}"
    if isinstance(value, Enum) and not is_number(value):
        value = str(value)
    if isinstance(value, str):
        return math.ldexp(1.0, zlib.crc32(value.encode()) % _KINDS)
    try:
        return float(value) if is_number(value) else None
    except OverflowError:  # an integer that is too large
        return math.inf


def _version(tensor: Tensor) -> int | None:
    """How often a tensor has been written to."""
    return None if tensor.is_inference() else tensor._version


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _some(value: Mapping[Any, Any]) -> int:
    """The number of entries, up to what Python has as one object for each number."""
    return min(len(value), _KINDS)


def _keys(value: Mapping[Any, Any]) -> str | None:
    """The keys of a small mapping, as one text."""
    if len(value) > _FEW:
        return None
    return " ".join([key for key in [*value] if isinstance(key, str)])


def _entries(value: Mapping[Any, Any], names: set[str] | None = None) -> Iterator[_Child]:
    is_small = names is None or len(value) <= _FEW
    for key in [*value]:
        if isinstance(key, str | int) and (is_small or key in (names or ())):
            yield value[key], functools.partial(_at, value, key)


def _elements(
    value: Sequence[Any], get: Callable[[], Sequence[Any]] | None = None
) -> Iterator[_Child]:
    for i, each in enumerate(value[:_FEW]):
        yield each, functools.partial(_element, get or (lambda: value), i)


def _element(get: Callable[[], Sequence[Any]], i: int) -> Any:
    return _at(get(), i)


def _at(value: Any, key: Any) -> Any:
    try:
        return value[key]
    except LookupError:
        return None


def attributes_of(value: Any) -> Mapping[str, Any]:
    """The attributes that an object has by itself, but for those in slots."""
    found: Mapping[str, Any] = getattr(value, "__dict__", {})
    return found


def _may_lead_on(value: Any) -> bool:
    """Whether an object may be, or contain, code of a user's or numbers."""
    if isinstance(value, types.FunctionType):
        return not is_ours(value.__code__.co_filename)
    if isinstance(value, types.ModuleType):
        return _is_a_users(getattr(value, "__file__", None) or "")
    if isinstance(value, _SEQUENCES):
        return len(value) <= _FEW
    if isinstance(value, property):
        return value.fget is not None
    if isinstance(value, Tensor):
        return False
    is_known = isinstance(value, functools.partial | types.MethodType | Mapping)
    return is_known or hasattr(value, "__dict__") or bool(slots_of(value))


def _is_a_users(filename: str) -> bool:
    return filename.startswith("<") or is_of_a_model(filename)
