"""A device type "sim", to test what needs streams and several devices, and to prove its order.

Memory is the host's, and all is done at once and by the operators of the CPU, so that values are
bit by bit those of the CPU. But each operator is charged to the stream that is current, and a
detector (``races.h``) sees to it that whatever is used has been waited for, and that memory is not
given away while another stream uses it: what a device would do wrong in one run of a thousand is
found in every one. :func:`races` says what it has found.

It has to be loaded ahead of the first backward of a process: then the autograd engine starts its
threads, one for each device that there is.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from tests.accelerator.sim.build import built

NAME = "sim"


def load() -> None:
    """Build the device, once for all processes, and make it PyTorch's accelerator."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


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
