"""Lanes: each entry in the pipeline's list of devices is one, whose stages a host thread runs.

On the CPU the thread itself computes, as a stream would; on an accelerator it launches work on the
device's stream. A run gives every lane its instructions, and lanes post values to each other's
inboxes::

    caller ──x──> inbox 0: lane 0 ──b──> inbox 1: lane 1 ──y──> inbox of the caller

A lane has a thread of its own where there are cores enough. More threads than cores that compute
never do more at once: they take the cores from each other, in the middle of operators, and each
switch costs time. So lanes on the CPU share as many threads as there are cores. A thread that has
several lanes runs one of them until that one waits for a value, and then another one::

    two cores      thread 0: lane 0 ~~~~~~ waits, so lane 2 ~~~~~~ waits, so lane 0 ~~~~
                   thread 1:   lane 1 ~~~~~~ waits, so lane 3 ~~~~~~

PyTorch keeps some state per thread: grad mode, inference mode, autocast, default device, current
streams. A run gives every lane the caller's state, and a copy of the caller's context variables: a
variable that a lane sets has that value in this lane until the run ends, and neither the caller nor
another lane sees it.

When one lane fails, or the caller is interrupted, every lane drops the run, and the first exception
is raised at the caller.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from operator import call
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.clock import Record
from fxpipe.runtime.ending import CALLS, wait_for_calls_at_exit
from fxpipe.runtime.program import CALLER, Program
from fxpipe.runtime.source import Part
from fxpipe.runtime.streams import HandOver, current, handed_over, has_streams, is_captured, on

_SharedBy = tuple[int, ...]
"""The lanes that a thread runs. The caller's thread runs the caller's part only."""


class _Dropped(Exception):
    """Raised in a lane to end its part of a run, since the run has failed elsewhere."""


class Inbox:
    """The values that other lanes have posted to a lane, by their nodes.

    Attributes:
        arrived: the values that are there and that the lane has not taken yet.
        awaited: the node whose value the lane waits for; None if it does not wait. Only this value
            wakes its thread: to switch threads takes longer than many stages do.
    """

    def __init__(self, bell: SimpleQueue[None]) -> None:
        self.arrived: dict[fx.Node, Any] = {}
        self.awaited: fx.Node | None = None
        self._bell = bell  # wakes the lane's thread
        self.take: Callable[[fx.Node], Any] = self.arrived.pop

    def post(self, node: fx.Node, value: Any) -> None:
        """Hand the value of a node over to this lane."""
        self.arrived[node] = value
        if self.awaited is node:
            self._bell.put(None)


class _ProgramCall:
    """One call of a program.

    Args:
        threads: the lanes of each thread that takes part, the caller's included.
        record: if given, gets the start and end of each instruction that a lane runs.

    Attributes:
        inboxes: of all lanes.
        error: the first error that was raised.
        rested: for each thread but the caller's, by its lanes, an event that is set once it has
            ended its part.
    """

    def __init__(self, threads: Iterable[_SharedBy], record: Record | None = None) -> None:
        self.record = record
        self.inboxes: dict[int, Inbox] = {}
        self.error: BaseException | None = None
        self.rested: dict[_SharedBy, threading.Event] = {}
        self._bells: dict[_SharedBy, SimpleQueue[None]] = {}
        self._lock = threading.Lock()
        for lanes in threads:
            bell: SimpleQueue[None] = SimpleQueue()
            self._bells[lanes] = bell
            self.inboxes |= {lane: Inbox(bell) for lane in lanes}
            if CALLER not in lanes:
                self.rested[lanes] = threading.Event()

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and wake every thread that waits."""
        with self._lock:
            if self.error is None:
                self.error = error
        for bell in self._bells.values():
            bell.put(None)

    def rest(self) -> None:
        """Wait until all lanes have ended their parts of the run.

        An interrupt of the caller makes the lanes drop the run. If the run has failed already, by
        an interrupt or otherwise, an interrupt is raised at once, without waiting for the lanes.
        """
        for rested in self.rested.values():
            while not rested.is_set():
                try:
                    rested.wait()
                except BaseException as error:
                    if self.error is not None:
                        raise
                    self.fail(error)

    def outcome(self) -> None:
        """Raise the first error of the run, if there was one.

        The error refers to the run through its traceback, so neither the run nor this frame may
        keep referring to the error: the cycle would keep all values of the run alive until the
        garbage collector comes by.
        """
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def lose(self, lanes: _SharedBy) -> None:
        """Fail the run, since the thread of these lanes has ended ahead of its part of it."""
        of = f"lane{'s' * (len(lanes) > 1)} {' and '.join(map(str, lanes))}"
        self.fail(
            RuntimeError(
                f"the thread of {of} has been ended from outside, so that its part of the call has "
                "not been done; the next call starts new threads"
            )
        )
        self.rested[lanes].set()

    def drop(self) -> None:
        """End the running lane's part, since the run has failed elsewhere."""
        raise _Dropped

    def in_thread(
        self,
        lanes: _SharedBy,
        program: Program,
        contexts: Sequence[Context],
        ambient: Ambient,
        taking: _Taking,
    ) -> None:
        """Do the parts of a thread's lanes in that thread, each in a context of its own; an error
        there fails the whole run."""
        try:
            with ambient.applied(), taking.taken():
                parts = [self._part(lane, program, taking.device) for lane in lanes]
                self.in_turns(lanes, parts, [context.run for context in contexts])
        except _Dropped:
            pass
        except BaseException as error:
            self.fail(error)
        finally:
            self.rested[lanes].set()

    def _part(self, lane: int, program: Program, device: torch.device) -> Part:
        if self.record is None:
            return program.function(lane).part(self)
        stopwatch = self.record.stopwatch(lane, device)
        return program.function(lane, timed=True).part(self, time=stopwatch.time)

    def in_turns(
        self, lanes: _SharedBy, parts: Sequence[Part], calls: Sequence[Callable[..., fx.Node]]
    ) -> Any:
        """Run the parts of lanes in this thread, each until it waits for a value that is not there
        yet. Returns the program's output if the caller's part is among them.

        ``calls``: for each lane what calls ``next(part)``, in the lane's context.
        """
        output = None
        # The last lane first: its values are those that backwards begin with.
        left = [*reversed(range(len(lanes)))]
        try:
            while left:
                has_gone_on = False
                for i in left.copy():
                    inbox = self.inboxes[lanes[i]]
                    if inbox.awaited is not None and inbox.awaited not in inbox.arrived:
                        continue
                    inbox.awaited, has_gone_on = None, True
                    try:
                        # From here on a post rings the bell. One that came before is seen above.
                        inbox.awaited = calls[i](next, parts[i])
                    except StopIteration as end:
                        output = end.value
                        left.remove(i)
                if not has_gone_on:
                    if self.error is not None:
                        raise _Dropped
                    self._bells[lanes].get()
        finally:
            for part in parts:  # frees the values of parts that have not come to their ends
                part.close()
        return output


