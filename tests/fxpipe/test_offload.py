"""``checkpoint="offload"``: what stages save for their backward waits in the host's memory, and
nothing else changes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import ops
from fxpipe.planning.estimates import stage_memory
from fxpipe.runtime.checkpointing import offload
from fxpipe.schedule import NAMES
from tests.zoo import MODELS, gradients, loop, loss_of, mean_loss, same


@pytest.fixture(autouse=True)
def however_small():
    """Let small tensors move, too."""
    with mock.patch.object(offload, "SMALL", 1):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_calls_give_the_bits_of_the_loop(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(7)
    own, reference = copy.deepcopy(model), copy.deepcopy(model)
    expected = loop(reference, x, 3)
    with fxpipe.compile(own, ["cpu"] * 3, chunks=3, checkpoint="offload") as pipe:
        output = pipe(*x)
        loss_of(output).backward()
        assert pipe.graph_module.graph.find_nodes(op="call_function", target=ops.offloaded)
    assert same(output.detach(), expected[0])
    assert same(gradients(own), expected[1])
    assert same(list(own.buffers()), list(reference.buffers()))


def stepped(name, schedule, checkpoint, rows=8, **options):
    """The loss of two steps, the gradients and the buffers; and the graph of the step."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make()
    x, target = inputs(rows), torch.randn(rows)
    options = {"chunks": 4, "loss_fn": mean_loss, **options}
    with fxpipe.compile(
        model, ["cpu"] * 2, schedule=schedule, checkpoint=checkpoint, **options
    ) as pipe:
        losses = [pipe.step(*x, target=target) for _ in range(2)]
        return [losses, gradients(model), list(model.buffers())], pipe.step_graph.graph


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", NAMES)
def test_steps_of_any_schedule_give_the_bits_of_those_that_keep_all(schedule):
    kept, _ = stepped("unet", schedule, "never")
    moved, graph = stepped("unet", schedule, "offload")
    assert same(kept, moved)
    left = graph.find_nodes(op="call_function", target=ops.offload)
    back = graph.find_nodes(op="call_function", target=ops.reload)
    assert len(left) == len(back)
    assert schedule not in ("gpipe", "zb_h1", "looped_bfs") or left


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["resnet", "transformer"])
@pytest.mark.parametrize(
    "mode", ["offload", ["offload", "always"], ["never", "offload"], ["offload 1/2", "offload 2/3"]]
)
def test_each_stage_may_have_its_own_mode(name, mode):
    assert same(stepped(name, "gpipe", "never")[0], stepped(name, "gpipe", mode)[0])


def test_of_a_part_that_moves_so_many_bytes_are_on_the_host():
    """A stage saves its input and two outputs of tanh, all of one size, so that parts are exact."""
    model = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(64, 64), nn.Tanh())))
    x, sent = torch.randn(32, 64), dict[str, int]()
    for mode in ("offload", "offload 1/3", "offload 2/3"):
        moved = []
        with (
            mock.patch.object(offload.Block, "send", counting(moved)),
            fxpipe.compile(model, ["cpu"] * 2, chunks=4, checkpoint=mode, partition=["4"]) as pipe,
        ):
            pipe(x).sum().backward()
        sent[mode] = sum(moved)
    assert sent["offload"]
    assert sent["offload 1/3"] * 3 == sent["offload"]
    assert sent["offload 2/3"] * 3 == sent["offload"] * 2


def counting(moved):
    """``Block.send``, which notes the bytes in a list."""
    send = offload.Block.send

    def counted(block, link):
        moved.append(block.size)
        send(block, link)

    return counted


def test_uneven_micro_batches_and_fewer_of_them():
    for rows in (7, 2, 1):
        kept, _ = stepped("unet", "gpipe", "never", rows)
        assert same(kept, stepped("unet", "gpipe", "offload", rows)[0])


def test_compiled_stages_move_what_they_save():
    kept, _ = stepped("unet", "gpipe", "never", stage_backend="aot_eager")
    assert same(kept, stepped("unet", "gpipe", "offload", stage_backend="aot_eager")[0])


