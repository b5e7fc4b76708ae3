"""On several devices a pipeline computes what it computes on the CPU, bit by bit, and whatever one
stream makes for another is waited for (``plugin.py`` looks for races after each test)."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.schedule import NAMES, named
from tests.accelerator import sim
from tests.zoo import MODELS, MLP, Tied, gradients, loop, loss_of, same, step_of_loop

MODELS = {k: v for k, v in MODELS.items() if k != "transformer"} | {"tied": (Tied, lambda batch: (torch.randint(11, (batch, 4)),))}
FOUR = ["sim:0", "sim:1", "sim:2", "sim:3"]
BATCH = 7  # divided by no number of micro-batches here


def here(values):
    """On the host."""
    return [None if v is None else v.detach().cpu() for v in values]


def check(name, found, wanted):
    """The same bits; but a tied weight's gradients are summed in another order between devices."""
    if name == "tied":
        torch.testing.assert_close(here(found), wanted)
    else:
        assert same(here(found), wanted)


def mean_loss(output, target):
    return (torch.sin(output).flatten(1).sum(1) * target).mean()


@contextmanager
def own_streams(devices=FOUR):
    """As one who computes on streams other than the default ones."""
    with ExitStack() as stack:
        for device in dict.fromkeys(devices):
            stream = torch.Stream(torch.device(device))
            stream.wait_stream(torch.accelerator.current_stream(torch.device(device)))
            stack.enter_context(stream)
        yield
        torch.accelerator.set_device_index(0)
    for device in dict.fromkeys(devices):
        torch.accelerator.synchronize(torch.device(device))


@pytest.fixture(params=["default streams", "own streams"])
def streams(request):
    with own_streams() if request.param == "own streams" else ExitStack():
        yield


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_buffers_are_those_of_the_loop(name, checkpoint, streams):
    make, inputs = MODELS[name]
    model, x = make(), inputs(BATCH)
    reference = copy.deepcopy(model)
    expected = loop(reference, x, 3)
    with fxpipe.compile(model, FOUR, chunks=3, checkpoint=checkpoint) as pipe:
        output = pipe(*(t.to("sim:0") for t in x))
        loss_of(output).backward()
        assert same(output.detach().cpu(), expected[0])
        check(name, gradients(model), expected[1])
        assert same(here(model.buffers()), list(reference.buffers()))
        assert output.device == torch.device("sim:3")
        for stage in pipe.stages:
            own = {*stage.module.parameters(), *stage.module.buffers()}
            assert {t.device for t in own} <= {stage.device} or name == "tied"


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", ["unet", "tied", "resnet"])
def test_a_step_gives_the_gradients_of_the_loop_in_that_order(name, schedule, streams):
    make, inputs = MODELS[name]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    reference, devices = copy.deepcopy(model), FOUR[:2]
    with fxpipe.compile(model, devices, chunks=4, schedule=schedule, loss_fn=mean_loss) as pipe:
        loss = pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:1"))
        order = named(schedule, lanes=2, microbatches=4, stages=len(pipe.stages))
        wanted = step_of_loop(reference, x, target, pipe, order, 4, mean_loss)
        torch.testing.assert_close(loss.cpu(), wanted[0], rtol=1e-6, atol=1e-6)
        check(name, gradients(model), wanted[1])
        assert same(here(model.buffers()), list(reference.buffers()))
