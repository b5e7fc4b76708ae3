import logging

import pytest
import torch

import fxpipe
from tests.zoo import MLP


def test_verbose_says_of_every_compilation_where_its_time_went(caplog):
    with caplog.at_level(logging.INFO, "fxpipe"):
        pipe = fxpipe.compile(MLP(), ["cpu"] * 2, verbose=True)
        pipe(torch.ones(6, 12))
        pipe(torch.ones(6, 12))  # which is compiled already
    pipe.close()
    kind, pipeline = (record.getMessage() for record in caplog.records)
    assert kind.startswith("MLP: a kind of call")
    assert all(f"\n  {name} " in kind for name in ("check", "trace", "cost", "partition"))
    assert "\n    symbolic " in kind
    assert pipeline.startswith("MLP: pipeline of 6 micro-batches")


def test_without_a_handler_the_log_is_on_stderr_and_logging_stays_as_it_was(capsys, monkeypatch):
    logger = logging.getLogger("fxpipe")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's handlers are at the root
    with fxpipe.compile(MLP(), ["cpu"] * 2, verbose=True) as pipe:
        pipe(torch.ones(6, 12))
    assert "MLP: a kind of call" in capsys.readouterr().err
    assert (logger.level, logger.handlers) == (logging.NOTSET, [])


@pytest.mark.parametrize("value, shown", [("compile", True), ("a, compile", True), ("", False)])
def test_the_environment_may_ask_for_the_log(value, shown, caplog, monkeypatch):
    monkeypatch.setenv("FXPIPE_LOGS", value)
    with caplog.at_level(logging.INFO, "fxpipe"):
        fxpipe.compile(MLP(), ["cpu"] * 2, example_inputs=(torch.ones(6, 12),)).close()
    assert bool(caplog.records) == shown


def test_a_compilation_that_fails_is_logged_too(caplog):
    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    with caplog.at_level(logging.INFO, "fxpipe"), pytest.raises(ValueError, match="not today"):
        fxpipe.compile(Fails(), ["cpu"] * 2, verbose=True)(torch.ones(6, 12))
    assert len(caplog.records) == 1
