"""Cost: what each node of the model graph takes, in time and memory, by a model of the device.

::

    conv  ──  relu  ──  linear            conv:   4.1 ms, 1.2 MB of parameters, 3 MB kept, 2 MB out
                                          relu:   0.2 ms, 0, 2 MB, 2 MB ...

The time is the roofline's (Williams et al., "Roofline: an insightful visual performance model",
2009): the larger of FLOPs over peak rate and bytes moved over bandwidth. Nothing is computed: nodes
run on fake tensors, ``torch.utils.flop_counter`` counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.graph import COST, VALUE, Cost, attribute, stage_nodes, tensor_bytes
from passes.fakes import FakeInterpreter, fake_mode


@dataclass(frozen=True)
class Roofline:
    """A device, by its two limits. The defaults are one core of a server CPU of the 2020s."""

    flops_per_s: float = 5e10
    bytes_per_s: float = 1e10
    launch_s: float = 2e-6  # what an operator costs that does nothing


@dataclass(frozen=True)
class AnalyticCost:
    """Model graph with fake values (pass "alias") → the same, with a :class:`Cost` at each node.

    The backward is taken for twice the forward where the node has a gradient to hand on.
    """

    name: ClassVar[str] = "cost"
    device: Roofline = Roofline()

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        counted: set[int] = set()  # a shared parameter is counted where it is used first
        interpreter = FakeInterpreter(gm, fake_mode(gm.graph))
        for node in stage_nodes(gm.graph):
            node.meta[COST] = self._of(gm, node, interpreter, counted)
        return gm

    def _of(
        self, gm: fx.GraphModule, node: fx.Node, interpreter: FakeInterpreter, counted: set[int]
    ) -> Cost:
        work = _run(interpreter, node)
        forward = max(work.flops / self.device.flops_per_s, work.bytes / self.device.bytes_per_s)
        forward += work.operators * self.device.launch_s
        output = node.meta[VALUE]
        has_gradient = any(getattr(t, "requires_grad", False) for t in pytree.tree_leaves(output))
        parameters = {id(p): p for p in _parameters(gm, node) if id(p) not in counted}
        counted.update(parameters)
        return Cost(
            forward_s=forward,
            backward_s=2 * forward if has_gradient else 0.0,
            param_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
            activation_bytes=work.saved if has_gradient else 0,
            output_bytes=tensor_bytes(output),
            flops=work.flops,
        )


@dataclass
class _Work:
    flops: int = 0
    bytes: int = 0
    operators: int = 0
    saved: int = 0


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and the bytes that they read and write. Views move nothing."""

    def __init__(self, work: _Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.work.operators += 1
            self.work.bytes += tensor_bytes((args, kwargs, result))
        return result


def _run(interpreter: FakeInterpreter, node: fx.Node) -> _Work:
    """Run one node on its inputs' fake values."""
    work = _Work()
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage()._cdata] = tensor_bytes(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with interpreter.mode, torch.enable_grad():
        args, kwargs = pytree.tree_map_only(FakeTensor, _fresh, (args, kwargs))
        with hooks, FlopCounterMode(display=False) as flops, _Traffic(work):
            getattr(interpreter, node.op)(node.target, args, kwargs)
    work.flops = flops.get_total_flops()
    work.saved = sum(saved.values())
    return work


def _fresh(tensor: FakeTensor) -> Tensor:
    """One like it that may be written to, with its requires_grad but without its history."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    requires_grad = tensor.requires_grad
    return tensor.detach().requires_grad_(requires_grad).clone()


def _parameters(gm: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    if node.op == "call_module":
        return list(gm.get_submodule(str(node.target)).parameters())
    values = (attribute(gm, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr")
    return [v for v in values if isinstance(v, nn.Parameter)]
