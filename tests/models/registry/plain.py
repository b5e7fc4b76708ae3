"""Models in plain PyTorch, as people write them. Each does something that a library's model seldom
does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.models.registry.entry import ENTRIES, VOCABULARY, Entry, Inputs, tensors

WIDTH = 8
ROWS, SEQUENCES, IMAGES = tensors(x=(WIDTH,)), tensors(x=(7, WIDTH)), tensors(x=(3, 16, 16))


def plain(
    family: str, inputs: Inputs, options: dict[str, Any] | None = None, across: str = ""
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Add a class to the zoo."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        given = options or {}
        ENTRIES.append(Entry(kind.__name__, "torch", family, kind, inputs, given, across=across))
        return kind

    return add


def layers(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


# -------------------------------------------------------------------------------------- sequences


@plain("sequences", lambda batch: {"words": torch.randint(VOCABULARY, (batch, 7))})
class Tagger(nn.Module):
    """Recurrent layers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True, proj_size=4)
        self.cell = nn.LSTMCell(4, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor) -> Tensor:
        x, _ = self.gru(self.embedding(words))
        x, _ = self.lstm(x)
        state = None
        tags = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            tags.append(self.head(state[0]))
        return torch.stack(tags, 1)


class Packed(nn.Module):
    """A recurrent layer over rows of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.lstm(packed)[0], True, total_length=x.shape[1])
        return padded


@plain(
    "sequences",
    lambda batch: {**SEQUENCES(batch), "lengths": torch.randint(1, 8, (batch,))},
)
class PackedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Packed(), Packed(), nn.Linear(WIDTH, 3)
        self.pool = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = torch.tanh(self.pool(self.first(x, lengths)))
        return self.head(self.second(x, lengths))


@plain("sequences", tensors(source=(5, 16), target=(4, 16)))
class Translator(nn.Module):
    """PyTorch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        return self.head(self.transformer(source, target, tgt_mask=mask))


@plain("sequences", SEQUENCES)
class LongConvolution(nn.Module):
    """A state space as a convolution, by way of frequencies, with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.rand(WIDTH))
        self.decay = nn.Parameter(torch.rand(WIDTH, 4))
        self.c = nn.Parameter(torch.randn(WIDTH, 4, 2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        a = -self.decay.exp() + 1j * torch.arange(4)
        da = a * self.step.exp()[:, None]
        c = torch.view_as_complex(self.c) * (da.exp() - 1) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, (da[..., None] * torch.arange(length)).exp())
        u = torch.fft.rfft(x.transpose(1, 2), n=2 * length)
        y = torch.fft.irfft(u * torch.fft.rfft(kernel.real, n=2 * length), n=2 * length)
        return self.head(F.gelu(y[..., :length]).transpose(1, 2))


# ----------------------------------------------------------------------------------- by the values


@plain("by values", SEQUENCES)
class Mixture(nn.Module):
    """Each expert has as many words as have been sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = layers()

    def forward(self, x: Tensor) -> Tensor:
        words = self.first(x).flatten(0, 1)
        weights, chosen = self.router(words).softmax(-1).topk(2)
        y = torch.zeros_like(words)
        for i, expert in enumerate(self.experts):
            word, place = torch.where(chosen == i)
            y.index_add_(0, word, weights[word, place, None] * expert(words[word]))
        return y.view_as(x)


@plain(
    "by values",
    lambda batch: {
        "words": torch.randint(VOCABULARY, (batch, 7)),
        "labels": torch.where(
            torch.rand(batch, 7) > 0.4, torch.randint(VOCABULARY, (batch, 7)), -100
        ),
    },
)
class MaskedLanguage(nn.Module):
    """Only words that have a label are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), layers()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        kept = labels != -100
        loss = F.cross_entropy(self.head(x[kept]), labels[kept])
        return {"loss": loss, "features": x}


@plain("by values", SEQUENCES)
class Quantizer(nn.Module):
    """Vectors of a codebook, which follows by moving averages, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(2), layers(2)
        self.register_buffer("codes", torch.randn(16, WIDTH))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.encoder:
            x = F.gelu(layer(x))
        words = x.flatten(0, 1)
        chosen = F.one_hot(torch.cdist(words, self.codes).argmin(-1), 16).to(x.dtype)
        y = (chosen @ self.codes).view_as(x)
        if self.training:
            self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(chosen.t() @ words.detach(), alpha=0.1)
            self.codes.data.copy_(self.sums / self.counts[:, None].clamp(min=1e-3))
        apart = (y.detach() - x).pow(2).mean((1, 2))
        y = x + (y - x).detach()
        for layer in self.decoder:
            y = F.gelu(layer(y))
        return y, apart


# ------------------------------------------------------------------------------------------- state


