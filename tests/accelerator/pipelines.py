"""On several devices a pipeline computes what it computes on the CPU, bit by bit, and a stream
waits for every value that another stream makes for it (``plugin.py`` looks for races after each
test)."""

from __future__ import annotations

import copy
import gc
import sys
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.left_out import LabelCondition, LabelWatch
from fxpipe.schedule import NAMES, named
from tests.accelerator import sim
from tests.accelerator.clocks import Speed, virtual_time
from tests.delays import CALLS, differing
from tests.zoo import MLP, MODELS, Tied, gradients, loop, loss_of, same, step_of_loop

MODELS = MODELS | {"tied": (Tied, lambda batch: (torch.randint(11, (batch, 4)),))}
FOUR = ["sim:0", "sim:1", "sim:2", "sim:3"]
BATCH = 7  # divided by no number of micro-batches here


def here(values):
    """Copies of the tensors on the host."""
    return [None if v is None else v.detach().cpu() for v in values]


def check(name, found, wanted):
    """Assert that the bits are the same. Those of the model "tied" are only close: between devices
    the gradients of its weight are summed in another order."""
    if name == "tied":
        torch.testing.assert_close(here(found), wanted)
    else:
        assert same(here(found), wanted)


def mean_loss(output, target):
    return (torch.sin(output).flatten(1).sum(1) * target).mean()


@contextmanager
def own_streams(devices=FOUR):
    """A context in which this thread computes on new streams, and not on the default ones."""
    with ExitStack() as stack:
        for device in dict.fromkeys(devices):
            stream = torch.Stream(torch.device(device))
            stream.wait_stream(torch.accelerator.current_stream(torch.device(device)))
            stack.enter_context(stream)
        yield
        torch.accelerator.set_device_index(0)
    for device in dict.fromkeys(devices):
        torch.accelerator.synchronize(torch.device(device))


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Every test computes on streams of its own, where more can go wrong than on default ones. The
    host may run ahead without limit: the order must not depend on the waits that save memory."""
    monkeypatch.setattr("fxpipe.runtime.streams.AHEAD", sys.maxsize)
    with own_streams():
        yield


@pytest.fixture
def however_small(monkeypatch):
    """Small tensors move to the host, too, with ``checkpoint="offload"``."""
    monkeypatch.setattr("fxpipe.runtime.checkpointing.offload.SMALL", 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "checkpoint", ["never", "except_last", "selective", "always 1/2", "offload", "offload 1/2"]
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("however_small")
def test_outputs_gradients_and_buffers_are_those_of_the_loop(name, checkpoint):
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


STEPS = [("unet", schedule) for schedule in NAMES]
STEPS += [(name, schedule) for name in ("tied", "resnet") for schedule in ("1f1b", "zbv")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "schedule"), STEPS)
def test_a_step_gives_the_gradients_of_the_loop_in_that_order(name, schedule):
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_a_penalty_on_parameters_is_computed_where_they_are(schedule):

    def penalised(model):
        def loss_fn(output, target):
            squares = [(p * p).sum().to(output.device) for p in model.parameters()]
            return mean_loss(output, target) + 0.1 * sum(squares)

        return loss_fn

    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    reference, devices = copy.deepcopy(model), FOUR[:2]
    with fxpipe.compile(
        model, devices, chunks=4, schedule=schedule, loss_fn=penalised(model)
    ) as pipe:
        pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:1"))
        order = named(schedule, lanes=2, microbatches=4, stages=len(pipe.stages))
        loss_fn = penalised(reference)
        _, wanted = step_of_loop(reference, x, target, pipe, order, 4, loss_fn)
    assert same(here(gradients(model)), wanted)


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "segments"),
    [
        ("zb_h1", "always", 2),
        ("1f1b", "selective", 2),
        ("gpipe", "offload", 1),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in (
                ("1f1b", "except_last", 1),
                ("1f1b", "always", 2),
                ("zbv", "always", 1),
                ("zb_h1", "selective", 1),
                ("1f1b", "offload", 1),
                ("zb_h1", "offload", 1),
                ("looped_bfs", "offload", 1),
            )
        ),
    ],
)
@pytest.mark.usefixtures("however_small")
def test_a_checkpointed_step(schedule, checkpoint, segments):
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin, devices = copy.deepcopy(model), FOUR[:2]
    how = {"chunks": 4, "schedule": schedule, "loss_fn": mean_loss}
    with fxpipe.compile(twin, ["cpu"] * 2, **how) as pipe:
        wanted = pipe.step(*x, target=target)
    how |= {"checkpoint": checkpoint, "checkpoint_segments": segments}
    with fxpipe.compile(model, devices, **how) as pipe:
        loss = pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:1"))
    assert same(loss.cpu(), wanted)
    assert same(here(gradients(model)), gradients(twin))


class WithOthers(nn.Module):
    """Has layers in a plain list, so that their parameters are none of the model's own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.others = [nn.Linear(6, 6), nn.Linear(6, 6)]

    def forward(self, x):
        x = self.first(x)
        for layer in self.others:
            x = layer(x).relu()
        return self.last(x)


