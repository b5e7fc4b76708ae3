"""Makes the pass "cost" of the kind that the option ``costs=`` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxpipe.ir.cost import Cost
from fxpipe.ir.devices import CPU_CORE, DeviceSpec
from passes.cost.analytic import ADAM, AnalyticCost
from passes.cost.given import GivenCost, Profile
from passes.cost.measured import MeasuredCost

Costs = str | Path | Profile | Mapping[str, float | Cost]
"""Where costs come from: "analytic", "measured", a :class:`Profile` or the path of a saved one, or
seconds by name of node or module."""

KINDS = (
    'give "analytic", "measured", the path of a saved profile, a Profile, or a dict from names to '
    "seconds"
)


def cost_pass(
    costs: Costs,
    inputs: tuple[Any, ...],
    *,
    device: torch.device | None = None,
    spec: DeviceSpec = CPU_CORE,
    optimizer_states: float = ADAM,
    chunks: int = 1,
    training: bool = True,
    in_dims: tuple[int | None, ...] | None = None,
    threads: int | None = None,
) -> AnalyticCost | MeasuredCost | GivenCost:
    """The cost pass that ``costs`` asks for.

    ``inputs``, ``in_dims``, ``device`` and ``threads`` are for measuring only; ``spec`` describes
    the device, ``chunks`` is the number of micro-batches, and ``training`` says whether there are
    backwards.
    """
    if isinstance(costs, str) and costs == "analytic":
        return AnalyticCost(spec, optimizer_states, chunks, training)
    if isinstance(costs, str) and costs == "measured":
        return MeasuredCost(
            inputs,
            device,
            spec=spec,
            optimizer_states=optimizer_states,
            chunks=chunks,
            training=training,
            in_dims=in_dims,
            threads=threads,
        )
    if isinstance(costs, str | Path):
        if not Path(costs).exists():
            raise ValueError(f"costs is {str(costs)!r}: {KINDS}")
        costs = Profile.load(costs)
    if not isinstance(costs, Profile | Mapping):
        raise ValueError(f"costs is {costs!r}: {KINDS}")
    return GivenCost(costs, spec, optimizer_states, chunks, training)
