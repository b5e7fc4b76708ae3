"""Modules whose way depends on values stay whole, as calls in an exported graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxpipe
from fxpipe.ir.graph import COST, stage_nodes
from fxpipe.trace import TraceError, trace
from fxpipe.trace.whole import Whole
from tests.zoo import gradients, loop, loss_of, same


class Experts(nn.Module):
    """Runs the experts that rows have been sent to, and no others."""

    def __init__(self, width: int = 6, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        scores = self.router(x).softmax(-1)
        chosen = scores.argmax(-1)
        y = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows = chosen == i
            y[rows] = self.experts[i](x[rows]) * scores[rows, i, None]
        return {"y": self.drop(y) * scale, "flat": scores.flatten(), "scale": scale}


class Mixture(nn.Module):
    """Has a branch on a fixed size too, so that fx does not take it."""

    def __init__(self, kind: type[nn.Module] = Experts, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))
        self.mixtures = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer, mixture in zip(self.layers, self.mixtures, strict=True):
            made = mixture(torch.tanh(layer(x)), scale=2.0)
            x = x + made["y"] + made["flat"].view(x.shape[0], -1).sum(-1, keepdim=True)
        return x * 2 if x.shape[1] > 2 else x


def wholes(gm: fx.GraphModule) -> dict[str, type]:
    return {name: type(m.module) for name, m in gm.named_modules() if isinstance(m, Whole)}


def test_a_module_that_goes_by_values_is_a_call_in_the_graph() -> None:
    model = Mixture()
    traced = trace(model, (torch.randn(4, 6),))
    assert traced.front_end == "export"
    assert wholes(traced.graph_module) == {f"mixtures.{i}": Experts for i in range(3)}
    for batch in 1, 3, 8:
        x = torch.randn(batch, 6)
        assert torch.equal(traced.rebuild(traced.graph_module(x)), model(x))
    ours = {id(p) for p in model.parameters()}
    assert {id(p) for p in traced.graph_module.parameters()} == ours
    assert not any("forward" in vars(module) for module in model.modules()), "it is as it was"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_it_trains_like_the_model(checkpoint: str) -> None:
    model, x = Mixture(), torch.randn(6, 6)
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 4, chunks=3, checkpoint=checkpoint) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        found = [any(isinstance(m, Whole) for m in s.module.modules()) for s in pipe.stages]
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])
    assert sum(found) > 1, "they may be in several stages"


class Frozen(nn.Module):
    """Takes features without gradients, from a module that goes by values."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = Experts(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.features(x.sin(), scale=2.0)["y"]
        return self.head(y + x)


def test_it_is_called_within_a_region_without_gradients() -> None:
    model, x = Frozen(), torch.randn(6, 6)
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        assert list(wholes(pipe.model_graph).values()) == [Experts]
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])
    assert model.features.router.weight.grad is None


class Noisy(Experts):
    """Draws random numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.count += 1
        return super().forward(x, scale)


def test_its_random_numbers_and_buffers_are_known_of() -> None:
    model, x = Mixture(Noisy), torch.randn(6, 6)
    seen = []
    for mode in "never", "always":
        for mixture in model.mixtures:
            mixture.count.zero_()
        model.zero_grad()
        with fxpipe.compile(model, ["cpu"] * 4, chunks=3, checkpoint=mode) as pipe:
            pipe.prepare(x)
            assert [m.count.item() for m in model.mixtures] == [0, 0, 0]
            torch.manual_seed(0)
            loss_of(pipe(x)).backward()
        seen.append(gradients(model))
    assert same(*seen), "a recomputation draws what the forward drew"
    assert [m.count.item() for m in model.mixtures] == [3, 3, 3]


class Moving(nn.Module):
    """Writes moving averages by way of ``.data``, which export takes for constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = torch.tanh(x) * self.gain.clone() * scale
        with torch.no_grad():
            self.mean.data.mul_(0.5).add_(x.mean(0))
            self.gain.data.copy_(1 + self.mean.abs())
        return {"y": y, "flat": y.flatten()}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_it_may_write_what_autograd_does_not_see(checkpoint: str) -> None:
    model, x = Mixture(Moving), torch.randn(6, 6)
    reference = copy.deepcopy(model)
    expected = loop(reference, (x,), 3)
    with fxpipe.compile(model, ["cpu"] * 4, chunks=3, checkpoint=checkpoint) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        assert wholes(pipe.model_graph) == {f"mixtures.{i}": Moving for i in range(3)}
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


