"""The pipeline of a small model, with a loss, for tests of what a step refuses."""

from __future__ import annotations

import fxpipe
from tests.zoo import MLP, mean_loss


def compiled(**options):
    told = dict(chunks=4, schedule="1f1b", loss_fn=mean_loss) | options
    return fxpipe.compile(MLP(), ["cpu"] * 2, **told)
