"""A thread that runs functions one after the other."""

from __future__ import annotations

import threading
import weakref

import pytest

from fxpipe.runtime.ranks.worker import Worker


@pytest.fixture
def worker():
    thread = Worker("test")
    yield thread
    thread.end()


def broken() -> None:
    raise ValueError("it is broken")


def test_functions_run_in_order_and_their_results_can_be_asked_for_in_any(worker):
    order: list[int] = []

    def noted(number: int) -> int:
        order.append(number)
        return 10 * number

    jobs = [worker.do(lambda number=number: noted(number)) for number in range(3)]
    assert [job.result() for job in reversed(jobs)] == [20, 10, 0]
    assert order == [0, 1, 2] and jobs[0].done()


def test_a_result_that_is_not_there_in_time_is_an_error_and_may_come_later(worker):
    event = threading.Event()
    job = worker.do(event.wait)
    with pytest.raises(TimeoutError):
        job.result(timeout=0.01)
    assert not job.done()
    event.set()
    assert job.result(timeout=10) is True


def test_an_interrupt_of_one_who_waits_lets_nobody_else_wait(worker):
    job = worker.do(int)
    job.wait()
    job._running.acquire()  # the interrupt has come before it was released
    assert job.done() and job.result(timeout=10) == 0
    worker.rest()


def test_the_first_error_is_raised_at_rest_also_if_later_functions_have_run(worker):
    worker.do(broken)
    worker.do(int)
    later = worker.do(int)
    assert later.result() == 0
    with pytest.raises(ValueError, match="it is broken"):
        worker.rest()
    worker.rest()  # it has been raised


def test_an_error_is_raised_where_the_result_is_asked_for(worker):
    with pytest.raises(ValueError, match="it is broken"):
        worker.do(broken).result()
    worker.rest(is_quiet=True)


def test_neither_what_a_function_holds_nor_what_it_returns_is_kept(worker):
    """A job of a message holds the memory that it sends, or that has come."""

    class Held:
        pass

    held = Held()
    seen = weakref.ref(held)
    job = worker.do(lambda held=held: held)
    del held
    job.result()
    worker.do(int).result()
    assert seen() is None
