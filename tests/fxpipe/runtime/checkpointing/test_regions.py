"""What a model checkpoints itself runs in a pipeline as ``torch.utils.checkpoint`` runs it."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fxpipe.runtime.checkpointing.checkpoint import checkpoint


def test_what_writes_again_leaves_the_buffers_that_torchs_checkpoint_leaves() -> None:
    ours, theirs = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    once, x = copy.deepcopy(ours), torch.randn(5, 3)
    checkpoint(ours, x, writes_again=True).sum().backward()
    torch_checkpoint(theirs, x, use_reentrant=False).sum().backward()
    checkpoint(once, x).sum().backward()
    assert ours[1].num_batches_tracked == theirs[1].num_batches_tracked == 2
    assert torch.equal(ours[1].running_mean, theirs[1].running_mean)
    assert once[1].num_batches_tracked == 1
