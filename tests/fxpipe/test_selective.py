"""``checkpoint="selective"``: stages run again with the results of their products, and nothing else
changes."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe import ops
from fxpipe.ir import flops
from fxpipe.schedule import NAMES
from tests.fxpipe.test_offload import stepped as with_its_graph
from tests.zoo import MODELS, gradients, loop, loss_of, mean_loss, same


@pytest.mark.parametrize("name", MODELS)
def test_calls_give_the_bits_of_the_loop(name):
    make, inputs = MODELS[name]
    model, x = make(), inputs(7)
    own, reference = copy.deepcopy(model), copy.deepcopy(model)
    expected = loop(reference, x, 3)
    with fxpipe.compile(own, ["cpu"] * 3, chunks=3, checkpoint="selective") as pipe:
        output = pipe(*x)
        loss_of(output).backward()
        assert pipe.graph_module.graph.find_nodes(op="call_function", target=ops.selective)
    assert same(output.detach(), expected[0])
    assert same(gradients(own), expected[1])
    assert same(list(own.buffers()), list(reference.buffers()))


def stepped(*args, **options):
    """The losses of two steps, the gradients and the buffers."""
    found, _ = with_its_graph(*args, **options)
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", NAMES)
def test_steps_of_any_schedule_give_the_bits_of_those_that_keep_all(schedule):
    assert same(stepped("unet", schedule, "never"), stepped("unet", schedule, "selective"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["resnet", "transformer"])
@pytest.mark.parametrize("options", [{}, {"checkpoint_segments": 2}])
@pytest.mark.parametrize("mode", ["selective", ["selective", "always"], ["never", "selective"]])
def test_each_stage_may_have_its_own_mode_and_be_cut_in_segments(name, mode, options):
    assert same(stepped(name, "1f1b", "never"), stepped(name, "1f1b", mode, **options))


def test_uneven_micro_batches_and_fewer_of_them():
    for rows in (7, 2, 1):
        kept = stepped("unet", "gpipe", "never", rows)
        assert same(kept, stepped("unet", "gpipe", "selective", rows))


@torch.library.custom_op("tests::counted_product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    RUNS.append(len(x))
    return x @ weight


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return gradient @ weight.t(), x.t() @ gradient


product.register_autograd(_backward, setup_context=_setup)
RUNS: list[int] = []


class Counted(nn.Module):
    """A layer whose product notes each time that it is really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight).sigmoid()


@pytest.mark.parametrize(("mode", "each"), [("never", 1), ("selective", 1), ("always", 2)])
def test_a_forward_that_is_run_again_computes_no_product_again(mode, each):
    model = nn.Sequential(nn.Linear(8, 8), Counted())
    with (
        mock.patch.dict(flops.FORMULAS, {torch.ops.tests.counted_product: lambda *_, **__: 1000}),
        fxpipe.compile(
            model, ["cpu"], chunks=4, schedule="gpipe", checkpoint=mode, loss_fn=mean_loss
        ) as pipe,
    ):
        for _ in range(2):  # the loss is checked with the first two mini-batches
            pipe.step(torch.randn(8, 8), target=torch.randn(8))
        RUNS.clear()
        pipe.step(torch.randn(8, 8), target=torch.randn(8))
    assert [2] * 4 * each == RUNS


def test_dropout_draws_the_same_numbers_also_within_an_attention():
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = nn.Linear(8, 24), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.linear(x)[:, None, :].chunk(3, -1)
            found = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            return self.drop(found[:, 0])

    model, found = nn.Sequential(Attending(), Attending()), []
    x = torch.randn(8, 8)
    for mode in ("never", "selective"):
        model.zero_grad()
        torch.manual_seed(1)
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=4, schedule="gpipe", loss_fn=mean_loss, checkpoint=mode
        ) as pipe:
            loss = pipe.step(x, target=torch.zeros(8))
        found.append([loss, gradients(model)])
    assert same(*found)


def test_a_result_that_is_written_to_is_computed_again():
    class Doubled(nn.Module):
        """Writes what a second run must not begin with."""

        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    layers = [nn.Linear(8, 8), Doubled(), nn.Linear(8, 8), nn.ReLU(inplace=True)]
    model, found = nn.Sequential(*layers), []
    x = torch.randn(8, 8)
    for mode in ("never", "selective"):
        model.zero_grad()
        with fxpipe.compile(
            model, ["cpu"] * 2, chunks=4, schedule="gpipe", loss_fn=mean_loss, checkpoint=mode
        ) as pipe:
            found.append([pipe.step(x, target=torch.zeros(8)), gradients(model)])
            assert same(pipe(x), torch.cat([model(part) for part in x.chunk(4)]))
    assert same(*found)


def test_stages_that_are_compiled_cannot_keep_single_results():
    with pytest.raises(ValueError, match="stage_backend makes one piece of code of all of a stage"):
        fxpipe.compile(nn.Linear(2, 2), ["cpu"], checkpoint="selective", stage_backend="aot_eager")


def test_it_is_chosen_where_that_is_all_that_recomputing_has_to_free():
    """Norms save much and take little time; products take nearly all of it. Where operators are
    small, calls of Python take longer than the products."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = nn.functional.layer_norm(x, (512,)).sigmoid()
            return self.linear(x)

    with torch.device("meta"):
        model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(4096, 512)
    options = {"schedule": "gpipe", "chunks": 4, "optimizer": "sgd"}
    kept = fxpipe.plan(model, ["cpu"] * 2, example_inputs=(x,), **options)
    limit = 0.7 * max(kept.memory)
    options |= {"memory": [limit, limit]}
    found = fxpipe.plan(model, ["cpu"] * 2, example_inputs=(x,), checkpoint="auto", **options)
    always = fxpipe.plan(model, ["cpu"] * 2, example_inputs=(x,), checkpoint="always", **options)
    assert "selective" in found.checkpoint and found.seconds < always.seconds
    few = (x[:8],)
    options["memory"] = None
    found, always = (
        fxpipe.plan(model, ["cpu"] * 2, example_inputs=few, checkpoint=mode, **options)
        for mode in ("selective", "always")
    )
    assert found.seconds > always.seconds