def test_parameters_beside_the_models_own_are_moved_to_their_stage_and_trained():
    model, x = WithOthers(), torch.randn(BATCH, 6)
    twin = copy.deepcopy(model)
    expected, _ = loop(twin, (x,), 3)
    with fxpipe.compile(model, FOUR, chunks=3) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        torch.testing.assert_close(output.cpu(), expected)
        for ones, others in zip(model.others, twin.others, strict=True):
            torch.testing.assert_close(here(gradients(ones)), gradients(others))
            assert ones.weight.device.type == "sim"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("home", ["cpu", "sim:0", "sim:5"])
def test_a_batch_may_be_anywhere(home):
    make, inputs = MODELS["unet"]
    model, x = make(), inputs(BATCH)
    expected = loop(copy.deepcopy(model), x, 3)
    with fxpipe.compile(model, FOUR, chunks=3, loss_fn=mean_loss) as pipe:
        for _ in range(2):
            model.zero_grad()
            output = pipe(*(t.to(home) for t in x))
            loss_of(output).backward()
            assert same(output.detach().cpu(), expected[0])
            assert same(here(gradients(model)), expected[1])
        pipe.step(*(t.to(home) for t in x), target=torch.randn(BATCH).to(home))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("home", "run"),
    [
        ("pinned", "step"),
        ("pinned", "forward"),
        ("sim:5", "forward"),
        ("sim:0", "step"),
        ("pinned", "graph module"),
        ("sim:5", "graph module"),
    ],
)
def test_a_batch_may_be_overwritten_as_soon_as_the_call_returns(home, run):
    def at_home(tensor):
        return tensor.pin_memory() if home == "pinned" else tensor.to(home)

    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin, how = copy.deepcopy(model), {"chunks": 3, "schedule": "1f1b", "loss_fn": mean_loss}
    own, own_target = [at_home(t) for t in x], at_home(target)
    with (
        fxpipe.compile(model, FOUR, **how) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
    ):
        if run == "step":
            pipe.step(*own, target=own_target)
            cpu.step(*x, target=target)
        else:
            pipe.prepare(*own)
            output = (pipe if run == "forward" else pipe.graph_module)(*own)
            loss_of(cpu(*x)).backward()
        for tensor in (*own, own_target):
            tensor.zero_()
        if run != "step":
            loss_of(output).backward()
        assert same(here(gradients(model)), gradients(twin))


def test_the_gradient_of_a_batch_comes_back_to_it():
    make, inputs = MODELS["unet"]
    model, (x,) = make(), inputs(5)
    a, b = x.clone().requires_grad_(), x.to("sim:0").requires_grad_()
    loop(copy.deepcopy(model), (a,), 2)
    with fxpipe.compile(model, FOUR, chunks=2) as pipe:
        loss_of(pipe(b)).backward()
    assert b.grad.device == b.device and same(a.grad, b.grad.cpu())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["unet", "tied"])
