"""Fakes of some results are made in one step, and are those that PyTorch makes in many."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from fxpipe.ir._torch import FakeTensorMode
from fxpipe.ir.somewhere import Somewhere
from fxpipe.ir.tensors import memory_of

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
            for operator in torch.native_batch_norm, torch._native_batch_norm_legit:
                expected = _batch_norm(FakeTensorMode(), operator, statistics, *case)
                found = _batch_norm(Somewhere(), operator, statistics, *case)
                assert found == expected, (operator, statistics, case)


def test_a_batch_norm_that_pytorch_refuses_is_refused():
    for channels in (5, 4, 4, 4), (4, 5, 4, 4), (4, 4, 5, 4), (4, 4, 4, 5):
        for mode in FakeTensorMode(), Somewhere():
            with mode:
                own = [torch.empty(each) for each in channels]
                with pytest.raises(RuntimeError):
                    torch.native_batch_norm(torch.empty(2, 4, 3), *own, True, 0.1, 1e-5)


def _batch_norm(mode, operator, statistics, dtype, has_weights, training, shape, layout):
    """What is known of the results of a batch norm, or the kind of error."""
    with mode:
        x = _input(dtype, shape, layout)
        weight, bias = (torch.empty(shape[1], dtype=statistics) for _ in range(2))
        mean, var = (torch.empty(shape[1], dtype=statistics or dtype) for _ in range(2))
        running = [None, None] if statistics is None and training else [mean, var]
        own = [weight, bias] if has_weights and statistics is not None else [None, None]
        given = [x, *own, *running]
        try:
            found = operator(*given, training, 0.1, 1e-5)
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


def test_the_result_of_a_relu_is_like_the_one_that_pytorch_makes():
    layouts = "contiguous", "channels last", "transposed", "with gaps", "sparse"
    for dtype, layout in product((torch.float32, torch.bfloat16, torch.int64), layouts):
        expected, found = (_relu(mode, dtype, layout) for mode in (FakeTensorMode(), Somewhere()))
        assert found == expected, (dtype, layout)


def _relu(mode, dtype, layout):
    with mode:
        x = _input(dtype, (2, 3, 4, 5), layout)
        found = torch.relu(x.to_sparse() if layout == "sparse" else x)
        if layout == "sparse":
            return found.layout, found.shape, found.dtype
        return _about(found), memory_of(found) == memory_of(x), x._version
