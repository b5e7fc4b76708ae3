"""What a forward saves for its backward moves to the host and back. On the CPU a second buffer
stands for the host's memory; on an accelerator see ``tests/accelerator``."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from fxpipe.runtime.checkpointing import offload as offloading
from fxpipe.runtime.checkpointing.checkpoint import offloaded, recompute
from fxpipe.runtime.checkpointing.offload import Offload, that_move

CPU = torch.device("cpu")
WIDTH = 64


class Saves(nn.Module):
    """Saves what ``picked`` gives for the input: a function of it that the loss depends on."""

    def __init__(self, picked):
        super().__init__()
        self.picked = picked

    def forward(self, x):
        return sum((each.abs() ** 3).sum() for each in self.picked(x.exp()))


def blocks_of(handle):
    return [each for ref in handle._blocks if (each := ref()) is not None]


def moved(module, x):
    """The output, and the handle, of a call whose saved tensors are on the host."""
    output, handle = offloaded(module, "cpu/compute", 1.0, x)
    return output, handle


def gradient(module, x):
    x = x.clone().requires_grad_()
    module(x).backward()
    return x.grad


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 7 * 7, WIDTH),
        nn.GELU(),
    )


def test_gradients_have_the_bits_of_those_without_and_nothing_is_computed_twice():
    found = []
    for moves in (False, True):
        module, calls = network(), []
        module[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        x = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = moved(module, x)[0] if moves else module(x)
        output.square().sum().backward()
        found.append([output, x.grad, *(p.grad for p in module.parameters())])
        assert len(calls) == 1
    assert all(map(torch.equal, *found))


def test_between_forward_and_backward_the_device_holds_none_of_it():
    _, handle = moved(network(), torch.randn(8, 3, 16, 16, requires_grad=True))
    blocks = blocks_of(handle)
    assert len(blocks) > 3 and all(each.on_device is None for each in blocks)
    assert all(each.on_host is not None for each in blocks)


def test_a_backward_frees_what_has_come_back_as_it_goes():
    class Counted(nn.Module):
        def forward(self, x):
            x.register_hook(lambda _: left.append(len(blocks_of(handle))))
            return x.tanh()

    left = []
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    output, handle = moved(nn.Sequential(nn.Tanh(), Counted(), Counted()), x)
    handle.restore()
    assert len(blocks_of(handle)) == 3
    output.sum().backward()
    assert left == [2, 1] and not blocks_of(handle)


def test_what_has_not_come_back_comes_when_the_backward_asks_for_it():
    x = torch.randn(WIDTH, WIDTH)
    own = x.clone().requires_grad_()
    output, handle = moved(nn.Tanh(), own)
    assert [each.on_device for each in blocks_of(handle)] == [None]
    output.backward(x)
    assert torch.equal(own.grad, torch.ops.aten.tanh_backward(x, output.detach()))


def test_what_the_backward_needs_first_comes_back_first(monkeypatch):
    fetched = []
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    output, handle = moved(module, torch.randn(WIDTH, WIDTH, requires_grad=True))
    saved = blocks_of(handle)
    monkeypatch.setattr(offloading.Block, "fetch", lambda block, link: fetched.append(block))
    handle.restore()
    assert len(saved) > 3 and fetched == saved[::-1]
    del output


def test_tensors_that_share_memory_move_together():
    class Product(nn.Module):
        def forward(self, x):
            y = x.exp()  # saves y
            return y @ y.t()  # saves both factors

    _, handle = moved(Product(), torch.randn(WIDTH, WIDTH, requires_grad=True))
    assert [each.size for each in blocks_of(handle)] == [WIDTH * WIDTH * 4]


@pytest.mark.parametrize(
    "picked",
    [
        lambda y: (y, y.t()),
        lambda y: (y[1:], y[:, 3:].contiguous()),
        lambda y: (y[0].expand(WIDTH, WIDTH), y.view(torch.complex64).real),
        lambda y: (y.double(), y[::2], y[:0]),
        lambda y: (torch.view_as_complex(y.view(WIDTH, -1, 2)).conj().imag, y),
        lambda y: (y.masked_fill(y > 1, 0), y.clone().relu_()),
    ],
)
def test_views_of_any_kind_come_back_as_they_were(picked):
    module, x = Saves(picked), torch.randn(WIDTH, WIDTH)
    own = x.clone().requires_grad_()
    output, handle = moved(module, own)
    handle.restore()
    output.backward()
    assert torch.equal(own.grad, gradient(module, x))


def test_a_part_of_a_larger_tensor_moves_by_itself():
    """A micro-batch is a view of the mini-batch, which the caller keeps."""
    whole = torch.randn(4 * WIDTH, WIDTH)
    part = whole[WIDTH : 2 * WIDTH]
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    _, handle = moved(linear, part)
    assert [each.size for each in blocks_of(handle)] == [WIDTH * WIDTH * 4]
    assert weight.requires_grad


def test_parameters_buffers_and_small_tensors_stay():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.register_buffer("scale", torch.randn(WIDTH, WIDTH))

        def forward(self, x, given):
            return (x @ (self.weight * self.scale[0]).t()) @ self.scale * given

    small = torch.randn(2, WIDTH, requires_grad=True)
    given = nn.Parameter(torch.randn(2, WIDTH))
    output, handle = offloaded(Scaled(), "cpu/compute", 1.0, small, given)
    (block,) = blocks_of(handle)  # the weight times the scale, which is an activation
    assert block.size == WIDTH * WIDTH * 4
    output.sum().backward()
    assert small.grad is not None and given.grad is not None


@pytest.mark.parametrize("when", ["in the call", "after it"])
def test_what_is_written_to_is_refused_as_autograd_does(when):
    class Writes(nn.Module):
        def forward(self, x):
            y = x.exp()
            z = y.sin()
            if when == "in the call":
                y.add_(1)
            return z

    weight = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(weight, Writes())
    output, _ = moved(module, torch.randn(WIDTH, WIDTH, requires_grad=True))
    if when == "after it":
        with torch.no_grad():
            weight.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_backwards_for_a_part_twice_and_of_second_order():
    module, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(WIDTH, WIDTH)
    results = []
    for moves in (False, True):
        own = x.clone().requires_grad_()
        output = moved(module, own)[0] if moves else module(own)
        (first,) = torch.autograd.grad(output.sum(), own, retain_graph=True)
        (again,) = torch.autograd.grad(output.sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), module[0].weight)
        results.append((first, again, second))
    assert all(map(torch.equal, *results))


def test_without_gradients_it_is_a_plain_call():
    with torch.no_grad():
        output, handle = moved(nn.Tanh(), torch.randn(WIDTH, WIDTH))
    assert handle is None and recompute(output, handle) is output


def test_recompute_brings_it_back_ahead_of_what_comes_before_it_in_the_forward():
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    output, handle = moved(nn.Tanh(), x)
    there = []
    output.register_hook(lambda _: there.append(blocks_of(handle)[0].on_device is not None))
    recompute(output, handle).sum().backward()
    assert there == [True]


def test_a_graph_that_is_dropped_is_freed_with_all_that_was_moved():
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    output, handle = moved(nn.Tanh(), x)
    (block,) = map(weakref.ref, blocks_of(handle))
    del output
    gc.collect()
    assert block() is None


def test_a_block_begins_where_kernels_find_the_same_alignment():
    memory = torch.randn(4096)
    part = memory[129 : 129 + 1024]  # 516 bytes into its memory
    begin, end = offloading._span(part)
    assert (begin, end) == (offloading.ALIGNED, 516 + 4096)


def test_tensors_on_other_devices_stay():
    handle = Offload(nn.Identity(), ())
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with handle.saving():
        output = x.exp()
    handle.out(torch.device("meta"))
    assert not blocks_of(handle)
    output.sum().backward()
    assert torch.equal(x.grad, output)


@pytest.mark.parametrize(
    ("sizes", "share", "moving"),
    [
        ([4, 4, 4, 4], 0.5, [0, 1]),
        ([4, 4, 4, 4], 1.0, [0, 1, 2, 3]),
        ([4, 4, 4, 4], 0.6, [0, 1]),  # 9.6 of 16 are nearer to 8 than to 12
        ([4, 4, 4, 4], 0.65, [0, 1, 2]),
        ([10, 1, 1], 0.25, []),  # 3 of 12 are nearer to nothing than to 10
        ([10, 1, 1], 0.5, [0]),
        ([1, 1, 10], 0.5, [0, 1]),  # what comes first moves first
        ([4, 1 / 2048, 4], 1.0, [0, 2]),  # of these is one too small
        ([], 0.5, []),
    ],
)
def test_as_many_tensors_move_as_come_nearest_to_the_share(sizes, share, moving):
    assert that_move([1024 * size for size in sizes], share) == moving
