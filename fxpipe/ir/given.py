"""Checks that a function which a user gives can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def check_call(option: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise TypeError if a function that a user has given as ``option`` does not take so many
    arguments; ``arguments`` names them. A function whose signature is not known is not refused."""
    call: Any = function
    if isinstance(function, nn.Module) and type(function).__call__ is nn.Module.__call__:
        call = function.forward
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a function in C that does not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{option} is called with ({', '.join(arguments)}), and {name}"
            f"({', '.join(signature.parameters)}) does not take these: {error}"
        ) from None
