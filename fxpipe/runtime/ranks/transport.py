"""Transport: how values get from one rank, a process of a group, to another.

::

    rank 0    transmit ── memory of the tensors ── header ── description ──┐   in this order, on an
    rank 1    receive ┄┄ (a thread for each edge awaits them) ┄ arrived ◁──┘   edge of its own

An edge is a pair of ranks, in one direction; messages on it arrive in the order in which they were
sent. PyTorch has one communicator for both directions of a pair, which NCCL makes at its first use.
So edges to higher ranks have one process group and edges to lower ranks another, in each of which a
pair talks in one direction only; and :meth:`GroupTransport.connect` uses each edge once ahead of
the first run, in one order on all ranks.

A communicator takes memory of the device. ``FXPIPE_COMMUNICATORS`` in the environment of all ranks
says how many a rank may have for single edges, 16 if it is not given. All other edges share one, on
which transfers wait for each other, in the order of the step. As this order is the same on all
ranks, they cannot wait for each other in a circle.

Nothing travels ahead of tensors whose sizes the receiver knows (see
:mod:`fxpipe.runtime.ranks.expected`): it has memory for them when they come. The header comes
behind them. It says which run the message belongs to, whether a gradient is missing, and whether
the rank has failed in place of sending. Tensors of up to 128 KiB travel in the header itself. Where
sizes follow from values, the header is ahead. The description (see
:mod:`fxpipe.runtime.ranks.packing`) is sent only at its first use on an edge; later headers refer
to it by number. Headers travel by gloo, from host to host. With a group that talks from device to
device (NCCL) the header is always ahead: a rank that fails then need not send what others expect
from its device.

A tensor by itself, which both ends know from the run before, travels without a header, from its own
memory into the memory of the tensor that arrives. To pack it, and to make, send and take a header,
is Python that is out of the CPU's caches whenever a rank has computed: a third of a millisecond.
If there is something else to send, or the rank has failed, the memory that is sent in the tensor's
place begins with a *mark*, 32 bytes which all ranks of the pipeline make up alike for each run, and
a header follows::

    what is expected     memory of the tensor        (it does not begin with the mark)
    something else       mark, zeros ── header ── description ── memory of the tensors

A run that fails on one rank ends on the others too: what the rank still had to transmit is sent as
a failure, and what it still had to receive is taken and dropped. Afterwards every edge is as empty
as ahead of the run.

``FXPIPE_RENDEZVOUS=1`` in the environment of all ranks, at the beginning of a run, makes each
transmit of the run wait until the other rank has come to its receive. A program that ends under it
ends however little the network buffers.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.runtime.ranks.alarm import Alarm
from fxpipe.runtime.ranks.errors import LostRank, RankError, failure, is_final, reason
from fxpipe.runtime.ranks.expected import Expected, Sizes, is_small
from fxpipe.runtime.ranks.groups import host_group, new_group
from fxpipe.runtime.ranks.packing import MARK, Description, Strided, packed, unpacked
from fxpipe.runtime.ranks.watch import Watch
from fxpipe.runtime.ranks.worker import Worker, WorkerJob
from fxpipe.runtime.streams import await_made, current, has_streams, made, on

T = TypeVar("T")
Edge = tuple[int, int]
"""The rank that transmits, and the rank that receives."""

COMMUNICATORS = "FXPIPE_COMMUNICATORS"  # an environment variable
# Tags, which gloo keeps apart: receives of one kind are posted before those of another have come.
HEADER, TENSOR, TEXT, REST, MET, LATE = range(7101, 7107)
# The run, the number of the description, and the length of its text. Behind it a tensor begins at a
# multiple of 64 bytes, as in memory that PyTorch gives.
_HEADER = struct.Struct("=qqq40x")
_FAILED, _ONCE = -1, -2  # in a header, in place of the number of a description
_MANY = 4096  # descriptions that are remembered for an edge
_KINDS = 256  # kinds of runs whose sizes are remembered


@dataclass(frozen=True)
class Planned:
    """A transfer in the plan of a run.

    Args:
        place: its place in the order of the step, which is the same on all ranks.
        said: for messages, which value travels.
    """

    place: int
    said: str


Plan = Mapping[Edge, Sequence[Planned]]
"""The transfers of each edge of a rank in a run, in order."""


class Arrival(Protocol):
    """A transfer that has begun, and whose values may still be on their way to this rank."""

    def wait(self) -> Any:
        """Wait for the values, and return them."""


class Transport(Protocol):
    """Moves values between ranks: the graph of a rank sends and receives through it."""

    def transmit(self, values: Any, edge: Edge, number: int) -> None:
        """Send values as the ``number``-th transfer of an edge in this run."""

    def receive(self, edge: Edge, number: int) -> Arrival:
        """Begin to receive the ``number``-th transfer of an edge in this run."""


@dataclass
class _Receiving:
    """An :class:`Arrival` that another thread waits for."""

    job: WorkerJob[Callable[[], Any]]
    device: torch.device
    waiting: Callable[[], AbstractContextManager[None]]

    def wait(self) -> Any:
        with self.waiting():
            make = self.job.result()
        values = make()
        for stream in current([self.device]):
            await_made(stream, values)
        return values


class GroupTransport:
    """The transport among the ranks of a process group.

    All ranks of the group have to make it at the same time.

    Args:
        group: the ranks among which values travel.
        device: where values arrive on this rank.
        timeout: how long a transfer waits for the other rank, before it raises ``LostRank``.
        names: what messages call the ranks of the group.
        watch: where this rank notes for whom it waits.
        alarm: tells the other ranks why a run has failed on this one, and this one why on others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        names: Sequence[str],
        watch: Watch,
        alarm: Alarm,
    ) -> None:
        self.timeout, self.names = timeout, names
        self.watch, self.alarm = watch, alarm
        self.device, self.rank = device, dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        # The given group, if it can be: PyTorch names a new group of some of the processes by the
        # number of groups that a process is in. Where that differs, they would never meet.
        self._control = host_group(group, device, timeout)
        self._places = [dist.get_group_rank(self._control, rank) for rank in self.ranks]
        # Gloo sends only from the host's memory, and has a separate channel for each direction.
        self._by_host = device.type == "cpu" or dist.get_backend(group) == "gloo"
        up, down, shared = (
            (self._control,) * 3
            if self._by_host
            else (new_group(self.ranks, None, timeout, [group], device) for _ in range(3))
        )
        self._payload = {True: up, False: down}
        self.communicators = _limit()
        self._channels = Channels(self.communicators, shared)
        self._edges: dict[Edge, _EdgeEnd] = {}
        self._lost: dict[int, RuntimeError] = {}  # by the rank, how the network has failed
        self._plan: Plan = {}
        self._kinds: OrderedDict[str, dict[Edge, Expected]] = OrderedDict()
        self._is_rendezvous = False
        self._run = 0
        self._key = 0
        self._mark = b""

    # ------------------------------------------------------------------------------------- a run

    def connect(self, edges: Sequence[Edge]) -> None:
        """Make the communicators of these edges, and use each edge once. ``edges`` are those
        between all ranks, in one order on all ranks."""
        self._begin(0, {}, {})
        shares = [self._channels.add(edge) for edge in edges]
        if any(shares) and not self._by_host:
            dist.barrier(self._channels.shared)  # it makes the communicator, on all ranks at once
        for edge in edges:
            if self.rank in edge and edge not in self._edges:
                self._edge(edge)
                if self.rank == edge[0]:
                    self.transmit(torch.zeros(1, device=self.device), edge, 0)
                else:
                    self.receive(edge, 0).wait()
        self.finish()

    def is_shared(self, edge: Edge) -> bool:
        """Whether an edge shares its communicator with others, so that transfers keep their order
        among all of them."""
        return edge in self._channels.sharing

    def run(
        self,
        program: Callable[[], Any],
        plan: Plan,
        key: int,
        kind: str,
        sizes: Mapping[Edge, Sequence[Sizes | None]],
    ) -> Any:
        """Run a program that transmits and receives, and return what it returns.

        Args:
            plan: the transfers in the program of this rank.
            key: a number that is the same on all ranks if their programs belong together.
            kind: a text that is the same on all ranks. Messages are expected to have the sizes that
                they had in the last run of this kind.
            sizes: those that are expected in the first run of this kind, by edges and in order; at
                both ends of an edge the same.

        Raises what the program raises, on this rank. Raises :class:`RankError` if it has failed on
        another rank, or if another rank runs another program.
        """
        self._run += 1
        self.watch.begin(self._run)
        if kind not in self._kinds:
            own = {edge: each for edge, each in sizes.items() if self.rank in edge}
            self._kinds[kind] = {edge: Expected(each) for edge, each in own.items()}
        self._kinds.move_to_end(kind)
        while len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        self._mark = hashlib.shake_256(f"{self.alarm.name} {self._run}".encode()).digest(MARK)
        self._begin(hash((self._run, key)), plan, self._kinds[kind])
        try:
            result = program()
            self.finish()
        except BaseException as error:
            text = failure(self.names[self.rank], error)
            self.alarm.ring(text, is_final(error))
            self._fail(text, plan, is_final(error))
            raise
        return result

    def _begin(self, key: int, plan: Plan, expected: dict[Edge, Expected]) -> None:
        self._key, self._plan = key, plan
        self._is_rendezvous = os.environ.get("FXPIPE_RENDEZVOUS", "0") not in ("", "0")
        for ends, edge in self._edges.items():
            edge.done = 0
            edge.expected = expected.setdefault(ends, Expected())

    def finish(self) -> None:
        """Wait until everything that this rank transmits has been sent."""
        for edge in self._edges.values():
            if edge.ends[0] == self.rank:
                edge.worker.rest()

    def _fail(self, text: str, plan: Plan, is_final: bool) -> None:
        """End a failed run: receive what other ranks still send, and send them the failure in place
        of the values that they wait for.

        ``is_final``: whether no other run follows, so that nothing has to be received.
        """
        for ends, transfers in plan.items():
            edge = self._edge(ends)
            while not is_final and ends[1] == self.rank and edge.done < len(transfers):
                self.receive(ends, edge.done)
        for ends, transfers in plan.items():
            edge = self._edge(ends)
            with suppress(RankError):
                while ends[0] == self.rank and edge.done < len(transfers):
                    self._send(edge, _FAILED, text.encode(), [])
        for ends in plan:
            if not is_final:
                self._edge(ends).worker.rest(is_quiet=True)

    # ------------------------------------------------------------------------------------ messages

    def transmit(self, values: Any, edge: Edge, number: int) -> None:
        """Send values to the other rank of an edge. Tensors among them must not be written to
        before they have been sent."""
        there = self._edge(edge)
        there.check(number)
        alone = self._alone(there, number)
        if alone is not None and alone.is_of(values):
            there.done += 1
            self._begin_to_send(there, number, _Message([values[0].detach()]))
            return
        description, parts = packed(values, self.device)
        self._send(there, *there.described(description), parts, description.alone)

    def _send(
        self,
        edge: _EdgeEnd,
        number: int,
        text: bytes,
        parts: list[Tensor],
        alone: Strided | None = None,
    ) -> None:
        """Send a message with a header, on an edge. Once the network has failed there, nothing is
        sent."""
        transfer = edge.done
        edge.done += 1
        message = self._message(edge, transfer, number, text, parts)
        if number != _FAILED:
            edge.expected.note(transfer, tuple(part.numel() for part in parts), alone)
        self._begin_to_send(edge, transfer, message)

    def _begin_to_send(self, edge: _EdgeEnd, transfer: int, message: _Message) -> None:
        """Begin to send a message. The edge's thread waits until it is sent, and keeps its memory
        until then."""
        if not self.is_shared(edge.ends):
            works = self._issue(edge, transfer, message)
            edge.worker.do(partial(self._wait, edge, transfer, works, message))
            return
        ready = [stream.record_event() for stream in current([self.device])]

        def send() -> None:
            for stream, event in zip(edge.streams, ready, strict=True):
                stream.wait_event(event)
            with on(*edge.streams):
                works = self._issue(edge, transfer, message)
                self._wait(edge, transfer, works, message)

        edge.worker.do(send)

    def _message(
        self, edge: _EdgeEnd, transfer: int, number: int, text: bytes, parts: list[Tensor]
    ) -> _Message:
        """What to send. Where parts are expected of which there are none, or others, memory of the
        expected sizes is sent in their place, and the parts come behind the header."""
        expected, alone = self._expected(edge, transfer), self._alone(edge, transfer)
        if self._by_host and self.device.type != "cpu":
            parts = [part.cpu() for part in parts]
        header = _bytes(_HEADER.pack(self._key, number, len(text)))
        said = _bytes(text) if text else None
        rest = [part for part in parts if part.numel()]
        if alone is not None:
            marked = _bytes(self._mark.ljust(alone.bytes, b"\0"))
            return _Message([marked], header, LATE, said, rest)
        if number != _FAILED and tuple(part.numel() for part in parts) == expected:
            rest = []
        else:
            parts = [_zeros(size) for size in expected or ()]
        if small := [part for part in parts if is_small(part.numel())]:
            header = torch.cat([header, *small])
        large = [part for part in parts if not is_small(part.numel())]
        return _Message(large, header, HEADER, said, rest)

    def _expected(self, edge: _EdgeEnd, transfer: int) -> Sizes | None:
        return edge.expected.of(transfer) if self._by_host else None

    def _alone(self, edge: _EdgeEnd, transfer: int) -> Strided | None:
        """The tensor that a message is expected to be, without a header."""
        return edge.expected.alone(transfer) if self.device.type == "cpu" else None

    def _issue(self, edge: _EdgeEnd, transfer: int, message: _Message) -> list[Any]:
        """Begin to send a message."""
        with self._or_lost(edge, transfer):
            works = self._issued(edge, message.parts, TENSOR)
            if message.header is not None:
                works.append(self._to(edge.ends[1], message.header, message.tag))
            if message.text is not None:
                works.append(self._to(edge.ends[1], message.text, TEXT))
            works += self._issued(edge, message.rest, REST)
            if self._is_rendezvous:
                self._from(edge.ends[1], torch.empty(1), MET).wait()
        return works

    def _issued(self, edge: _EdgeEnd, parts: Sequence[Tensor], tag: int) -> list[Any]:
        return [work for part in parts for work in self._exchange(edge, part, tag)]

    def _exchange(self, edge: _EdgeEnd, part: Tensor, tag: int) -> list[Any]:
        """Begin to send or to receive a part. With NCCL a pair of ranks has a communicator, except
        for what is sent in a batch, which uses the one of the whole group."""
        source, target = edge.ends
        is_sent = self.rank == source
        if self._by_host:
            return [self._to(target, part, tag) if is_sent else self._from(source, part, tag)]
        how, peer = (dist.isend, target) if is_sent else (dist.irecv, source)
        if not self.is_shared(edge.ends):
            return [how(part, self.ranks[peer], self._payload[source < target], tag=tag)]
        return dist.batch_isend_irecv(
            [dist.P2POp(how, part, self.ranks[peer], self._channels.shared)]
        )

    def _to(self, rank: int, memory: Tensor, tag: int) -> dist.Work:
        """Begin to send memory of the host. The group itself is asked, as ``dist.isend`` does too,
        after lookups in Python that have been made here once."""
        return self._control.send([memory], self._places[rank], tag)

    def _from(self, rank: int, memory: Tensor, tag: int) -> dist.Work:
        """Begin to receive memory of the host; see :meth:`_to`."""
        return self._control.recv([memory], self._places[rank], tag)

    def _wait(self, edge: _EdgeEnd, transfer: int, works: list[Any], message: _Message) -> None:
        """Wait until a message is sent, and keep its tensors alive until then."""
        with self._or_lost(edge, transfer):
            for work in works:
                work.wait()

    @contextmanager
    def _or_lost(self, edge: _EdgeEnd, transfer: int) -> Iterator[None]:
        """A context that raises :class:`LostRank`, which says what has been waited for, if the
        network fails or has failed before between this rank and the other one of an edge."""
        other = next(rank for rank in edge.ends if rank != self.rank)
        begun = time.monotonic()
        if other not in self._lost:
            try:
                yield
                return
            except RankError:
                raise
            except RuntimeError as error:
                self._lost[other] = error
        planned = _planned(self._plan, edge.ends, transfer)
        here, there = self.names[self.rank], self.names[other]
        said = f"{here} has lost {there} at {planned.said} ({reason(self._lost[other])})"
        is_hanging = time.monotonic() - begun > self.timeout.total_seconds() / 2
        if is_hanging and (hanging := self.watch.said(other)):
            said = f"{hanging}; {said}"
        if cause := self.alarm.heard():
            said = f"{cause}; {said}"
        else:
            said = self.alarm.report(planned.place, said, is_hanging)
        raise LostRank(said) from self._lost[other]

    def receive(self, edge: Edge, number: int) -> _Receiving:
        """Begin to receive the next message. Returns at once; the edge's thread waits for what
        comes.

        What is expected is asked for now, so that the other rank can send it at once. An edge that
        shares its communicator asks for it when what was asked for earlier has come.
        """
        there = self._edge(edge)
        there.check(number)
        there.done += 1
        ask: Callable[[], _Incoming] = partial(self._asked, there, number)
        if self._by_host and not self.is_shared(edge):
            ask = _tried(ask)
        taken = there.worker.do(partial(self._take, there, number, self._key, ask))
        plan = self._plan
        waiting = partial(self.watch.waiting, edge[0], lambda: _planned(plan, edge, number).said)
        return _Receiving(taken, self.device, waiting)

    def _asked(self, edge: _EdgeEnd, transfer: int) -> _Incoming:
        """Begin to receive a message: what is expected, and the header."""
        source = edge.ends[0]
        works: list[Any] = []
        if self._is_rendezvous:
            works.append(self._to(source, torch.zeros(1), MET))
        alone = self._alone(edge, transfer)
        if alone is not None:
            tensor = alone.empty()
            works.append(self._from(source, tensor, TENSOR))
            return _Incoming(works, tensor=tensor, requires_grad=alone.requires_grad)
        expected = self._expected(edge, transfer)
        sizes = expected or ()
        large = [self._part(edge, size, TENSOR) for size in sizes if not is_small(size)]
        small = [size for size in sizes if is_small(size)]
        header = torch.empty(_HEADER.size + sum(small), dtype=torch.uint8)
        works.append(self._from(source, header, HEADER))
        return _Incoming(works, expected, large, header)

    def _take(
        self, edge: _EdgeEnd, number: int, key: int, ask: Callable[[], _Incoming]
    ) -> Callable[[], Any]:
        """Wait for a message. Returns what makes its values.

        The thread that needs the values makes them, as it has the interpreter then. Where they are
        copied to a device they are made at once, so that the copy overlaps with what is computed.
        """
        with self._or_lost(edge, number):
            asked = ask()
            asked.wait()
            if asked.tensor is not None and not self._is_marked(asked.tensor):
                tensor = asked.tensor.requires_grad_(asked.requires_grad)
                return lambda: (tensor,)
            description, came = self._taken(edge, number, key, asked)
        if not edge.streams:
            return partial(unpacked, description, came)
        with on(*edge.streams):
            values = unpacked(description, came)
        for stream in edge.streams:
            made(values, stream)
        return lambda: values

    def _is_marked(self, tensor: Tensor) -> bool:
        """Whether something else than this tensor is to come."""
        return ctypes.string_at(tensor.data_ptr(), MARK) == self._mark

    def _taken(
        self, edge: _EdgeEnd, transfer: int, key: int, asked: _Incoming
    ) -> tuple[Description, list[Tensor]]:
        came = asked.came(self.device)
        header = asked.header
        if header is None:
            header = self._received(edge, _HEADER.size, LATE)
        theirs, number, length = _HEADER.unpack_from(header.numpy().data)
        text = bytes(self._received(edge, length, TEXT).tolist()) if length else b""
        if number == _FAILED:
            raise RankError(text.decode())
        description = edge.description(number, text)
        edge.expected.note(transfer, description.sizes, description.alone)
        if description.sizes != asked.expected:
            with on(*edge.streams):
                came = [self._part(edge, size, REST)() for size in description.sizes]
        if theirs != key:
            raise RankError(
                f"{self.names[edge.ends[0]]} is not at the same call as {self.names[self.rank]}: "
                "every rank has to make the same calls of the pipeline, with batches of the same "
                "shapes"
            )
        return description, came

    def _received(self, edge: _EdgeEnd, size: int, tag: int) -> Tensor:
        """Receive what follows: a text behind its header, or a header behind a mark."""
        found = torch.empty(size, dtype=torch.uint8)
        self._from(edge.ends[0], found, tag).wait()
        return found

    def _part(self, edge: _EdgeEnd, size: int, tag: int) -> Callable[[], Tensor]:
        """Begin to receive a part. Returns what waits for it, and returns it."""
        device = torch.device("cpu") if self._by_host else self.device
        part = torch.empty(size, dtype=torch.uint8, device=device)
        works = self._exchange(edge, part, tag) if size else []

        def come() -> Tensor:
            for work in works:
                work.wait()
            return part.to(self.device)

        return come

    def _edge(self, edge: Edge) -> _EdgeEnd:
        if edge not in self._edges:
            worker = self._channels.worker if self.is_shared(edge) else None
            self._edges[edge] = _EdgeEnd(edge, self.device, worker)
        return self._edges[edge]

    def close(self) -> None:
        """End the threads that send and receive."""
        self.watch.close()
        for edge in self._edges.values():
            edge.worker.end()
        self._edges.clear()


