"""Load a checkpoint into a model, or initialise the model, each tensor on the device of its stage.

::

    meta.weight  ── in the checkpoint ──────────── memory on its device, then load_state_dict
    meta.inv_freq ─ not saved by its module ────── memory on its device, then the module's method
    meta.bias ───── missing in the checkpoint ──── stays on "meta", and is reported as missing

The model's own ``load_state_dict`` reports keys that are missing, unexpected or of another shape.
It also runs the hooks by which modules rename the keys of old checkpoints.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.loading.files import stored_tensors
from fxpipe.loading.initialise import Init, initialised
from fxpipe.loading.storage import Storage, without_values

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A checkpoint: a path, as :func:`stored_tensors` takes it, or a dictionary of tensors by name."""

Homes = Mapping[str, torch.device]
"""The device of each tensor, by name."""


def load(
    model: nn.Module,
    source: Source,
    homes: Homes,
    *,
    strict: bool,
    assign: bool,
    init: Init | None,
    names: Collection[str] | None = None,
) -> Any:
    """Load a checkpoint, one tensor at a time; see :meth:`fxpipe.Pipeline.load`.

    Args:
        homes: the devices on which tensors that are on "meta" get memory; tensors that it does not
            name stay on "meta". Empty if the model has no tensors on "meta".
        names: the names of the tensors to load, where others belong to other processes: those are
            neither read nor missed. None: all.
    """
    saves = model.state_dict(keep_vars=True)
    own = {name: value for name, value in saves.items() if isinstance(value, Tensor)}
    stored = dict(source) if isinstance(source, Mapping) else stored_tensors(source)
    _fill_in_ties(stored, own)
    if names is not None:  # names that the model does not have stay, since hooks may rename them
        stored = {
            name: value for name, value in stored.items() if name in names or name not in saves
        }
    given = {id(own[name]) for name in stored if name in own}
    saved = {id(tensor) for tensor in own.values()}
    unset = _unset(model, homes)
    to_make = {
        name: tensor
        for name, tensor in unset.items()
        if id(tensor) not in given and (init is not None or id(tensor) not in saved)
    }
    to_load = {name: tensor for name, tensor in unset.items() if id(tensor) in given}
    dtypes = {}
    if assign:
        of = {id(own[name]): stored[name].dtype for name in stored if name in own}
        dtypes = {name: of[id(tensor)] for name, tensor in to_load.items()}
        for name, tensor in own.items():
            if name in stored and not tensor.is_meta and tensor.dtype != stored[name].dtype:
                tensor.data = tensor.data.to(stored[name].dtype)
    # If an old checkpoint lacks a buffer, its module may put the buffer's present value into the
    # state dict, as batch norms do with the number of batches. So the buffer needs a value for the
    # time of loading; it goes back to "meta" if the module does not do that.
    lacking = {
        name: tensor
        for name, tensor in unset.items()
        if name not in to_make and name not in to_load and not isinstance(tensor, nn.Parameter)
    }
    memory, provisional = Storage(homes), Storage(homes)
    missing: set[int] = set(map(id, lacking.values()))
    with torch.inference_mode(False):
        try:
            left = initialised(model, to_make, memory, init)
            if left:
                raise RuntimeError(_not_made(model, left, init))
            initialised(model, lacking, provisional, None)
            provisional.take_back()
            memory.give(to_load, dtypes)
            if names is None:
                result = model.load_state_dict(stored, strict=strict)
            else:
                result = _load_a_part(model, stored, names, strict)
            missing = {id(own[name]) for name in result.missing_keys if name in own}
            return result
        finally:
            memory.take_back()
            provisional.take_back(lambda tensor: id(tensor) in missing)


def materialize(model: nn.Module, homes: Homes, init: Init | None, seed: int | None = None) -> None:
    """Initialise the tensors that are on "meta"; see :meth:`fxpipe.Pipeline.materialize`.

    Args:
        homes: the devices on which they get memory; tensors that it does not name stay on "meta".
        seed: as for :func:`fxpipe.loading.initialise.initialised`.
    """
    memory = Storage(homes)
    with torch.inference_mode(False):
        try:
            left = initialised(model, _unset(model, homes), memory, init, seed)
        finally:
            memory.take_back()
    if left:
        raise RuntimeError(_not_made(model, left, init))


def _unset(model: nn.Module, homes: Homes) -> dict[str, Tensor]:
    """The tensors on "meta" that are to get memory, by name."""
    unset = without_values(model) if homes else {}
    return {name: tensor for name, tensor in unset.items() if name in homes}


def _load_a_part(
    model: nn.Module, stored: dict[str, Any], names: Collection[str], strict: bool
) -> Any:
    """Load the tensors with these names, and return the missing keys among them and the unexpected
    keys.

    Raises RuntimeError, if ``strict``, for keys that are missing or unexpected.
    """
    with warnings.catch_warnings():
        # Modules add what an old checkpoint lacks, such as the number of batches of a batch norm.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")
        result = model.load_state_dict(stored, strict=False)
    missing = [name for name in result.missing_keys if name in names]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"the checkpoint lacks {missing}, which this process needs of "
            f"{type(model).__name__}, and has {result.unexpected_keys}, which the model does not "
            "have: give strict=False to load what fits"
        )
    return type(result)(missing, result.unexpected_keys)


def _fill_in_ties(stored: dict[str, Any], own: Mapping[str, Tensor]) -> None:
    """If the model has one tensor under several names, and the checkpoint has it under one of them,
    add it to ``stored`` under all of them. Files of safetensors hold tied weights only once."""
    names = {id(own[name]): name for name in stored if name in own}
    for name, tensor in own.items():
        if name not in stored and id(tensor) in names:
            stored[name] = stored[names[id(tensor)]]


def _not_made(model: nn.Module, left: list[str], init: Init | None) -> str:
    others = f" and {len(left) - 1} others" if len(left) > 1 else ""
    owner = model.get_submodule(left[0].rpartition(".")[0])
    if init is not None:
        why = "init has not written to it"
    else:
        why = (
            f"no checkpoint has it, {type(owner).__name__} has no reset_parameters() that writes "
            "to it, and the model has no _init_weights(module) that does"
        )
    return (
        f'{left[0]}{others} of {type(model).__name__} is on the device "meta", and {why}: give '
        "init=, a function of a module that sets its parameters and buffers; or build the model "
        "with this tensor on the CPU"
    )