class Passes(nn.Module):
    """Gives its input back, now and then."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        y = x if x.sum() > 1e9 else x * 1
        return {"y": x if x.sum() < 1e9 else y, "flat": y.flatten()}


def test_a_write_to_an_output_that_is_an_input_too_is_noticed() -> None:
    class Writes(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            y = self.mixtures[0](x)["y"]
            return y.add_(1) + x

    model, x = Writes(Passes), torch.randn(4, 6)
    with pytest.raises(TraceError, match="differs on the example"):
        trace(model, (x,), tracer="export")  # the graph has a copy


def test_what_encloses_is_kept_whole_where_a_part_cannot_be() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor, flag: bool) -> Tensor:
            return x + 1 if flag else x

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Given()

        def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
            y = self.part(x, (x.sum() > 0).item())
            return {"y": y, "flat": y}

    traced = trace(Mixture(Decides, depth=1), (torch.randn(4, 6),))
    assert wholes(traced.graph_module) == {"mixtures.0": Decides}


class Causal(nn.Module):
    """An encoder of PyTorch's, which looks whether a mask is causal, if nothing says so."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.first, self.encoder = nn.Linear(8, 8), nn.TransformerEncoder(layer, 2)
        self.is_causal = is_causal

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.first(x), mask, is_causal=self.is_causal)
        return out


def test_what_spares_an_encoder_a_look_at_its_mask_is_said() -> None:
    inputs = torch.randn(4, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    for is_causal in (None, True):
        model = Causal(is_causal)
        with fxpipe.compile(model, ["cpu"] * 2, chunks=2, in_dims=[0, None]) as pipe:
            pipe(*inputs)
            text = " ".join(str(pipe.explain()).split())
        is_said = "looks at the values of a mask unless is_causal=True" in text
        assert is_said == (is_causal is None)


class Positive(nn.Module):
    """Works on the rows that are positive, as many as there are: no branch, so that fx takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, rows, self.linear(x[rows]))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_sizes_within_it_may_follow_from_values(checkpoint: str) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), Positive(), nn.Linear(6, 6)), torch.randn(6, 6)
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3, checkpoint=checkpoint) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        assert list(wholes(pipe.model_graph)) == ["values_0"], "a part of it is"
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


def test_by_the_symbolic_front_end_they_are_refused_with_the_line() -> None:
    with pytest.raises(TraceError, match=r"needs the values .*\n.*test_whole.py.*\n.*nonzero\(\)"):
        fxpipe.compile(Positive(), ["cpu"] * 2, tracer="symbolic").prepare(torch.randn(6, 6))


def test_its_forward_may_be_one_that_was_put_onto_it() -> None:
    """As libraries do that wrap modules in place."""

    def wrapped(x: Tensor) -> Tensor:
        return Positive.forward(model[1], x) * 2

    model, x = nn.Sequential(nn.Linear(6, 6), Positive(), nn.Linear(6, 6)), torch.randn(6, 6)
    model[1].forward = wrapped
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
        assert model[1].forward is wrapped


class Forces(nn.Module):
    """The gradient of an energy, as models of molecules have it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_it_may_compute_gradients_of_its_own() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), Forces(), nn.Linear(6, 6)), torch.randn(6, 6)
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 3, chunks=3) as pipe:
        output = pipe(x)
        loss_of(output).backward()
        assert wholes(pipe.model_graph) == {"1": Forces}
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])
    with pytest.raises(TraceError, match=r"computes gradients within .*test_whole.py.*autograd"):
        trace(Forces(), (x,))


