from __future__ import annotations

import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.runtime.checkpointing.checkpoint import (
    CheckpointError,
    checkpoint,
    checkpointed,
    recompute,
)
from fxpipe.runtime.copy import wait
from tests.zoo import same


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def grads(loss, *tensors, **options):
    return torch.autograd.grad(loss, tensors, **options)


class Counted(nn.Module):
    """Counts how often it runs."""

    def __init__(self, module):
        super().__init__()
        self.module, self.count = module, 0

    def forward(self, *args):
        self.count += 1
        return self.module(*args)


def test_gradients_are_those_without_and_the_function_runs_twice():
    model, x = Counted(net()), torch.randn(3, 4, requires_grad=True)
    expected = grads(model(x).sum(), x, *model.parameters())
    model.count = 0
    out = checkpoint(model, x)
    assert model.count == 1
    assert same(grads(out.sum(), x, *model.parameters()), expected)
    assert model.count == 2


def test_it_is_public():
    assert fxpipe.checkpoint is checkpoint


def test_activations_are_not_kept():
    storages = []

    class Spy(nn.Module):
        def forward(self, x):
            y = torch.tanh(x)  # saves its result
            storages.append(weakref.ref(y.untyped_storage()))
            return y * 2

    x = torch.randn(5, requires_grad=True)
    out = checkpoint(Spy(), x, early_stop=False)
    assert storages[0]() is None
    out.sum().backward()
    assert storages[1]() is None, "nor is what was computed again, once it is used"


def test_it_stops_early_unless_told_not_to():
    ends = []

    def fn(x):
        y = torch.tanh(x)
        z = torch.exp(y)
        ends.append("end")
        return y, z

    x = torch.ones(2, requires_grad=True)
    checkpoint(fn, x)[0].sum().backward()
    assert ends == ["end"], "the second run ended at exp: nobody wants what that saves"
    checkpoint(fn, x, early_stop=False)[0].sum().backward()
    assert ends == ["end"] * 3


@pytest.mark.parametrize("early_stop", [True, False])
def test_three_deep(early_stop):
    model, x = net(), torch.randn(3, 4, requires_grad=True)
    expected = grads(model(x).sum(), x, *model.parameters())

    def nested(depth):
        def run(x):
            if depth == 0:
                return model(x)
            return checkpoint(nested(depth - 1), x, early_stop=early_stop)

        return run

    assert same(grads(nested(3)(x).sum(), x, *model.parameters()), expected)


def test_retain_graph_twice():
    model, x = net(), torch.randn(3, 4, requires_grad=True)
    expected = grads(model(x).sum(), x)
    loss = checkpoint(model, x).sum()
    for retain in True, True, False:
        assert same(grads(loss, x, retain_graph=retain), expected)


def test_a_part_of_the_gradients_leaves_nothing_behind():
    kept = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            kept.append(weakref.ref(h.untyped_storage()))
            return torch.tanh(self.b(h))

    model, x = Spy(), torch.randn(3, 4)
    expected = grads(model(x).sum(), model.b.bias)
    loss = checkpoint(model, x).sum()
    assert same(grads(loss, model.b.bias, retain_graph=True), expected)
    assert kept[-1]() is None, "the input of b was made again, not asked for, and let go"
    assert same(grads(loss, model.a.weight), grads(model(x).sum(), model.a.weight))


def test_double_backward():
    def fn(x):
        return torch.tanh(x) ** 3

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(fn, x), (x,))
    assert torch.autograd.gradcheck(lambda x: checkpoint(fn, x), (x,))


def test_a_backward_within_the_forward():
    def fn(x):
        y = torch.tanh(x)
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            (g,) = torch.autograd.grad(torch.tanh(z).sum(), z)
        return y * g

    x = torch.randn(4, requires_grad=True)
    assert same(grads(checkpoint(fn, x).sum(), x), grads(fn(x).sum(), x))


def test_detached_tensors_and_parameters_only():
    model, x = net(), torch.randn(3, 4)  # no input has a gradient
    expected = grads(model(x).sum(), *model.parameters())
    assert same(grads(checkpoint(model, x).sum(), *model.parameters()), expected)

    def fn(x):
        return model(x.detach()) + x.sum()

    x.requires_grad_()
    assert same(
        grads(checkpoint(fn, x).sum(), x, *model.parameters()),
        grads(fn(x).sum(), x, *model.parameters()),
    )


def test_nested_and_keyword_inputs():
    def fn(pair, *, by, label=None):
        return (torch.tanh(pair["a"]) * pair["b"][0] * by["factor"]).sum(), label

    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    inputs, by = {"a": a, "b": [b, 2]}, {"factor": c}
    out, label = checkpoint(fn, inputs, by=by, label="x")
    assert label == "x"
    assert same(grads(out, a, b, c), grads(fn(inputs, by=by)[0], a, b, c))


