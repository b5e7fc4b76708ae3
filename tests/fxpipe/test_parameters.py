"""Parameters of every kind, and what people do with them: all as in the loop over micro-batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fxpipe
from tests.zoo import MLP, parts, same


def loss_of(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output.float()
    return torch.sin(real).sum()


def in_a_row(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(modules[0], nn.Tanh(), *modules[1:], nn.Linear(8, 8))


class LowRank(nn.Module):
    """A frozen layer, and a small one beside it that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Embedding(nn.Module):
    """Its gradient is sparse; ``twice``: so is a sum of two."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(11, 8, sparse=True), *linears(2)
        self.twice = twice

    def forward(self, tokens):
        x = self.b(torch.tanh(self.a(self.embed(tokens))))
        return x + self.embed(tokens) if self.twice else x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.a, self.b = (nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat)) for _ in range(2))

    def forward(self, x):
        return torch.fft.ifft((torch.fft.fft(self.first(x)) @ self.a).abs().to(self.b) @ self.b)


class Unused(nn.Module):
    """A layer that nobody calls, and a buffer that is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.unused, self.b = linears(3)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, x):
        return self.b(self.a(x) * self.scale)


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(count)]


def frozen(index: int) -> nn.Module:
    model = in_a_row(*linears(2))
    model[index].requires_grad_(False)
    return model


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    return model.to(memory_format=torch.channels_last)


def old(normed) -> nn.Module:
    """A parametrization by hooks, as it used to be."""
    with pytest.warns(FutureWarning):
        return in_a_row(normed(nn.Linear(8, 8)))


def rows() -> Tensor:
    return torch.randn(7, 8)


def tokens() -> Tensor:
    return torch.randint(11, (7, 5))


