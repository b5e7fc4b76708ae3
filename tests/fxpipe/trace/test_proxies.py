"""What a model does with a value that a symbolic trace does not see: it looks something up by it,
asks for its class, or writes to it. Such a trace is refused, and the model is exported."""

from __future__ import annotations

import copy
import enum
from collections import Counter

import pytest
import torch
from torch import nn

import fxpipe
from tests.fxpipe.trace.small import TEXTS, Scaled

LENGTHS = 8, 6, 3, 9, 6
FAR = 10, 14, 3, 9, 14  # a graph for all lengths is compared with the model at 7, which is no key


class Kind(enum.Enum):
    SHORT = 3
    LONG = 9


def by_enum(t):
    try:
        return {Kind.SHORT: 2.0, Kind.LONG: 3.0}[Kind(t)]
    except ValueError:
        return 1.0


def by_error(t):
    try:
        return {3: 2.0, 9: 3.0}[t]
    except KeyError:
        return 1.0


LOOKUPS = {
    "dict": lambda t: {3: 2.0, 9: 3.0}.get(t, 1.0),
    "set": lambda t: 2.0 if t in {3, 9} else 1.0,
    "Counter": lambda t: 1.0 + Counter([3, 9, 9])[t],
    "tuple": lambda t: {(3, 1): 2.0, (9, 1): 3.0}.get((t, 1), 1.0),
    **TEXTS,
    "Enum": by_enum,
    "KeyError": by_error,
}


@pytest.mark.covering(1)
@pytest.mark.one_in(6)
@pytest.mark.parametrize("lengths", [LENGTHS, FAR])
@pytest.mark.parametrize("way", LOOKUPS)
def test_each_length_has_what_is_looked_up_by_it(way, lengths):
    model = Scaled(LOOKUPS[way])
    alone = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for length in lengths:
            x = torch.randn(4, length, 4)
            torch.testing.assert_close(pipe(x), torch.cat([alone(part) for part in x.chunk(2)]))


def test_a_symbolic_trace_that_looks_something_up_is_refused_at_its_line():
    pipe = fxpipe.compile(Scaled(LOOKUPS["set"]), ["cpu"] * 2, chunks=2, tracer="symbolic")
    said = r"looks something up by a size, .*if t in \{3, 9\}"
    with pytest.raises(fxpipe.TraceError, match=said):
        pipe(torch.randn(4, 5, 4))


def test_a_size_that_is_only_computed_with_is_no_key():
    model = Scaled(lambda t: t * 0.5)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer="symbolic") as pipe:
        for length in LENGTHS:
            pipe(torch.randn(4, length, 4))
        assert len(pipe.compilations) == 1


def multiplied(h, mask):
    h.data *= mask


def replaced(h, mask):
    h.data = h.data * mask


def of_a_copy(h, mask):
    h.detach().data *= mask


class Written(nn.Module):
    """Scales what is hidden by its mask, by an attribute of the tensor."""

    def __init__(self, write):
        super().__init__()
        self.a, self.b, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write

    def forward(self, x, mask):
        h = self.a(x)
        self.write(h, mask)
        h.named = h * 2
        return self.b(h.named)


@pytest.mark.parametrize("write", [multiplied, replaced, of_a_copy])
def test_what_is_written_to_an_attribute_of_a_value_is_not_lost(write):
    model = Written(write)
    example = torch.randn(4, 4), torch.ones(4, 4)  # which hides that the mask is left out
    if write is replaced:
        said = (
            r"symbolic: it sets .data of a value, .*\n"
            r" *export: it sets .data of a value.*h.data \* mask"
        )
        with pytest.raises(fxpipe.TraceError, match=said):
            fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=example)
        return
    pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=example)
    x, mask = torch.randn(4, 4), torch.zeros(4, 4)
    torch.testing.assert_close(pipe(x, mask), copy.deepcopy(model)(x, mask))


def test_an_attribute_that_is_set_on_a_parameter_is_known():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.a.weight.scale = 0.5

        def forward(self, x):
            return self.b(self.a(x) * self.a.weight.scale)

    model, x = Net(), torch.randn(4, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
