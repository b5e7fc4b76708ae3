"""The end of the interpreter waits for calls in daemon threads."""

import os
import threading

import pytest

from fxpipe.runtime.ending import CALLS, CallsUnderWay


class Caller:
    """A thread that makes calls, each of which lasts until it is let go."""

    def __init__(self, calls, *, daemon=True, within=0):
        self.calls, self.within = calls, within
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self.thread = threading.Thread(target=self.run, daemon=daemon)
        self.thread.start()

    def run(self):
        with self.calls.one():
            self.begun.set()
            self.go_on.wait()
            for _ in range(self.within):
                with self.calls.one():
                    pass
        self.ended.set()


def ending(calls):
    """A thread in which the process ends: it is done once the end has waited for all calls."""
    thread = threading.Thread(target=calls.end)
    thread.start()
    return thread


@pytest.mark.parametrize("within", [0, 2])
def test_the_end_waits_for_a_call_which_its_thread_does_not_leave(within):
    calls = CallsUnderWay()
    caller = Caller(calls, within=within)
    assert caller.begun.wait(60)
    end = ending(calls)
    end.join(0.05)
    assert end.is_alive()
    caller.go_on.set()
    end.join(60)
    assert not end.is_alive()
    assert not caller.ended.wait(0.05)


def test_a_daemon_thread_makes_no_call_after_the_end():
    calls = CallsUnderWay()
    calls.end()
    caller = Caller(calls)
    assert not caller.begun.wait(0.05)
    calls.end()  # nothing is under way


def test_other_threads_are_neither_waited_for_nor_held():
    calls = CallsUnderWay()
    caller = Caller(calls, daemon=False)
    assert caller.begun.wait(60)
    calls.end()
    caller.go_on.set()
    assert caller.ended.wait(60)
    with calls.one():  # an exit handler that calls a pipeline
        pass


def test_a_call_in_a_lane_is_part_of_another_call():
    calls = CallsUnderWay()
    done = threading.Event()

    def lane():
        calls.belong()
        with calls.one():
            done.set()

    calls.end()
    threading.Thread(target=lane, daemon=True).start()
    assert done.wait(60)


def test_a_call_that_raises_has_ended():
    calls = CallsUnderWay()
    raised = threading.Event()

    def run():
        try:
            with calls.one():
                raise ValueError
        except ValueError:
            raised.set()

    threading.Thread(target=run, daemon=True).start()
    assert raised.wait(60)
    calls.end()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_waits_for_no_call_of_its_parent():
    caller = Caller(CALLS)
    assert caller.begun.wait(60)
    child = os.fork()
    if child == 0:
        CALLS.end()
        os._exit(0)
    caller.go_on.set()
    assert os.waitpid(child, 0)[1] == 0
    assert caller.ended.wait(60)
