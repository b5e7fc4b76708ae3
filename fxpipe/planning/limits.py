"""How much memory each lane may take, as a user says it or as an accelerator says it of itself.

::

    memory="20GiB"                 each lane
    memory=["40GiB", "20GiB"]      one figure for each lane
    memory="h100"                  as much as a known device has
    memory=None                    what is free on an accelerator; no limit on the CPU
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fxpipe.ir.devices import KNOWN
from fxpipe.ir.tensors import memory_bytes, memory_of

_UNITS = {
    **{unit: 1024**i for i, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
    **{unit: 1000**i for i, unit in enumerate(("kB", "MB", "GB", "TB"), 1)},
}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}

Memory = str | float | Sequence[str | float | None] | None
"""A figure for all lanes, one for each, or None."""


def bytes_of(given: object) -> float:
    """The bytes that a user has given: a number, text such as "20GiB" or "400 MiB", or the name of
    a known device.

    Raises ValueError for anything else.
    """
    if isinstance(given, int | float) and not isinstance(given, bool) and given > 0:
        return float(given)
    if isinstance(given, str):
        spec = KNOWN.get(given)
        if spec is not None and spec.memory is not None:
            return float(spec.memory)
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]+)\s*", given, re.IGNORECASE)
        if found and found[2].lower() in _BY_LOWER and float(found[1]) > 0:
            return float(found[1]) * float(_BY_LOWER[found[2].lower()])
    named = ", ".join(repr(name) for name, spec in KNOWN.items() if spec.memory is not None)
    raise ValueError(
        f'memory is {given!r}: give bytes above zero, text such as "20GiB" or "400MiB", or the '
        f"name of a known device ({named})"
    )


def limits_of(given: Memory, lanes: int) -> tuple[float | None, ...]:
    """The bytes that each of ``lanes`` lanes may take; None for a lane without a limit.

    Raises ValueError for what is no figure, or where there is not one for each lane.
    """
    if given is None or isinstance(given, str | int | float):
        return (None if given is None else bytes_of(given),) * lanes
    if not isinstance(given, Sequence) or len(given) != lanes:
        raise ValueError(
            f"memory is {given!r}: give one figure for all of the {lanes} lanes, or a list with "
            "one for each"
        )
    return tuple(None if each is None else bytes_of(each) for each in given)


def free_memory(devices: Sequence[torch.device], model: nn.Module) -> tuple[float | None, ...]:
    """The bytes of each lane's device that a model may take: what is free there, what PyTorch has
    reserved and does not use, and what the model and its gradients take already. Lanes on one
    device have equal parts. None for a CPU, and for a device that does not say how much is free."""
    used = {
        device: torch.accelerator.memory_allocated(device) - _held(model, device)
        for device in set(devices)
        if _reachable(device) is not None
    }
    return _shared_out(devices, lambda device, most: most - used[device])


def reachable_memory(devices: Sequence[torch.device]) -> tuple[float | None, ...]:
    """The bytes of each lane's device that this process has taken or can take. Lanes on one device
    have equal parts. None for a CPU, and for a device that does not say how much is free."""
    return _shared_out(devices, lambda device, most: most)


def _shared_out(
    devices: Sequence[torch.device], part: Callable[[torch.device, float], float]
) -> tuple[float | None, ...]:
    """A part of what is reachable on each lane's device, divided by the number of its lanes."""
    most = {device: _reachable(device) for device in set(devices)}
    return tuple(
        None if (found := most[device]) is None else part(device, found) / devices.count(device)
        for device in devices
    )


def _reachable(device: torch.device) -> float | None:
    if device.type in ("cpu", "meta"):
        return None
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        return float(free + torch.accelerator.memory_reserved(device))
    except (RuntimeError, NotImplementedError, AttributeError):  # its backend does not tell
        return None


def _held(model: nn.Module, device: torch.device) -> int:
    """The bytes of a device that the tensors of a model and their gradients take."""
    own: list[Any] = [*model.parameters(), *model.buffers()]
    own += [tensor.grad for tensor in own if tensor.is_leaf and tensor.grad is not None]
    return sum({memory_of(t): memory_bytes(t) for t in own if t.device == device}.values())