class Routes(nn.Module):
    """Says how many rows are positive, as a number."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        order = x[:, 0].argsort(descending=True)
        return order, int((x[:, 0] > 0).sum())


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.routes, self.a, self.b = Routes(), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        order, count = self.routes(x)
        first, rest = x[order].split([count, x.shape[0] - count])
        return torch.cat([self.a(first), self.b(rest)])[order.argsort()]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_number_that_it_gives_is_no_constant(rows: int) -> None:
    """What encloses it is kept whole instead, also in a graph for one size of the batch."""

    class OneSize(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.stack([x[i] for i in range(x.shape[0])]))

    model, x = OneSize(nn.Linear(6, 6), Routed(), nn.Linear(6, 6)), torch.randn(6, 6)
    with fxpipe.compile(model, ["cpu"] * 3, chunks=6 // rows) as pipe:
        pipe.prepare(torch.ones(6, 6))
        assert wholes(pipe.model_graph) == {"1": Routed}
        torch.testing.assert_close(pipe(x), model(x))


class Count(nn.Module):
    """How many are above zero, as a number."""

    def forward(self, x: Tensor) -> int:
        return len((x > 0).nonzero().tolist())


class Router(nn.Module):
    """Asked by another method than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(6, 1), Count()

    def sort(self, x: Tensor) -> int:
        return self.count(self.linear(x))


class Sorts(nn.Module):
    """Its way depends on what a part of it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        y = x * 2 if self.router.sort(x) > 1 else x * 3
        return {"y": y, "flat": y}


def test_where_another_method_goes_by_values_what_calls_it_is_kept_whole() -> None:
    traced = trace(Mixture(Sorts, depth=2), (torch.randn(4, 6),))
    assert wholes(traced.graph_module) == {f"mixtures.{i}": Sorts for i in range(2)}


class Pads(nn.Module):
    """By as many columns as a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, int(self.columns)))


class Padded(nn.Module):
    """What comes after it has a branch on how wide it is by then."""

    def __init__(self) -> None:
        super().__init__()
        self.pads, self.linear = Pads(), nn.Linear(6, 6)
        self.narrow = nn.ModuleDict({"only": Narrow()})

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow["only"](self.pads(self.linear(x)))


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :6] * 2 if x.shape[1] > 6 else x


def test_who_reads_a_value_is_kept_whole_and_not_who_needs_it() -> None:
    model = Padded()
    traced = trace(model, (torch.randn(4, 6),))
    assert wholes(traced.graph_module) == {"pads": Pads}
    x = torch.randn(3, 6)
    assert torch.equal(traced.rebuild(traced.graph_module(x)), model(x))
    model.pads.columns.fill_(3)
    with pytest.raises(RuntimeError, match=r"Pads gave a tensor of shape \(3, 9\) in place of"):
        traced.graph_module.forward(x)


class Cond(nn.Module):
    """Has a layer in each of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x), (x,))


class If(Cond):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.other(x)


def test_a_branch_by_values_is_an_if_and_no_operator() -> None:
    x = torch.randn(4, 6)
    traced = trace(nn.Sequential(If(), nn.Linear(6, 6)), (x,))
    assert wholes(traced.graph_module) == {"0": If}
    with pytest.raises(TraceError, match=r"the operator cond calls .*test_whole.py.* a plain if"):
        trace(nn.Sequential(Cond(), nn.Linear(6, 6)), (x,))


class Recurrent(nn.Module):
    """Rows of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return padded


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Recurrent(), Recurrent(), nn.Linear(6, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(x, lengths)), lengths))


def test_rows_of_several_lengths_may_be_packed_within_it() -> None:
    model, x = Tagger(), torch.randn(6, 5, 6)
    lengths = torch.tensor([5, 1, 3, 2, 4, 5])
    expected = loop(model, (x, lengths), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x, lengths)
        loss_of(output).backward()
        assert wholes(pipe.model_graph) == {"first": Recurrent, "second": Recurrent}
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


