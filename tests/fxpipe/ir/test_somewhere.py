"""What is on "meta" is examined as if it were on the CPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from fxpipe.ir._torch import FakeTensorMode
from fxpipe.ir.somewhere import CPU, Somewhere, seen_on
from fxpipe.ir.tensors import memory_of

META = torch.device("meta")


def test_a_fake_is_like_its_tensor_but_for_where_it_says_it_is():
    weight = nn.Parameter(torch.empty(4, 3, device=META).t())
    mode = Somewhere()
    fake = mode.from_tensor(weight)
    assert isinstance(fake, nn.Parameter) and fake.requires_grad and fake.device == CPU
    assert (fake.shape, fake.stride(), fake.dtype) == (weight.shape, (1, 3), weight.dtype)
    assert mode.from_tensor(weight) is fake


def test_views_of_one_memory_share_it():
    whole = torch.empty(4, 3, device=META)
    mode = Somewhere()
    fakes = [mode.from_tensor(tensor) for tensor in (whole, whole[1:], torch.empty_like(whole))]
    first, view, other = map(memory_of, fakes)
    assert first == view != other


def test_what_is_made_on_meta_is_together_with_it():
    mode = Somewhere(allow_non_fake_inputs=True)
    with mode:
        x = mode.from_tensor(torch.empty(3, device=META))
        held = torch.empty(3, device=META)
        made = torch.arange(3, device="meta"), torch.empty_like(x, device=META), x.to(META), held
        assert all(tensor.device == CPU for tensor in (x, *made))
        assert (x + sum(made) + torch.ones(3)).device == CPU


def test_an_operator_takes_what_the_cpu_takes():
    mode = Somewhere()
    with mode:
        x = mode.from_tensor(torch.empty(3, device=META))
        assert torch.histc(x, 4, 0, 3).shape == (4,)
        with pytest.raises(RuntimeError, match="not implemented for"):
            torch.histc(x.int(), 4, 0, 3)


def test_other_devices_are_as_they_are():
    for name in ("cpu", "cuda:1", "xpu"):
        assert seen_on(torch.device(name)) == torch.device(name)


CASES = list(
    product(
        (torch.float32, torch.bfloat16),
        (True, False),  # with weights
        (True, False),  # in training
        ((2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)),
        ("contiguous", "channels last", "transposed", "with gaps"),
    )
)


MORE = [
    *((torch.float64, True, True, (2, 3, 4), "contiguous"),),
    *((torch.float32, True, True, shape, "contiguous") for shape in ((2, 1, 5, 5), (1, 3, 2, 1))),
    *((torch.float32, True, True, shape, "contiguous") for shape in ((1, 3), (1, 3, 1, 1))),
    *((torch.float32, True, True, shape, "contiguous") for shape in ((0, 3), (3, 0, 2))),
]


def test_results_of_a_batch_norm_are_like_those_that_pytorch_makes_of_many_operators():
    for case in [*CASES, *MORE]:
        for statistics in torch.float32, case[0], None:
            expected = _batch_norm(FakeTensorMode(), statistics, *case)
            assert _batch_norm(Somewhere(), statistics, *case) == expected, (statistics, case)


def test_a_batch_norm_that_pytorch_refuses_is_refused():
    for channels in (5, 4, 4, 4), (4, 5, 4, 4), (4, 4, 5, 4), (4, 4, 4, 5):
        for mode in FakeTensorMode(), Somewhere():
            with mode:
                own = [torch.empty(each) for each in channels]
                with pytest.raises(RuntimeError):
                    torch.native_batch_norm(torch.empty(2, 4, 3), *own, True, 0.1, 1e-5)


def _batch_norm(mode, statistics, dtype, has_weights, training, shape, layout):
    """What is known of the results of a batch norm, or the kind of error."""
    with mode:
        x = _input(dtype, shape, layout)
        weight, bias = (torch.empty(shape[1], dtype=statistics) for _ in range(2))
        mean, var = (torch.empty(shape[1], dtype=statistics or dtype) for _ in range(2))
        running = [None, None] if statistics is None and training else [mean, var]
        own = [weight, bias] if has_weights and statistics is not None else [None, None]
        given = [x, *own, *running]
        try:
            found = torch.native_batch_norm(*given, training, 0.1, 1e-5)
        except Exception as error:
            return type(error)
        given = [each for each in given if each is not None]
        versions = [each._version for each in given]
        memories = {memory_of(each) for each in (*found, *given)}
    return versions, len(memories), [_about(each) for each in found]


def test_gradients_of_a_batch_norm_are_like_those_that_pytorch_makes_of_many_operators():
    for dtype, has_weights, training, shape, layout in CASES:
        case = dtype, has_weights, training, shape, layout
        expected = _gradients_of_batch_norm(FakeTensorMode(), *case)
        assert _gradients_of_batch_norm(Somewhere(), *case) == expected, case


def _gradients_of_batch_norm(mode, dtype, has_weights, training, shape, layout):
    """What is known of the gradients of a batch norm's input and weights."""
    with mode:
        x = _input(dtype, shape, layout).detach().requires_grad_()
        mean, var, weight, bias = (torch.empty(shape[1]) for _ in range(4))
        own = [weight.requires_grad_(), bias.requires_grad_()] if has_weights else [None, None]
        y = nn.functional.batch_norm(x, mean, var, *own, training)
        wanted = [tensor for tensor in (x, *own) if tensor is not None]
        found = torch.autograd.grad(y, wanted, torch.empty_like(y))
    return [_about(gradient) for gradient in found]


def _input(dtype, shape, layout):
    x = torch.empty(shape, dtype=dtype)
    if layout == "channels last" and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    if layout == "transposed" and len(shape) > 3:
        x = x.transpose(-1, -2)
    if layout == "with gaps" and len(shape) > 2:
        x = x.repeat_interleave(2, -1)[..., ::2]
    return x


def _about(t):
    size = t.untyped_storage().nbytes()
    return t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), size
