import threading

import torch

import fxpipe
from fxpipe.ir.progress import listening, report_progress
from tests.zoo import MLP


def test_without_a_listener_work_goes_on_and_prints_nothing(capfd):
    with fxpipe.compile(MLP(), ["cpu"] * 2) as pipe:
        assert pipe(torch.ones(6, 12)).shape == (6, 12)
    report_progress("a part that nobody listens to")
    assert capfd.readouterr() == ("", "")


def test_a_listener_is_told_of_the_trace_and_of_every_pass():
    told = []
    with listening(told.append):
        fxpipe.compile(MLP(), ["cpu"] * 2, example_inputs=(torch.ones(6, 12),)).close()
    assert told[:2] == ["check", "trace"] and told[-1] == "verify"
    assert [name for name in told if name in ("alias", "cost", "partition", "split")] == [
        *("alias", "cost", "partition", "split")
    ]


def test_afterwards_and_in_other_threads_it_is_told_nothing():
    told = []
    with listening(told.append):
        other = threading.Thread(target=report_progress, args=("elsewhere",))
        other.start()
        other.join()
        with listening(lambda what: told.append(f"inner {what}")):
            report_progress("a")
        report_progress("b")
    report_progress("c")
    assert told == ["inner a", "b"]