@dataclass(frozen=True)
class _Taking:
    """What a lane takes over from the caller when a run starts.

    ``device`` is the lane's. ``streams`` are the caller's current streams on all devices of the
    run, on which the lane computes too. ``given`` knows when the caller's tensors may be read.
    """

    device: torch.device
    streams: Sequence[torch.Stream]
    given: HandOver

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A context in which this thread computes on these streams and on the lane's device."""
        with on(*self.streams), handed_over(self.given), _current(self.device):
            yield


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """A context that makes a device the current one in this thread, if it is an accelerator.

    Tensors that a stage makes on "cuda", without a number, and kernels that look for the current
    device, then use the stage's device.
    """
    if not has_streams(device):
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


class _InlineCall:
    """One call of a program without lanes."""

    on = staticmethod(_current)


def run_inline(program: Program, values: Sequence[Any], record: Record | None = None) -> Any:
    """Run a program without lanes, in this thread. It was lowered without a ``placement``.

    The device of each stage is the current one while the stage runs, as it is in a lane.
    """
    if record is None:
        return program.function(CALLER)(_InlineCall, values)
    stopwatch = record.stopwatch(0, torch.device("cpu"))
    return program.function(CALLER, timed=True)(_InlineCall, values, stopwatch.time)


def refuse_capture(devices: Iterable[torch.device]) -> None:
    """Raise RuntimeError while a graph (a CUDA graph, say) is captured on one of the devices."""
    if (captured := next(filter(is_captured, devices), None)) is not None:
        raise RuntimeError(
            f"the pipeline was called while a graph is captured on {captured}, which cannot "
            "record it: the pipeline's host threads wait for the device within a call; call it "
            "outside of the capture"
        )


