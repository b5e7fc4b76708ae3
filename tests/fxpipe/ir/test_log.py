"""Warnings are warnings of Python's, and logged once."""

import logging
import warnings

import pytest

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
