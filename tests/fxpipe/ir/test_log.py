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
from fxpipe.ir.log import each_once, warn


def test_a_warning_is_given_where_the_caller_is_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING, "fxpipe"):
        for _ in range(2):
            with pytest.warns(FutureWarning, match="the pipeline is tired") as given:
                warn("the pipeline is tired", FutureWarning)
            assert given[0].filename == __file__
    assert [(r.name, r.getMessage()) for r in caplog.records] == [
        ("fxpipe.warnings", "the pipeline is tired")
    ]


def given(run):
    """The texts of the warnings that are given to somebody who wants all of them."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in found]


def test_where_each_is_given_once_a_text_that_has_been_told_is_not_told_again():
    told = set()

    def twice():
        with each_once(told):
            warn("one")
            with each_once(None):
                warn("one")
            warn("one")
        warn("one")

    assert given(twice) == ["one"] * 3, "the first, the one inside, and the one behind the block"
    assert given(twice) == ["one"] * 2


class Prints(nn.Module):
    """Prints, and keeps the number of its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), []

    def forward(self, x):
        self.calls.append(len(self.calls))
        print("forward")
        return self.linear(x)


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_pipeline_that_compiles_again_gives_no_warning_again(has_cache, tmp_path):
    cache = tmp_path if has_cache else None

    def run():
        with fxpipe.compile(Prints(), ["cpu"], chunks=2, cache=cache) as pipe:
            pipe(torch.randn(4, 4))
            pipe.eval()
            pipe(torch.randn(4, 4))
            assert len(pipe.compilations) == 2

    for _ in range(2):  # another pipeline gives them again
        texts = given(run)
        assert len(texts) == len(set(texts)) == 2
        assert "Prints sets calls in its forward" in texts[0]
        assert "Prints prints within its forward" in texts[1]


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