class Lanes:
    """The host threads of a pipeline. Started at the first run, ended by :meth:`close`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lanes: list[_SharedBy] = []  # of each thread
        self._queues: list[JobQueue] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._close: weakref.finalize[..., Lanes] | None = None

    def run(self, program: Program, values: Sequence[Any], record: Record | None = None) -> Any:
        """Run a program on the lanes, and the caller's part of it in this thread.

        Args:
            values: one for each input of the program, in order.
            record: if given, gets the start and end of each instruction that a lane runs.

        Returns the value of the program's output. Raises the first error of an instruction, after
        all lanes have ended their parts of the run.
        """
        ambient = Ambient.here()
        given = [value.device for value in values if isinstance(value, Tensor)]
        streams = current([*self._devices, *given])
        if record is not None:
            record.begin(streams)
        hand_over = HandOver(streams)
        self._notice_fork()
        # All threads get their parts of runs in one order, so that none waits for another. Nobody
        # ends the threads between their start and the last job.
        with self._lock:
            self._start()
            shared = [tuple(lane for lane in all_ if lane in program.lanes) for all_ in self._lanes]
            run = _ProgramCall([(CALLER,), *filter(None, shared)], record)
            for lanes, queue in zip(shared, self._queues, strict=True):
                if lanes:
                    taking = _Taking(self._devices[lanes[0]], streams, hand_over)
                    contexts = [copy_context() for _ in lanes]
                    work = partial(run.in_thread, lanes, program, contexts, ambient, taking)
                    queue.put(work, partial(run.lose, lanes))
        for (node, others), value in zip(program.inputs.items(), values, strict=True):
            for lane in others:
                run.inboxes[lane].post(node, value)
        output = None
        try:
            output = run.in_turns((CALLER,), [program.function(CALLER).part(run, values)], [call])
        except _Dropped:
            pass
        except BaseException as error:  # KeyboardInterrupt, say
            run.fail(error)
        run.rest()
        hand_over.give_back()
        run.outcome()
        return output

    def is_one(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of these lanes, which must not wait for a run of these lanes."""
        return thread in self._threads

    def close(self) -> None:
        """End the threads, once they have done the jobs in their queues. The next run starts new
        ones."""
        self._notice_fork()
        with self._lock:
            end, self._close = self._close, None
            self._lanes, self._queues, self._threads = [], [], []
        if end is not None:  # without the lock: a job may call the pipeline, or close it
            end()

    def _notice_fork(self) -> None:
        if self._process != os.getpid():  # a forked process has no threads of its parent
            self._reset()

    def _start(self) -> None:
        """Start the threads, unless they run. The caller holds the lock."""
        if self._queues and not any(queue.has_ended for queue in self._queues):
            return
        if self._close is not None:  # a lane has been ended from outside: end the others, too
            self._close.detach()
            for waiting in self._queues:
                waiting.end()
        self._lanes, self._queues, self._threads = shared_out(self._devices, cores()), [], []
        total, share = torch.get_num_threads(), threads_of_a_lane(self._devices)
        ready = threading.Semaphore(0)
        for lanes in self._lanes:
            queue = JobQueue()
            threads = share if self._devices[lanes[0]].type == "cpu" else None
            name = f"fxpipe-lane-{'-'.join(map(str, lanes))}"
            thread = threading.Thread(
                target=_work, args=(queue, threads, ready), name=name, daemon=True
            )
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()
        for _ in self._threads:
            ready.acquire()
        # The number of threads that a lane sets for itself also becomes the default of threads
        # that start later: set the caller's number again.
        torch.set_num_threads(total)
        self._close = weakref.finalize(self, _end, self._queues, self._threads)
        wait_for_calls_at_exit()


