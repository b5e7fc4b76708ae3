"""The machine that a part runs on: CUDA GPUs, or the simulated accelerator in a dry run.

Parts call functions that only CUDA has through this file, and all others through
``torch.accelerator``, which is the same for both machines.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from tests.gpu.part import Part, Skip

T = TypeVar("T")
MOST = 4  # devices that a dry run looks at


def machine_for(part: Part, dry: bool) -> Machine:
    """The machine, for a part.

    Raises Skip if there is none, or if it has fewer devices than the part needs.
    """
    machine = _simulated() if dry else _cuda()
    if machine.count < part.devices:
        raise Skip(f"it needs {part.devices} GPUs, and there are {machine.count}")
    return machine


def _simulated() -> Machine:
    from tests.accelerator import sim
    from tests.accelerator.sim.build import compiler

    if compiler() is None:
        raise Skip("the simulated accelerator needs a C++ compiler: g++, or CXX=...")
    sim.load()
    torch.set_num_threads(1)
    return Machine("sim", min(MOST, torch.accelerator.device_count()))


def _cuda() -> Machine:
    if not torch.cuda.is_available():
        build = "is built without CUDA" if torch.version.cuda is None else "sees no GPU"
        raise Skip(f"torch {torch.__version__} {build}")
    return Machine("cuda", torch.cuda.device_count())


class Machine:
    """A machine with ``count`` devices of one kind, ``"cuda"`` or ``"sim"``."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count
        torch.manual_seed(0)

    @property
    def is_real(self) -> bool:
        """Whether figures mean something."""
        return self.kind == "cuda"

    def pick(self, real: T, dry: T) -> T:
        """A size: the real one, or that of a dry run."""
        return real if self.is_real else dry

    def name(self, index: int = 0) -> str:
        """The name of a device."""
        return f"{self.kind}:{index}"

    @property
    def all(self) -> list[str]:
        """The names of all devices."""
        return [self.name(index) for index in range(self.count)]

    @property
    def two(self) -> list[str]:
        """Two different devices if there are two, else one and the host."""
        return self.all[:2] if self.count > 1 else [self.name(), "cpu"]

    # ---------------------------------------------------------------------------------------- time

    def synchronize(self) -> None:
        """Wait until all devices have done what they have been given."""
        for index in range(self.count):
            torch.accelerator.synchronize(index)

    def seconds(self, run: Callable[[], object], rounds: int = 7) -> float:
        """The median time of a call, its work on the devices included, after two to warm up."""
        taken = []
        for _ in range(self.pick(rounds, 1) + self.pick(2, 1)):
            self.synchronize()
            begin = time.perf_counter()
            run()
            self.synchronize()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[self.pick(2, 1) :])

    # ------------------------------------------------------------------------------------- streams

    def sleep(self, stream: torch.Stream, seconds: float) -> None:
        """Let a stream do nothing for about so many seconds, after what it has been given."""
        with stream:
            if self.is_real:
                torch.cuda._sleep(int(seconds * 2e9))  # cycles of a clock of about 2 GHz
            else:
                torch.ops.sim.work(torch.zeros(1, device=stream.device), seconds)

    @contextmanager
    def own_streams(self, devices: list[str]) -> Iterator[None]:
        """A context in which this thread computes on new streams, on each of the devices."""
        places = [torch.device(d) for d in dict.fromkeys(devices) if d != "cpu"]
        before = [torch.accelerator.current_stream(place) for place in places]
        index = torch.accelerator.current_device_index()
        try:
            for place, default in zip(places, before, strict=True):
                stream = torch.Stream(place)
                stream.wait_stream(default)
                torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(index)
            yield
        finally:
            for default in before:
                torch.accelerator.set_stream(default)
            torch.accelerator.set_device_index(index)
            self.synchronize()

    @contextmanager
    def streams_used(self) -> Iterator[dict[tuple[str, int], torch.Stream]]:
        """A context that collects the streams that are current at some time within it, by device
        and number: those of the running thread, and what any thread makes current."""
        found: dict[tuple[str, int], torch.Stream] = {}

        def add(stream: torch.Stream) -> None:
            found[str(stream.device), stream.stream_id] = stream

        def seen(stream: torch.Stream) -> None:
            add(stream)
            real(stream)

        real = torch.accelerator.set_stream
        for index in range(self.count):
            add(torch.accelerator.current_stream(torch.device(self.kind, index)))
        with patch.object(torch.accelerator, "set_stream", seen):
            yield found

    @contextmanager
    def no_synchronization(self) -> Iterator[None]:
        """A context in which what makes the host wait for a GPU is an error, in all threads."""
        if not self.is_real:
            from tests.accelerator import sim

            with sim.no_waits():
                yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def races(self) -> list[str]:
        """The races that the simulated accelerator has found since the last call, each in short."""
        if self.is_real:
            return []
        from tests.accelerator import sim

        found = sim.races()
        sim.clear()
        return [" ".join(race.split("\n")[:3]) for race in found]

    # -------------------------------------------------------------------------------------- memory

    def pinned(self, tensor: Tensor) -> Tensor | None:
        """A copy in pinned memory of the host; None where there is none."""
        try:
            return tensor.pin_memory()
        except (RuntimeError, NotImplementedError):
            if self.is_real:
                raise
            return None

    def forget_peaks(self) -> None:
        """Count the most memory from now on."""
        for index in range(self.count):
            torch.accelerator.reset_peak_memory_stats(index)

    def allocated(self, index: int = 0) -> int:
        """The bytes that tensors hold now."""
        return torch.accelerator.memory_allocated(index)

    def most_allocated(self, index: int = 0) -> int:
        """The most bytes that tensors have held."""
        return torch.accelerator.max_memory_allocated(index)

    def most_reserved(self, index: int = 0) -> int:
        """The most bytes that the allocator has taken from the device."""
        return torch.accelerator.max_memory_reserved(index)

    # --------------------------------------------------------------------------------------- traces

    def profiler(self) -> Any:
        """A profiler of PyTorch's that sees the lanes' threads and the GPUs."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.is_real:
            activities.append(ProfilerActivity.CUDA)
        config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        return profile(activities=activities, experimental_config=config)

    def deterministic(self) -> Any:
        """A context in which operators choose kernels that give the same bits each time, where
        there are such."""
        return _deterministic() if self.is_real else nullcontext()


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
