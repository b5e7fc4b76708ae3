"""``"cpu"`` and ``"cpu:0"`` are two devices by name, between which nothing has to be moved."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fxpipe
from fxpipe import ops
from fxpipe.ir.printing import format_graph
from passes.common.skips import Hop
from tests.zoo import Tied, gradients, loop, loss_of, same

TWO = ["cpu", "cpu:0"]
X = torch.randint(11, (7, 5))


def loss_fn(output, target):
    """Its mean over rows is that of the sum in ``loss_of``, but for a factor."""
    return torch.sin(output).sum() / len(output)


def compiled(model, devices=TWO, starts=("head",), **options):
    return fxpipe.compile(
        model,
        devices,
        chunks=3,
        partition=list(starts),
        example_inputs=(X,),
        loss_fn=loss_fn,
        **options,
    )


def test_a_tied_weight_is_brought_to_another_device_beside_the_micro_batches():
    model = Tied()
    with compiled(model) as pipe:
        assert_expected_inline(
            format_graph(pipe.stage_graph),
            """\
tokens: input
embed_weight = self.embed.weight
embed_weight_s1 = bring(embed_weight, 'cpu:0/copy', 'cpu:0/compute')  # stage 1
stage_0 = stage_0(tokens)  # stage 0
stage_1 = stage_1(embed_weight_s1, stage_0)  # stage 1
return stage_1
""",
        )
        assert_expected_inline(
            format_graph(pipe.stages[1].module),
            """\
embed_weight_s1: input
mix_1: input
embed_weight_shared_s1 = share(embed_weight_s1)  # stage 1
head_module = self.head
head = call(head_module, {'weight': embed_weight_shared_s1}, mix_1)  # stage 1
return head
""",
        )
        brought = pipe.graph.find_nodes(op="call_function", target=ops.bring)
        assert [len(node.users) for node in brought] == [3, 3]  # at home, too: see pass "lend"
        size = model.embed.weight.nbytes
        assert not pipe.skip_layout.skips
        assert pipe.skip_layout.brought == (Hop("embed.weight", 0, 1, size, once=True),)
        assert size == 352
        assert "shared parameter embed.weight: stage 0 -> stage 1, 352 B, once" in pipe.report()
        assert {p.device.type for p in pipe.parameters()} == {"cpu"}
        for level in ("model", "stage", "pipeline"):
            assert str(pipe.draw(level))


def test_it_takes_memory_where_it_is_brought_to_and_so_does_its_gradient():
    model = Tied()
    weight = model.embed.weight.nbytes
    with compiled(model, ["cpu", "cpu"]) as here, compiled(model) as there:
        assert [
            there.stages[i].cost.fixed_bytes - here.stages[i].cost.fixed_bytes for i in range(2)
        ] == [0, 2 * weight]


def test_on_one_device_it_goes_the_way_of_all_values():
    model = Tied()
    expected = loop(copy.deepcopy(model), (X,), 3)
    with compiled(model, ["cpu", "cpu"]) as pipe:
        assert not pipe.graph.find_nodes(op="call_function", target=ops.bring)
        loss_of(pipe(X)).backward()
    assert same(gradients(model), expected[1])


CUTS = {
    "there": (TWO, ["head"]),
    "there and back": (["cpu", "cpu:0", "cpu"], ["mix_1", "head"]),
    "both weights": (TWO, ["mix_1"]),
    "twice": (["cpu", "cpu:0", "cpu:0"], ["mix_1", "head"]),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("cut", CUTS)
def test_gradients_of_all_uses_meet(cut, checkpoint):
    devices, starts = CUTS[cut]
    model = Tied()
    expected = loop(copy.deepcopy(model), (X,), 3)
    with compiled(model, devices, starts, checkpoint=checkpoint) as pipe:
        for _ in range(2):  # nothing is left of the first
            model.zero_grad()
            output = pipe(X)
            loss_of(output).backward()
            assert same(output.detach(), expected[0])
            torch.testing.assert_close(gradients(model), expected[1])
            with torch.no_grad():
                assert same(pipe(X), expected[0])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": "always"}, {"checkpoint": "always", "checkpoint_segments": 2}],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("cut", CUTS)
def test_they_meet_in_a_training_step_too(cut, schedule, options):
    devices, starts = CUTS[cut]
    model = Tied()
    expected = [g / len(X) for g in loop(copy.deepcopy(model), (X,), 3)[1]]
    with compiled(model, devices, starts, schedule=schedule, **options) as pipe:
        for _ in range(2):
            model.zero_grad()
            pipe.step(X)
            torch.testing.assert_close(gradients(model), expected)
        brought = pipe.step_graph.graph.find_nodes(op="call_function", target=ops.replicate)
        assert len(brought) == len(
            pipe.stage_graph.graph.find_nodes(op="call_function", target=ops.bring)
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_optimizer_steps_it_once_with_all_of_its_gradient(schedule, segments):
    model, plain = Tied().double(), Tied().double()
    plain.load_state_dict(model.state_dict())
    with compiled(
        model, schedule=schedule, checkpoint="always", checkpoint_segments=segments
    ) as pipe:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        theirs = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            pipe.step(X, optimizer=optimizer)
            loop(plain, (X,), 3)
            for p in plain.parameters():
                p.grad /= len(X)
            theirs.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


def test_a_new_parameter_is_brought():
    model = Tied()
    with compiled(model) as pipe:
        pipe(X)
        model.embed.weight = model.head.weight = nn.Parameter(torch.randn(11, 8))
        assert same(pipe(X).detach(), loop(copy.deepcopy(model), (X,), 3)[0])


@pytest.mark.parametrize("is_step", [False, True])
def test_a_frozen_one_gets_no_gradient(is_step):
    model = Tied()
    model.embed.weight.requires_grad_(False)
    with compiled(model) as pipe:
        if is_step:
            pipe.step(X)
        else:
            loss_of(pipe(X)).backward()
    assert [p.grad is None for p in model.parameters()] == [True] + [False] * 4


def test_its_hooks_are_called_once_with_the_whole_gradient():
    model, seen = Tied(), []
    model.embed.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with compiled(model) as pipe:
        loss_of(pipe(X)).backward()
    assert same(seen, [model.embed.weight.grad])
