"""What is on "meta" is examined as if it were on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
