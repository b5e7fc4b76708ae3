"""Hooks fire in a pipeline as in a loop over micro-batches whose outputs are put together.

That loop is ``torch.cat([model(part) for part in parts])`` and one backward: hooks on modules fire
once a micro-batch, hooks on parameters once, with the sum of the gradients.
"""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.zoo import loss_of, parts, same

CHUNKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Tanh(), Block(), nn.Linear(4, 2))


class Log:
    """What has been called, by the thing that it was registered on."""

    def __init__(self) -> None:
        self.of: dict[str, list[list[Tensor]]] = defaultdict(list)

    def add(self, name: str, *values: object) -> None:
        tensors = [v for value in values for v in _tensors(value)]
        assert not any("Fake" in type(t).__name__ for t in tensors)
        self.of[name].append([t.detach().clone() for t in tensors])


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value if isinstance(v, Tensor)] if isinstance(value, tuple) else []


def on_modules(model: nn.Module, log: Log) -> None:
    for name, module in model.named_modules():
        if not name:
            continue
        module.register_forward_pre_hook(lambda m, args, n=name: log.add(f"pre {n}", args))
        module.register_forward_hook(lambda m, args, out, n=name: log.add(f"post {n}", args, out))
        module.register_full_backward_pre_hook(lambda m, out, n=name: log.add(f"bpre {n}", out))
        module.register_full_backward_hook(
            lambda m, inputs, out, n=name: log.add(f"bpost {n}", inputs, out)
        )


def on_parameters(model: nn.Module, log: Log) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, n=name: log.add(f"grad {n}", grad))
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: log.add(f"accumulated {n}", p.grad)
        )
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_prehook(lambda grads, n=name: log.add(f"node pre {n}", grads))
        node.register_hook(lambda inputs, outputs, n=name: log.add(f"node post {n}", outputs))
        log.of["kept"].append(node)


def cat(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in parts(x, CHUNKS)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("register", [on_modules, on_parameters])
def test_every_kind_fires_as_often_with_the_same_and_in_the_same_order(register, stages):
    model, x = blocks(), torch.randn(7, 4, requires_grad=True)
    reference, logs = copy.deepcopy(model), (Log(), Log())
    register(model, logs[0])
    register(reference, logs[1])
    with fxpipe.compile(model, ["cpu"] * stages, chunks=CHUNKS) as pipe:
        for _ in range(2):  # the first call compiles, and no hook notices
            loss_of(pipe(x)).backward()
            loss_of(cat(reference, x)).backward()
    found, wanted = (log.of for log in logs)
    found.pop("kept", None), wanted.pop("kept", None)
    assert found.keys() == wanted.keys()
    for name, calls in wanted.items():
        assert len(calls) in (2, 2 * CHUNKS), name
        assert same(found[name], calls), name


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("register", [on_modules, on_parameters])
def test_under_checkpoints_only_forward_hooks_fire_once_more(register, segments):
    """As in a loop in which each micro-batch is checkpointed."""
    model, x = blocks(), torch.randn(7, 4, requires_grad=True)
    reference, logs = copy.deepcopy(model), (Log(), Log())
    register(model, logs[0])
    register(reference, logs[1])
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=CHUNKS, checkpoint="always", checkpoint_segments=segments
    ) as pipe:
        loss_of(pipe(x)).backward()
        loss_of(cat(reference, x)).backward()
    found, wanted = (log.of for log in logs)
    found.pop("kept", None), wanted.pop("kept", None)
    assert found.keys() == wanted.keys()
    for name, calls in wanted.items():
        if name.startswith(("pre", "post")):  # of the forward: it goes from the last to the first
            assert same(found[name], calls + calls[::-1]), name
        else:
            assert same(found[name], calls), name


class Inside(nn.Module):
    """A module that puts hooks on its tensors and on their nodes, and keeps a gradient."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.linear, self.log = nn.Linear(4, 4), log
        self.register_forward_hook(lambda *_: None)  # which makes it one node, not looked into

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.retain_grad()
            y.register_hook(lambda grad: self.log.add("tensor", grad))
            y.grad_fn.register_prehook(lambda grads: self.log.add("node pre", grads))
            y.grad_fn.register_hook(lambda inputs, _: self.log.add("node post", inputs))
            y.register_hook(lambda grad: grad * 2)
        return torch.tanh(y)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_hooks_on_tensors_and_nodes_within_a_module_fire_once_a_micro_batch(checkpoint):
    logs, x = (Log(), Log()), torch.randn(6, 4)
    model, reference = (
        nn.Sequential(nn.Linear(4, 4), Inside(log), nn.Linear(4, 4), Inside(log)) for log in logs
    )
    reference.load_state_dict(model.state_dict())
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS, checkpoint=checkpoint) as pipe:
        pipe.prepare(x)
        for log in logs:
            log.of.clear()
        loss_of(pipe(x)).backward()
    loss_of(cat(reference, x)).backward()
    found, wanted = (log.of for log in logs)
    for name, calls in wanted.items():
        assert len(calls) == 2 * CHUNKS
        assert same(sorted(found[name], key=str), sorted(calls, key=str)), name
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert same(ours.grad, theirs.grad)


def test_a_hook_may_change_what_a_module_gives():
    model, x = blocks(), torch.randn(5, 4)
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        assert same(pipe(x).detach(), cat(reference, x).detach())


def test_hooks_may_come_and_go_after_compiling():
    model, x, log = blocks(), torch.randn(6, 4), []
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        before = pipe(x)
        handle = model[2].register_forward_hook(lambda *_: log.append("called"))
        assert same(pipe(x), before)
        assert log == ["called"] * 2
        handle.remove()
        assert same(pipe(x), before)
        assert log == ["called"] * 2


def test_hooks_of_the_model_itself_are_the_pipelines():
    model, x, log = blocks(), torch.randn(6, 4, requires_grad=True), []
    model.register_forward_hook(lambda module, args, out: log.append(tuple(out.shape)))
    model.register_full_backward_hook(lambda module, inputs, outputs: log.append("backward"))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        pipe(x).sum().backward()
    assert log == [(6, 2), "backward"], "once a mini-batch"


def test_hooks_on_what_goes_in_and_comes_out():
    model, log = blocks(), Log()
    x = torch.randn(6, 4, requires_grad=True)
    reference, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for tensor, run in (
            (x, pipe),
            (y, lambda t: torch.cat([reference(p) for p in parts(t, 2)])),
        ):
            tensor.register_hook(lambda grad: log.add("in", grad))
            inner = tensor * 2
            inner.retain_grad()
            out = run(inner)
            out.retain_grad()
            out.register_hook(lambda grad: log.add("out", grad))
            loss_of(out).backward()
            log.add("retained", inner.grad, out.grad)
    for name in ("in", "out", "retained"):
        ours, theirs = log.of[name]
        assert same(ours, theirs), name


def test_the_optimizer_may_step_in_the_backward():
    model, x = blocks(), torch.randn(6, 4)
    reference = copy.deepcopy(model)
    for each in (model, reference):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in each.parameters()}

        def step(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in each.parameters():
            p.register_post_accumulate_grad_hook(step)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=CHUNKS) as pipe:
        for _ in range(3):
            loss_of(pipe(x)).backward()
            loss_of(cat(reference, x)).backward()
    assert same(list(model.parameters()), list(reference.parameters()))


def test_an_exported_model_says_that_hooks_on_its_modules_are_not_called():
    model = blocks()
    model[2].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"hooks on '2' \(1 such modules\) will not be called"):
        fxpipe.compile(model, ["cpu"], example_inputs=(torch.randn(4, 4),), tracer="export")
