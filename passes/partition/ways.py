"""The changes that would make a model fit into the devices' memory, the smallest change first, for
the messages of pass "partition" and of plans.

::

    never, 2 devices      no                     it would fit with checkpoint="except_last" or with
    except_last           yes ─────────────────▶ 3 devices
    3 devices             yes ─────────────────▶

Each change is tried, so that the message names only changes which are known to suffice. Changed
settings are tried first, one alone and then several together; then more devices; then fewer
additional devices together with changed settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product
from typing import Any

MORE = 4  # at most this many times the present number of devices is tried


@dataclass(frozen=True)
class Change:
    """A change to what the user has asked for: other settings, or another number of devices (None
    if that stays)."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    devices: int | None = None

    def __str__(self) -> str:
        parts = [
            f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in self.settings.items()
        ]
        if self.devices is not None:
            parts.append(f"{self.devices} devices")
        return " and ".join(parts)


def ways_out(
    fits: Callable[[Change], bool],
    settings: Mapping[str, Sequence[Any]],
    devices: int,
    is_over: Callable[[], bool] = lambda: False,
) -> str:
    """The changes that would make the model fit, as a sentence for the error message.

    Args:
        fits: tells whether the model fits after a change.
        settings: for each setting the values to try in place of the present one, the mildest first.
        devices: the present number of devices.
        is_over: whether the time for this is over, so that nothing more is tried. To cut a large
            model for many more devices takes minutes, which nobody waits for to read an error.
    """

    def fits_in_time(change: Change) -> bool:
        return not is_over() and fits(change)

    found = _of_settings(fits_in_time, settings)
    fewest = MORE * devices + 1
    for chosen in _kinds(settings):
        if not any(way.settings.keys() <= set(chosen) for way in found if way.devices is None):
            change = Change({name: settings[name][0] for name in chosen})
            count = _count(fits_in_time, change, devices, fewest)
            if count < fewest:
                found.append(Change(change.settings, count))
                fewest = count
    if found:
        return f"it would fit with {_listed([str(way) for way in found])}"
    if is_over():
        return (
            "no change that makes it fit has been found in the time that is taken for advice: give "
            "devices with more memory, or more of them"
        )
    tried = ", ".join([*settings, f"up to {MORE * devices} devices"])
    return f"nothing that was tried makes it fit ({tried}): give devices with more memory"


def _kinds(settings: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """All subsets of the settings' names, smaller ones first."""
    return [c for size in range(len(settings) + 1) for c in combinations(settings, size)]


def _of_settings(
    fits: Callable[[Change], bool], settings: Mapping[str, Sequence[Any]]
) -> list[Change]:
    """The changes of settings alone, with the present number of devices, that make the model fit. A
    change that contains a smaller sufficient one is left out."""
    found: list[Change] = []
    for chosen in _kinds(settings)[1:]:
        if not any(way.settings.keys() <= set(chosen) for way in found):
            values = product(*(settings[name] for name in chosen))
            changes = (Change(dict(zip(chosen, some, strict=True))) for some in values)
            found += islice(filter(fits, changes), 1)
    return found


def _count(fits: Callable[[Change], bool], change: Change, devices: int, fewest: int) -> int:
    """The smallest number of devices, above ``devices`` and below ``fewest``, with which the model
    fits after a change; ``fewest`` if there is none.

    Devices are added by 1, 2, 4 and so on until the model fits, and the last step is bisected. So
    hardly more devices are tried than are needed: where the model fits, the whole plan is made,
    which takes the longer the more devices there are.
    """
    low, high, added = devices, fewest, 1
    while low < fewest - 1:
        count = min(devices + added, fewest - 1)
        if fits(Change(change.settings, count)):
            high = count
            break
        low, added = count, 2 * added
    else:
        return fewest
    while high - low > 1:
        middle = (low + high) // 2
        if fits(Change(change.settings, middle)):
            high = middle
        else:
            low = middle
    return high


def _listed(words: Sequence[str]) -> str:
    *all_but_last, last = words
    return f"{', with '.join(all_but_last)} or with {last}" if all_but_last else last