class Centred(nn.Module):
    """Keeps the mean that it subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Recurrent(), nn.Linear(6, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.mean = x.mean(1, keepdim=True)
        return self.last(self.first(x - self.mean, lengths))


@pytest.mark.filterwarnings("ignore:Centred sets mean")
def test_the_model_around_it_may_keep_a_tensor_in_an_attribute() -> None:
    """The export that fails in the layer leaves a fake tensor there, which no run computes with."""
    model, x, lengths = Centred(), torch.randn(6, 5, 6), torch.tensor([5, 1, 3, 2, 4, 5])
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x, lengths)
        assert wholes(pipe.model_graph) == {"first": Recurrent}
    assert same(output, loop(model, (x, lengths), 3)[0])


class LastState(Recurrent):
    """Of rows of several lengths, of which it makes no use but for the last state of each."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        _, (h, _) = self.lstm(packed)
        return h[-1]


class Summary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.summary, self.last = Recurrent(), LastState(), nn.Linear(6, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.summary(torch.tanh(self.first(x, lengths)), lengths))


def test_the_last_state_of_rows_of_several_lengths_is_as_good_as_all_of_them(recwarn: Any) -> None:
    model, x = Summary(), torch.randn(6, 5, 6)
    lengths = torch.tensor([5, 1, 3, 2, 4, 5])
    expected = loop(model, (x, lengths), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x, lengths)
        loss_of(output).backward()
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(gradients(model), expected[1])
    said = [str(each.message) for each in recwarn]
    assert not any("assigned during export" in text for text in said), "the user has assigned none"


class Picks(nn.Module):
    """As many rows as are above the mean."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        count = len((x[:, 0] > x[:, 0].mean()).nonzero().tolist())
        return {"y": x, "flat": x[:count]}


class SumOfPicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks()

    def forward(self, x: Tensor) -> Tensor:
        made = self.picks(x)
        return made["y"] * 2 + made["flat"].sum() if x.shape[1] > 2 else x


def test_sizes_that_values_decide_are_refused_with_the_line() -> None:
    x = torch.eye(6)[:4]  # one of four is above the mean; two of five, the first being repeated
    with pytest.raises(TraceError, match=r"(?s)export: .*test_whole.py.*nonzero\(\).tolist\(\)"):
        trace(SumOfPicks(), (x,))


def test_sizes_that_turn_out_to_depend_on_values_are_an_error_when_run() -> None:
    traced = trace(SumOfPicks(), (torch.zeros(4, 6),))
    graph = traced.graph_module
    assert torch.equal(traced.rebuild(graph.forward(torch.zeros(3, 6))), torch.zeros(3, 6))
    with pytest.raises(
        RuntimeError, match=r"Picks gave a tensor of shape \(1, 6\) in place of \(0"
    ):
        graph.forward(torch.eye(6)[:4])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_rows_that_are_packed_within_it_cost_the_work_of_the_recurrent_layer(
    kind: type[nn.Module], gates: int
) -> None:
    rows, steps, width, chunks = 12, 5, 6, 3
    model = Tagger()
    for part in (model.first, model.second):
        part.lstm = kind(width, width, batch_first=True)
    x, lengths = torch.randn(rows, steps, width), torch.full((rows,), steps)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=chunks, example_inputs=(x, lengths)) as pipe:
        costs = {n.name: n.meta[COST] for n in stage_nodes(pipe.model_graph.graph)}
    flops = 2 * rows * steps * gates * width * (width + width)
    for name in ("first", "second"):
        assert costs[name].flops == flops
        assert costs[name].backward_flops == 2 * flops
        started = costs[name].operators / chunks
        assert 2 * steps <= started <= 25 * steps, "those of each step, for any number of rows"


class LastOfPacked(nn.Module):
    """Packs rows of several lengths in its own forward, and uses the last state of each."""

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.lstm, self.head, self.padded = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3), padded

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, self.padded)
        output, (last, _) = self.lstm(packed)
        if not self.padded:
            return self.head(last[-1])
        total = x.shape[1]
        return self.head(
            nn.utils.rnn.pad_packed_sequence(output, True, total_length=total)[0],
        )


def test_a_size_that_the_first_rows_share_by_chance_is_not_taken_as_fixed():
    torch.manual_seed(0)
    model, x = LastOfPacked(), torch.randn(8, 7, 6)
    lengths = torch.tensor([7, 3, 5, 1, 7, 6, 2, 4])  # the last two rows are shorter
    with fxpipe.compile(model, ["cpu", "cpu"], chunks=4) as pipe:
        torch.testing.assert_close(pipe(x, lengths), model(x, lengths))


def test_packed_sequences_that_cannot_leave_a_layer_are_refused_with_what_to_do():
    lengths = torch.tensor([7, 6, 5, 4, 3, 2, 2, 1])
    with pytest.raises(
        TraceError, match=r"LSTM cannot be kept whole: .*in a module of its own .*total_length="
    ):
        fxpipe.compile(LastOfPacked(padded=True), ["cpu"]).prepare(torch.randn(8, 7, 6), lengths)


class Ponders(nn.Module):
    """Applies a layer until its values are large, or often enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            if float(x.detach().abs().max()) > 1e6:
                break
            x = torch.tanh(3 * self.layer(x))
        return x


