"""A call of :func:`fxpipe.compile` as text, as the user has written it, so that advice can show the
same call with other options.

::

    fxpipe.compile(net, ["cpu"] * 2, chunks=4, loss_fn=nn.MSELoss())
        ──▶ fxpipe.compile(model, ["cpu", "cpu"], chunks=8, loss_fn=loss_fn)

Arguments that can be written down are, the others stand there by the names of their parameters.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from fxpipe.loss_weight import Tokens
from passes.partition.automatic import Auto

FIRST = "model", "devices"  # these are given by position
LONGEST = 60  # the most characters of an argument that is written down
_NAMES: Mapping[type, str] = {Tokens: "fxpipe.loss_weight.tokens", Auto: "fxpipe.Auto"}
"""What users call to make the values that are dataclasses of this project."""


@dataclass(frozen=True)
class WrittenCall:
    """The arguments of a call that are not the defaults, as text, in the order of the parameters.
    ``name`` is that of the function."""

    name: str
    arguments: tuple[tuple[str, str], ...]

    @staticmethod
    def of(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> WrittenCall:
        """The call of a function with these values for its parameters, by their names."""
        parameters = inspect.signature(function).parameters
        return WrittenCall(
            name,
            tuple(
                (key, written(key, given[key]))
                for key, parameter in parameters.items()
                if key in FIRST[:1] or not _is_default(given[key], parameter.default)
            ),
        )

    def with_options(self, **changed: Any) -> WrittenCall:
        """The same call with other options; one that is None is left out."""
        known = dict(self.arguments)
        known |= {key: written(key, value) for key, value in changed.items()}
        left_out = {key for key, value in changed.items() if value is None}
        return WrittenCall(
            self.name, tuple((key, text) for key, text in known.items() if key not in left_out)
        )

    def __str__(self) -> str:
        said = [text if key in FIRST else f"{key}={text}" for key, text in self.arguments]
        return f"{self.name}({', '.join(said)})"


def written(name: str, value: Any) -> str:
    """A value as a user would write it; the name of its parameter for one that has no literal, or a
    long one."""
    text = _literal(value)
    return name if text is None or len(text) > LONGEST else text


def _literal(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str | torch.device):
        return json.dumps(str(value))
    if isinstance(value, list | tuple):
        parts = [_literal(each) for each in value]
        if None in parts:
            return None
        said = ", ".join(map(str, parts))
        return f"[{said}]" if isinstance(value, list) else f"({said}{',' * (len(parts) == 1)})"
    if isinstance(value, dict):
        pairs = [(_literal(key), _literal(each)) for key, each in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return "{" + ", ".join(f"{key}: {each}" for key, each in pairs) + "}"
    name = _NAMES.get(type(value))
    return None if name is None else _made_by(name, value)


def _made_by(name: str, value: Any) -> str | None:
    """The call that makes a dataclass: with the fields that are not as by default."""
    parts = []
    for field in fields(value):
        own = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if own != default:
            parts.append((field.name, _literal(own)))
    if any(text is None for _, text in parts):
        return None
    return f"{name}({', '.join(f'{key}={text}' for key, text in parts)})"


def _is_default(value: Any, default: Any) -> bool:
    is_plain = isinstance(value, str | bool | int | float)
    return value is default or (is_plain and type(value) is type(default) and value == default)


COMPILE = WrittenCall("fxpipe.compile", (("model", "model"),))
"""The call without options."""
