"""The models that the zoo compiles: real ones, from three libraries, made small.

An entry says how to build a model with random weights and how to make a batch for it. A model is
changed in one way only: its dropout is switched off, so that two runs of it can be compared. The
configurations are the libraries' defaults except for sizes; caches, attention kernels and the kind
of output are left at their defaults.
"""

from __future__ import annotations

import importlib

from tests.models.registry.entry import ENTRIES, Entry

__all__ = ["Entry", "entries"]

KINDS = (  # in the order of the table
    *("text", "vision", "detection", "multimodal", "audio", "series"),
    *("diffusion", "medical", "plain"),
)
for name in KINDS:
    importlib.import_module(f"{__name__}.{name}")


def entries() -> dict[str, Entry]:
    """All of them by name."""
    named = {entry.name: entry for entry in ENTRIES}
    assert len(named) == len(ENTRIES), "two models of one name"
    return named
