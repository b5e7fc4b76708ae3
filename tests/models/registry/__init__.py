"""The models that the zoo compiles: real ones, from three libraries, made small.

An entry says how to build a model with random weights and how to make a batch for it. Nothing else
is done to a model but that its dropout is off, so that two ways to run it can be compared. The
configurations are the libraries' own but for sizes; caches, attention kernels and what is returned
are left as they are by default.
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
