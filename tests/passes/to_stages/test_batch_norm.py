"""Deferred batch norm: running statistics of the mini-batch, whatever the micro-batches."""
# ruff: noqa: E501 (graphs as they are printed)

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fxpipe
from fxpipe.ir.printing import format_graph
from passes import DeferredBatchNorm
from tests.zoo import ResNet, gradients, loop, loss_of, same

SHAPES = {nn.BatchNorm1d: (7, 4), nn.BatchNorm2d: (7, 4, 3, 2), nn.BatchNorm3d: (7, 4, 2, 3, 2)}
SHAPES[nn.SyncBatchNorm] = 7, 4, 3  # in one process it does as the others do
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def close(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_running_statistics_are_those_without_a_pipeline(kind, momentum, affine, checkpoint):
    model = nn.Sequential(kind(4, momentum=momentum, affine=affine), nn.Dropout(0.0), nn.Tanh())
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint, deferred_batch_norm=True
    ) as pipe:
        for step in range(3):
            x = torch.randn(SHAPES[kind]) * 3 + 5
            pipe.train(), reference.train()
            x.requires_grad_()
            loss_of(pipe(x)).backward()
            reference(x)
            close(model, reference)
            assert model[0].num_batches_tracked == step + 1
            pipe.eval(), reference.eval()
            torch.testing.assert_close(pipe(x), reference(x), rtol=1e-5, atol=1e-5)
            close(model, reference)


class Averaging(nn.Module):
    """Batch norms without momentum, one of them used twice; they read how many batches there were."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.once, self.twice = (nn.BatchNorm1d(4, momentum=None) for _ in range(2))

    def forward(self, x):
        return self.twice(self.second(torch.tanh(self.twice(self.once(self.first(x))))))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_one_without_momentum_need_not_be_deferred(checkpoint, tracer):
    model = Averaging()
    reference, x = copy.deepcopy(model), torch.randn(7, 4)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, checkpoint=checkpoint, tracer=tracer) as pipe:
        for step in range(2):
            model.zero_grad()
            output = pipe(x)
            loss_of(output).backward()
            wanted, _ = loop(reference, (x,), 3)
            assert same(output.detach(), wanted)
            assert same(gradients(model), gradients(reference))
            assert same(list(model.buffers()), list(reference.buffers()))
            assert [model.once.num_batches_tracked, model.twice.num_batches_tracked] == [
                3 * (step + 1),
                6 * (step + 1),
            ]


def test_an_exported_model_defers_too():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    reference, x = copy.deepcopy(model), torch.randn(5, 3, 4, 4)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=2, tracer="export", deferred_batch_norm=True
    ) as pipe:
        pipe(x), reference(x)
        close(model, reference)
        pipe(x), reference(x)
        close(model, reference)


def test_outputs_and_gradients_are_what_they_are_without():
    x, results = torch.randn(6, 3, 8, 8), []
    first = ResNet()
    for deferred in (False, True):
        model = copy.deepcopy(first)
        with fxpipe.compile(
            model, ["cpu"] * 3, chunks=4, deferred_batch_norm=deferred, checkpoint="except_last"
        ) as pipe:
            output = pipe(x)
            loss_of(output).backward()
        results.append((output.detach(), [p.grad for p in model.parameters()]))
    assert same(*results)
    first(x)  # the first batch norm sees the same without a pipeline
    for name in BUFFERS:
        torch.testing.assert_close(getattr(model.stem[1], name), getattr(first.stem[1], name))


def test_half_precision_and_no_running_statistics():
    model = nn.Sequential(
        nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
    ).bfloat16()
    reference, x = copy.deepcopy(model), torch.randn(6, 4).bfloat16()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, deferred_batch_norm=True) as pipe:
        pipe(x), reference(x)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_failed_step_updates_nothing():
    class Fails(nn.Module):
        def forward(self, x):
            return torch.linalg.cholesky(x)

    model = nn.Sequential(nn.BatchNorm1d(2), Fails())
    x = torch.stack([torch.eye(2), torch.eye(2), -torch.eye(2)])
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, deferred_batch_norm=True, tracer="symbolic"
    ) as pipe:
        before = [b.clone() for b in model.buffers()]
        with pytest.raises(torch.linalg.LinAlgError):
            pipe(x)
        assert same(list(model.buffers()), before)


def test_a_batch_norm_is_taken_apart():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    gm = DeferredBatchNorm()(torch.fx.symbolic_trace(model))
    assert_expected_inline(
        format_graph(gm),
        """\