MODELS = {
    "weight norm": (
        lambda: in_a_row(*map(parametrizations.weight_norm, linears(2))),
        rows,
    ),
    "spectral norm": (
        lambda: in_a_row(*map(parametrizations.spectral_norm, linears(2))),
        rows,
    ),
    "orthogonal": (lambda: in_a_row(*map(parametrizations.orthogonal, linears(2))), rows),
    "weight norm by hooks": (lambda: old(nn.utils.weight_norm), rows),
    "adapters": (lambda: in_a_row(LowRank(), LowRank()), rows),
    "sparse": (lambda: Embedding(twice=False), tokens),
    "sparse, shared": (lambda: Embedding(twice=True), tokens),
    "complex": (Complex, rows),
    "bfloat16": (lambda: in_a_row(*linears(2)).bfloat16(), lambda: rows().bfloat16()),
    "channels last": (
        convolutions,
        lambda: torch.randn(7, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "frozen at first": (lambda: frozen(0), rows),
    "frozen in between": (lambda: frozen(2), rows),
    "all frozen": (lambda: in_a_row(*linears(2)).requires_grad_(False), rows),
    "unused": (Unused, rows),
}


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def run(outputs: list[Tensor]) -> Tensor:
    for output in reversed(outputs):
        if output.requires_grad:
            loss_of(output).backward()
    return torch.cat([output.detach() for output in outputs])


@pytest.mark.covering(1)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_buffers_are_those_of_the_loop(name, checkpoint):
    make, inputs = MODELS[name]
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    model, x = make(), inputs()
    expected = run([plain(part) for part in parts(x, 3)])
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3, checkpoint=checkpoint) as pipe:
        output = run([pipe(x)])
        assert len(pipe.stages) == 3
    assert same(output, expected)
    assert output.stride() == expected.stride()  # channels last stay last
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.layout == theirs.layout and ours.dtype == theirs.dtype
            assert same(*(g.to_dense() if g.is_sparse else g for g in (ours, theirs)))
    assert same(list(model.buffers()), list(plain.buffers()))


@pytest.mark.parametrize("name", ["weight norm", "adapters", "sparse", "complex", "unused"])
def test_states_go_both_ways(name):
    make, inputs = MODELS[name]
    model, other, x = make(), make(), inputs()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,)) as pipe:
        other.load_state_dict(pipe.state_dict(), strict=True)
        assert same(other(x).detach(), model(x).detach())
        again = make()
        pipe.load_state_dict(again.state_dict(), strict=True)
        expected = torch.cat([again(part) for part in parts(x, 2)])
        assert same(pipe(x).detach(), expected.detach())


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_it_trains_with_scaled_and_clipped_gradients(tracer):
    model, plain = MLP(width=8), MLP(width=8)
    plain.load_state_dict(model.state_dict())
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        for one, call in ((pipe, lambda x: [pipe(x)]), (plain, lambda x: map(plain, parts(x, 2)))):
            torch.manual_seed(2)
            optimizer = torch.optim.Adam(one.parameters(), 0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for _ in range(3):
                one.zero_grad()
                for output in reversed(list(call(torch.randn(6, 8)))):
                    scaler.scale(loss_of(output)).backward()
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(one.parameters(), 1.0)
                assert norm > 1
                scaler.step(optimizer)
                scaler.update()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_a_pipeline_changes_its_dtype(convert):
    model, x = MLP(width=8), torch.randn(6, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, example_inputs=(x,)) as pipe:
        assert convert(pipe) is pipe
        dtype = pipe.layers[0].weight.dtype
        assert dtype == model.layers[0].weight.dtype != torch.float32
        x = x.to(dtype)
        assert same(pipe(x), torch.cat([model(part) for part in parts(x, 2)]))


def test_a_pipeline_is_not_moved():
    with (
        fxpipe.compile(MLP(), ["cpu"] * 2) as pipe,
        pytest.raises(RuntimeError, match="cannot be moved to meta: its stages are on cpu, cpu"),
    ):
        pipe.to("meta")


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_train_and_eval_take_effect(tracer):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    x = torch.randn(6, 8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        assert not same(pipe(x), pipe(x))
        assert pipe.eval() is pipe and not model.training
        before = [buffer.clone() for buffer in model.buffers()]
        torch.testing.assert_close(pipe(x), model(x), rtol=1e-5, atol=1e-6)
        assert same(list(model.buffers()), before)
        model.train()
        assert pipe.training and not same(pipe(x), pipe(x))


class Shared(nn.Module):
    """Gives back what all micro-batches share: as it came, changed, and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linears(2)

    def forward(self, x, table, flags):
        return {
            "y": self.b(self.a(x) + table),
            "table": table,
            "twice": table * 2,
            "flags": [flags, flags.sum()],
            "weight": self.a.weight,
            "decay": F.relu(self.a.weight).sum(),
        }


@pytest.mark.parametrize("tracer", ["symbolic", "export"])
def test_outputs_that_nothing_of_the_batch_is_in_are_given_as_they_are(tracer):
    model, plain = Shared(), Shared()
    plain.load_state_dict(model.state_dict())
    table = torch.randn(1, 8, requires_grad=True)
    theirs = table.detach().clone().requires_grad_()
    x, flags = torch.randn(6, 8), torch.tensor([[True, False]])
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, tracer=tracer) as pipe:
        output = pipe(x, table, flags)
    expected = plain(x, theirs, flags)
    torch.testing.assert_close(output, expected)
    assert same(output["table"], table) and same(output["flags"], [flags, flags.sum()])
    for one in (output, expected):
        sum(value.sin().sum() for key, value in one.items() if key != "flags").backward()
    torch.testing.assert_close(table.grad, theirs.grad)
    torch.testing.assert_close(gradients(model), gradients(plain))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("training", [True, False])
def test_pytorch_s_own_transformers_are_cut_between_their_layers(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train(training)
    x = torch.randn(6, 5, 8)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        held = [
            {name.split(".")[1] for name, _ in s.module.named_parameters()} for s in pipe.stages
        ]
    assert all(held) and set().union(*held) == set("0123")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers_have_packed_ones():
    """Of several layers, whose weights cannot be compared with each other."""
    engines = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    if not engines:
        pytest.skip("no quantised kernels here")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engines[-1]
    try:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).eval()
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
        x = torch.randn(6, 4)
        # Activations are quantised by the largest value of all rows.
        with fxpipe.compile(model, ["cpu"] * 3, chunks=2, check=False) as pipe:
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.chunk(2)]))
    finally:
        torch.backends.quantized.engine = before


class Taught(nn.Module):
    """A student, whose forward moves its teacher, with the loss between them."""

    def __init__(self, is_moved_first: bool) -> None:
        super().__init__()
        self.is_moved_first, self.head = is_moved_first, nn.Linear(8, 8)
        self.body, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.teacher.load_state_dict(self.body.state_dict())

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor:
        found = None if self.is_moved_first else self.teacher(x)
        for old, new in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)
        return self.teacher(x) if found is None else found

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x))
        return F.mse_loss(y, self.taught(x))


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore::fxpipe.BatchWarning")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("is_moved_first", [False, True])
def test_a_teacher_that_the_forward_moves_is_moved_as_in_the_loop(is_moved_first, schedule):
    model, batches = Taught(is_moved_first), torch.randn(4, 6, 8)
    alone = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.5) for each in (model, alone))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, schedule=schedule) as pipe:
        for x in (*batches, torch.randn(6, 2, 8)):  # the last one is compiled for, once they differ
            loss = pipe.step(x, optimizer=ours, zero_grad=True)
            losses = [alone(part) for part in x.chunk(3)]
            wanted = sum(losses, torch.zeros(())) / 3
            wanted.backward()
            theirs.step()
            theirs.zero_grad()
            torch.testing.assert_close(loss, wanted.detach())
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    "parametrized", [parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_a_first_call_may_come_while_parametrizations_are_cached(parametrized):
    model, x = in_a_row(nn.Linear(8, 8), parametrized(nn.Linear(8, 8))), torch.randn(4, 8)
    alone = copy.deepcopy(model)
    with parametrize.cached(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        loss_of(pipe(x)).backward()
        assert model[2].weight is model[2].weight
    sum(loss_of(alone(part)) for part in x.chunk(2)).backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
