"""Options that a function does not take: an error says which was probably meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from fxpipe.ir.text import kind

P = ParamSpec("P")
R = TypeVar("R")


SYNONYMS = {
    **dict.fromkeys(("microbatches", "micro_batches", "num_micro_batches"), "chunks"),
    **dict.fromkeys(("num_microbatches", "n_microbatches", "n_micro_batches"), "chunks"),
    **dict.fromkeys(("balance", "split_spec", "split_points"), "partition"),
    **dict.fromkeys(("recompute", "activation_checkpointing"), "checkpoint"),
    **dict.fromkeys(("args", "example_args", "mb_args"), "example_inputs"),
    **dict.fromkeys(("kwargs", "mb_kwargs"), "example_kwargs"),
}
"""Names that other libraries, or people, have for options."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """The name that is most like a misspelled one; None if none is like it."""
    near = get_close_matches(name, list(known), 1)
    return near[0] if near else None


def check_options(who: str, given: Iterable[str], taken: Collection[str]) -> None:
    """Raise TypeError if some of the options that are given are not taken; ``who`` takes them."""
    for name in given:
        if name not in taken:
            known = SYNONYMS.get(name)
            near = known if known in taken else meant(name, taken)
            said = f"did you mean {near!r}?" if near else f"give some of {', '.join(taken)}"
            raise TypeError(f"{who} takes no option {name!r}: {said}")


def note_misnamed(
    error: TypeError, function: Callable[..., Any], given: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Note on an error of a call which of the arguments that are given by their names the function
    does not take, and which was probably meant: one of its own, or of ``others``."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            near = meant(name, [*parameters, *others])
            if near:
                error.add_note(f"{name}= is given to the model: did you mean {near}=?")
            elif repr(name) not in str(error):
                error.add_note(f"{name}= is given to the model, which takes no such argument")


def options_checked(*others: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: it raises the error of :func:`check_options` for an option that it does
    not take, and TypeError, with what to write, for more arguments than it takes without a name.
    ``others`` are the functions that it gives further options to."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        options = list(dict.fromkeys(chain.from_iterable(map(options_of, (function, *others)))))
        parameters = inspect.signature(function).parameters.values()
        in_order = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_options(function.__name__, kwargs, options)
            if len(args) > len(in_order):
                taken, more = ", ".join(in_order), kind(args[len(in_order)])
                named = "example_kwargs"  # often meant: the model's arguments that have names
                example = f", such as {named}={{...}}" if named in options else ""
                raise TypeError(
                    f"{function.__name__} takes {taken} by place, and is given {more} beyond that: "
                    f"give everything else by its name{example}"
                )
            return function(*args, **kwargs)

        return checked

    return decorated


def options_of(function: Callable[..., Any]) -> list[str]:
    """The options that a function takes by their names, in its order."""
    parameters = inspect.signature(function).parameters.values()
    collected = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [each.name for each in parameters if each.kind not in collected]
