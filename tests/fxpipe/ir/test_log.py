"""Warnings are warnings of Python's, and logged once."""

import functools
import inspect
import logging
import threading
import warnings

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.log import warn


def test_a_warning_is_given_where_the_caller_is_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING, "fxpipe"):
        for _ in range(2):
            with pytest.warns(FutureWarning, match="the pipeline is tired") as given:
                warn("the pipeline is tired", FutureWarning)
            assert given[0].filename == __file__
    assert [(r.name, r.getMessage()) for r in caplog.records] == [
        ("fxpipe.warnings", "the pipeline is tired")
    ]


def test_a_warning_is_not_printed_twice_where_logging_is_not_set_up(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fxpipe"), "propagate", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warn("only for those who listen")
    assert capsys.readouterr() == ("", "")


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return h - h.mean(0)


def contrastive(output, target):
    return (output @ output.t()).logsumexp(1).mean()


def test_warnings_of_the_check_point_to_the_line_of_the_user():
    x = torch.randn(4, 4)
    with fxpipe.compile(Centred(), ["cpu"], chunks=2, check="warn") as pipe:
        line = inspect.currentframe().f_lineno + 2
        with pytest.warns(fxpipe.BatchWarning) as given:
            pipe(x)
    assert [(each.filename, each.lineno) for each in given] == [(__file__, line)]
    with fxpipe.compile(nn.Linear(4, 4), ["cpu"], chunks=2, loss_fn=contrastive) as pipe:
        line = inspect.currentframe().f_lineno + 2
        with pytest.warns(fxpipe.BatchWarning) as given:
            pipe.step(x, target=x)
    assert [(each.filename, each.lineno) for each in given] == [(__file__, line)]


def test_a_warning_in_a_thread_without_code_of_a_user_is_given_as_well():
    with pytest.warns(UserWarning, match="alone"):
        thread = threading.Thread(target=functools.partial(warn, "alone"))
        thread.start()
        thread.join()
