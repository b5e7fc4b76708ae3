"""Descriptions of devices in numbers, by which a plan is made without having the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GB = 10**9
GIB = 2**30
OPTIONAL_RATES = "half_flops_per_s", "full_flops_per_s", "host_bytes_per_s"


@dataclass(frozen=True)
class DeviceSpec:
    """A device, by its limits. The defaults are one core of a server CPU of the 2020s.

    A node takes the longer of its FLOPs over the peak rate and its bytes over the bandwidth (the
    roofline: Williams et al., "Roofline: an insightful visual performance model", 2009). No program
    reaches the figures of a data sheet, so predicted times are too short; their proportions, on
    which a cut depends, suffer less.

    Args:
        name: for tables.
        flops_per_s: FLOPs per second in float32 (and wider), in TF32 where the device has it.
        full_flops_per_s: FLOPs per second in float32 where PyTorch is not set to use TF32, as it is
            not for products of matrices by default; None: as many.
        half_flops_per_s: FLOPs per second in 16 bits; None: as many as in float32.
        bytes_per_s: the bandwidth of its memory.
        memory: bytes of its memory that the model may use; None: no limit.
        link_bytes_per_s: the bandwidth of the link to other devices, one way.
        link_latency_s: seconds that a tensor takes over the link, beside those for its bytes.
        launch_s: seconds that any operator costs, even if it computes nothing.
        host_bytes_per_s: the bandwidth of the link to the host's memory, one way, where activations
            may wait for their backward; None: there is no such memory beside the device's own.
        is_eager: whether stages run there operator by operator, so that a stage can keep what some
            operators give. If they are compiled, it cannot.
    """

    name: str = "cpu core"
    flops_per_s: float = 5e10
    half_flops_per_s: float | None = None
    bytes_per_s: float = 1e10
    memory: float | None = None
    link_bytes_per_s: float = 1e10
    link_latency_s: float = 5e-6
    launch_s: float = 1e-5
    full_flops_per_s: float | None = None
    host_bytes_per_s: float | None = None
    is_eager: bool = True

    def __post_init__(self) -> None:
        rates = "flops_per_s", "bytes_per_s", "link_bytes_per_s", *OPTIONAL_RATES
        for what in rates:
            rate = getattr(self, what)
            is_left_out = what in OPTIONAL_RATES and rate is None
            if not is_left_out and not (isinstance(rate, int | float) and rate > 0):
                raise ValueError(f"{what} is {rate!r}: give a rate above zero")
        for what in ("link_latency_s", "launch_s"):
            seconds = getattr(self, what)
            if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
                raise ValueError(f"{what} is {seconds!r}: give seconds, 0 or more")
        if self.memory is not None and not (
            isinstance(self.memory, int | float) and self.memory > 0
        ):
            raise ValueError(
                f"memory is {self.memory!r}: give bytes, above zero, or None for no limit"
            )

    def with_memory(self, memory: float | None) -> DeviceSpec:
        """The same device with so many bytes for the model; None: no limit."""
        return replace(self, memory=memory)

    @staticmethod
    def of(name: str | DeviceSpec) -> DeviceSpec:
        """The device of this name in :data:`KNOWN`; ``"cpu"``, the name of a lane, is one core. A
        ``DeviceSpec`` is returned unchanged.

        Raises ValueError for an unknown name.
        """
        if isinstance(name, DeviceSpec):
            return name
        name = CPU_CORE.name if name == "cpu" else name
        if name not in KNOWN:
            raise ValueError(
                f"no device {name!r} is known: give one of {', '.join(NAMES)}, or describe it "
                "as DeviceSpec(flops_per_s=..., bytes_per_s=..., memory=...)"
            )
        return KNOWN[name]


CPU_CORE = DeviceSpec()
ACCELERATOR = DeviceSpec("accelerator", 1e13, None, 5e11, None, 1.6e10, 1e-5, 5e-6, None, 1.6e10)
"""An accelerator that is not known by its name, with links as fast as PCI Express 3.0."""

# Peaks of the vendors' data sheets: dense, without sparsity. The links to the host are PCI Express
# 3.0, 4.0 and 5.0, with 16 lanes each.
_V100 = DeviceSpec("v100", 15.7e12, 125e12, 900 * GB, 32 * GIB, 25 * GB, 10e-6, 5e-6)
_A100 = DeviceSpec("a100", 156e12, 312e12, 2039 * GB, 80 * GIB, 300 * GB, 10e-6, 4e-6, 19.5e12)
_H100 = DeviceSpec("h100", 495e12, 989e12, 3350 * GB, 80 * GIB, 450 * GB, 10e-6, 4e-6, 67e12)
_H200 = DeviceSpec("h200", 495e12, 989e12, 4800 * GB, 141 * GB, 450 * GB, 10e-6, 4e-6, 67e12)
KNOWN: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            CPU_CORE,
            DeviceSpec(
                "p40", 11.8e12, None, 346 * GB, 24 * GB, 12 * GB, 10e-6, 5e-6, None, 16 * GB
            ),
            replace(_V100, host_bytes_per_s=16 * GB),
            replace(_A100, host_bytes_per_s=32 * GB),
            replace(_H100, host_bytes_per_s=64 * GB),
            replace(_H200, host_bytes_per_s=64 * GB),
        )
    }
)
NAMES = "cpu", *(name for name in KNOWN if name != CPU_CORE.name)
"""The names to give, as messages list them: a core of a CPU is called as a lane on it is."""


def spec_of(device: torch.device) -> DeviceSpec:
    """The description of a device that is here, without a limit of memory: that of the known device
    whose name is part of its name."""
    if device.type == "cpu":
        return CPU_CORE
    import torch  # here, as the help of the command line, which names known devices, needs none

    try:
        name = str(torch.get_device_module(device).get_device_name(device)).lower()
    except Exception:  # another process's device, or a kind of device that has no such function
        return ACCELERATOR
    known = (spec for spec in KNOWN.values() if spec.name in name)
    return next(known, ACCELERATOR).with_memory(None)
