"""Plans of small models, without values and with links that cost nothing."""

from __future__ import annotations

import torch
from torch import nn

import fxpipe
from fxpipe import DeviceSpec

FREE_LINKS = DeviceSpec(link_bytes_per_s=1e30, link_latency_s=0.0, launch_s=2e-6)
"""A CPU core to which tensors travel in no time, and which starts operators so fast that those of
the small models here take time in proportion to their sizes."""


def on_meta(model, *inputs):
    return model.to("meta"), tuple(t.to("meta") for t in inputs)


def even(**options):
    """The plan for eight layers that take, and keep, the same."""
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8))
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(512, 32))
    options = {"devices": [FREE_LINKS] * 4, "chunks": 8, **options}
    return fxpipe.plan(model, example_inputs=x, costs={f"{i}": 1.0 for i in range(8)}, **options)
