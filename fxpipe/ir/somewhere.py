"""Where a model on "meta" is: it is examined as if it were on the CPU.

::

    real, on the CPU ─┐
                      ├─ trace ── graph ── alias, rows, cost ── plan
    on "meta" ────────┘        fakes, all of which say that they are on the CPU

A model may compute in another way on each kind of device, and "meta" is none of those that it is
written for. There is no saying which one it will be on, and a kind that is not present cannot be
asked what it has. The CPU is there, and it is where a model is that has been built without a device
in mind: a model on "meta" so gives the same graph, costs and cut as the one that has values. The
front ends and the passes have to agree in this, as a graph of operators for one kind of device may
not run on another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.ir._torch import FakeTensorMode, TensorDescriber
from fxpipe.ir.few_steps import made_at_once

CPU = torch.device("cpu")


def seen_on(device: torch.device) -> torch.device:
    """The device that a tensor says it is on where a model is examined."""
    return CPU if device.type == "meta" else device


class Somewhere(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake tensor mode in which a tensor on "meta" gets a fake that says it is on the CPU.

    This matters for operators, too: "meta" lacks kernels that real devices have (attention that
    never stores the whole matrix of its weights), it has some that the CPU lacks, and it may give
    results other strides than real devices do.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fake_tensor_converter.meta_converter.describer = _Describer()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None:
            kwargs = {**kwargs, "device": seen_on(device)}
        if (made := made_at_once(self, func, args, kwargs)) is not None:
            return made
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Describer(TensorDescriber):
    """Describes the tensors of which a mode makes fakes."""

    def describe_tensor(self, t: Tensor, **options: Any) -> Any:
        found = super().describe_tensor(t, **options)
        device = seen_on(found.device)
        return found if device == found.device else replace(found, device=device)
