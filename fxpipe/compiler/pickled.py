"""Options that a pickle cannot hold are named, with what to give in their place.

A pickle holds a function by its module and its name, so that it holds no lambda and no function
that is defined within another one. Python's own error names neither the option nor a way out.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Mapping
from typing import Any

FUNCTIONS = "loss_fn", "loss_weight", "partition", "tracer"
"""The options that may be functions."""


def check_pickled(options: Mapping[str, Any]) -> None:
    """Raise PicklingError if one of these options is a function, or an object of a class, that a
    pickle cannot hold."""
    for option in FUNCTIONS:
        named = _held_by_name(options.get(option))
        try:
            pickle.dumps(named)
        except (pickle.PicklingError, AttributeError) as error:
            if _holds_code():
                return
            raise pickle.PicklingError(
                f"{option} is {_described(named)}, which a pickle cannot hold, as no module has it "
                "by its name: define it at the top level of a module; or save the weights alone, "
                "torch.save(pipe.state_dict(), path), and load them into a model that is compiled "
                "with the same options"
            ) from error


def _held_by_name(value: Any) -> Any:
    """What a pickle holds of a value by its name: a function itself, or the class of an object."""
    if isinstance(value, functools.partial):
        return _held_by_name(value.func)
    return value if inspect.isroutine(value) else type(value)


def _described(named: Any) -> str:
    what = "of the class" if isinstance(named, type) else "the function"
    return f"{what} {named.__qualname__}"


def _holds_code() -> bool:
    """Whether a pickler of another library is at work, such as cloudpickle's, which holds the code
    of a function. Such a pickler says itself how functions are held."""
    frame = inspect.currentframe()
    while frame is not None:
        kind = type(frame.f_locals.get("self"))
        if hasattr(kind, "reducer_override") or hasattr(kind, "save_reduce"):
            return True
        frame = frame.f_back
    return False
