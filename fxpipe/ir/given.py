"""Functions that a user gives: they are checked to be called as they will be, and an error in one
says what it was given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxpipe.ir.tensors import tensors_of
from fxpipe.ir.text import kind

MOST_PARTS = 4  # of an output or a target that are named in a note


def shown(value: Any) -> str:
    """A value in words: of a tensor its shape, of what has tensors in it their shapes, of a dict
    its keys, too."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        parts = [f"{key!r} {_part(each)}" for key, each in value.items()]
    else:
        parts = list(map(_part, value if isinstance(value, tuple | list) else tensors_of(value)))
    several = [*parts[:MOST_PARTS], "..."] if len(parts) > MOST_PARTS else parts
    return f"{kind(value)} with {', '.join(several)}" if parts else kind(value)


def _part(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else kind(value)


def check_call(option: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise TypeError if a function that a user has given as ``option`` does not take so many
    arguments; ``arguments`` names them. A function whose signature is not known is not refused."""
    if said := _refusal(function, arguments, ()):
        raise TypeError(f"{option} is called with ({', '.join(arguments)}), and {said}")


@dataclass(frozen=True)
class CalledByName:
    """A function that a user has given as ``option``, and that is called with the arguments of the
    model by their names. The call says so where the function does not take these.

    Which arguments there are is known at a call only, as a model may have optional ones.
    """

    option: str
    function: Callable[..., Any]

    def __call__(self, **named: Any) -> Any:
        try:
            return self.function(**named)
        except Exception as error:
            said = _refusal(self.function, (), named) if isinstance(error, TypeError) else ""
            if not said:  # an error in the function itself
                _note_given(error, self.option, f"the arguments are {shown(named)}")
                raise
            raise TypeError(
                f"{self.option} is called with the model's arguments by their names, "
                f"({', '.join(named)}), and {said}. Name those that it needs as the model does, "
                f"and let **_ take the others: lambda {', '.join([*list(named)[-1:], '**_'])}: ..."
            ) from None


@dataclass(frozen=True)
class CalledWithTarget:
    """A function that a user has given as ``option``, and that is called with the target of a
    micro-batch. An error in it says what the target was, as the user sees that of a mini-batch."""

    option: str
    function: Callable[[Any], Any]

    def __call__(self, target: Any) -> Any:
        try:
            return self.function(target)
        except Exception as error:
            if target is not None:  # who has given none is told that
                _note_given(error, self.option, f"the target is {shown(target)}")
            raise


def _note_given(error: Exception, option: str, what: str) -> None:
    error.add_note(f"in fxpipe: {option} is called for each micro-batch; here {what}")


def _refusal(function: Callable[..., Any], arguments: Iterable[str], named: Iterable[str]) -> str:
    """What to say of a function that does not take these arguments, and arguments of these names;
    "" if it does, or if nobody knows."""
    call: Any = function
    if isinstance(function, nn.Module) and type(function).__call__ is nn.Module.__call__:
        call = function.forward
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a function in C that does not tell
        return ""
    try:
        signature.bind(*arguments, **dict.fromkeys(named))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        empty = inspect.Parameter.empty
        own = (e.replace(annotation=empty, default=empty) for e in signature.parameters.values())
        taken = ", ".join(map(str, own))
        return f"{name}({taken}) does not take these: {error}"
    return ""
