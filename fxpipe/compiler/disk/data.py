"""Values as JSON, and back. What JSON has no word for is an object with one key, which names the
kind: ``{"dtype": "float32"}``. Nothing in a file is evaluated, imported or unpickled."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.compiler.disk.errors import NotKept, Unusable

_SIMPLE = bool, int, str, type(None)
_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""Kinds of values that are attributes of ``torch``, and known by their names there."""
_LARGEST = 2**26  # bytes of a constant


def packed(value: Any) -> Any:
    """A value as JSON. Nodes of a graph go by their names.

    Raises NotKept for a value of another kind than those that graphs usually have.
    """
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [packed(value.real), packed(value.imag)]}
    if isinstance(value, torch.Size):
        return {"size": list(map(packed, value))}
    if type(value) is slice:
        return {"slice": [packed(each) for each in (value.start, value.stop, value.step)]}
    if type(value) is range:
        return {"range": [value.start, value.stop, value.step]}
    if type(value) is frozenset:
        return {"set": sorted(map(packed, value))}
    if type(value) is tuple:
        return {"tuple": list(map(packed, value))}
    if isinstance(value, list) and type(value).__name__ in ("list", "immutable_list"):
        return list(map(packed, value))
    if isinstance(value, dict) and type(value).__name__ in ("dict", "immutable_dict"):
        return {"dict": [[packed(key), packed(each)] for key, each in value.items()]}
    if value is ...:
        return {"ellipsis": True}
    if type(value) is torch.device:
        return {"device": str(value)}
    for kind, of in _NAMED.items():
        if type(value) is of:
            return {kind: str(value).removeprefix("torch.")}
    raise NotKept(f"its graph has a {type(value).__name__}, which a file cannot hold")


def unpacked(data: Any, node: Callable[[str], Any] = lambda name: None) -> Any:
    """The value that :func:`packed` has made JSON of. ``node`` gives the node of a name.

    Raises Unusable for anything else.
    """
    if type(data) in (*_SIMPLE, float):
        return data
    if type(data) is list:
        return [unpacked(each, node) for each in data]
    if type(data) is not dict or len(data) != 1:
        raise Unusable("it has a value of no known kind")
    ((kind, given),) = data.items()
    if kind == "node":
        return node(str(given))
    if kind == "float" and given in ("inf", "-inf", "nan"):
        return float(given)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return torch.device(str(given))
    if kind in _NAMED:
        value = vars(torch).get(str(given))
        if type(value) is _NAMED[kind]:
            return value
    if kind in _MADE and type(given) is list:
        return _MADE[kind](*(unpacked(each, node) for each in given))
    if kind == "dict" and type(given) is list:
        return {unpacked(key, node): unpacked(each, node) for key, each in given}
    raise Unusable(f"it has a value of no known kind, {kind!r}")


_MADE: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "size": lambda *sizes: torch.Size(sizes),
    "slice": slice,
    "range": range,
    "set": lambda *values: frozenset(values),
    "tuple": lambda *values: values,
}


def packed_tensor(tensor: Tensor) -> Any:
    """A tensor that is a constant of a graph, with its values, as JSON."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    if not is_plain or tensor.is_meta or tensor.requires_grad or tensor.nbytes > _LARGEST:
        raise NotKept("its graph has a constant tensor of a kind that a file cannot hold")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {
        "dtype": packed(tensor.dtype),
        "device": packed(tensor.device),
        "shape": list(tensor.shape),
        "bytes": base64.b64encode(flat.numpy().tobytes()).decode(),
    }


def unpacked_tensor(data: Any) -> Tensor:
    """The tensor that :func:`packed_tensor` has made JSON of."""
    dtype, shape = unpacked(data["dtype"]), [int(size) for size in data["shape"]]
    content = bytearray(base64.b64decode(data["bytes"], validate=True))
    if not content:
        return torch.empty(shape, dtype=dtype, device=unpacked(data["device"]))
    tensor = torch.frombuffer(content, dtype=dtype).view(shape)
    return tensor.to(unpacked(data["device"]))
