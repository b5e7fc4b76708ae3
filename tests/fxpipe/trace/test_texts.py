"""A size of which a model makes text is a constant of an exported graph, unless the text is only
logged, printed, or said in an error."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import fxpipe
from tests.fxpipe.trace.small import TEXTS, Scaled

LENGTHS = 8, 6, 3, 9, 6


@pytest.mark.parametrize("way", TEXTS)
def test_a_text_by_which_something_is_looked_up_is_that_of_the_length(way):
    model = Scaled(TEXTS[way])
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="export") as pipe:
        for length in LENGTHS:
            x = torch.randn(4, length, 4)
            torch.testing.assert_close(pipe(x), torch.cat([alone(part) for part in x.chunk(2)]))


def by_format(t):
    logging.getLogger(__name__).debug(f"{t:>5}")


def by_logger(t):
    logging.getLogger(__name__).warning("length %s", t)


def by_print(t):
    print("length", t)


def by_assertion(t):
    torch._assert(t > 1, f"length {t}")


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("tell", [by_format, by_logger, by_print, by_assertion])
@pytest.mark.filterwarnings("ignore:.*prints within its forward")
def test_a_size_that_is_only_told_may_vary(tell, tracer):
    model = Scaled(lambda t: tell(t) or 2.0)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        for length in LENGTHS:
            pipe(torch.randn(4, length, 4))
        # Export traces the first length by itself, and then all of them.
        assert len(pipe.compilations) == (1 if tracer == "symbolic" else 2)
