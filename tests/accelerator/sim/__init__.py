"""A device type "sim", on which code for streams and several devices is tested without any device.

Its memory is that of the host, and the CPU's operators run at once, so that values are bit by bit
those of the CPU. But each operator is charged to the stream that is current, and a detector
(``races.h``) checks that every use of a tensor waits for the work that made it, and that no memory
is given away while another stream uses it. So an error that a real device would show in one run of
a thousand is found in every run. :func:`races` returns what the detector has found.

The device has to be loaded before the first backward of a process: at that backward the autograd
engine starts its threads, one for each device that there is.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.accelerator.sim.build import built
from tests.accelerator.threads import watch

NAME = "sim"


def load() -> None:
    """Build the device, once for all processes, and make it PyTorch's accelerator."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    watch()


def races() -> list[str]:
    """What has been found since the last :func:`clear`, one text for each race."""
    found: list[str] = torch.ops.sim.reports()
    return found


def clear() -> None:
    """Forget what has been found."""
    torch.ops.sim.clear()


def keep_stacks(whether: bool) -> None:
    """Whether the Python stack of every operator is kept, so that a race says where both of its
    ends were called. It takes time."""
    torch.ops.sim.keep_stacks(whether)


@contextmanager
def no_waits() -> Iterator[None]:
    """A context in which what makes the host wait for a device raises RuntimeError, in all threads:
    a value that the host asks for, a copy that it waits for. As
    ``torch.cuda.set_sync_debug_mode("error")`` it lets the host wait for a stream or an event."""
    torch.ops.sim.let_host_wait(False)
    try:
        yield
    finally:
        torch.ops.sim.let_host_wait(True)


def _module() -> types.ModuleType:
    """``torch.sim``: what PyTorch and its users ask a device's module for."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    accelerator = torch.accelerator

    def generator(device: Any = None) -> torch.Generator:
        if not isinstance(device, int):
            device = torch.device(NAME if device is None else device).index
        index = accelerator.current_device_index() if device is None else device
        return module.default_generators[index]

    def manual_seed_all(seed: int) -> None:
        for each in module.default_generators:
            each.manual_seed(seed)

    def default_stream(device: Any) -> torch.Stream:
        like = accelerator.current_stream(torch.device(device))
        return torch.Stream(
            stream_id=0, device_index=like.device_index, device_type=like.device_type
        )

    module.default_generators = tuple(
        torch.ops.sim.default_generator(index) for index in range(torch.ops.sim.device_count())
    )
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = torch.ops.sim.device_count
    module.current_device = accelerator.current_device_index
    module.set_device = accelerator.set_device_index
    module.synchronize = accelerator.synchronize
    module.current_stream = accelerator.current_stream
    module.default_stream = default_stream
    module.Stream, module.Event = torch.Stream, torch.Event
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module  # type: ignore[no-any-return]
