import pytest

from fxpipe import DeviceSpec
from fxpipe.ir.devices import KNOWN, NAMES


def test_known_devices_go_by_their_names():
    assert DeviceSpec.of("p40").memory == 24 * 10**9
    assert all(KNOWN[name].name == name for name in KNOWN)


def test_a_lane_on_the_cpu_is_planned_as_a_core():
    assert DeviceSpec.of("cpu") == DeviceSpec.of("cpu core") == DeviceSpec()


def test_the_names_to_give_are_known():
    assert NAMES[:2] == ("cpu", "p40") and all(map(DeviceSpec.of, NAMES))


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"no device 'p4' is known: give one of cpu, p40, "):
        DeviceSpec.of("p4")


@pytest.mark.parametrize("what", ["flops_per_s", "bytes_per_s", "link_bytes_per_s", "memory"])
def test_what_no_device_has_is_refused(what):
    with pytest.raises(ValueError, match=f"{what} is 0"):
        DeviceSpec(**{what: 0})


def test_memory_may_be_lifted():
    assert DeviceSpec.of("p40").with_memory(None).memory is None
