"""Hooks on parameters that change a parameter, while a step runs several micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.zoo import MLP, gradients, mean_loss, same

CHUNKS = 3


def by_an_optimizer(parameter: Tensor) -> None:
    torch.optim.SGD([parameter], lr=0.1).step()
    parameter.grad = None


def by_a_list_of_tensors(parameter: Tensor) -> None:
    torch.optim.AdamW([parameter], lr=0.1, foreach=True).step()


def through_data(parameter: Tensor) -> None:
    parameter.data.add_(parameter.grad, alpha=-0.1)


def without_gradients(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def halve_the_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 12), torch.randn(6)


def compiled(model: nn.Module, schedule: str = "1f1b", chunks: int = CHUNKS) -> fxpipe.Pipeline:
    return fxpipe.compile(model, ["cpu"] * 2, chunks=chunks, schedule=schedule, loss_fn=mean_loss)


def loop(model: nn.Module, x: Tensor, target: Tensor, chunks: int = CHUNKS) -> None:
    for rows, wanted in zip(x.tensor_split(chunks), target.tensor_split(chunks), strict=True):
        (mean_loss(model(rows), wanted) / chunks).backward()


@pytest.mark.parametrize(
    "hook", [by_an_optimizer, by_a_list_of_tensors, through_data, without_gradients]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_hook_that_changes_its_parameter_between_micro_batches_is_stopped(schedule, hook):
    """Micro-batches would have run on other weights than in a loop, without a word in 1F1B."""
    model, (x, target) = MLP(), batch()
    before = copy.deepcopy(model)
    handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
    with compiled(model, schedule) as pipe:
        with pytest.raises(RuntimeError, match=r"a hook on the parameter 'layers.*optimizer="):
            pipe.step(x, target=target)
        assert same(list(model.parameters()), list(before.parameters()))

        for handle in handles:
            handle.remove()
        model.zero_grad()
        pipe.step(x, target=target)
        loop(before, x, target)
        assert same(gradients(model), gradients(before))


def test_a_hook_on_a_gradient_that_changes_a_parameter_is_stopped():
    model, (x, target) = MLP(), batch()
    other = model.layers[0].weight
    model.layers[-1].weight.register_hook(lambda grad: other.data.mul_(0.9) and None)
    with compiled(model) as pipe, pytest.raises(RuntimeError, match=r"changes 'layers.0.weight'"):
        pipe.step(x, target=target)


def test_a_hook_that_gives_its_parameter_other_memory_is_stopped():
    model, (x, target) = MLP(), batch()

    def hook(parameter: Tensor) -> None:
        parameter.data = parameter.data - parameter.grad

    model.layers[-1].bias.register_post_accumulate_grad_hook(hook)
    with compiled(model) as pipe, pytest.raises(RuntimeError, match="has changed"):
        pipe.step(x, target=target)


def test_a_hook_on_a_parameter_of_the_loss_is_stopped_as_well():
    class ScaledByWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.scale * mean_loss(output, target)

    loss_fn, (x, target) = ScaledByWeight(), batch()
    loss_fn.scale.register_post_accumulate_grad_hook(through_data)
    with (
        fxpipe.compile(MLP(), ["cpu"] * 2, chunks=CHUNKS, loss_fn=loss_fn) as pipe,
        pytest.raises(RuntimeError, match=r"a hook on the parameter 'loss_fn\.scale'"),
    ):
        pipe.step(x, target=target)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_hook_may_change_its_parameter_in_the_last_micro_batch(schedule):
    model, (x, target) = MLP(), batch()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        seen: dict[Tensor, int] = {}

        def hook(parameter: Tensor, seen: dict[Tensor, int] = seen) -> None:
            seen[parameter] = seen.get(parameter, 0) + 1
            if seen[parameter] % CHUNKS == 0:
                by_an_optimizer(parameter)

        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    with compiled(model, schedule) as pipe:
        for _ in range(2):
            pipe.step(x, target=target)
            loop(reference, x, target)
            torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))


def test_a_hook_may_change_its_parameter_if_there_is_one_micro_batch():
    model, (x, target) = MLP(), batch()
    reference = copy.deepcopy(model)
    for parameter in [*model.parameters(), *reference.parameters()]:
        parameter.register_post_accumulate_grad_hook(by_an_optimizer)
    with compiled(model, chunks=1) as pipe:
        for _ in range(2):
            pipe.step(x, target=target)
            loop(reference, x, target, chunks=1)
    assert same(list(model.parameters()), list(reference.parameters()))


def test_hooks_may_read_and_change_gradients_while_the_step_has_an_optimizer():
    model, (x, target) = MLP(), batch()
    reference, norms = copy.deepcopy(model), []
    for each in (model, reference):
        for parameter in each.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
            parameter.register_post_accumulate_grad_hook(halve_the_gradient)
            parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.norm()))
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    with compiled(model) as pipe:
        for _ in range(2):
            pipe.step(x, target=target, optimizer=ours, zero_grad=True)
            loop(reference, x, target)
            theirs.step()
            theirs.zero_grad()
    assert same(list(model.parameters()), list(reference.parameters()))
    assert len(norms) == 2 * 2 * CHUNKS * len(list(model.parameters()))
