import pytest
import torch

from fxpipe.runtime import streams
from fxpipe.runtime.streams import (
    CALLER,
    COMPUTE,
    COPY,
    current,
    device_of,
    on,
    stream,
    stream_name,
)


def test_a_name_says_device_and_role():
    assert stream_name("cuda:1", COPY) == "cuda:1/copy"
    assert device_of("cuda:1/copy") == torch.device("cuda", 1)
    assert device_of(CALLER) is None


@pytest.mark.parametrize("name", ["cpu/compute", "cpu/copy", "meta/copy", CALLER])
def test_what_has_no_streams_has_none_and_work_goes_on(name):
    assert stream(name) is None
    with on(stream(name)):
        pass
    streams.make_wait(stream(name), stream(name), (torch.ones(1),))
    streams.keep(stream(name), (torch.ones(1),))


needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator"
)


@needs_accelerator
def test_computation_is_on_the_current_stream_and_copies_are_on_another():
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    compute, copy = (stream(stream_name(device, role)) for role in (COMPUTE, COPY))
    assert compute == torch.accelerator.current_stream(device)
    assert copy != compute and copy == stream(stream_name(device, COPY))
    assert current([device, torch.device("cpu"), device]) == [compute]
    with on(copy):
        assert torch.accelerator.current_stream(device) == copy
        assert current([device]) == [copy]
    assert torch.accelerator.current_stream(device) == compute
    x = torch.ones(1000, device=device)
    with on(copy):
        streams.make_wait(copy, compute, (x,))
        y = x * 2
    streams.make_wait(compute, copy, (y,))
    assert y.sum().item() == 2000
