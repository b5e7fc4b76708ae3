"""The class of the zoo's entries, and functions with which an entry is written in a line or two."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    name: str
    library: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    """The keyword arguments of one call, for a batch of that size."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of ``fxpipe.compile`` that this model needs."""
    fast: bool = False
    """Whether it is compiled in every test run."""
    warm: bool = False
    """Whether it has to be called once in train mode and once in eval mode before it is
    compiled."""
    double: bool = False
    """Whether it is compared in double precision, since its sums cancel most digits of single."""
    across: str = ""
    """Why the rows of a batch depend on each other in it, if they do: then it is compiled with
    ``check="warn"``."""


ENTRIES: list[Entry] = []

# ------------------------------------------------------------------------------------------ inputs

VOCABULARY, LENGTH, IMAGE = 64, 8, 32


def tokens(batch: int) -> dict[str, Tensor]:
    """Token ids, and a mask: the last rows are padded at their end."""
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[batch // 2 :, -2:] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)), "attention_mask": mask}


def ids(batch: int) -> dict[str, Tensor]:
    """Token ids alone."""
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH))}


def labelled(batch: int) -> dict[str, Tensor]:
    """Token ids which are to be predicted, so that the model returns its loss."""
    given = tokens(batch)
    return {**given, "labels": given["input_ids"]}


def translated(batch: int) -> dict[str, Tensor]:
    """Token ids for an encoder, and others for its decoder."""
    return {**tokens(batch), "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH - 2))}


def pixels(batch: int) -> dict[str, Tensor]:
    """Images, as transformers names them."""
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE)}


def pictures_and_text(batch: int) -> dict[str, Tensor]:
    """Images with a text for each."""
    return {**tokens(batch), **pixels(batch)}


def sound(batch: int) -> dict[str, Tensor]:
    """Samples of a wave."""
    return {"input_values": torch.randn(batch, 400)}


def tensors(**shapes: tuple[int, ...]) -> Inputs:
    """Noise: for each argument a tensor of the shape, ahead of which stands the batch."""
    return lambda batch: {name: torch.randn(batch, *shape) for name, shape in shapes.items()}


def with_time(**shapes: tuple[int, ...]) -> Inputs:
    """Noise, and for each row a timestep of a diffusion."""
    return lambda batch: {
        **tensors(**shapes)(batch),
        "timestep": torch.randint(1000, (batch,)),
    }


# ----------------------------------------------------------------------------------------- building


def without_dropout(config: Any) -> None:
    """No randomness in the training of a Hugging Face model, nor of models within it."""
    for key, value in vars(config).items():
        if hasattr(value, "model_type"):
            without_dropout(value)
        elif isinstance(value, float) and any(word in key for word in ("drop", "jitter")):
            setattr(config, key, 0.0)
        elif isinstance(value, float) and key.startswith("mask_") and key.endswith("_prob"):
            setattr(config, key, 0.0)  # SpecAugment


def transformer(
    family: str,
    name: str,
    inputs: Inputs,
    fast: bool = False,
    options: dict[str, Any] | None = None,
    warm: bool = False,
    double: bool = False,
    across: str = "",
    **sizes: Any,
) -> None:
    """A model from transformers, by the name of its class."""

    def build() -> nn.Module:
        kind = getattr(importlib.import_module("transformers"), name)
        config = kind.config_class(**sizes)
        without_dropout(config)
        return kind(config)

    ENTRIES.append(
        Entry(
            name, "transformers", family, build, inputs, options or {}, fast, warm, double, across
        )
    )


def of(
    library: str,
    family: str,
    name: str,
    inputs: Inputs,
    kind: str | None = None,
    fast: bool = False,
    **sizes: Any,
) -> None:
    """A model from diffusers or monai, by the name of its class or a name of its own."""
    home = {"monai": "monai.networks.nets"}.get(library, library)

    def build() -> nn.Module:
        model = getattr(importlib.import_module(home), kind or name)(**sizes)
        for module in model.modules():
            for key, value in vars(module).items():
                if isinstance(value, float) and (key == "p" or "drop" in key):
                    setattr(module, key, 0.0)
        return model

    ENTRIES.append(Entry(name, library, family, build, inputs, fast=fast))
