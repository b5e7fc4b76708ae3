import pytest
import torch

from fxpipe.runtime import streams
from fxpipe.runtime.streams import (
    CALLER,
    COMPUTE,
    COPY,
    current,
    device_of,
    link,
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
    x = torch.ones(1)
    streams.made((x,), stream(name))
    streams.await_made(stream(name), (x,))
    streams.await_callers(stream(name), x)
    streams.keep(stream(name), (x,))
    assert link(torch.device("cpu"), torch.device("meta")) == (None, None)


needs_accelerator = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator"
)


def device(index=0):
    return torch.device(torch.accelerator.current_accelerator().type, index)


@needs_accelerator
def test_computation_is_on_the_current_stream():
    compute = stream(stream_name(device(), COMPUTE))
    assert compute == torch.accelerator.current_stream(device())
    assert stream(stream_name(device(), COPY)) is None, "links have it: there are many"
    other = torch.Stream(device())
    assert current([device(), torch.device("cpu"), device()]) == [compute]
    with on(other):
        assert torch.accelerator.current_stream(device()) == other
        assert current([device()]) == [other]
    assert torch.accelerator.current_stream(device()) == compute


@needs_accelerator
def test_each_direction_has_a_link_and_so_have_inputs():
    cpu = torch.device("cpu")
    (there, none), (other, back) = link(device(), cpu), link(cpu, device())
    assert none is None and other is None
    assert there == link(device(), cpu, of_inputs=False)[0], "the same each time"
    assert len({there, back, link(cpu, device(), of_inputs=True)[1]}) == 3


@needs_accelerator
def test_a_stream_that_waits_for_a_value_uses_it_after_it_has_been_made():
    compute, other = stream(stream_name(device(), COMPUTE)), torch.Stream(device())
    x = torch.ones(1000, device=device())
    streams.made((x,), compute)
    streams.await_made(other, (x,))
    with on(other):
        y = x * 2
    streams.made((y,), other)
    view = y.view_as(y)
    streams.pass_on(y, view)
    streams.await_made(compute, (view,))
    assert view.sum().item() == 2000
