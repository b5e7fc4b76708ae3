"""Where a forward cuts its autograd graph, so that its backward is not its derivative.

::

    soft = scores.softmax(1) / scores.softmax(1).sum(0)      rows see each other in soft
    return hard + soft - soft.detach()                       the output is hard, row by row;
                                                             the gradient is that of soft

The outputs then say nothing of what the backward does with rows, and neither does the graph that
autograd records.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.ir._torch import TorchDispatchMode
from fxpipe.ir.tensors import tensors_of

_DETACHING = torch.ops.aten.detach.default


class CutOff(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether operators run without gradients on tensors that require them: ``detach``, and
    any operator under ``torch.no_grad()``.

    Attributes:
        found: whether one has run.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found and (func is _DETACHING or not torch.is_grad_enabled()):
            given = tensors_of((args, kwargs or {}))
            self.found = any(
                tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)
                for tensor in given
            )
        return func(*args, **(kwargs or {}))
