"""The key of a compilation: a digest of all that it depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compiler.disk.digest import Digest
from fxpipe.compiler.disk.versions import versions
from fxpipe.compiler.guards.calls import autocast_of
from fxpipe.compiler.options import Options
from fxpipe.ir.structure import Structure
from fxpipe.trace.premises import value_of

FORMAT = 1
"""The version of the format of cache files. A file of another version is not found."""

Attributes = Sequence[tuple[str, str]]
"""Attributes of modules: the path of each module in the model, and the name."""

_DECIDED_LATER = {
    "verbose",
    "observer",
    "call",
    "passes",
    "stage_backend",
    "cache",
    "loss_fn",
    "example_target",
    "memory",
    "optimizer",
    "optimizer_states",
    "optimizer_update",
    "choice",
}
"""Options on which neither the model graph nor its meaning depends."""


def digest_of(
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    options: Options,
    settings: Mapping[str, Any],
) -> Digest:
    """The digest of a model, of a call, and of how the call is to be compiled.

    Args:
        inputs: the arguments of the call, as ``model.forward`` takes them.
        settings: what else decides, beside the options.

    Raises:
        NotKept: if the model, or the call, depends on what cannot be compared between processes.
    """
    digest = Digest(model)
    digest.add("the versions", (FORMAT, *versions()))
    digest.add("the settings of PyTorch", _settings_of_torch())
    digest.add("the settings", dict(settings))
    digest.add_model(model)
    for field in dataclasses.fields(options):
        if field.name not in _DECIDED_LATER:
            digest.add(f"the option {field.name}", getattr(options, field.name))
    digest.add("the option loss_fn", options.loss_fn is None)
    _add_call(digest, inputs)
    return digest


def digest_of_attributes(model: nn.Module, attributes: Attributes) -> Digest:
    """The digest of the values that these attributes of a model's modules have.

    Raises:
        NotKept: if a value cannot be compared between processes.
    """
    digest, found = Digest(model), cache(model.get_submodule)  # a module has several attributes
    for path, name in attributes:
        value = value_of(found(path), name)
        digest.add(f"{path}.{name}".removeprefix("."), value)
    return digest


def _add_call(digest: Digest, inputs: Any) -> None:
    tensors, structure = Structure.of(inputs)
    for path, tensor in zip(structure.paths(), tensors, strict=True):
        digest.add_tensor(f"the input {path}", tensor)
    digest.add("the inputs", (structure.same, str(structure.spec), structure.paths()))
    digest.add("the inputs", structure.constants())
    digest.add("autocast", autocast_of([t for t in tensors if isinstance(t, Tensor)]))


def _settings_of_torch() -> dict[str, Any]:
    attention: Any = torch.backends.cuda
    onednn: Any = torch.backends.mkldnn
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": onednn.is_available() and onednn.enabled,
        "attention": (
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
        ),
    }
