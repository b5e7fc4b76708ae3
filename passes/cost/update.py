"""What the step of an optimizer takes, for pass "cost" and for plans."""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.devices import DeviceSpec


@dataclass(frozen=True)
class Update:
    """What the step of an optimizer takes.

    Attributes:
        memory: the bytes that it needs only while it runs, for each byte of the parameters, where
            it steps all of them at once.
        bytes: the bytes that it reads and writes, for each byte of the parameters.
        operators: how many operators it launches: for all parameters, or for each.
        is_at_once: whether it steps all parameters at once where it can, as on accelerators.
    """

    memory: float = 0.0
    bytes: float = 0.0
    operators: int = 0
    is_at_once: bool = True

    def seconds(self, size: float, count: int, device: DeviceSpec) -> float:
        """Seconds for parameters of so many bytes on a device. ``count`` is their number.

        All operators move about as much. So either all of them take longer than it takes to launch
        them, or none does.
        """
        is_at_once = self.is_at_once and device.host_bytes_per_s
        launches = self.operators * (min(count, 1) if is_at_once else count)
        return max(self.bytes * size / device.bytes_per_s, launches * device.launch_s)


NO_UPDATE = Update()  # of an optimizer that takes nothing
