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
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
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
    """Seed Python's random number generator and NumPy's, which takes seeds of 32 bits."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _numpy_state() -> Any:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _comparable(state: Any) -> Any:
    is_legacy = isinstance(state, tuple)
    return tuple(map(_bytes, state)) if is_legacy else repr(state)


def _bytes(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part


def default_generator(device: torch.device) -> torch.Generator | None:
    """The default generator of a device. None if the device has never been used, or its backend
    does not give it."""
    if device.type == "cpu":
        return torch.default_generator
    if device in _GENERATORS:
        return _GENERATORS[device]
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    if not generators or device.index is None:
        return None
    return _GENERATORS.setdefault(device, generators[device.index])


_GENERATORS: dict[torch.device, torch.Generator] = {}
"""Those that :func:`default_generator` has found. A device keeps its generator."""


class _KeptGenerator:
    """The state that a default generator has now."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._state = self._now()

    def _now(self) -> Any:
        """The state, as a pair of numbers if they are all of it: those of a GPU's generator, which
        are a tenth of the time of a tensor that holds them."""
        if self._generator.device.type not in _COUNTING:
            return self._generator.get_state()
        return self._generator.initial_seed(), self._generator.get_offset()

    @property
    def has_changed(self) -> bool:
        now = self._now()
        is_pair = isinstance(now, tuple)
        return bool(now != self._state) if is_pair else not torch.equal(now, self._state)

    def put_back(self) -> None:
        if isinstance(self._state, tuple):
            seed, offset = self._state
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)
        else:
            self._generator.set_state(self._state)

    def seed(self, seed: int) -> None:
        """Let the generator start from a seed."""
        self._generator.manual_seed(seed)


_COUNTING = frozenset({"cuda"})
"""Types of devices whose generators are counters: a seed and an offset are all of their state."""


class _KeptByBackend:
    """The state of the default generator of a device whose backend does not give the generator."""

    def __init__(self, device: torch.device) -> None:
        self._backend, self._device = torch.get_device_module(device), device
        self._state = self._backend.get_rng_state(device)

    @property
    def has_changed(self) -> bool:
        return not torch.equal(self._state, self._backend.get_rng_state(self._device))

    def put_back(self) -> None:
        self._backend.set_rng_state(self._state, self._device)

    def seed(self, seed: int) -> None:
        with torch.accelerator.device_index(self._device.index):  # manual_seed is for this one
            self._backend.manual_seed(seed)


def _kept(device: torch.device) -> _KeptGenerator | _KeptByBackend:
    generator = default_generator(device)
    return _KeptByBackend(device) if generator is None else _KeptGenerator(generator)


class RandomState:
    """The states of the default generators of the CPU and some devices, as they are now.

    Other devices are not asked: to ask one that has never been used would initialise it.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = [device for device in devices if device.type not in ("cpu", "meta")]
        with LOCK:  # which another lane holds while it has changed them
            self._kept = [_KeptGenerator(torch.default_generator), *map(_kept, self.devices)]

    @property
    def has_changed(self) -> bool:
        """Whether random numbers have been drawn since the states were read."""
        with LOCK:
            return any(each.has_changed for each in self._kept)

    def put_back(self) -> None:
        """Set the generators to these states."""
        with LOCK:
            for each in self._kept:
                each.put_back()

    def seed(self, seed: int) -> None:
        """Let the generators start from a seed."""
        for each in self._kept:
            each.seed(seed)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within this context the generators start from these states. At its end they go back to
        the states that they had when it was entered."""
        with borrowed(self.devices):
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