def test_dropout_draws_the_same_numbers():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    x, found = torch.randn(8, 8), []
    for mode in ("never", "offload"):
        model.zero_grad()
        torch.manual_seed(1)
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=4, schedule="gpipe", loss_fn=mean_loss, checkpoint=mode
        ) as pipe:
            loss = pipe.step(x, target=torch.zeros(8))
        found.append([loss, gradients(model)])
    assert same(*found)


def test_a_schedule_may_say_when_they_come_back():
    order = """
        0F0 0F1 0R0 0F2 0B0 0F3 0R1 0R2 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1F3 1B1 1B2 1B3
    """
    given = fxpipe.schedule.Schedule.from_text(order)
    kept, _ = stepped("unet", given.recomputing([0, 0]), "never", chunks=None)
    moved, graph = stepped("unet", given, "offload", chunks=None)
    assert same(kept, moved)
    names = [node.name for node in graph.nodes if node.name.startswith(("reload", "forward"))]
    own = [name for name in names if "_s0_" in name]
    assert own.index("reload_s0_mb0") < own.index("forward_s0_mb2")
    assert own[-1] == "reload_s0_mb3", "which the schedule does not have"


def test_a_failed_step_leaves_the_pipeline_usable():
    class Fails(nn.Module):
        def forward(self, x):
            if not torch.is_grad_enabled():
                return x
            return Failing.apply(x)

    class Failing(torch.autograd.Function):
        fails = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if Failing.fails:
                raise RuntimeError("on purpose")
            return grad

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Fails(), nn.Linear(8, 8))
    x, y = torch.randn(8, 8), torch.zeros(8)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=4, schedule="gpipe", loss_fn=mean_loss, checkpoint="offload"
    ) as pipe:
        pipe.step(x, target=y)
        expected = gradients(model)
        Failing.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            pipe.step(x, target=y)
        Failing.fails = False
        model.zero_grad()
        pipe.step(x, target=y)
    assert same(expected, gradients(model))


def test_the_report_says_how_much_of_the_hosts_memory_a_step_takes():
    make, inputs = MODELS["unet"]
    options = {"chunks": 4, "schedule": "gpipe", "loss_fn": mean_loss}
    reports = []
    for mode in ("never", "offload"):
        model = make()
        with fxpipe.compile(model, ["cpu"] * 2, checkpoint=mode, **options) as pipe:
            pipe.step(*inputs(8), target=torch.randn(8))
            reports.append(pipe.report())
            what = pipe.explain()
    said = "activations that wait in the host's memory (predicted): "
    assert said in reports[1] and said not in reports[0]
    assert "What stages recompute, or have on the host (checkpoint): offload." in str(what)


def test_without_gradients_nothing_moves():
    make, inputs = MODELS["unet"]
    model, x = make().eval(), inputs(8)
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=4) as kept,
        fxpipe.compile(model, ["cpu"] * 2, chunks=4, checkpoint="offload") as pipe,
        mock.patch.object(offload.Offload, "out", side_effect=AssertionError),
        torch.no_grad(),
    ):
        assert same(pipe(*x), kept(*x))


def test_an_input_that_is_written_to_ahead_of_the_backward_is_refused():
    """As by autograd itself. The last micro-batch does not move, and its backward comes first."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, checkpoint="offload") as pipe:
        output = pipe(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("mode", ["offload 1/4", "offload 1/2", "offload 3/4", "offload"])
def test_the_bytes_that_move_are_those_of_the_plan(mode, monkeypatch):
    """Whole tensors move, so that these are not quite the part that the mode says."""
    make, inputs = MODELS["unet"]
    x, chunks, moved = inputs(8), 4, []
    send = offload.Block.send
    monkeypatch.setattr(
        offload.Block, "send", lambda block, link: (moved.append(block.size), send(block, link))
    )
    with fxpipe.compile(
        make(), ["cpu"] * 2, chunks=chunks, schedule="gpipe", checkpoint=mode, loss_fn=mean_loss
    ) as pipe:
        pipe.step(*x, target=torch.randn(8))
        moved.clear()
        pipe.step(*x, target=torch.randn(8))
        layout = pipe.skip_layout
        stages = stage_memory([s.cost for s in pipe.stages], layout, pipe.stage_graph)
    assert sum(moved) == sum(stage.moves(mode, chunks) for stage in stages)
