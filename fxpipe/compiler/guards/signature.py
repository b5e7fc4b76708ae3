"""The signature of a call, by which it is looked up fast which program has served such a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.compiler.guards.calls import autocast_of
from fxpipe.ir.exact import exact
from fxpipe.ir.structure import same_objects


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The signature of a call, and the tensors in it. Two calls of equal signature pass the same
    guards on the call.

    Only a call of plain tensors, numbers and strings has a signature, so that the look-up takes
    less time than the smallest model. For any other call the signature is None, and every guard is
    checked.
    """
    parts = [*args, *kwargs.values()]
    tensors = [part for part in parts if type(part) is Tensor]
    if not all(isinstance(part, _CONSTANTS) or type(part) is Tensor for part in parts):
        return None, tensors
    if any(vars(tensor) for tensor in tensors):  # of which a forward may ask
        return None, tensors
    if any(tensor.is_nested for tensor in tensors):
        return None, tensors  # to ask one for its shape is an error
    kinds = [
        (part.shape, part.dtype, part.requires_grad)
        if isinstance(part, Tensor)
        else (type(part), exact(part))
        for part in parts
    ]
    same = same_objects(tensors)
    modes = autocast_of(tensors), torch.is_grad_enabled()
    return (modes, same, len(args), *kwargs, *kinds), tensors


_CONSTANTS = (type(None), bool, int, float, str)
