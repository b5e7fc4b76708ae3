"""Lanes: a host thread for each entry in the pipeline's list of devices, which runs its stages.

On the CPU the thread itself computes, as a stream would; on an accelerator it launches work on the
device's stream. A run gives every lane its instructions, and lanes post values to each other's
inboxes::

    caller ──x──> inbox 0: lane 0 ──b──> inbox 1: lane 1 ──y──> inbox of the caller

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
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.clock import Record
from fxpipe.runtime.ending import CALLS, wait_for_calls_at_exit
from fxpipe.runtime.program import CALLER, Program
from fxpipe.runtime.streams import HandOver, current, handed_over, has_streams, is_captured, on


class _Dropped(Exception):
    """Raised in a lane to end its part of a run, since the run has failed elsewhere."""


class Inbox:
    """The values that other lanes have posted to a lane, by their nodes.

    The lane's thread is woken only by the value that it waits for: to switch threads takes longer
    than many stages do.
    """

    def __init__(self) -> None:
        self._arrived: dict[fx.Node, Any] = {}
        self._awaited: fx.Node | None = None  # the node whose value the lane waits for
        self._has_failed = False
        self._bell: SimpleQueue[None] = SimpleQueue()

    def post(self, node: fx.Node, value: Any) -> None:
        """Hand the value of a node over to this lane."""
        self._arrived[node] = value
        if self._awaited is node:
            self._bell.put(None)

    def fail(self) -> None:
        """Let the lane know that the run has failed."""
        self._has_failed = True
        self._bell.put(None)

    def take(self, node: fx.Node) -> Any:
        """The value of a node, once it is there. Raises :class:`_Dropped` if the run has failed."""
        if node not in self._arrived:
            # From here on a post rings the bell. One that came before is seen by the loop.
            self._awaited = node
            while node not in self._arrived:
                if self._has_failed:
                    raise _Dropped
                self._bell.get()
            self._awaited = None
        return self._arrived.pop(node)


@dataclass
class _ProgramCall:
    """One call of a program.

    It has an inbox for each lane, an event for each lane that is set once the lane has ended its
    part, and the first error that was raised.
    """

    lanes: Sequence[int]
    record: Record | None = None
    inboxes: dict[int, Inbox] = field(init=False)
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    rested: dict[int, threading.Event] = field(init=False)

    def __post_init__(self) -> None:
        self.inboxes = {lane: Inbox() for lane in self.lanes}
        self.rested = {lane: threading.Event() for lane in self.lanes if lane != CALLER}

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and wake every lane that waits."""
        with self.lock:
            if self.error is None:
                self.error = error
        for inbox in self.inboxes.values():
            inbox.fail()

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

    def lose(self, lane: int) -> None:
        """Fail the run, since the thread of a lane has ended ahead of its part of it."""
        self.fail(
            RuntimeError(
                f"the thread of lane {lane} has been ended from outside, so that its part of the "
                "call has not been done; the next call starts new threads"
            )
        )
        self.rested[lane].set()

    def drop(self) -> None:
        """End the running lane's part, since the run has failed elsewhere."""
        raise _Dropped

    def in_lane(self, lane: int, program: Program, ambient: Ambient, taking: _Taking) -> None:
        """Do a lane's part of the run in the lane's thread; an error there fails the whole run."""
        try:
            with ambient.applied(), taking.taken():
                if self.record is None:
                    program.function(lane)(self)
                else:
                    stopwatch = self.record.stopwatch(lane, taking.device)
                    program.function(lane, timed=True)(self, time=stopwatch.time)
        except _Dropped:
            pass
        except BaseException as error:
            self.fail(error)
        finally:
            self.rested[lane].set()


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
        run = _ProgramCall(list(program.lanes), record)
        ambient = Ambient.here()
        given = [value.device for value in values if isinstance(value, Tensor)]
        streams = current([*self._devices, *given])
        if record is not None:
            record.begin(streams)
        hand_over = HandOver(streams)
        taking = [_Taking(device, streams, hand_over) for device in self._devices]
        lanes = [lane for lane in program.lanes if lane != CALLER]
        self._notice_fork()
        # All lanes get their runs in one order, so that none waits for another. Nobody ends the
        # threads between their start and the last job.
        with self._lock:
            self._start()
            for lane in lanes:
                job = partial(run.in_lane, lane, program, ambient, taking[lane])
                work = partial(copy_context().run, job)
                self._queues[lane].put(work, partial(run.lose, lane))
        for (node, others), value in zip(program.inputs.items(), values, strict=True):
            for lane in others:
                run.inboxes[lane].post(node, value)
        output = None
        try:
            output = program.function(CALLER)(run, values)
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
            self._queues, self._threads = [], []
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
        self._queues, self._threads = [], []
        total, share = torch.get_num_threads(), threads_of_a_lane(self._devices)
        ready = threading.Semaphore(0)
        for i, device in enumerate(self._devices):
            queue = JobQueue()
            threads = share if device.type == "cpu" else None
            thread = threading.Thread(
                target=_work, args=(queue, threads, ready), name=f"fxpipe-lane-{i}", daemon=True
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
