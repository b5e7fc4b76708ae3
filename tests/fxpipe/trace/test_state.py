"""What a forward changes on modules: kept, where the model computes with it, or told of."""

from __future__ import annotations

import copy
import warnings
from collections import deque

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.trace import TraceError, trace
from tests.fxpipe.trace.small import BOTH, MLP, run, x
from tests.zoo import same


class Warmup(nn.Module):
    """Its output grows with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.t = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.t += 1
        return self.linear(x) * min(1, self.t / 100)


class Recent(nn.Module):
    """Adds up numbers, of which it keeps the last three."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), deque[int](maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(sum(self.seen) + 1)
        return self.linear(x) + sum(self.seen)


class Nested(nn.Module):
    """Counts in a dict of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": [0]}

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"][0] += 1
        return x * self.counts["calls"][0]


class Recurrent(nn.Module):
    """Keeps a tensor, which is no buffer, from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.h = nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.h = 0.5 * self.h + self.linear.bias.detach()
        return torch.tanh(self.linear(x) + self.h)


class Cached(nn.Module):
    """Computes a value from its first input only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = x.detach().mean(0)
        return self.linear(x - self.first)


class FirstWeight(nn.Module):
    """Keeps the weight of its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), dict[str, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.kept["start"] = self.linear.weight.detach().clone()
        return self.linear(x) * (self.linear.weight - self.kept["start"]).norm()


class ParametersAtHand(FirstWeight):
    """Keeps the weight itself, which an optimizer changes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.kept["weight"] = self.linear.weight
        return self.linear(x) * self.kept["weight"].norm()


def following(number: int) -> int:
    unchanged = number
    return unchanged + 1


class Following(nn.Module):
    """Counts by a function, whose lines run later than the one that changes the count begins."""

    def __init__(self) -> None:
        super().__init__()
        self.t = 0

    def forward(self, x: Tensor) -> Tensor:
        self.t = following(self.t)
        return x * following(self.t)


STATEFUL = [Warmup, Recent, Nested, Recurrent]


def around(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), module, nn.Tanh(), nn.Linear(8, 8))


def in_a_loop(model: nn.Module, x: Tensor, chunks: int) -> Tensor:
    return torch.cat([model(part) for part in x.chunk(chunks)])


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_module_with_a_state_is_kept_whole_and_changes_it_once_a_micro_batch(
    tracer: str, kind: type[nn.Module]
) -> None:
    model = around(kind())
    plain = copy.deepcopy(model)
    if kind is Recurrent and tracer == "symbolic":
        with pytest.raises(TraceError, match="1 has tensors among its state"):
            trace(model, (x(),), tracer=tracer)
        return
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer) as pipe:
        for batch in 6, 9, 6:
            data = x(batch)
            y, wanted = pipe(data), in_a_loop(plain, data, 3)
            assert same(y.detach(), wanted.detach())
            y.square().sum().backward()
            wanted.square().sum().backward()
        assert len(pipe.compilations) == 1, "what a module changes by itself is no guard"
    assert str(vars(model[1])) == str(vars(plain[1]))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@BOTH
@pytest.mark.parametrize("kind, is_whole", [(FirstWeight, True), (ParametersAtHand, False)])
def test_what_a_module_keeps_of_its_first_weight_is_not_the_weight_that_an_optimizer_changes(
    tracer: str, kind: type[nn.Module], is_whole: bool
) -> None:
    model = around(kind())
    plain = copy.deepcopy(model)
    data = x(6)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer) as pipe:
        for _ in range(2):
            assert same(pipe(data).detach(), in_a_loop(plain, data, 3).detach())
            for each in model, plain:
                torch._foreach_mul_(list(map(torch.detach, each.parameters())), 2)
        assert (model[1] in set(pipe.model_graph.modules())) == is_whole


@pytest.mark.parametrize("kind", [Warmup, Recent, Nested])
def test_a_module_whose_state_has_mattered_is_kept_whole_when_it_is_compiled_again(kind):
    """By the state of now, it cannot be seen: large sums make the same of every tanh."""
    model = around(kind())
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        for _ in range(2):
            assert same(pipe(x(9)).detach(), in_a_loop(plain, x(9), 3).detach())
            pipe.recompile()
    assert str(vars(model[1])) == str(vars(plain[1]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_checkpoint_that_runs_it_again_does_not_change_it_twice(
    mode: str, kind: type[nn.Module]
) -> None:
    model = around(kind())
    plain = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=mode) as pipe:
        for _ in range(2):
            pipe(x(6)).square().sum().backward()
            in_a_loop(plain, x(6), 3).square().sum().backward()
    assert str(vars(model[1])) == str(vars(plain[1]))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@BOTH
@pytest.mark.parametrize("kind", STATEFUL)
def test_tracing_leaves_the_state_as_it_was(tracer: str, kind: type[nn.Module]) -> None:
    model = around(kind())
    before = str(vars(model[1]))
    trace(model, (x(),), tracer="export" if kind is Recurrent else tracer)
    assert str(vars(model[1])) == before


@BOTH
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Warmup, r"changes t in its forward \(at .*test_state.py:\d+: self.t \+= 1\)"),
        (Recent, r"changes seen in its forward \(at .*: self.seen.append\(sum\(self.seen\) \+ 1\)"),
        (Nested, r"changes counts in .*: self.counts\[.calls.\]\[0\] \+= 1\)"),
        (
            Recurrent,
            r"changes h in its forward \(at .*: self.h = 0.5 \* self.h \+ self.linear.bias.detach",
        ),
        (Cached, r"changes first in its forward \(at .*: self.first = x.detach"),
        (FirstWeight, r"changes kept in its forward \(at .*: self.kept\[.start.\] = self.linear"),
        (Following, r"changes t in its forward \(at .*: self.t = following\(self.t\)\)"),
    ],
)
def test_a_model_with_a_state_of_its_own_is_refused_with_the_attribute_and_the_line(
    tracer: str, kind: type[nn.Module], line: str
) -> None:
    with pytest.raises(TraceError, match=line + ".*register_buffer"):
        trace(kind(), (x(),), tracer=tracer)


class Remembers(MLP):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        self.last = x
        return super().forward(x)


class Counting(nn.Module):
    """Counts its calls, and branches by values, so that it is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 0 if x.max() > 1e9 else x.sin()


def test_what_a_module_that_is_kept_whole_changes_is_not_told_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*in its forward")
        traced = trace(model, (torch.randn(3, 4),))
    model[1].calls = 0
    run(traced, torch.randn(3, 4))
    assert model[1].calls == 1


@BOTH
def test_what_nothing_depends_on_is_told_of_and_left_alone(tracer: str) -> None:
    model = Remembers()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        traced = trace(model, (x(),), tracer=tracer)
    texts = [str(each.message) for each in told if "in its forward" in str(each.message)]
    assert len(texts) == 2
    assert any(
        "sets calls in its forward (at " in t and "+ 1); a pipeline does not" in t for t in texts
    )
    assert any("sets last in its forward" in text and "self.last = x" in text for text in texts)
    assert same(run(traced, x(3)), model.layers(x(3)) + 1)
    assert not hasattr(model, "last") and not hasattr(model, "calls")


@BOTH
def test_a_number_that_each_call_computes_of_its_input_is_told_of(tracer: str) -> None:
    class Logs(MLP):
        norm: float

        def forward(self, x: Tensor) -> Tensor:
            self.norm = x.detach().norm().item()
            return super().forward(x)

    with pytest.warns(UserWarning, match=r"Logs sets norm in its forward \(at .*self.norm = x"):
        trace(Logs(), (x(),), tracer=tracer)


@pytest.mark.parametrize("said", [float, "{:.3f}".format], ids=["float", "format"])
def test_a_number_that_is_made_for_people_is_to_be_returned_as_a_tensor(said) -> None:
    class Says(MLP):
        def forward(self, x: Tensor) -> Tensor:
            self.norm = said(x.detach().norm().item())
            return super().forward(x)

    with pytest.raises(TraceError, match="is best returned as a tensor"):
        trace(Says(), (x(),))


def test_a_weight_that_a_hook_of_torch_computes_is_to_be_a_parametrization() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    instead = (
        "read it after a call, or .*, use torch.nn.utils.parametrizations.spectral_norm, which"
    )
    with pytest.warns(UserWarning, match=rf"sets 0.weight in its forward; .* {instead}"):
        trace(model, (torch.ones(2, 4),), tracer="export")


@BOTH
def test_a_mask_that_is_made_once_and_kept_is_nothing_to_tell(tracer: str) -> None:
    class Masked(MLP):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones(x.shape[1]).cumsum(0)
            return super().forward(x) * self.mask

    model = Masked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The tensor attribute self.model.mask")  # of PyTorch
        traced = trace(model, (x(),), tracer=tracer)
    assert model.mask is None
    assert same(run(traced, x(3)), model(x(3)))


def test_a_lack_of_memory_in_a_later_call_does_not_mean_that_the_state_matters() -> None:
    class Grows(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 500:
                raise torch.OutOfMemoryError("no room")
            return super().forward(x)

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        trace(nn.Sequential(Grows(), nn.Tanh()), (x(),))


class Frozen(nn.Module):
    """Puts its norm into eval mode: ahead of each use, or once it has been used."""

    def __init__(self, is_ahead: bool) -> None:
        super().__init__()
        self.is_ahead, self.norm = is_ahead, nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_ahead:
            self.norm.eval()
        x = self.norm(x)
        self.norm.eval()
        return x


@pytest.mark.parametrize("tracer", ["auto", "export"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_module_that_changes_a_mode_on_which_it_depends_is_kept_whole(
    tracer: str, checkpoint: str
) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), Frozen(False), nn.Linear(8, 8)), torch.randn(6, 8)
    other = copy.deepcopy(model)
    options = {"tracer": tracer, "checkpoint": checkpoint}
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, **options) as pipe:
        for training in (True, True, False):
            for each in (model, other):
                each.train(training)
            outputs = [pipe(batch), torch.cat([other(part) for part in batch.chunk(2)])]
            assert same(*outputs)
            for output in outputs:
                output.sin().sum().backward()
    assert [m.training for m in model.modules()] == [m.training for m in other.modules()]
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(same(one.grad, its.grad) for one, its in pairs)


@pytest.mark.parametrize("tracer", ["auto", "export"])
def test_a_model_that_changes_a_mode_on_which_it_depends_is_refused(tracer: str) -> None:
    where = r"Frozen changes norm\.training .*test_state\.py.*self\.norm\.eval\(\)"
    with pytest.raises(TraceError, match=where):
        trace(Frozen(False), (x(),), tracer=tracer)
    with pytest.raises(TraceError, match=where):
        fxpipe.compile(Frozen(False), ["cpu"], tracer=tracer)(x())


def test_a_mode_on_which_nothing_depends_is_told_of() -> None:
    with pytest.warns(match=r"Frozen sets norm\.training .* outside of the forward"):
        traced = trace(model := Frozen(True), (x(),), tracer="export")
    assert model.norm.training and same(run(traced, x()), copy.deepcopy(model).eval()(x()))