input_1: input
_0_weight = self.0.weight
_0_bias = self.0.bias
_0_running_mean = self.0.running_mean
_0_running_var = self.0.running_var
_0_num_batches_tracked = self.0.num_batches_tracked
_0_norm = batch_norm(input_1, _0_weight, _0_bias, 1e-05)
_0_out = _0_norm[0]
_0_mean = _0_norm[1]
_0_var = _0_norm[2]
_0_count = _0_norm[3]
_0_update = update_statistics(_0_running_mean, _0_running_var, _0_num_batches_tracked, 0.1, ((_0_mean, _0_var, _0_count),))
_1 = 1(_0_out)
return _1
""",
    )
    reference, x = copy.deepcopy(model), torch.randn(5, 4)
    assert same(gm(x), reference(x))
    close(model, reference)


def test_the_update_stands_after_all_micro_batches():
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))
    pipe = fxpipe.compile(
        model, ["cpu"], chunks=2, example_inputs=(torch.randn(4, 4),), deferred_batch_norm=True
    )
    assert_expected_inline(
        format_graph(pipe.stage_graph),
        """\
input_1: input
stage_0 = stage_0(input_1)  # stage 0
_0_mean = stage_0[0]  # stage 0
_0_var = stage_0[1]  # stage 0
_0_count = stage_0[2]  # stage 0
_1 = stage_0[3]  # stage 0
_0_running_mean = self.0.running_mean
_0_running_var = self.0.running_var
_0_num_batches_tracked = self.0.num_batches_tracked
_0_update = update_statistics(_0_running_mean, _0_running_var, _0_num_batches_tracked, 0.1, ((_0_mean, _0_var, _0_count),))  # stage 0
return _1
""",
    )
    lines = format_graph(pipe.graph_module).splitlines()
    assert_expected_inline(
        "\n".join(lines[-3:-1]),
        """\
_0_update = update_statistics(_0_running_mean, _0_running_var, _0_num_batches_tracked, 0.1, ((_0_mean_s0_mb0, _0_var_s0_mb0, _0_count_s0_mb0), (_0_mean_s0_mb1, _0_var_s0_mb1, _0_count_s0_mb1)))  # stage 0, cpu/compute
_1_out = gather((_1_s0_mb0, _1_s0_mb1), 0, input_1_parts, 0)  # stage 0, cpu/compute""",
    )
    for level in ("model", "stage", "pipeline"):
        str(pipe.draw(level))
    pipe.report()


def test_an_update_belongs_to_the_stage_that_has_the_statistics_wherever_it_is_cut():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    with fxpipe.compile(
        model, ["cpu"] * 3, chunks=2, partition=["1", "2"], deferred_batch_norm=True
    ) as pipe:
        pipe(torch.randn(4, 4))
        assert [hop.value for hop in pipe.skip_layout.hops] == ["input_1", "_0", "_1_out"]


class Functional(nn.Module):
    """Normalises by a function, with buffers of its own."""

    def __init__(self, function=F.batch_norm) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        if self.function is torch.batch_norm:
            return torch.batch_norm(x, None, None, self.mean, self.var, True, 0.3, 1e-5, False)
        return F.batch_norm(x, self.mean, self.var, training=self.training, momentum=0.3)


class Activated(nn.BatchNorm1d):
    """A batch norm with a forward of its own, as timm has them."""

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum
        )
        return torch.relu(x)


class Counting(nn.BatchNorm1d):
    def forward(self, x):
        self.num_batches_tracked += 1
        return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.2)


class Twice(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(torch.tanh(self.norm(x)) * 2)


NORMS = {
    "F.batch_norm": Functional,
    "torch.batch_norm": lambda: Functional(torch.batch_norm),
    "a subclass": lambda: Activated(4),
    "a subclass that counts by +=": lambda: Counting(4),
    "no momentum": lambda: nn.BatchNorm1d(4, momentum=None),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("name", NORMS)
def test_those_that_are_functions_or_kept_whole_defer_too(name, tracer):
    model = nn.Sequential(nn.Linear(4, 4), NORMS[name](), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    with fxpipe.compile(
        model, ["cpu"] * 2, chunks=3, tracer=tracer, deferred_batch_norm=True
    ) as pipe:
        for shift in range(3):
            x = torch.randn(7, 4) + shift
            wanted, _ = loop(copy.deepcopy(model), (x,), 3)
            output = pipe(x)
            loss_of(output).backward()
            assert same(output.detach(), wanted)
            reference(x)
            close(model, reference)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), lambda: Activated(4)])
@pytest.mark.filterwarnings("error::fxpipe.BatchWarning")  # of a count that goes up more often
def test_one_that_is_called_twice_in_a_stage_counts_twice(make, tracer):
    model = Twice(make())
    with fxpipe.compile(model, ["cpu"], chunks=3, tracer=tracer, deferred_batch_norm=True) as pipe:
        for _ in range(2):
            pipe(torch.randn(7, 4))
    assert model.norm.num_batches_tracked == 4


class OfAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.stack([torch.zeros(4), torch.ones(4)]))

    def forward(self, x):
        return F.batch_norm(x, self.statistics[0], self.statistics[1], training=True)


class OfAMomentum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("momentum", torch.tensor(0.3))

    def forward(self, x):
        running = self.norm.running_mean, self.norm.running_var
        return F.batch_norm(x, *running, training=True, momentum=self.momentum.item())