class Channels:
    """Which edges have a communicator of their own, and which share one.

    An edge gets its own if both of its ranks have fewer than ``limit`` yet. Every rank decides this
    for the edges of all ranks, in the same order, so that both ends of an edge decide alike.

    Args:
        shared: the group whose communicator the others share.
    """

    def __init__(self, limit: int, shared: Any) -> None:
        self._limit, self.shared = limit, shared
        self._owned: Counter[int] = Counter()
        self._known: set[Edge] = set()
        self.sharing: set[Edge] = set()

    def add(self, edge: Edge) -> bool:
        """Decide about an edge. Returns whether it is new, and shares the communicator."""
        if edge in self._known:
            return False
        self._known.add(edge)
        if max(self._owned[rank] for rank in edge) >= self._limit:
            self.sharing.add(edge)
        else:
            self._owned.update(edge)
        return edge in self.sharing

    @cached_property
    def worker(self) -> Worker:
        """The thread of this rank for all edges that share: their transfers keep one order."""
        return Worker("fxpipe-edges-shared")


def _limit() -> int:
    """How many communicators a rank has at most for single edges.

    Raises ValueError for an environment that does not say a number.
    """
    given = os.environ.get(COMMUNICATORS, "16")
    if not given.isdecimal():
        raise ValueError(
            f"{COMMUNICATORS} is {given!r}: give the number of communicators of a rank"
        )
    return int(given)


