"""Lists, dicts and sets that a call changes although a graph does not see it.

::

    def record(seen, h):          as a node of a graph, the call gets a list that is made for it;
        seen.append(h)            what reads ``seen`` later reads another list

A function or module that becomes one node, and is not looked into, may change a container among its
arguments. Later nodes would not see the change, and the graph would give other numbers than the
model. So the contents of containers are compared before and after each such call, and a change is
an error: in the comparison with the model, after which the next front end is tried, but in every
later call too, since the change may depend on the sizes or the values of tensors.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

from fxpipe.ir.exact import exact
from fxpipe.ir.structure import all_parts

_CONTAINERS = list, dict, set, deque
_PLAIN = bool, int, float, str, frozenset


class Contents:
    """What a value holds: its leaves by their paths, and the lengths of its containers.

    An attribute that an object gets in addition (a property that is computed once, say) is no
    change.
    """

    def __init__(self, value: Any) -> None:
        self._value, self._before = value, _contents(value)

    def have_changed(self) -> bool:
        """Whether the value holds something else now."""
        now = _contents(self._value)
        return not all(_is_same(each, now.get(path)) for path, each in self._before.items())


def _contents(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, part, is_leaf in all_parts(value):
        if isinstance(part, set):
            found[path] = frozenset(part)
        elif is_leaf:
            found[path] = part
        elif isinstance(part, _CONTAINERS):
            found[path] = len(part)
    return found


def _is_same(one: Any, other: Any) -> bool:
    is_plain = type(one) in _PLAIN and type(one) is type(other)
    return one is other or (is_plain and exact(one) == exact(other))


def has_containers(value: Any) -> bool:
    """Whether there is a list, dict or set in a value, so that a call may change it."""
    return any(isinstance(part, _CONTAINERS) for _, part, _ in all_parts(value))


def unchanging(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which raises RuntimeError if it changes a container that it is given."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return checked(function, args, kwargs)

    return call


class Unchanging(nn.Module):
    """The same module, which raises RuntimeError if it changes a container that it is given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checked(self.module, args, kwargs)


def checked(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function or module gives; raises RuntimeError if it changes a container among its
    arguments."""
    contents = Contents((args, kwargs))
    output = function(*args, **kwargs)
    if contents.have_changed():
        name = getattr(function, "__name__", type(function).__name__)
        raise RuntimeError(f"{name} {CHANGES}")
    return output


CHANGES = (
    "changes a list or another object that it is given, which the other nodes of a graph do not "
    "see: let it return what is new, and its caller add that to the list"
)
"""What to tell the user: it follows the name of a function or a module."""
