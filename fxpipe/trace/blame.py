"""Blame: errors that name the module that stands in the way of a trace."""

from __future__ import annotations

from torch import nn


class Blamed(Exception):
    """A module cannot be traced; the message says why, and ``module`` is the one to keep whole."""

    def __init__(self, module: nn.Module, message: str) -> None:
        super().__init__(message)
        self.module = module


class NotWhole(Blamed):
    """A module cannot be kept whole; the message says why."""

    def __init__(self, module: nn.Module, why: str) -> None:
        super().__init__(module, f"{type(module).__name__} cannot be kept whole: {why}")