def shared_out(devices: Sequence[torch.device], cores: int) -> list[_SharedBy]:
    """The lanes of each thread, where there are lanes on these devices: an accelerator's lane has a
    thread of its own, and those on the CPU share as many threads as there are cores.

    Neighbours have different threads where they can: one of them works at the micro-batch after the
    other's.
    """
    on_cpu = [lane for lane, device in enumerate(devices) if device.type == "cpu"]
    alone = [(lane,) for lane in range(len(devices)) if lane not in on_cpu]
    threads = min(len(on_cpu), max(1, cores))
    return sorted(alone + [tuple(on_cpu[i::threads]) for i in range(threads)])


def cores() -> int:
    """The number of cores on which threads of this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_a_lane(devices: Sequence[torch.device]) -> int:
    """The number of intra-op threads of each lane on the CPU, where there are lanes on these
    devices: the threads that are set for the process are shared out."""
    on_cpu = sum(device.type == "cpu" for device in devices)
    return max(1, torch.get_num_threads() // max(1, on_cpu))


class _Job:
    """Work for a lane's thread to do.

    Nothing of Python ends a thread in the middle, but an exception that another thread sets, or a
    debugger. A job that is freed without having been done then calls ``lost``.
    """

    def __init__(self, work: Callable[[], None], lost: Callable[[], None]) -> None:
        self._work, self._lost, self._is_done = work, lost, False

    def __call__(self) -> None:
        self._work()
        self._is_done = True

    def __del__(self) -> None:
        if not self._is_done:
            self._lost()


class JobQueue:
    """The jobs of a lane, which its thread does one after the other.

    Attributes:
        has_ended: whether no thread does them any more, since it was told to end, or has been
            ended from outside.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.has_ended = False

    def put(self, work: Callable[[], None], lost: Callable[[], None]) -> None:
        """Let the thread do this work.

        ``lost`` is called in its place if the thread has been ended from outside, so that nobody
        waits for it.
        """
        self._jobs.put(_Job(work, partial(self._lose, lost)))
        if self.has_ended:
            self._clear()

    def end(self) -> None:
        """End the thread once it has done the jobs that have been put."""
        self._jobs.put(None)

    def work(self) -> None:
        """Do the jobs, in this thread."""
        try:
            while (job := self._jobs.get()) is not None:
                job()
                del job
        finally:
            # Who puts a job looks at this afterwards: so one of the two finds every job.
            self.has_ended = True
            self._clear()

    def _lose(self, lost: Callable[[], None]) -> None:
        self.has_ended = True  # first: whoever learns of it starts new threads
        lost()

    def _clear(self) -> None:
        """Free the jobs that are left."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()


def _work(queue: JobQueue, threads: int | None, ready: threading.Semaphore) -> None:
    """Do the jobs of a queue, in a lane's thread.

    The thread refers to its queue only, and not to :class:`Lanes`, so that it keeps no pipeline
    alive.
    """
    if threads is not None:
        # At a thread's first call of get_num_threads PyTorch sets the process's number, and undoes
        # an earlier set_num_threads: so ask first, and set then.
        torch.get_num_threads()
        torch.set_num_threads(threads)
    CALLS.belong()
    ready.release()
    queue.work()


def _end(queues: list[JobQueue], threads: list[threading.Thread]) -> None:
    for queue in queues:
        queue.end()
    # This may run in a lane, by a hook or when garbage is collected: a lane does not join lanes,
    # which may be waiting for it.
    if threading.current_thread() not in threads:
        for thread in threads:
            thread.join()
