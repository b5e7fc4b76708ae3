from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.skip import Namespace, SkipError, pop, stash, tracking
from tests.zoo import gradients, loop, loss_of, same


class Down(nn.Module):
    def __init__(self, name="fine", namespace=None):
        super().__init__()
        self.linear, self.name, self.namespace = nn.Linear(4, 4), name, namespace

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        stash(self.name, x, self.namespace)
        return x


class Up(Down):
    def forward(self, x):
        return torch.tanh(self.linear(x)) + pop(self.name, self.namespace)


def hourglass():
    return nn.Sequential(Down("a"), Down("b"), nn.Linear(4, 4), Up("b"), Up("a"))


def by_hand(model, x):
    """The same without names."""
    a = torch.tanh(model[0].linear(x))
    b = torch.tanh(model[1].linear(a))
    x = torch.tanh(model[3].linear(model[2](b))) + b
    return torch.tanh(model[4].linear(x)) + a


def test_what_is_stashed_is_popped_once():
    stash("x", 1)
    assert pop("x") == 1
    with pytest.raises(SkipError, match=r"'x' is popped by a function .* has been popped already"):
        pop("x")


def test_namespaces_keep_equal_names_apart():
    one, two = Namespace("one"), Namespace("two")
    stash("x", 1, one)
    stash("x", 2, two)
    stash("x", 3)
    assert (pop("x", two), pop("x"), pop("x", one)) == (2, 3, 1)


def test_every_thread_has_a_tracker_of_its_own():
    found = []
    stash("x", 1)

    def work():
        try:
            pop("x")
        except SkipError as error:
            found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "has not been stashed" in found[0]
    assert pop("x") == 1


def test_a_model_runs_eagerly():
    model, x = hourglass(), torch.randn(3, 4)
    assert same(model(x), by_hand(model, x))
    assert same(model(x), model(x))


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_compiled_a_skip_is_an_edge_like_any_other(tracer):
    model, x = hourglass(), torch.randn(6, 4)
    twin = copy.deepcopy(model)
    expected = loop(twin, (x,), 3)
    with fxpipe.compile(
        model, ["cpu"] * 4, chunks=3, partition=["1", "2", "4"], tracer=tracer, checkpoint="always"
    ) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    assert same(gradients(model), expected[1])
    assert [(h.source, h.target) for h in pipe.skip_layout.skips] == [(1, 3)]
    assert len([h for h in pipe.skip_layout.hops if h.source == 0]) == 1, "a goes by stage 1"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(Down("a"), nn.Linear(4, 4)),
            r"'a' is stashed by 0 \(Down\), and nobody pops it",
        ),
        (
            lambda: nn.Sequential(Down("a"), Down("a"), Up("a")),
            r"'a' is stashed by 1 \(Down\), but it is stashed already, by 0 \(Down\)",
        ),
        (
            lambda: nn.Sequential(Up("a"), Down("a")),
            r"'a' is popped by 0 \(Up\), but it has not been stashed by then: a skip goes forward",
        ),
        (
            lambda: nn.Sequential(Down("a"), Up("b"), Up("a")),
            r"'b' is popped by 1 \(Up\), but it has not been stashed by then; what has been is 'a'",
        ),
        (
            lambda: nn.Sequential(Down("a", Namespace("n")), Up("a"), Up("a")),
            r"'a' is popped by 1 \(Up\).*what has been is 'a' of Namespace\('n'\)",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_of_compile_that_names_the_modules(make, message):
    with pytest.raises(SkipError, match=message):
        fxpipe.compile(make(), ["cpu"] * 2, example_inputs=(torch.randn(2, 4),))


def test_a_failed_forward_leaves_nothing_behind():
    with pytest.raises(ValueError), tracking():
        stash("left", 1)
        raise ValueError
    with pytest.raises(SkipError, match="has not been stashed"):
        pop("left")


def test_what_a_failed_eager_forward_has_left_is_replaced():
    stash("again", 1)
    stash("again", 2)
    assert pop("again") == 2
