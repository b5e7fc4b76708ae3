"""What stands in the place of random numbers while a model is checked: numbers that depend neither
on a row nor on how many rows there are.

A uniform number is often compared with a rate: ``torch.rand(n, 1) > 0.5`` drops rows, and
``torch.rand(()) < 0.1`` is a layer that is left out. Which side the number is on decides what the
check sees, and a mask that drops all rows hides whatever comes behind it. So the check runs such a
model several times, with all of :data:`UNIFORM` one after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import schema_of

aten = torch.ops.aten

UNIFORM = 0.6, 1 / 16, 15 / 16
"""What stands for numbers from 0 to 1. With the first one most masks keep what they are made for:
those that keep what is above a rate of up to a half, or below one that is higher. With the others,
what happens below any usual rate happens, and what happens above it."""

_NORMAL = 0.5
"""What stands for numbers of a normal distribution, in standard deviations. Not their mean: noise
that a layer is multiplied by would hide the layer."""

Given = dict[str, Any]
"""The arguments of an operator, by their names."""


class Drawn:
    """Replaces operators that draw random numbers.

    Args:
        uniform: what stands for numbers from 0 to 1.
    """

    def __init__(self, uniform: float = UNIFORM[0]) -> None:
        self.uniform = uniform
        self.met = False  # whether an operator that draws has been replaced
        self.met_uniform = False  # whether it draws numbers that may be compared with a rate

    def instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for the result of an operator; NotImplemented if nothing has to."""
        packet = func.overloadpacket
        if (value_of := _VALUES.get(packet)) is not None:
            self.met = True
            self.met_uniform |= packet in _RATES
            given = _given(func, args, kwargs)
            return _put(func, value_of(given, self.uniform), given, kwargs)
        if (made_of := _TOGETHER.get(packet)) is not None:
            given = _given(func, args, kwargs)
            made = made_of(given)
            if made is not NotImplemented:
                self.met = True
            return made
        places = _rates(func)
        if places and any(i < len(args) and args[i] for i in places):
            self.met = True
            return func(*(0.0 if i in places else each for i, each in enumerate(args)), **kwargs)
        return NotImplemented


def is_replaced(func: Any) -> bool:
    """Whether :class:`Drawn` has something to put in the place of an operator's random numbers."""
    packet = func.overloadpacket
    return packet in _VALUES or packet in _TOGETHER or bool(_rates(func))


@functools.cache
def _rates(func: Any) -> tuple[int, ...]:
    """The places of the rates of dropout among the arguments of an operator, such as an attention:
    with a rate of zero it draws nothing."""
    names = [each.name for each in schema_of(func).arguments]
    return tuple(i for i, name in enumerate(names) if name in ("dropout", "dropout_p"))


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    known = schema_of(func).arguments
    defaults = {each.name: each.default_value for each in known if each.has_default_value()}
    return {**defaults, **{e.name: arg for e, arg in zip(known, args, strict=False)}, **kwargs}


def _put(func: Any, value: Any, given: Given, kwargs: dict[str, Any]) -> Any:
    """The result of an operator of one result, all of whose values are ``value``, a number or a
    tensor: in a new tensor, or in the one that the operator writes to."""
    if func.overloadpacket.__name__.endswith("_"):
        written: Tensor = given["self"]
        return written.copy_(value) if isinstance(value, Tensor) else written.fill_(value)
    if isinstance(value, Tensor):
        made = value
    else:
        is_new = "size" in given
        names = ("dtype", "layout", "device", "pin_memory", *(["memory_format"] * (not is_new)))
        options = {name: kwargs[name] for name in names if name in kwargs}
        if is_new:
            default = torch.long if isinstance(value, int) else None
            made = torch.full(given["size"], value, **{"dtype": default, **options})
        else:
            made = torch.full_like(given["self"], value, **options)
    out = kwargs.get("out")
    return made if out is None else out.resize_(made.shape).copy_(made)


# --------------------------------------------------------------------------- what is put, by values


def _between(given: Given, uniform: float) -> Any:
    low, high = given["from"], given["to"]
    return low + uniform * (high - low)


def _normal(given: Given, uniform: float) -> Any:
    return given["mean"] + _NORMAL * given["std"]


def _log_normal(given: Given, uniform: float) -> float:
    return math.exp(given["mean"] + _NORMAL * given["std"])


def _heads(given: Given, uniform: float) -> Any:
    """Ones where the probability is large: with a large ``uniform`` that is nearly everywhere."""
    probability: Any = given["p"] if "p" in given else given["self"]
    if not isinstance(probability, Tensor):
        return float(probability > 1 - uniform)
    return torch.zeros_like(given["self"]) + (probability > 1 - uniform)