class PondersOver(nn.Module):
    """Applies a module that it may share with others."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().abs().max()) < 1e6 else x


@pytest.mark.parametrize("inner", [nn.BatchNorm1d(6), nn.Linear(6, 6)], ids=["norm", "layer"])
@pytest.mark.parametrize("is_twice", [True, False])
def test_modules_that_share_a_module_or_are_called_twice_are_kept_whole(
    inner: nn.Module, is_twice: bool
) -> None:
    """torch.export calls other objects in their place, which are none of the model's modules."""
    first, inner = nn.Linear(6, 6), copy.deepcopy(inner)
    one = PondersOver(inner)
    model = nn.Sequential(first, one, nn.Tanh(), one if is_twice else PondersOver(inner), first)
    alone, x = copy.deepcopy(model), torch.randn(8, 6)
    with fxpipe.compile(model, ["cpu"], chunks=2) as pipe:
        outputs = pipe(x)
        loss_of(outputs).backward()
    expected = torch.cat([alone(part) for part in x.chunk(2)])
    loss_of(expected).backward()
    assert same(outputs, expected)
    torch.testing.assert_close(gradients(model), gradients(alone))
    assert same([*model.buffers()], [*alone.buffers()])


class PondersInHalf(Ponders):
    """Switches autocast on, which casts the layer's weight once for all of its uses."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Around(nn.Module):
    """Calls a module between two layers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module, self.last = nn.Linear(6, 6), module, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.module(self.first(x)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Ponders, PondersInHalf])
def test_what_it_uses_several_times_gets_the_bits_of_the_loop(
    kind: type[Ponders], checkpoint: str
) -> None:
    model, x = Around(kind()), torch.randn(12, 6)
    expected = loop(model, (x,), 4)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, checkpoint=checkpoint) as pipe:
        output = pipe(x)
        assert list(wholes(pipe.model_graph).values()) == [kind]
        loss_of(output).backward()
    assert same([output.detach(), gradients(model)], list(expected))


class Freezes(Ponders):
    """Takes a step for which its layer is frozen: only leaves of the autograd graph can be."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.requires_grad_(False)
        x = self.layer(x)
        self.layer.requires_grad_(True)
        return super().forward(x)


def test_it_may_do_what_only_leaves_take() -> None:
    model, x = Around(Freezes()), torch.randn(6, 6)
    expected = loop(model, (x,), 3)
    model.zero_grad()
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x)
        loss_of(output).backward()
    assert same(output.detach(), expected[0])
    torch.testing.assert_close(gradients(model), expected[1])


class Warms(Ponders):
    """Scales more with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 0.5
        return super().forward(x * self.scale)


@pytest.mark.parametrize("tied", [False, True])
def test_it_keeps_what_it_assigns_to_itself_also_where_others_have_its_weight(tied: bool) -> None:
    model, x = Around(Warms()), torch.randn(6, 6)
    if tied:
        model.first.weight = model.module.layer.weight
    reference = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"], chunks=3, check=False, checkpoint="never") as pipe:
        for calls in 3, 6:
            expected, _ = loop(reference, (x,), 3)
            assert torch.equal(pipe(x), expected)
            assert model.module.scale == reference.module.scale == 1 + 0.5 * calls
