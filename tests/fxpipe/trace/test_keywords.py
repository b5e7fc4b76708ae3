"""A part of a model whose name is a keyword of Python is refused by its name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpipe.trace import TraceError, trace
from tests.fxpipe.trace.small import BOTH


class Heads(nn.Module):
    """Has a head for classes, and another one, which may have the name of a keyword as well."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.heads = nn.ModuleDict({name: nn.Linear(4, 2), "box": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"class": self.heads[self.name](x), "box": self.heads["box"](x)}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"lambda": torch.ones(4)})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales["lambda"]


@BOTH
def test_a_name_that_is_a_keyword_is_refused(tracer: str) -> None:
    x = torch.randn(4, 4)
    trace(Heads("class_"), (x,), tracer=tracer)
    with pytest.raises(TraceError, match=r"heads\.class.* such as 'class_'"):
        trace(Heads("class"), (x,), tracer=tracer)
    with pytest.raises(TraceError, match=r"scales\.lambda.* such as 'lambda_'"):
        trace(Scaled(), (x,), tracer=tracer)