@dataclass
class _Message:
    """What is sent for a transfer, in this order: parts that the receiver expects, the header with
    small ones, the text that belongs to it, and parts that the receiver does not expect."""

    parts: Sequence[Tensor]
    header: Tensor | None = None
    tag: int = HEADER
    text: Tensor | None = None
    rest: Sequence[Tensor] = ()


@dataclass
class _Incoming:
    """A message whose expected parts and header may still be on their way.

    ``tensor``: a tensor that is expected alone, without a header; ``requires_grad``: whether a
    gradient is wanted for it.
    """

    works: Sequence[dist.Work]
    expected: Sizes | None = None
    large: Sequence[Callable[[], Tensor]] = ()
    header: Tensor | None = None
    tensor: Tensor | None = None
    requires_grad: bool = False

    def wait(self) -> None:
        """Wait for the header, or the tensor. It comes last: when it is there, so is all."""
        for work in reversed(self.works):
            work.wait()

    def came(self, device: torch.device) -> list[Tensor]:
        """The expected parts, once they are there; none if a tensor was expected alone."""
        parts = [wait() for wait in self.large]
        large, begin, every = iter(parts), _HEADER.size, []
        is_alone = len(self.expected or ()) == 1
        for size in self.expected or ():
            if is_small(size):
                assert self.header is not None
                part = self.header[begin : begin + size]
                # Several would keep each other's memory, and not begin at multiples of 64 bytes.
                every.append((part if is_alone else part.clone()).to(device))
                begin += size
            else:
                every.append(next(large))
        return every


