"""The sizes for which a graph is right as JSON, and back."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]

from fxpipe.compiler.disk.errors import NotKept, Unusable
from fxpipe.ir._torch import SIZE_FUNCTIONS
from fxpipe.trace.sizes import Condition, Sizes

_FUNCTIONS = {
    **{
        kind.__name__: kind
        for kind in (
            *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Mod, sympy.Max, sympy.Min),
            *(sympy.And, sympy.Or, sympy.Not, sympy.floor, sympy.ceiling, sympy.Abs),
            *(sympy.Equality, sympy.Unequality, sympy.LessThan, sympy.StrictLessThan),
            *(sympy.GreaterThan, sympy.StrictGreaterThan),
        )
    },
    **SIZE_FUNCTIONS,
}


def packed_sizes(sizes: Sizes | None) -> Any:
    """Sizes as JSON.

    Raises NotKept for relations with a function of sympy that is not in the table.
    """
    if sizes is None:
        return None
    return {
        "symbols": [
            [_expression(symbol), symbol.assumptions0, list(place)]
            for symbol, place in sizes.symbols.items()
        ],
        "batch": sorted(symbol.name for symbol in sizes.batch),
        "conditions": [[_expression(each.relation), each.where] for each in sizes.conditions],
        "fixed": [[list(place), why] for place, why in sizes.fixed.items()],
        "values": [[symbol.name, _expression(value)] for symbol, value in sizes.values.items()],
    }


def unpacked_sizes(data: Any) -> Sizes | None:
    """The sizes that :func:`packed_sizes` has made JSON of."""
    if data is None:
        return None
    symbols = {
        name: sympy.Symbol(name, **{str(k): v for k, v in about.items() if type(v) is bool})
        for (_, name), about, _ in data["symbols"]
    }
    return Sizes(
        {symbols[name]: (int(i), int(dim)) for (_, name), _, (i, dim) in data["symbols"]},
        frozenset(symbols[name] for name in data["batch"]),
        tuple(Condition(_made(each, symbols), str(where)) for each, where in data["conditions"]),
        {(int(i), int(dim)): str(why) for (i, dim), why in data["fixed"]},
        {symbols[name]: _made(value, symbols) for name, value in data["values"]},
    )


def _expression(value: Any) -> Any:
    """An expression of sympy as nested lists: ``["Add", ["symbol", "s0"], 1]``."""
    if isinstance(value, int) or value.is_Integer:
        return int(value)
    if value in (sympy.true, sympy.false):
        return bool(value)
    if value.is_Rational:
        return ["rational", int(value.p), int(value.q)]
    if value.is_Symbol:
        return ["symbol", value.name]
    name = value.func.__name__
    if _FUNCTIONS.get(name) is not value.func:
        raise NotKept(f"a relation between sizes has {name}, which a file cannot hold")
    return [name, *map(_expression, value.args)]


def _made(data: Any, symbols: dict[str, Any]) -> Any:
    if type(data) is bool:
        return sympy.true if data else sympy.false
    if type(data) is int:
        return sympy.Integer(data)
    name, *args = data
    if name == "symbol":
        return symbols[args[0]]
    if name == "rational":
        return sympy.Rational(int(args[0]), int(args[1]))
    if name not in _FUNCTIONS:
        raise Unusable(f"a relation between sizes has {name!r}")
    return _FUNCTIONS[name](*(_made(each, symbols) for each in args), evaluate=False)