def test_without_gradients_it_is_a_plain_call():
    model = Counted(net())
    with torch.no_grad():
        out, handle = checkpointed(model, torch.ones(1, 4))
    assert handle is None and not out.requires_grad


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x * 1, "saved 2 tensors, its recomputation 0"),
        (lambda x: torch.exp(torch.tanh(x[:1])), r"was float32\[3\] on cpu .* float32\[1\] on cpu"),
        (lambda x: torch.exp(torch.tanh(x.double())), r"was float32\[3\].* is float64\[3\]"),
    ],
)
def test_a_second_run_that_differs_is_an_error(second, message):
    runs = []

    def fn(x):
        runs.append(1)
        return torch.exp(torch.tanh(x)) if len(runs) == 1 else second(x)

    loss = checkpoint(fn, torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(CheckpointError, match=message):
        loss.backward()


def test_writing_to_an_input_or_a_parameter_before_the_backward_is_noticed():
    model, x = net(), torch.randn(3, 4, requires_grad=True)
    h = x * 1
    loss = checkpoint(model, h).sum()
    h.data.zero_()  # unseen by autograd, as it would be without a checkpoint
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = checkpoint(model, x).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_recompute_runs_ahead_of_what_comes_before_it_in_the_forward():
    log = []

    class Logged(nn.Module):
        def forward(self, x):
            log.append("run")
            return torch.tanh(x)

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            log.append("wait")
            return grad

    x = torch.randn(3, requires_grad=True)
    y, handle = checkpointed(Logged(), x)
    y = Mark.apply(*wait((y,), "cpu/compute", "cpu/copy"))
    (y,) = recompute((y,), handle)
    y.sum().backward()
    assert log == ["run", "run", "wait"]
    assert same(x.grad, grads(torch.tanh(x).sum(), x)[0])


def test_a_handle_keeps_nothing_alive():
    x = torch.randn(3, requires_grad=True)
    y, handle = checkpointed(torch.tanh, x)
    frame = handle._frame
    assert frame() is not None
    del y
    assert frame() is None
    handle.restore()  # there is nothing to do


def test_the_forward_computes_with_its_inputs_and_not_with_what_is_packed_of_them():
    """Hooks around it may pack to fewer bits: that concerns the backward only."""
    x = torch.randn(100, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
    with hooks:
        y = checkpoint(torch.sin, x)
    assert same(y, x.sin())
    assert same(grads(y.sum(), x)[0], x.bfloat16().float().cos())


@pytest.mark.parametrize("depth", range(1, 7))
def test_a_nested_call_runs_once_in_the_forward_and_once_more(depth):
    count = [0]

    def nested(level):
        def run(x):
            count[0] += 1
            return x.sin() if level == 0 else checkpoint(nested(level - 1), x)

        return run

    out = nested(depth)(torch.ones(2, requires_grad=True))
    assert count[0] == depth + 1
    out.sum().backward()
    # The outermost is not checkpointed. All others but the innermost run again for its input only.
    assert count[0] == 2 * depth + 1


def test_a_nested_call_that_saves_nothing_of_its_inputs_is_not_made_in_the_second_run():
    count = [0]

    def inner():
        count[0] += 1
        return torch.ones(2)

    def outer(x):
        y = torch.tanh(x).exp()
        return y + checkpoint(inner)

    checkpoint(outer, torch.ones(2, requires_grad=True)).sum().backward()
    assert count == [1], "by then all is there that the outer function has saved"


@pytest.mark.parametrize("after", [lambda y: y, lambda y: y.sin().exp()])
def test_a_nested_call_may_write_to_its_input(after):
    """Also where more is saved after it, so that the second run goes on beyond the write."""

    def inner(h):
        return (h.mul_(3) * 2).sin()

    def outer(x):
        return after(checkpoint(inner, x * 1))

    x = torch.tensor([0.1, 0.2], requires_grad=True)
    expected = after((x * 6).sin())
    y = checkpoint(outer, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grads(y.sum(), x), grads(expected.sum(), x))


def test_what_is_saved_and_then_written_to_is_noticed_as_without_checkpoint():
    def fn(x):
        y = x * 1
        z = y.sin()
        y.add_(1)
        return z.exp()

    x = torch.ones(2, requires_grad=True)
    for call in fn, lambda x: checkpoint(fn, x, early_stop=False):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call(x).sum().backward()


def test_what_an_operator_saves_before_it_computes_it_is_waited_for():
    x = torch.randn(2000, requires_grad=True)
    torch.manual_seed(0)
    expected = grads(F.rrelu(x, training=True).sum(), x)
    torch.manual_seed(0)
    assert same(grads(checkpoint(F.rrelu, x, training=True).sum(), x), expected)


def test_the_end_of_another_threads_backward_leaves_what_has_just_been_computed_again():
    """A thread's backward ends, and empties its slots, while another thread fills them."""
    first_is_at_its_end, second_is_inside = threading.Event(), threading.Event()
    runs = []

    def fn(x):
        y = x.sin().exp()
        runs.append(None)
        if len(runs) == 3:  # the forward, the first thread's second run, and the other's
            second_is_inside.set()
            first.join(0.5)  # it ends only once this run is done
        return y

    x = torch.ones(3, requires_grad=True)
    h = x * 1
    loss = fxpipe.checkpoint(fn, h, early_stop=False).sum()

    def ends_late(_):
        if threading.current_thread() is first:
            first_is_at_its_end.set()
            second_is_inside.wait(60)

    h.register_hook(ends_late)
    keeping = {"retain_graph": True}
    first = threading.Thread(target=torch.autograd.grad, args=(loss, x), kwargs=keeping)
    first.start()
    first_is_at_its_end.wait(60)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    first.join()
    assert torch.equal(grad, x.sin().exp() * x.cos())