def _planned(plan: Plan, edge: Edge, number: int) -> Planned:
    """A transfer of a run, as messages name it."""
    planned = plan.get(edge, ())[number : number + 1]
    value = f"{planned[0].said}, " if planned else ""
    place = planned[0].place if planned else -1
    return Planned(place, f"{value}transfer {number} of the edge {edge}")


def _tried(begin: Callable[[], T]) -> Callable[[], T]:
    """Run a function now. Returns one that returns its result, or raises its error."""
    job = WorkerJob(begin)
    job.run()
    return job.result


class _EdgeEnd:
    """One end of an edge: its thread, and the descriptions that both ends know by number."""

    def __init__(self, ends: Edge, device: torch.device, worker: Worker | None) -> None:
        self.ends = ends
        self.done = 0  # how many transfers have begun in this run
        self.expected = Expected()  # the sizes of this run's messages
        self.worker = worker or Worker(f"fxpipe-edge-{ends[0]}-{ends[1]}")
        self.streams = (torch.Stream(device=device),) if has_streams(device) else ()
        self._numbers: dict[Description, int] = {}
        self._known: list[Description] = []

    def check(self, number: int) -> None:
        """Raise RuntimeError unless the edge's next transfer in this run is the ``number``-th."""
        if number != self.done:
            raise RuntimeError(
                f"transfer {number} of the edge {self.ends} comes as number {self.done}"
            )

    def described(self, description: Description) -> tuple[int, bytes]:
        """The number of a description, and its text if the other end does not know it yet."""
        try:
            number = self._numbers.get(description)
        except TypeError:  # it has constants without a hash
            return _ONCE, pickle.dumps(description)
        if number is not None:
            return number, b""
        if len(self._numbers) == _MANY:
            return _ONCE, pickle.dumps(description)
        number = self._numbers[description] = len(self._numbers)
        return number, pickle.dumps(description)

    def description(self, number: int, text: bytes) -> Description:
        """The description that the sender refers to by a number; ``text`` is its pickle, and
        is empty where this end has received the description before."""
        if not text:
            return self._known[number]
        found: Description = pickle.loads(text)
        if number != _ONCE:
            self._known.append(found)
        return found


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _zeros(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)
