import logging

import pytest
import torch
from torch import nn

import fxpipe
from tests.zoo import MLP


def test_verbose_says_of_every_compilation_where_its_time_went(caplog):
    with caplog.at_level(logging.INFO, "fxpipe"):
        pipe = fxpipe.compile(MLP(), ["cpu"] * 2, verbose=True)
        pipe(torch.ones(6, 12))
        pipe(torch.ones(6, 12))  # which is compiled already
    pipe.close()
    tables = [record.getMessage() for record in caplog.records if "of CPU" in record.getMessage()]
    kind, pipeline = tables
    assert kind.startswith("MLP: compiling a new kind of call")
    assert all(f"\n  {name} " in kind for name in ("check", "trace", "cost", "partition"))
    assert "\n    symbolic " in kind
    assert pipeline.startswith("MLP: pipeline of 6 micro-batches")


def test_verbose_says_when_a_loss_is_checked_again_with_a_later_mini_batch(caplog):
    options = {"chunks": 2, "loss_fn": nn.functional.mse_loss, "verbose": True}
    x, target = torch.randn(4, 12), torch.randn(4, 12)
    with (
        caplog.at_level(logging.INFO, "fxpipe"),
        fxpipe.compile(MLP(), ["cpu"] * 2, **options) as pipe,
    ):
        pipe.step(x, target=target)
        caplog.clear()
        for _ in range(3):  # the 2nd mini-batch is checked, the 3rd and the 4th are not
            pipe.step(x, target=target)
    (table,) = [each.getMessage() for each in caplog.records if "of CPU" in each.getMessage()]
    assert table.startswith("MLP: check of a later mini-batch")


def test_each_compilation_is_logged_with_its_reason_its_guards_and_the_cut(caplog):
    with caplog.at_level(logging.INFO, "fxpipe"), fxpipe.compile(MLP(), ["cpu"] * 2) as pipe:
        pipe(torch.ones(6, 12))
        pipe.eval()
        pipe(torch.ones(6, 12))
    said = [(record.name, record.getMessage()) for record in caplog.records]
    names = [name.removeprefix("fxpipe.") for name, _ in said]
    assert names == ["guards", "compilations", "plan", "plan", "guards", "compilations"]
    assert said[0][1] == "MLP is compiled for a new kind of call: the first call"
    assert said[1][1].startswith("MLP: compilation 1 in ")
    assert "symbolic, compiled for x: " in said[1][1]
    assert said[2][1] == "MLP: stage 0 on cpu, checkpoint never: " + pipe.stages[0].contains
    assert said[4][1].endswith("mode of the model: train → eval")


def test_a_search_for_the_fastest_setting_is_logged_as_it_goes_on(caplog):
    with caplog.at_level(logging.INFO, "fxpipe.plan"):
        fxpipe.compile(
            MLP(),
            ["cpu"] * 2,
            schedule="auto",
            chunks=4,
            loss_fn=nn.functional.mse_loss,
            example_inputs=(torch.ones(8, 12),),
        ).close()
    first, *tried = [r.getMessage() for r in caplog.records if r.name == "fxpipe.plan"]
    assert first.startswith("the fastest of 7 settings is searched for by prediction: gpipe, 1f1b,")
    assert "zbv, dualpipe_v, with 4 micro-batches; those are left out" in first
    cut = next(i for i, text in enumerate(tried) if text.startswith("MLP: stage 0 on cpu"))
    assert tried[0].startswith("gpipe with 4 micro-batches: a step of ")
    settings = [text.partition(": a step of ")[0] for text in tried[:cut]]
    assert all(each.endswith(" with 4 micro-batches") for each in settings)
    assert len(set(settings)) == cut <= 9, "seven schedules, and at most two orders of its own"


def test_the_times_of_phases_are_for_those_who_look_for_them(caplog):
    with caplog.at_level(logging.DEBUG, "fxpipe"), fxpipe.compile(MLP(), ["cpu"] * 2) as pipe:
        pipe(torch.ones(6, 12))
    debug = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert [text.split("  ")[0] for text in debug] == [
        "MLP: compiling a new kind of call",
        "MLP: pipeline of 6 micro-batches",
    ]


def test_without_a_handler_the_log_is_on_stderr_and_logging_stays_as_it_was(capsys, monkeypatch):
    logger, own = logging.getLogger("fxpipe"), logging.getLogger("fxpipe.compilations")
    monkeypatch.setattr(logger, "propagate", False)  # pytest's handlers are at the root
    before = logger.level, list(logger.handlers), own.level, list(own.handlers)
    with fxpipe.compile(MLP(), ["cpu"] * 2, verbose=True) as pipe:
        pipe(torch.ones(6, 12))
    assert "MLP: compiling a new kind of call" in capsys.readouterr().err
    assert (logger.level, logger.handlers, own.level, own.handlers) == before


def test_nothing_is_shown_unless_logging_is_set_up(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fxpipe"), "propagate", False)
    with fxpipe.compile(MLP(), ["cpu"] * 2) as pipe:
        pipe(torch.ones(6, 12))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_compilation_that_takes_long_says_so_once_with_what_helps(threads, capsys, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(logging.getLogger("fxpipe"), "propagate", False)
    monkeypatch.setattr("fxpipe.compiler.log.LONG", 0.0)
    with fxpipe.compile(MLP(), ["cpu"] * 2) as pipe:
        pipe.prepare(torch.ones(6, 12))
        first, second = capsys.readouterr().err.splitlines()
        pipe(torch.ones(6, 12))  # which is compiled by now
    assert capsys.readouterr().err == ""
    assert first.startswith("MLP: compiling a new kind of call has taken ")
    assert "in the phase " in first
    assert "verbose=True" in first
    assert ("OMP_NUM_THREADS=1" in first) == (threads > 1), "one thread has nobody to wait for"
    assert second.startswith("MLP: pipeline of 6 micro-batches has taken ")


@pytest.mark.parametrize("value, shown", [("compile", True), ("a, compile", True), ("", False)])
def test_the_environment_may_ask_for_the_log(value, shown, caplog, monkeypatch):
    monkeypatch.setenv("FXPIPE_LOGS", value)
    with caplog.at_level(logging.INFO, "fxpipe"):
        fxpipe.compile(MLP(), ["cpu"] * 2, example_inputs=(torch.ones(6, 12),)).close()
    assert any("of CPU" in record.getMessage() for record in caplog.records) == shown


def test_a_compilation_that_fails_is_logged_too(caplog):
    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    with caplog.at_level(logging.INFO, "fxpipe"), pytest.raises(ValueError, match="not today"):
        fxpipe.compile(Fails(), ["cpu"] * 2, verbose=True)(torch.ones(6, 12))
    assert "Fails: compiling a new kind of call" in caplog.records[-1].getMessage()