def test_the_callers_streams_may_be_the_default_ones(name):
    make, inputs = MODELS[name]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin, how = copy.deepcopy(model), {"chunks": 4, "schedule": "1f1b", "loss_fn": mean_loss}
    default = [torch.sim.default_stream(device) for device in FOUR]
    with ExitStack() as stack:
        for stream in default:
            stack.enter_context(stream)
        with (
            fxpipe.compile(model, FOUR, **how) as pipe,
            fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
        ):
            loss_of(pipe(*(t.to("sim:0") for t in x))).backward()
            loss_of(cpu(*x)).backward()
            pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:3"))
            cpu.step(*x, target=target)
        check(name, gradients(model), gradients(twin))


def test_gradients_remain_while_a_model_is_compiled_for_another_call():
    make, inputs = MODELS["mlp"]
    model, x = make(), inputs(BATCH)
    with fxpipe.compile(model, FOUR, chunks=3) as pipe:
        loss_of(pipe(*(t.to("sim:0") for t in x))).backward()
        before = [p.grad for p in model.parameters()]
        model.eval()
        pipe.prepare(*(t.to("sim:0") for t in x))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_emitted_graph_module_runs_by_itself(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(BATCH)
    expected = loop(copy.deepcopy(model), x, 3)
    with fxpipe.compile(model, FOUR, chunks=3, example_inputs=x, checkpoint="except_last") as pipe:
        output = pipe.graph_module(*(t.to("sim:0") for t in x))
        loss_of(output).backward()
    assert same(output.detach().cpu(), expected[0])
    check(name, gradients(model), expected[1])


def test_what_goes_wrong_in_a_lane_leaves_all_streams_as_they_were():
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    expected = loop(copy.deepcopy(model), x, 3)
    with fxpipe.compile(model, FOUR, chunks=3, loss_fn=mean_loss) as pipe:
        pipe.step(*x, target=target)
        before = [torch.accelerator.current_stream(device) for device in FOUR]
        for run in (pipe, lambda wrong: pipe.step(wrong, target=target)):
            with pytest.raises(RuntimeError, match="to have 3 channels, but got 1"):
                run(x[0][:, :1])
        assert before == [torch.accelerator.current_stream(device) for device in FOUR]
        model.zero_grad()
        output = pipe(*x)
        loss_of(output).backward()
    assert same(output.detach().cpu(), expected[0])
    assert same(here(gradients(model)), expected[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_the_host_never_waits_for_a_value_of_a_device(checkpoint):
    """Also in the first call of stages that are run again, and that write to buffers."""
    make, inputs = MODELS["resnet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH, device="sim:1")
    x = tuple(t.to("sim:0") for t in x)
    how = {"chunks": 3, "checkpoint": checkpoint, "schedule": "1f1b", "loss_fn": mean_loss}
    with fxpipe.compile(model, FOUR[:2], **how) as pipe:
        pipe.prepare(*x)
        with virtual_time(Speed(kernel_s=1.0)), sim.no_waits():
            mean_loss(pipe(*x), target).backward()
        for _ in range(2):  # what these steps mean is checked, for which the host waits
            pipe.step(*x, target=target)
        with sim.no_waits():
            pipe.step(*x, target=target)


class OnTheCurrentDevice(nn.Module):
    """It names no index, as code that was written for one device does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x)
        return x + twos_like(x)


@torch.fx.wrap
def twos_like(x):
    return torch.full(x.shape, 2.0, device="sim")


@pytest.mark.covering(1)
@pytest.mark.parametrize("chunks", [1, 3])  # one micro-batch runs in the caller's thread
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_runs_with_its_device_as_the_current_one(checkpoint, chunks):
    torch.accelerator.set_device_index(0)
    model = nn.Sequential(OnTheCurrentDevice(), OnTheCurrentDevice()).to("sim:0")
    x = torch.randn(BATCH, 6, device="sim:0")
    how = {"partition": ["1.linear"], "loss_fn": mean_loss, "checkpoint": checkpoint}
    with fxpipe.compile(model, FOUR[:2], chunks=chunks, **how) as pipe:
        pipe(x).sum().backward()
        pipe.step(x, target=torch.randn(BATCH))
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_pipeline_is_not_captured_in_a_graph(lanes, monkeypatch):
    x = torch.randn(BATCH, 12)
    with fxpipe.compile(MLP(depth=4), FOUR[:lanes], chunks=2) as pipe:
        pipe(x)
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.sim, "is_current_stream_capturing", lambda: True, raising=False)
            with pytest.raises(RuntimeError, match="while a graph is captured on sim:0"):
                pipe(x)
        pipe(x)


def test_stages_may_share_a_device():
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin = copy.deepcopy(model)
    devices = ["sim:0", "sim:1", "sim:0", "sim:1"]
    how = {"chunks": 4, "schedule": "1f1b", "loss_fn": mean_loss}
    with (
        fxpipe.compile(model, devices, **how) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
    ):
        loss_of(pipe(*(t.to("sim:0") for t in x))).backward()
        loss_of(cpu(*x)).backward()
        pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:1"))
        cpu.step(*x, target=target)
    assert same(here(gradients(model)), gradients(twin))


def test_lanes_of_the_cpu_and_of_devices_work_together():
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin = copy.deepcopy(model)
    how = {"chunks": 4, "schedule": "1f1b", "loss_fn": mean_loss}
    with (
        fxpipe.compile(model, ["cpu", "sim:1", "cpu", "sim:2"], **how) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
    ):
        loss_of(pipe(*x)).backward()
        loss_of(cpu(*x)).backward()
        pipe.step(*x, target=target)
        cpu.step(*x, target=target)
    assert same(here(gradients(model)), gradients(twin))


class Recurrent(nn.Module):
    """Layers of which PyTorch asks the device for whole cells."""

    def __init__(self, kind):
        super().__init__()
        self.first = kind(6, 8, batch_first=True)
        self.second = kind(8, 8, batch_first=True, num_layers=2)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x, _ = self.first(x)
        x, _ = self.second(x)
        return self.last(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, checkpoint):
    model, x = Recurrent(kind), torch.randn(BATCH, 5, 6)
    expected = loop(copy.deepcopy(model), (x,), 3)
    how = {"chunks": 3, "checkpoint": checkpoint, "partition": ["second"]}
    with fxpipe.compile(model, FOUR[:2], **how) as pipe:
        output = pipe(x.to("sim:0"))
        loss_of(output).backward()
    torch.testing.assert_close(here([output]), [expected[0]])
    torch.testing.assert_close(here(gradients(model)), expected[1])


class Noisy(nn.Module):
    """Draws random numbers in every stage."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh()) for _ in range(4)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_dropout_depends_on_the_seed_and_on_nothing_else(checkpoint):
    def run(devices, home):
        torch.manual_seed(1)
        model, x = Noisy(), torch.randn(BATCH, 8)
        target = torch.randn(BATCH)
        found = []
        how = {"chunks": 3, "checkpoint": checkpoint, "loss_fn": mean_loss, "schedule": "1f1b"}
        with fxpipe.compile(model, devices, **how) as pipe:
            torch.manual_seed(2)
            output = pipe(x.to(home))
            loss_of(output).backward()
            found += [output, *gradients(model)]
            model.zero_grad()
            found += [pipe.step(x.to(home), target=target.to(home)), *gradients(model)]
        return here(found)

    first, second = run(FOUR, "sim:0"), run(FOUR, "sim:0")
    assert same(first, second) and same(first, run(["cpu"] * 4, "cpu"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_steps_each_stage_on_its_device(kind):
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin, how = copy.deepcopy(model), {"chunks": 4, "schedule": "1f1b", "loss_fn": mean_loss}
    optimizer = kind(model.parameters(), lr=0.1, foreach=False)
    twins = kind(twin.parameters(), lr=0.1, foreach=False)
    with (
        fxpipe.compile(model, FOUR, **how) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
    ):
        for _ in range(3):
            pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:3"), optimizer=optimizer)
            cpu.step(*x, target=target, optimizer=twins)
            assert same(here(model.parameters()), list(twin.parameters()))
            optimizer.zero_grad()
            twins.zero_grad()


def test_training_by_hand():
    make, inputs = MODELS["resnet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    twins = torch.optim.AdamW(twin.parameters(), lr=0.1, foreach=True)
    with (
        fxpipe.compile(model, FOUR, chunks=3) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, chunks=3) as cpu,
    ):
        for _ in range(3):
            mean_loss(pipe(*(t.to("sim:0") for t in x)), target.to("sim:3")).backward()
            mean_loss(cpu(*x), target).backward()
            for each in optimizer, twins:
                each.step()
                each.zero_grad()
        assert same(here(model.parameters()), list(twin.parameters()))
        assert same(here(model.buffers()), list(twin.buffers()))
        model.eval(), twin.eval()
        for off in torch.no_grad, torch.inference_mode:
            with off():
                assert same(pipe(*(t.to("sim:0") for t in x)).cpu(), cpu(*x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_autocast_is_the_callers(checkpoint):
    make, inputs = MODELS["unet"]
    model, (x,) = make(), inputs(BATCH)
    twin, how = copy.deepcopy(model), {"chunks": 3, "checkpoint": checkpoint}
    with (
        fxpipe.compile(model, FOUR, **how) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
    ):
        with torch.autocast("sim", torch.bfloat16):
            output = pipe(x.to("sim:0"))
        with torch.autocast("cpu", torch.bfloat16):
            expected = cpu(x)
        assert output.dtype == torch.bfloat16 and same(output.detach().cpu(), expected.detach())
        loss_of(output).backward()
        loss_of(expected).backward()
    assert same(here(gradients(model)), gradients(twin))


def test_gradients_may_be_scaled():
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin, how = copy.deepcopy(model), {"chunks": 4, "schedule": "1f1b", "loss_fn": mean_loss}
    results = []
    for net, devices, kind in (model, FOUR, "sim"), (twin, ["cpu"] * 4, "cpu"):
        scaler = torch.amp.GradScaler(kind, init_scale=64.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with fxpipe.compile(net, devices, **how) as pipe:
            loss = pipe.step(
                *(t.to(devices[0]) for t in x), target=target.to(devices[-1]), scaler=scaler
            )
            scaler.step(optimizer)
            scaler.update()
        results.append([loss.cpu(), *here(net.parameters())])
    assert same(*results)


def test_batch_norm_may_be_deferred():
    make, inputs = MODELS["resnet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    twin = copy.deepcopy(model)
    how = {"chunks": 3, "deferred_batch_norm": True, "loss_fn": mean_loss}
    with (
        fxpipe.compile(model, FOUR, **how) as pipe,
        fxpipe.compile(twin, ["cpu"] * 4, **how) as cpu,
    ):
        loss_of(pipe(*(t.to("sim:0") for t in x))).backward()
        loss_of(cpu(*x)).backward()
        pipe.step(*(t.to("sim:0") for t in x), target=target.to("sim:3"))
        cpu.step(*x, target=target)
    assert same(here(gradients(model)), gradients(twin))
    assert same(here(model.buffers()), list(twin.buffers()))


def test_a_step_can_be_measured_and_costs_too():
    make, inputs = MODELS["unet"]
    model, x, target = make(), inputs(BATCH), torch.randn(BATCH)
    x = tuple(t.to("sim:0") for t in x)
    how = {"chunks": 3, "loss_fn": mean_loss, "schedule": "1f1b", "costs": "measured"}
    with fxpipe.compile(model, FOUR, example_inputs=x, **how) as pipe:
        timeline = pipe.measure(*x, target=target.to("sim:3"), rounds=2)
        lanes = {span.lane for span in timeline.spans}
        assert len(lanes) == 4 and timeline.makespan > 0
        assert all(span.start <= span.end for span in timeline.spans)
        assert "sim:3" in pipe.report()


def test_without_devices_all_that_there_are_are_taken():
    model = MLP(depth=9)
    with fxpipe.compile(model, chunks=2) as pipe:
        pipe(torch.randn(4, 12))
        assert [str(s.device) for s in pipe.stages] == [f"sim:{i}" for i in range(8)]


def test_memory_is_free_again_and_checkpoints_need_less_of_it():
    def peak(checkpoint):
        torch.manual_seed(0)
        torch.accelerator.reset_peak_memory_stats(0)
        model, x = MLP(depth=16), torch.randn(256, 12)
        before = torch.accelerator.memory_allocated(0)
        with fxpipe.compile(model, FOUR[:2], chunks=8, checkpoint=checkpoint) as pipe:
            loss_of(pipe(x)).backward()
        del pipe, model
        gc.collect()
        assert torch.accelerator.memory_allocated(0) == before
        return torch.accelerator.max_memory_allocated(0) - before

    gc.collect()
    assert 0 < peak("always") < 0.7 * peak("never")


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_compiled_stages_give_the_bits_of_the_stages_as_they_are(schedule, checkpoint):
    """Also in halves: the backward of an accelerator runs in a thread of the autograd engine."""
    x, target = torch.randn(BATCH, 12), torch.randn(BATCH)
    found = {}
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = MLP().to("sim")
        told = {"chunks": 3, "schedule": schedule, "checkpoint": checkpoint}
        with fxpipe.compile(
            model, FOUR[:2], loss_fn=mean_loss, stage_backend=backend, **told
        ) as pipe:
            loss = pipe.step(x.to("sim"), target=target.to("sim:1"))
            assert "runs as it is" not in str(pipe.report())
        found[backend] = here([loss, *gradients(model)])
    assert same(found["aot_eager"], found[None])


@pytest.mark.filterwarnings("ignore:stage_. is not compiled")
def test_stages_run_as_they_are_where_the_backend_does_not_know_the_kind_of_device():
    """Inductor has no code for this accelerator, nor graphs of it (of which CUDA's are one kind);
    the report says so for each stage, and the bits are those of the stages as they are."""
    x, target = torch.randn(BATCH, 12), torch.randn(BATCH)
    found = []
    for backend in (None, {"backend": "inductor", "mode": "reduce-overhead"}):
        torch.manual_seed(0)
        model = MLP().to("sim")
        told = {"chunks": 3, "loss_fn": mean_loss, "stage_backend": backend}
        with fxpipe.compile(model, FOUR[:2], **told) as pipe:
            loss = pipe.step(x.to("sim"), target=target.to("sim:1"))
            report = str(pipe.report())
        found.append(here([loss, *gradients(model)]))
    assert same(*found)
    assert "stages are compiled by inductor (reduce-overhead)" in report
    assert all(f"stage_{i} runs as it is: " in report for i in range(2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("home", ["cpu", "sim:0", "sim:1"])
def test_what_would_help_is_predicted_with_parameters_that_are_on_several_devices(home, tracer):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(home)
    x, y = (torch.randn(8, 8, device=home) for _ in range(2))
    options = {"chunks": 2, "tracer": tracer, "loss_fn": nn.functional.mse_loss}
    with fxpipe.compile(model, FOUR[:2], **options) as pipe:
        pipe.step(x, target=y)
        assert "chunks=" in str(pipe.explain()).partition("What would help")[2]


def test_labels_left_out_are_looked_at_once_the_device_has_an_answer():
    """The host does not wait for it: a mini-batch is told of from the second such one on."""
    uneven, even = torch.tensor([1, 2, 3, -1]).to("sim"), torch.tensor([1, -1, 3, -1]).to("sim")
    watch = LabelWatch([LabelCondition("eq", -1)])
    met = [watch.meets([(labels, 0)], (2, 2)) for labels in (even, uneven, even, uneven, uneven)]
    assert met == [False, False, False, True, False]


def test_the_labels_that_a_loss_is_checked_with_are_looked_at_at_once():
    uneven = torch.tensor([1, 2, 3, -1]).to("sim")
    watch = LabelWatch([LabelCondition("eq", -1)])
    met = [watch.meets([(uneven, 0)], (2, 2), wait) for wait in (True, False, False)]
    assert met == [True, False, False]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "way"),
    [("tied", CALLS[0]), ("tied", CALLS[1]), ("transformer", "zb_h1"), ("skips", "1f1b")],
)
def test_whichever_device_is_slow_the_bits_are_the_same(name, way):
    """Also those of a weight that two devices use, though autograd has a thread for each."""
    assert differing(FOUR[:2], name, way, range(3)) == []
