"""Checks that a function which a user gives can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


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
        except TypeError:
            said = _refusal(self.function, (), named)
            if not said:
                raise  # an error in the function itself
            raise TypeError(
                f"{self.option} is called with the model's arguments by their names, "
                f"({', '.join(named)}), and {said}. Name those that it needs as the model does, "
                f"and let **_ take the others: lambda {', '.join([*list(named)[-1:], '**_'])}: ..."
            ) from None


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
