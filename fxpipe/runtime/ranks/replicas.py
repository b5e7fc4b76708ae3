"""Replicas: copies of a pipeline of ranks that train on other rows, and sum their gradients.

::

                     rank 0 (stage 0)    rank 1 (stage 1)
    replica 0        backward 0          backward 1         on the rows of replica 0
                         ┊ sum               ┊ sum
    replica 1        backward 0          backward 1         on the rows of replica 1

A step of all replicas is a step on the batch that they have together: each row counts alike in the
loss, or each unit of a ``loss_weight``, whichever replica has it. So the weights of micro-batches
are shares of what all replicas have, and losses and gradients are sums.

The ranks that have one stage, in all replicas, form a group. A rank begins to sum the gradients of
a stage when the stage's backwards are done. A thread does the rest, while the rank goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.runtime.ranks.alarm import Alarm
from fxpipe.runtime.ranks.errors import LostRank, RankError
from fxpipe.runtime.ranks.groups import host_group
from fxpipe.runtime.ranks.worker import Worker, WorkerJob
from fxpipe.runtime.streams import current, has_streams, on


class ReplicaGroup:
    """The ranks that have the same stages, one in each replica.

    All of them have to make it at the same time, and to make the same calls in the same order.

    Args:
        group: the ranks, in the order of the replicas.
        device: where this rank has its parameters.
        timeout: as for :class:`fxpipe.runtime.ranks.transport.GroupTransport`.
        alarm: tells a rank that waits that the run has failed elsewhere.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, alarm: Alarm
    ) -> None:
        self.alarm = alarm
        self.number, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.device = device
        self._group, self._host = group, host_group(group, device, timeout)
        self._first = self.ranks[0]
        self._worker = Worker("fxpipe-replicas")
        self._streams = (torch.Stream(device=device),) if has_streams(device) else ()

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give the values of the first replica to all others."""
        with torch.no_grad(), self._or_lost():
            for tensor in tensors:
                value = tensor.detach().contiguous()
                dist.broadcast(value, self._first, group=self._group)
                tensor.detach().copy_(value)

    def total(self, value: float) -> float:
        """The sum of a number over all replicas, in their order."""
        return self.sum(torch.tensor(value, dtype=torch.float64)).item()

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all replicas, in their order."""
        own = tensor.detach().cpu()
        every = [torch.empty_like(own) for _ in range(self.count)]
        with self._or_lost():
            self.alarm.wait(self._worker.do(lambda: dist.all_gather(every, own, group=self._host)))
        total = every[0]
        for each in every[1:]:
            total = total + each
        return total.to(tensor.device)

    def begin(self, parameters: Sequence[Tensor]) -> WorkerJob[list[torch.Event]]:
        """Begin to sum the gradients of these parameters over all replicas, and return at once.

        The result of the job are the events to wait for on an accelerator. A parameter that has
        a gradient in some replicas only gets the sum of these.

        Raises TypeError for a sparse gradient.
        """
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise TypeError(
                    f"a gradient of layout {parameter.grad.layout} cannot be summed over replicas: "
                    "leave out sparse=True"
                )
        begun = [stream.record_event() for stream in current([self.device])]
        return self._worker.do(lambda: self._summed(parameters, begun))

    def do(self, function: Callable[[], None]) -> WorkerJob[None]:
        """Let the thread that talks to other replicas run a function, after all that it has to
        do, on the stream of the calling thread."""
        streams = current([self.device])

        def run() -> None:
            with torch.no_grad(), self._or_lost(), on(*streams):
                function()

        return self._worker.do(run)

    def have_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Give zeros as gradient to the parameters that have one in another replica only. Returns
        those that have one now, which are the same in all replicas."""
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        if len(has):
            dist.all_reduce(has, dist.ReduceOp.MAX, group=self._host)
        found = [p for p, anywhere in zip(parameters, has.tolist(), strict=True) if anywhere]
        for parameter in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return found

    def _summed(
        self, parameters: Sequence[Tensor], begun: Sequence[torch.Event]
    ) -> list[torch.Event]:
        with torch.no_grad(), self._or_lost():
            for stream in self._streams:
                for event in begun:
                    stream.wait_event(event)
            with on(*self._streams):
                kinds: dict[torch.dtype, list[Tensor]] = {}
                for parameter in self.have_gradients(parameters):
                    assert parameter.grad is not None
                    kinds.setdefault(parameter.grad.dtype, []).append(parameter.grad)
                for grads in kinds.values():
                    flat = torch.cat([grad.reshape(-1) for grad in grads])
                    dist.all_reduce(flat, group=self._group)
                    begin = 0
                    for grad in grads:
                        grad.copy_(flat[begin : begin + grad.numel()].view(grad.shape))
                        begin += grad.numel()
        return [stream.record_event() for stream in self._streams]

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        """A context that raises :class:`LostRank` if the network fails."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            text = f"replica {self.number} has lost another replica: {error}"
            raise LostRank(text) from error

    def close(self) -> None:
        """End the thread that exchanges gradients with other replicas."""
        self._worker.end()


class Gradients:
    """The gradients of one step, which are summed over replicas.

    Gradients that were there before the step have been summed by earlier steps. They are put aside,
    and added to the sum.

    Args:
        parameters: all parameters of this rank, but those that are in shards, see
            :mod:`fxpipe.runtime.ranks.shards`.
        are_sharded: gives the ids of those that are.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        parameters: Iterable[Tensor],
        are_sharded: Callable[[], Container[int]] = tuple,
    ) -> None:
        self.replicas, self._are_sharded = replicas, are_sharded
        self._before = {p: p.grad for p in parameters if p.grad is not None}
        for parameter in self._before:
            parameter.grad = None
        self._begun: list[tuple[Sequence[Tensor], WorkerJob[list[torch.Event]]]] = []

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Begin to sum the gradients of these parameters."""
        sharded = self._are_sharded()
        trained = [p for p in parameters if p.requires_grad and id(p) not in sharded]
        self._begun.append((trained, self.replicas.begin(trained)))

    def finish(self) -> None:
        """Wait until all sums that have begun are there."""
        begun, self._begun = self._begun, []
        for _, job in begun:
            for event in self.replicas.alarm.wait(job):
                for stream in current([self.replicas.device]):
                    stream.wait_event(event)
        for parameter, before in self._before.items():
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._before = {}