class OfTheCount(nn.BatchNorm1d):
    def forward(self, x):
        count = self.num_batches_tracked.add_(1)
        x = F.batch_norm(x, self.running_mean, self.running_var, training=True)
        return x / (1 + count)


class OfValues(nn.Module):
    """Is kept whole, as it branches by values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(x)
        return x if x.sum() > 1e9 else x * 2


class FunctionalOfValues(Functional):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum() > 1e9 else x * 2


CANNOT = {
    OfAView: r"deferred_batch_norm=True: 'batch_norm' \(at .*test_batch_norm.py:\d+\) updates "
    "running statistics in 1.statistics, and would do so for each micro-batch: call a batch norm",
    OfAMomentum: r"the batch norm 'batch_norm' \(at .*\) has a momentum that the model computes",
    lambda: OfTheCount(4): "the model computes with 1.num_batches_tracked, the number of batches",
    OfValues: "1.module.norm.running_mean are running statistics within 1.module, a OfValues that "
    "is kept whole",
    FunctionalOfValues: r"1.module.\w+ are running statistics within 1.module, a Functional",
}


@pytest.mark.parametrize("make", CANNOT)
def test_what_cannot_be_deferred_is_refused(make):
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4))
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2, deferred_batch_norm=True, check=False) as pipe,
        pytest.raises(ValueError, match=CANNOT[make]),
    ):
        pipe(torch.randn(4, 4))


class FunctionalOfRows(nn.Module):
    def __init__(self, *, statistics: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4) if statistics else None)
        self.register_buffer("variance", torch.ones(4) if statistics else None)

    def forward(self, x):
        return F.instance_norm(x, self.mean, self.variance, self.weight)


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
@pytest.mark.parametrize("make", [lambda **how: nn.InstanceNorm1d(4, **how), FunctionalOfRows])
def test_instance_norms_with_running_statistics_are_refused(make, tracer):
    how = "statistics" if make is FunctionalOfRows else "track_running_stats"
    options = {"chunks": 2, "deferred_batch_norm": True, "tracer": tracer}
    with (
        fxpipe.compile(nn.Sequential(make(**{how: True})), ["cpu"], **options) as pipe,
        pytest.raises(ValueError, match="is an instance norm with running statistics, which"),
    ):
        pipe(torch.randn(4, 4, 3))
    for norm in make(**{how: False}), make(**{how: True}).eval():
        if how == "statistics" and norm.mean is not None:
            continue  # the function has no mode
        with fxpipe.compile(nn.Sequential(norm), ["cpu"], **options) as pipe:
            pipe(torch.randn(4, 4, 3))


def test_one_that_is_synchronised_with_other_processes_is_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4), nn.Linear(4, 4))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    graph = torch.fx.symbolic_trace(model)
    with pytest.raises(ValueError, match="1 is a SyncBatchNorm, which updates its running stat"):
        DeferredBatchNorm()(graph)


def test_statistics_that_are_no_buffers_are_nothing_to_defer():
    class Of(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, x.new_zeros(4), x.new_ones(4), training=True)

    model, x = nn.Sequential(nn.Linear(4, 4), Of()), torch.randn(6, 4)
    wanted, _ = loop(model, (x,), 2)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, deferred_batch_norm=True) as pipe:
        assert same(pipe(x).detach(), wanted)


class Refined(nn.Module):
    """A block that is applied three times, with one batch norm."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.first, self.block, self.last = nn.Linear(4, 4), block, nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.last(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_one_that_is_called_several_times_is_updated_in_the_order_of_its_calls(tracer, checkpoint):
    torch.manual_seed(0)
    model, x = Refined(), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    options = {"tracer": tracer, "checkpoint": checkpoint, "deferred_batch_norm": True}
    with fxpipe.compile(model, ["cpu"] * 2, chunks=1, **options) as pipe:
        for _ in range(2):
            pipe(x), reference(x)
            close(model, reference)
    found = []
    for lanes in (1, 2):
        copied = copy.deepcopy(reference)
        with fxpipe.compile(copied, ["cpu"] * lanes, chunks=4, **options) as pipe:
            for _ in range(2):
                loss_of(pipe(x)).backward()
        found.append([buffer.clone() for buffer in copied.buffers()])
        assert copied.block[1].num_batches_tracked == 12
    assert same(*found)


class Read(nn.Module):
    """Reads the running mean of its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) - self.norm.running_mean


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_statistics_that_the_forward_reads_are_not_deferred(tracer):
    pipe = fxpipe.compile(
        Read(), ["cpu"] * 2, chunks=4, tracer=tracer, deferred_batch_norm=True, check=False
    )
    with pytest.raises(ValueError, match=r"'sub.* reads .*norm.running_mean.*deferred_batch_norm"):
        pipe(torch.randn(8, 4))