@plain("state", ROWS, across="in train mode it takes a mean of all rows off each of them")
class MovingAverage(nn.Module):
    """A buffer of which another takes the place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


@plain("state", ROWS)
class Queue(nn.Module):
    """Contrasts rows with those that came before, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("rows", F.normalize(torch.randn(12, WIDTH)))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        x = F.normalize(x)
        scores = x @ self.rows.clone().t()
        if self.training:
            with torch.no_grad():
                self.rows[(self.next + torch.arange(x.shape[0])) % 12] = x
                self.next[0] = (self.next[0] + x.shape[0]) % 12
        return scores


# ---------------------------------------------------------------------------- flows and operators


@plain("flows and operators", ROWS)
class CouplingFlow(nn.Module):
    """A normalizing flow, and the likelihood by it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.shifts = layers(4), layers(4)
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)
        self.prior = torch.distributions.MultivariateNormal(torch.zeros(WIDTH), torch.eye(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume, mask = x.new_zeros(x.shape[0]), self.mask
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            kept = x * mask
            log = torch.tanh(scale(kept)) * ~mask
            x = kept + ~mask * (x - shift(kept)) * torch.exp(-log)
            volume -= log.sum(1)
            mask = ~mask
        return x, self.prior.log_prob(x) + volume


@plain("flows and operators", IMAGES)
class FourierOperator(nn.Module):
    """Layers in the lowest frequencies, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, 1, 1)
        self.spectral = nn.ParameterList(
            torch.randn(WIDTH, WIDTH, 4, 4, dtype=torch.cfloat) / WIDTH for _ in range(3)
        )
        self.local = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for weight, conv in zip(self.spectral, self.local, strict=True):
            modes = torch.fft.rfft2(x)
            kept = torch.zeros_like(modes)
            low = torch.einsum("bixy,ioxy->boxy", modes[..., :4, :4], weight)
            kept[..., :4, :4] = low
            x = F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + conv(x))
        return self.head(x)


@plain("flows and operators", tensors(x=(64,)))
class Vocoder(nn.Module):
    """To frequencies, and back to a wave."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.convolutions = nn.ModuleList(nn.Conv1d(9, 9, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        gain = z.abs()
        for convolution in self.convolutions:
            gain = torch.sigmoid(convolution(gain))
        z = torch.polar(gain * z.abs(), z.angle())
        return torch.istft(z, 16, 4, window=self.window, length=x.shape[-1])


@plain("flows and operators", ROWS)
class NeuralODE(nn.Module):
    """The same layers in every step of an integration."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, *, steps: int = 4) -> Tensor:
        h = 1 / steps
        for _ in range(steps):
            a = self.field(x)
            b = self.field(x + h / 2 * a)
            c = self.field(x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.field(x + h * c))
        return x


@plain("flows and operators", tensors(x=(10,)))
class GraphPropagation(nn.Module):
    """Over a graph, which is a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(10, 6), nn.Linear(6, 10)
        ends = torch.stack([torch.arange(10), torch.arange(10).flip(0)])
        self.register_buffer("edges", torch.sparse_coo_tensor(ends, torch.rand(10), (10, 10)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.relu(self.decoder(torch.relu(self.encoder(x))))
            x = torch.sparse.mm(self.edges, x.t()).t()
        return x


# --------------------------------------------------------------------- ways to write and to wrap it


class Reversed(torch.autograd.Function):
    """The domain classifier is to be misled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Domains(NamedTuple):
    label: Tensor
    domain: Tensor


@plain("wrapped", ROWS)
class DomainAdversarial(nn.Module):
    """A backward of its own, and a named tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*layers(), nn.ReLU())
        self.heads = nn.ModuleDict({"label": nn.Linear(WIDTH, 3), "domain": nn.Linear(WIDTH, 2)})

    def forward(self, *, x: Tensor, scale: float = 0.5) -> Domains:
        x = self.features(x)
        return Domains(self.heads["label"](x), self.heads["domain"](Reversed.apply(x, scale)))


@plain("wrapped", IMAGES)
class NormedWeights(nn.Module):
    """Weights that are made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Conv2d(3, WIDTH, 3))
        self.second = parametrizations.spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3))
        self.third = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.last = nn.utils.spectral_norm(nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(F.relu(self.first(x))).mean((2, 3))))


@plain("wrapped", ROWS)
class CompiledParts(nn.Module):
    """Parts of it have been given to ``torch.compile`` and to TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.compiled = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager", fullgraph=True)
        self.scripted = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH))
        own = self.layers[0].forward
        self.layers[0].forward = lambda x: own(x) + x / 8  # as adapters are put onto layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return self.scripted(torch.tanh(self.compiled(x)))


@plain("wrapped", SEQUENCES)
class Ensemble(nn.Module):
    """The same function for several weights, by ``torch.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.weights = layers(), nn.Parameter(torch.randn(3, WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = F.gelu(layer(x))
        many = torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weights)
        return self.head(many.mean(0)), many.var(0)
