"""It is known whether code switches autocast on."""

from __future__ import annotations

import pytest
import torch

from fxpipe.trace.casts import autocasts


def test_an_autocast_that_is_on_is_noted():
    with autocasts() as found, torch.autocast("cpu", torch.bfloat16):
        pass
    assert found == ["cpu"]
    with torch.autocast("cpu", torch.bfloat16):
        assert found == ["cpu"], "outside of the block nothing is noted"


@pytest.mark.parametrize("outside", [True, False])
def test_one_that_is_off_is_not(outside: bool):
    around = torch.autocast("cpu", torch.bfloat16, enabled=outside)
    with around, autocasts() as found, torch.autocast("cpu", enabled=False):
        pass
    assert found == []