class borrowed(alone):
    """A context in which no other thread of ours uses the default generators of the CPU and these
    devices. At its end they have the states again that they had before."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = devices

    def __enter__(self) -> None:
        super().__enter__()
        try:
            self._before = self._kept()
        except BaseException:
            super().__exit__()
            raise

    def _kept(self) -> RandomState | _KeptGenerator:
        """The states to which the generators go back."""
        return RandomState(self._devices)

    def __exit__(self, *raised: object) -> None:
        try:
            self._before.put_back()
        finally:
            super().__exit__(*raised)


class seeded(borrowed):
    """A context in which the default generators of the CPU and these devices start from a seed. At
    its end they have the states again that they had before.

    It is a class, and no generator: each dropout of each micro-batch is computed in it.
    """

    def __init__(self, seed: int, devices: Iterable[torch.device]) -> None:
        super().__init__(devices)
        self._seed = seed

    def __enter__(self) -> None:
        super().__enter__()
        try:
            self._before.seed(self._seed)
        except BaseException:
            self.__exit__()
            raise


class _seeded_one(seeded):
    """As :class:`seeded`, for one generator only."""

    def __init__(self, seed: int, generator: torch.Generator) -> None:
        super().__init__(seed, ())
        self._generator = generator

    def _kept(self) -> _KeptGenerator:
        return _KeptGenerator(self._generator)


class seeded_with_the_host(seeded):
    """As :class:`seeded`, with Python's generator and NumPy's, too."""

    def __enter__(self) -> None:
        super().__enter__()
        self._host = HostRandomState()
        seed_host(self._seed)

    def __exit__(self, *raised: object) -> None:
        try:
            self._host.put_back()
        finally:
            super().__exit__(*raised)


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
    None, the function draws from the default generator as it stands. ``on_the_host`` says whether
    it draws with Python's ``random``, or with NumPy, whose generators all lanes share as well.
    """

    def __init__(self, function: Callable[..., Any], index: int, on_the_host: bool = False) -> None:
        super().__init__()
        self.function = function
        self.index = index
        self._is_dropout = _is_dropout(function)
        self.on_the_host = on_the_host
        self._seeded = seeded_with_the_host if on_the_host else seeded

    def of(self, function: Callable[..., Any]) -> Seeded:
        """The same with another function."""
        return Seeded(function, self.index, self.on_the_host)

    def forward(self, seed: int | None, *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, whose random numbers depend on the seed only."""
        if seed is None:
            return self.function(*args, **kwargs)
        own = derived_seed(seed, self.index)
        if self._is_dropout and args and isinstance(args[0], Tensor):
            generator = default_generator(args[0].device)
            if generator is not None:
                with _seeded_one(own, generator):
                    return self.function(*args, **kwargs)
        with self._seeded(own, _devices(args, kwargs)):
            return self.function(*args, **kwargs)


def unseeded(module: Any) -> Any:
    """The function or module that a :class:`Seeded` gives a seed to; anything else as it is."""
    return module.function if isinstance(module, Seeded) else module


def draws_on_the_host(module: nn.Module | None) -> bool:
    """Whether a module, or one within it, has been seen to draw with Python's ``random``, or with
    NumPy: it has an attribute of this name then (:class:`fxpipe.trace.whole.Whole`)."""
    within = () if module is None else module.modules()
    return any(getattr(each, "draws_on_the_host", False) is True for each in within)


_DROPOUT_MODULES = frozenset(
    {
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        *(nn.AlphaDropout, nn.FeatureAlphaDropout),
    }
)
_DROPOUT_FUNCTIONS = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout),
        *(F.feature_alpha_dropout, torch.dropout, torch.feature_dropout),
        *(torch.ops.aten.dropout.default, torch.ops.aten.feature_dropout.default),
        *(torch.ops.aten.native_dropout.default, torch.ops.aten.dropout_.default),
    }
)


def _is_dropout(function: Callable[..., Any]) -> bool:
    """Whether a function is one of PyTorch's dropouts, which draw from the default generator of
    their tensor's device and from no other. Models have many of them, and to keep and seed the
    generator of the CPU as well takes longer than a dropout on a GPU takes the host."""
    if isinstance(function, nn.Module):
        hooks = function._forward_hooks or function._forward_pre_hooks  # they may draw elsewhere
        return type(function) in _DROPOUT_MODULES and not hooks
    return isinstance(function, Hashable) and function in _DROPOUT_FUNCTIONS


def _devices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    """The devices of the tensors among the arguments of a call."""
    leaves = pytree.tree_leaves((args, kwargs))
    return {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}


class Method:
    """``tensor.name(...)`` as a function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.name)(*args, **kwargs)
