"""What fxpipe exports is run by ``torch.distributed.pipelining`` with the gradients of fxpipe."""

from __future__ import annotations

import pytest
import torch

from tests.fxpipe.ranks import torch_pipelining
from tests.fxpipe.ranks.jobs import Call, compiled
from tests.zoo import Chain, mean_loss, same

pytestmark = pytest.mark.one_thread  # as each rank has


def skipping() -> Chain:
    """Values skip one stage, and two."""
    return Chain(4, {0: (2, 3)})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "schedule, ranks", [("gpipe", 4), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2)]
)
def test_torch_runs_the_relayed_stages_in_the_exported_schedule(pool, tmp_path, schedule, ranks):
    call = Call((torch.randn(8, 3),), torch.randn(8))
    given = {"schedule": schedule, "chunks": 4}
    found = pool.run(
        torch_pipelining.train,
        skipping,
        call,
        starts=["b", "c", "d"],
        folder=str(tmp_path),
        ranks=ranks,
        **given,
    )
    more = {"partition": ["b", "c", "d"], "stages": 4, "example_inputs": call.args}
    with compiled(ranks, skipping, mean_loss, **given, **more) as pipe:
        loss = pipe.step(*call.args, target=call.target)
        expected = {name: p.grad for name, p in pipe.named_parameters()}
    (losses,) = (losses for losses, _ in found if losses)
    assert torch.allclose(torch.stack(losses).mean(), loss)
    grads = {name: grad for _, own in found for name, grad in own.items()}
    assert grads.keys() == expected.keys()
    assert all(same(grads[name], expected[name]) for name in expected)