def _kept(given: Given, uniform: float) -> Any:
    """For the mask of a dropout, of which all is kept; or for ones by a tensor of probabilities."""
    return _heads(given, uniform) if isinstance(given["p"], Tensor) else 1


def _integer(given: Given, uniform: float) -> int:
    """An integer in the middle: 0 would hide what is multiplied by it."""
    low: Any = given.get("low", given.get("from"))
    high: Any = given.get("high", given.get("to"))
    first = 0 if low is None else int(low)
    return first + 1 if high is None else (first + int(high)) // 2


def _turned(given: Given, uniform: float) -> Tensor:
    """In place of a random order the reverse one, in which rows that change places show."""
    names = "dtype", "layout", "device", "pin_memory"
    # The default of the type is a number of C++ here.
    own = {n: given[n] for n in names if n in given and not isinstance(given[n], int)}
    return torch.arange(given["n"] - 1, -1, -1, **own)


def _likeliest(given: Given, uniform: float) -> Tensor:
    """In place of samples from probabilities the likeliest ones, all different if there are as
    many; of equally likely ones the last."""
    probabilities, count = given["self"], given["num_samples"]
    last_first = probabilities.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = probabilities.shape[-1] - 1 - last_first
    places = torch.arange(count, device=order.device) % order.shape[-1]
    found: Tensor = order.index_select(-1, places)
    return found


_VALUES: dict[Any, Callable[[Given, float], Any]] = {
    aten.rand: lambda given, uniform: uniform,
    aten.rand_like: lambda given, uniform: uniform,
    aten.uniform: _between,
    aten.uniform_: _between,
    aten.randn: lambda given, uniform: _NORMAL,
    aten.randn_like: lambda given, uniform: _NORMAL,
    aten.normal: _normal,
    aten.normal_: _normal,
    aten.normal_functional: _normal,
    aten.log_normal: _log_normal,
    aten.log_normal_: _log_normal,
    aten.cauchy: lambda given, uniform: given["median"] + _NORMAL * given["sigma"],
    aten.cauchy_: lambda given, uniform: given["median"] + _NORMAL * given["sigma"],
    aten.exponential: lambda given, uniform: 1 / given["lambd"],
    aten.exponential_: lambda given, uniform: 1 / given["lambd"],
    aten.geometric: lambda given, uniform: 1,
    aten.geometric_: lambda given, uniform: 1,
    aten.bernoulli: _heads,
    aten.bernoulli_: _kept,
    aten.random: _integer,
    aten.random_: _integer,
    aten.randint: _integer,
    aten.randint_like: _integer,
    aten.randperm: _turned,
    aten.multinomial: _likeliest,
    aten.poisson: lambda given, uniform: given["self"].ceil(),
    aten.binomial: lambda given, uniform: (given["count"] * given["prob"]).ceil(),
    torch.ops.aten._standard_gamma: lambda given, uniform: given["self"].clone(),
    torch.ops.aten._sample_dirichlet: lambda given, uniform: (
        given["self"] / given["self"].sum(-1, keepdim=True)
    ),
}
"""By an operator of one result: the value, from its arguments and what stands for a uniform number;
a number, or a tensor with all values."""

_RATES = {aten.rand, aten.rand_like, aten.uniform, aten.uniform_, aten.bernoulli}
"""The operators whose numbers may be compared with a rate, or that do it themselves."""


# ------------------------------------------------------------------ operators of several results


def _undropped(given: Given) -> Any:
    """In place of dropout: the output equals the input, and the mask keeps all values."""
    x = given["input"]
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _undropped_by_bytes(given: Given) -> Any:
    """The same for the older operator, whose mask consists of bytes."""
    return given["self"].clone(), torch.ones_like(given["self"], dtype=torch.uint8)


def _rrelu(given: Given) -> Any:
    """In place of random slopes their mean, which is the slope in evaluation mode. The operator
    notes the slopes, by which its backward multiplies."""
    if not given["training"]:
        return NotImplemented
    x, noise = given["self"], given["noise"]
    noise.copy_(torch.where(x <= 0, (given["lower"] + given["upper"]) / 2, 1.0))
    return x * noise


def _rrelu_in_place(given: Given) -> Any:
    made = _rrelu(given)
    return made if made is NotImplemented else given["self"].copy_(made)


def _rrelu_with_slopes(given: Given) -> Any:
    noise = given["noise"].clone()
    made = _rrelu({**given, "noise": noise})
    return made if made is NotImplemented else (made, noise)


_TOGETHER: dict[Any, Callable[[Given], Any]] = {
    aten.native_dropout: _undropped,
    aten._fused_dropout: _undropped_by_bytes,
    aten.rrelu_with_noise: _rrelu,
    aten.rrelu_with_noise_: _rrelu_in_place,
    aten.rrelu_with_noise_functional: _rrelu_with_slopes,
}
"""By an operator of several results, or that writes to several tensors: what stands for them."""
