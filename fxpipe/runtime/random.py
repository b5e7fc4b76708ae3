"""Random numbers that depend on a seed and nothing else, drawn while other lanes draw theirs.

CPU lanes share one default generator, so the numbers that a stage draws would depend on what the
other lanes happen to have drawn. Therefore the caller gives every micro-batch a seed, and a
function that draws random numbers first seeds the default generator from it. Meanwhile it holds a
lock, and at its end it gives the generator its former state. So only functions that draw wait for
each other, and for the loss, which may draw from the default generator without a seed.

There is one lock for all lanes because there is one generator for all of them: ``F.dropout`` takes
no generator, and PyTorch has a default generator for each device, and not for each thread. The lock
is held while the function that draws runs, and not while the rest of its stage computes; on an
accelerator the function only launches kernels meanwhile.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir._torch import pytree

LOCK = threading.RLock()  # held by the thread that reads or changes the default generators
_here = threading.local()  # .alone: whether this thread is within alone()


class alone:
    """Within this context no other thread of ours draws from the default generators.

    It is a class, and no generator: the loss of every micro-batch is computed in it.
    """

    def __enter__(self) -> None:
        LOCK.acquire()
        self._outer, _here.alone = is_alone(), True

    def __exit__(self, *_: object) -> None:
        _here.alone = self._outer
        LOCK.release()


def is_alone() -> bool:
    """Whether this thread is within :func:`alone`. Lanes that draw wait for it then, so it must not
    wait for lanes."""
    return getattr(_here, "alone", False)


def seeds(count: int) -> tuple[int, ...]:
    """Seeds drawn from the default generator, so that ``torch.manual_seed`` determines them all."""
    with LOCK:
        return tuple(torch.randint(2**62, (count,)).tolist())


class HostRandomState:
    """The states of Python's random number generator and of NumPy's, as they are now."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    @property
    def has_changed(self) -> bool:
        """Whether random numbers have been drawn since the states were read."""
        is_same = random.getstate() == self._python
        return not is_same or _comparable(_numpy_state()) != _comparable(self._numpy)

    def put_back(self) -> None:
        """Set the generators to these states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def seed_host(seed: int) -> None:
    """Seed Python's random number generator and NumPy's."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _numpy_state() -> Any:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _comparable(state: Any) -> Any:
    is_legacy = isinstance(state, tuple)
    return tuple(map(_bytes, state)) if is_legacy else repr(state)


def _bytes(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part


class RandomState:
    """The states of the default generators of the CPU and some devices, as they are now.

    Other devices are not asked: to ask one that has never been used would initialise it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        with LOCK:  # which another lane holds while it has changed them
            self.cpu = torch.get_rng_state()
            self.others = [
                (backend, device, backend.get_rng_state(device))
                for device in devices
                if device.type not in ("cpu", "meta")
                for backend in [torch.get_device_module(device)]
            ]

    @property
    def has_changed(self) -> bool:
        """Whether random numbers have been drawn since the states were read."""
        with LOCK:
            return not torch.equal(self.cpu, torch.get_rng_state()) or any(
                not torch.equal(state, backend.get_rng_state(device))
                for backend, device, state in self.others
            )

    def put_back(self) -> None:
        """Set the generators to these states."""
        with LOCK:
            torch.set_rng_state(self.cpu)
            for backend, device, state in self.others:
                backend.set_rng_state(state, device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within this context the generators start from these states. At its end they go back to
        the states that they had when it was entered."""
        with borrowed(device for _, device, _ in self.others):
            self.put_back()
            yield


class GeneratorState:
    """The state of a generator, from which another one can draw the same numbers."""

    def __init__(self, generator: torch.Generator) -> None:
        self.device = generator.device
        self.state = generator.get_state()

    def again(self) -> torch.Generator:
        """A new generator, which draws the numbers that the first one has drawn since."""
        generator = torch.Generator(self.device)
        generator.set_state(self.state)
        return generator


@contextmanager
def borrowed(devices: Iterable[torch.device]) -> Iterator[RandomState]:
    """A context in which no other thread of ours uses the default generators of the CPU and these
    devices. At its end they have the states again that they had before."""
    with alone():
        before = RandomState(devices)
        try:
            yield before
        finally:
            before.put_back()


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """A context in which the default generators of the CPU and these devices start from a seed. At
    its end they have the states again that they had before."""
    with borrowed(devices) as state:
        torch.default_generator.manual_seed(seed)
        for backend, device, _ in state.others:
            with torch.accelerator.device_index(device.index):  # manual_seed is for this one
                backend.manual_seed(seed)
        yield


def derived_seed(seed: int, index: int, number: int = 0) -> int:
    """The seed of a function that draws, computed from the seed of its micro-batch.

    ``index`` is the function's number among those that are given the same seed. ``number`` counts
    the draws of one call of the function, where each draw needs a seed.
    """
    # Not a plain sum: (seed + 1, index) and (seed, index + 1), say, must not give the same seed.
    mixed = seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03 + number * 0x8CB92BA72F3D8DD7
    return mixed % 2**63


class Seeded(nn.Module):
    """A module that takes a seed and then runs a function (or module) that draws random numbers.

    ``index`` is the function's number among those that are given the same seed. Where the seed is
    None, the function draws from the default generator as it stands.
    """

    def __init__(self, function: Callable[..., Any], index: int) -> None:
        super().__init__()
        self.function = function
        self.index = index

    def forward(self, seed: int | None, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, whose random numbers depend on the seed only."""
        if seed is None:
            return self.function(*args, **kwargs)
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        with seeded(derived_seed(seed, self.index), {t.device for t in tensors}):
            return self.function(*args, **kwargs)


class Method:
    """``tensor.name(...)`` as a function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.name)(*args, **kwargs)
