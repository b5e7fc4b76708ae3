"""What ranks do in tests of replicas, and one process does for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fxpipe
from tests.fxpipe.ranks.jobs import BROKEN, Breaking, Call, Trained, compiled, made
from tests.zoo import Chain, mean_loss

Make = Callable[[], nn.Module]
CHUNKS = 3


def mesh_of(names: tuple[str, str]) -> Any:
    """Two replicas of two stages, in processes that are in different numbers of groups already."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def positives(target: Tensor) -> Tensor:
    """A loss_weight: how many rows a mean over positive targets is a mean of."""
    return (target > 0).sum()


def mean_of_positives(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the rows whose target is positive; 0 / 0 without any."""
    each = torch.sin(output).flatten(1).sum(1) * target
    return each[target > 0].sum() / (target > 0).sum()


def train(
    group: dist.ProcessGroup,
    make: Make,
    names: tuple[str, str],
    batches: Sequence[tuple[Call, Call]],
    loss_fn: Any = mean_loss,
    how: dict[str, Any] | None = None,
    is_accumulated: bool = False,
    **options: Any,
) -> tuple[int, Trained]:
    """Make a step of each batch, of which each replica has a part. Returns the replica, too.

    ``how``: arguments of the step beside the optimizer; without any there is no optimizer.
    """
    mesh = mesh_of(names)
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(10 + replica)  # no replica but the first has the right values
    model = make()
    if not replica:
        model = made(make)
    first = batches[0][replica]
    with compiled_of(model, mesh, loss_fn, first, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        calls = [parts[replica] for parts in batches]
        return replica, stepped(pipe, optimizer, calls, how, is_accumulated)


def stepped(
    pipe: fxpipe.Pipeline,
    optimizer: torch.optim.Optimizer,
    calls: Sequence[Call],
    how: dict[str, Any] | None,
    is_accumulated: bool,
) -> Trained:
    """Make a step for each call; ``how`` and ``is_accumulated`` are those of :func:`train`."""
    losses, grads = [], {}
    for call in calls:
        if not is_accumulated:
            optimizer.zero_grad()
        given = {} if how is None else {"optimizer": optimizer, **how}
        losses.append(pipe.step(*call.args, target=call.target, **given))
        grads = {n: whole(p.grad) for n, p in pipe.named_parameters() if p.grad is not None}
    state = {name: whole(value) for name, value in pipe.state_dict().items()}
    return Trained(losses, grads, state, None)


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, which may be in shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def compiled_of(model: nn.Module, mesh: Any, loss_fn: Any, call: Call, **options: Any) -> Any:
    """The model as a pipeline of replicas."""
    example = {"example_inputs": call.args, "example_kwargs": call.kwargs}
    return compiled(mesh, lambda: model, loss_fn, chunks=CHUNKS, **example, **options)


def expected(
    make: Make,
    batches: Sequence[tuple[Call, Call]],
    loss_fn: Any = mean_loss,
    weigh: Callable[[Tensor], Any] = len,
    max_norm: float | None = None,
    is_stepped: bool = True,
    is_accumulated: bool = False,
) -> Trained:
    """The same by loops over the micro-batches of each replica."""
    model = made(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses: list[Tensor] = []
    grads: dict[str, Tensor] = {}
    for parts in batches:
        before = grads if is_accumulated else {}
        every = sum(float(weigh(call.target)) for call in parts)
        totals, sums = [], []
        for call in parts:
            model.zero_grad()
            terms = []
            (x,) = call.args
            for i in range(CHUNKS):
                part, y = x.tensor_split(CHUNKS)[i], call.target.tensor_split(CHUNKS)[i]
                weight = float(weigh(y)) / every
                if weight:
                    loss = loss_fn(model(part), y)
                    loss.backward(torch.full_like(loss, weight))
                    terms.append(loss.detach() * weight)
            totals.append(sum(terms[1:], terms[0]) if terms else torch.tensor(0.0))
            own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            sums.append({name: grad.clone() for name, grad in own.items()})
        losses.append(totals[0] + totals[1])
        for name, parameter in model.named_parameters():
            own = [each[name] for each in sums if name in each]
            parameter.grad = sum(own[1:], own[0]) if own else None
            if name in before:
                parameter.grad = parameter.grad + before[name]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if is_stepped:
            optimizer.step()
    return Trained(losses, grads, model.state_dict(), None)


def four() -> Chain:
    """Four layers."""
    return Chain(4)


def of_two(group: dist.ProcessGroup, call: Call) -> list[Tensor] | None:
    """The losses of a step of a mesh of two of the four processes, where one of the two has been in
    a group of its own; None in the other two processes."""
    rank = dist.get_rank()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "pp"))  # all processes make it
    if rank > 1:
        return None
    with compiled_of(made(four), mesh, mean_loss, call) as pipe:
        return [pipe.step(*call.args, target=call.target)]


def clipped(
    where: Any, make: Make, call: Call, max_norm: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The norm of all gradients after a step, and this process's gradients, clipped."""
    options = {"chunks": CHUNKS, "example_inputs": call.args, "partition": ["other"]}
    with compiled(where, make, mean_loss, **options) as pipe:
        pipe.step(*call.args, target=call.target)
        norm = pipe.clip_grad_norm_(max_norm)
        return norm, {n: p.grad.clone() for n, p in pipe.named_parameters()}


def failing(group: dist.ProcessGroup, where: str, call: Call) -> tuple[list[str], bool]:
    """What a rank says to a step in which a layer of the second replica breaks down, and to one
    more step; and whether it is in that replica."""
    mesh = mesh_of(("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    said = []
    with compiled_of(Breaking(where), mesh, mean_loss, call, partition=["c"]) as pipe:
        pipe.step(*call.args, target=call.target)
        BROKEN.extend([True] * replica)
        for _ in range(2):
            try:
                said.append(repr(pipe.step(*call.args, target=call.target)))
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        BROKEN.clear()
    return said, bool(replica)
