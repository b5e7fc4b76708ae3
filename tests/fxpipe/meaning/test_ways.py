"""Ways in which a model can fail to be row by row, or averaged: none is silently wrong.

Each is run as a pipeline, and has one of these fates:

- RIGHT: its output is the model's, and so are its gradients;
- WARNED: the output is that of the micro-batches, put together, and a warning says so, with the
  difference and a remedy;
- a part of a message: it is refused, with what to do.
"""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.ir.structure import leaves

RIGHT, WARNED = "right", "warned"
MIXES = "depends on which other rows there are"
NO_WAY = "whatever the batch size, and is neither a mean over the rows, nor a sum"
PAIRS = "all depend on the batch size"
N, D = 6, 8


def rows(n=N, d=D):
    return torch.randn(n, d)


class Net(nn.Module):
    """Two layers, and then what the case is about, of the hidden rows and all that is given."""

    def __init__(self, then, d=D):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.table = nn.Parameter(torch.randn(N, d))
        self.then = then

    def forward(self, x, *more):
        return self.then(self.b(torch.tanh(self.a(x))), *more)


class WithItsWeights(Net):
    def forward(self, x):
        return super().forward(x, self)


class Tokens(nn.Module):
    """Logits of tokens, and then what the case is about."""

    def __init__(self, then):
        super().__init__()
        self.a, self.b = nn.Embedding(11, D), nn.Linear(D, 11)
        self.then = then

    def forward(self, ids, *more):
        return self.then(self.b(torch.tanh(self.a(ids))), *more)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.GRU, batch_first=False):
        super().__init__()
        self.a, self.b = nn.Embedding(11, D), nn.Linear(D, 11)
        self.rnn = kind(D, D, batch_first=batch_first)

    def forward(self, ids, state=None):
        y, _ = self.rnn(self.a(ids), state)
        return self.b(y)


class Packed(Recurrent):
    """Rows of several lengths, which have to be sorted unless the layer is told to do that. They
    are padded to the length of the inputs, or to that of the longest row."""

    def __init__(self, *arguments, to_the_longest=False, **options):
        super().__init__(*arguments, **options)
        self.to_the_longest = to_the_longest

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.a(ids), lengths, batch_first=True, enforce_sorted=not self.to_the_longest
        )
        y, _ = nn.utils.rnn.pad_packed_sequence(
            self.rnn(packed)[0],
            batch_first=True,
            total_length=None if self.to_the_longest else ids.shape[1],
        )
        return self.b(y)


class Illustrated(nn.Module):
    """Features of a picture take the places of marks among a row's tokens, as in BLIP-2 and Llava:
    each row has as many marks as a picture has features."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(11, D), nn.Linear(D, D)
        self.picture = nn.Linear(4, 2 * D)

    def forward(self, ids, pixels):
        features = self.picture(pixels).view(-1, D)
        h = self.a(ids).masked_scatter((ids == 10)[..., None], features)
        return self.b(torch.tanh(h))


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, edges):
        h = self.a(x)
        return self.b(h.index_add(0, edges[:, 1], h[edges[:, 0]]))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.EmbeddingBag(11, D), nn.Linear(D, D)

    def forward(self, indices, offsets):
        return self.b(self.a(indices, offsets))


class Detector(nn.Module):
    """Lists with one image, and one dict of boxes, for each row, as in torchvision."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images, targets=None):
        found = [self.b(self.a(image[None]).mean((2, 3))) for image in images]
        if targets is None:
            return found
        return sum((f - t["boxes"]).abs().sum() for f, t in zip(found, targets, strict=True))


class Attends(nn.Module):
    """Attention over rows in place of time."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x):
        h = self.a(x)[:, None]
        return self.b(self.attention(h, h, h)[0][:, 0])


class Trains(Net):
    """Another output in train mode than in evaluation."""

    def forward(self, x, y):
        h = super().forward(x)
        return F.cross_entropy(h, y, reduction="sum") if self.training else h


class Normalises(nn.Module):
    """By statistics of the batch in evaluation too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D, track_running_stats=False)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


def sinkhorn(h):
    q = torch.exp(h)
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def mixup(h):
    return 0.7 * h + 0.3 * h.roll(1, 0)


def turned(h, parts):
    """The first of so many equal parts of the batch comes last."""
    n = len(h) // parts
    return torch.cat([h[n:], h[:n]])


def contrast(h):
    similar = F.normalize(h, dim=1) @ F.normalize(h, dim=1).T
    return F.cross_entropy(similar / 0.1, torch.arange(len(h)))


def router(h):
    p = h.softmax(1)
    return h, (p.mean(0) * F.one_hot(p.argmax(1), D).float().mean(0)).sum()


def masked(h, mask):
    return (h.square().mean(1) * mask).sum() / mask.sum()


def per_token(h, y):
    return F.cross_entropy(h.flatten(0, 1), y.flatten())


def huber_of_median(h):
    return (h - h.quantile(0.9)).abs().mean()


def capacity(h):
    """Only so many rows of the whole batch go to an expert."""
    chosen = h.argmax(1) < D
    kept = chosen & (chosen.long().cumsum(0) <= 2)
    return torch.where(kept[:, None], h * 2, h)


def segments(h, ids):
    return torch.zeros(3, D).index_add(0, ids, h)


def ragged(h, n):
    return torch.cat([row[: int(k)] for row, k in zip(h, n, strict=True)])


MASK = torch.tensor([1.0, 0, 0, 1, 1, 1])
LABELS = torch.tensor([[1, 2, -100], [-100, -100, 3]] * 3)
IDS = torch.randint(0, 11, (N, 5), generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(N) % D
EDGES = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0]])
LONG = torch.tensor([5, 5, 4, 3, 2, 2])

CASES = {
    # ------------------------------------------------------- which dimension is the batch's
    "time-major encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0), 2),
        lambda: (torch.randn(N, D, D),),
        RIGHT,
    ),
    "time-major encoder and decoder": (
        lambda: nn.Transformer(D, 2, 1, 1, 16, dropout=0.0),
        lambda: (torch.randn(N, D, D), torch.randn(5, D, D)),
        RIGHT,
    ),
    "batch-first encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True), 2
        ),
        lambda: (torch.randn(N, D, D),),
        RIGHT,
    ),
    "time-major language model": (Recurrent, lambda: (torch.randint(0, 11, (7, N)),), RIGHT),
    "time-major with a state": (
        Recurrent,
        lambda: (torch.randint(0, 11, (N, N)), torch.randn(1, N, D)),
        RIGHT,
    ),
    "time-major LSTM": (
        lambda: Recurrent(nn.LSTM),
        lambda: (torch.randint(0, 11, (N, 4)),),
        RIGHT,
    ),
    "batch-first language model": (
        lambda: Recurrent(batch_first=True),
        lambda: (torch.randint(0, 11, (N, 7)),),
        RIGHT,
    ),
    "sorted lengths": (
        lambda: Packed(batch_first=True),
        lambda: (torch.randint(0, 11, (N, 5)), LONG),
        "no front end can trace",
    ),
    "rows padded to the longest one": (
        lambda: Packed(batch_first=True, to_the_longest=True),
        lambda: (torch.randint(0, 11, (N, 5)), torch.tensor([3, 5, 1, 4, 2, 2])),
        "give it one size for all rows, as total_length=x.shape[1]",
    ),
    "a table as large as the batch": (
        lambda: Net(lambda h, by: h @ by.T),
        lambda: (rows(), torch.randn(N, D)),
        RIGHT,
    ),
    "a mask of all pairs of positions": (
        lambda: Net(lambda h, mask: (h.view(N, -1, 2, D).sum(2) if False else h) + mask.sum()),
        lambda: (rows(), torch.ones(N, N)),
        RIGHT,
    ),
    "a vector for all rows": (
        lambda: Net(lambda h, by: h * by),
        lambda: (rows(D), torch.randn(D)),
        RIGHT,
    ),
    "features in the places of marks": (
        Illustrated,
        lambda: (torch.tensor([[10, 1, 10] + [2] * 5, [3] * 5 + [10, 10, 4]] * 3), rows(d=4)),
        RIGHT,
    ),
    "one weight for each row": (
        lambda: Net(lambda h, w: h * w[:, None]),
        lambda: (rows(), torch.randn(N)),
        RIGHT,
    ),
    "a batch on the second dimension of one input": (
        lambda: Net(lambda h, t: h + t.t()),
        lambda: (rows(), torch.randn(D, N)),
        RIGHT,
    ),
    "a batch that has no dimension": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 3, 3)),
        lambda: (torch.randn(3, N + 4),),
        "BatchError",
    ),
    # -------------------------------------------------------------- rows that see each other
    "the row from the other end": (lambda: Net(lambda h: h + h.flip(0)), None, MIXES),
    "the row before": (lambda: Net(mixup), None, MIXES),
    "a half of the batch comes last": (lambda: Net(lambda h: turned(h, 2)), None, MIXES),
    "a third of the batch comes last": (lambda: Net(lambda h: turned(h, 3)), None, MIXES),
    "a fourth of the batch comes last": (lambda: Net(lambda h: turned(h, 4)), None, MIXES),
    "the batch's mean taken off": (lambda: Net(lambda h: h - h.mean(0)), None, MIXES),
    "softmax over the batch": (lambda: Net(lambda h: h.softmax(0)), None, MIXES),
    "normalised by the batch": (
        lambda: Net(lambda h: (h - h.mean()) / h.std()),
        None,
        MIXES,
    ),
    "the largest of the batch": (lambda: Net(lambda h: h / h.abs().max()), None, MIXES),
    "sorted rows": (lambda: Net(lambda h: h.sort(0).values), None, MIXES),
    "rows by rank": (lambda: Net(lambda h: h[h[:, 0].argsort()]), None, MIXES),
    "cumulated over the batch": (lambda: Net(lambda h: h.cumsum(0)), None, MIXES),
    "differences of rows": (
        lambda: Net(lambda h: torch.cat([h[:1], h[1:] - h[:-1]])),
        None,
        MIXES,
    ),
    "attention over rows": (Attends, None, MIXES),
    "Sinkhorn": (lambda: Net(sinkhorn), None, MIXES),
    "positions of rows": (
        lambda: Net(lambda h: h + torch.arange(h.shape[0])[:, None]),
        None,
        MIXES,
    ),
    "rows of a table": (
        lambda: Net(lambda h: h * torch.linspace(0, 1, len(h))[:, None]),
        None,
        MIXES,
    ),
    "the first row for all": (lambda: Net(lambda h: h + h[:1]), None, MIXES),
    "the last row for all": (lambda: Net(lambda h: h * h[-1]), None, MIXES),
    "a flag that lets rows see each other": (
        lambda: Net(lambda h, flags: h + flags.view(-1, 1) * h.mean(0)),
        lambda: (rows(), torch.zeros(N, dtype=torch.long)),
        MIXES,
    ),
    "the first row alone": (lambda: Net(lambda h: h[0]), None, NO_WAY),
    "experts of limited capacity": (lambda: Net(capacity), None, MIXES),
    "statistics of the batch in evaluation": (
        lambda: Normalises().eval(),
        None,
        MIXES,
    ),
    "the number of rows": (lambda: Net(lambda h: h / len(h)), None, MIXES),
    "a batch put into the channels": (
        lambda: Net(lambda h: (h.t() @ torch.ones(len(h), len(h))).t()),
        None,
        MIXES,
    ),
    "pairs of neighbours": (
        lambda: Net(lambda h: h.view(-1, 2, D).sum(1)),
        lambda: (rows(8),),
        RIGHT,
    ),
    "all pairs": (lambda: Net(lambda h: h @ h.t()), None, PAIRS),
    "all pairs that differ": (lambda: Net(lambda h: F.pdist(h)), None, "BatchError"),
    "distances": (lambda: Net(lambda h: torch.cdist(h, h)), None, PAIRS),
    "one row less": (lambda: Net(lambda h: h[1:] - h[:-1]), None, "cannot be joined"),
    "a row more": (
        lambda: Net(lambda h: torch.cat([h, h.mean(0, keepdim=True)])),
        None,
        "cannot be joined",
    ),
    "unique values": (
        lambda: Net(lambda h, y: h.sum() + torch.unique(y).float()),
        lambda: (rows(), torch.arange(N) % 3),
        "Error",
    ),
    "rows that are picked": (
        lambda: Net(lambda h: h[h[:, 0] > h[:, 0].mean()]),
        None,
        "Error",
    ),
    "a graph": (GraphNet, lambda: (rows(), EDGES), "in_dims"),
    "a graph with its edges in columns": (
        lambda: Net(lambda h, e: h.index_add(0, e[1], h[e[0]])),
        lambda: (rows(), EDGES.t()),
        "in_dims",
    ),
    "an adjacency of all rows": (
        lambda: Net(lambda h, a: a @ h),
        lambda: (rows(), torch.rand(N, N)),
        RIGHT,  # each micro-batch computes its rows of it from all of x
    ),
    "bags with offsets": (
        Bags,
        lambda: (torch.randint(0, 11, (3 * N,)), torch.arange(0, 3 * N, 3)),
        "in_dims",
    ),
    "segments": (
        lambda: Net(segments),
        lambda: (rows(), torch.tensor([0, 0, 1, 1, 2, 2])),
        RIGHT,  # a sum over the rows
    ),
    "rows of several lengths": (
        lambda: Net(ragged),
        lambda: (rows(), torch.tensor([1, 2, 3, 4, 5, 6])),
        "Error",
    ),
    "images in a list": (
        Detector,
        lambda: ([torch.randn(3, 9, 9) for _ in range(4)],),
        RIGHT,
    ),
    "images and targets in lists": (
        Detector,
        lambda: (
            [torch.randn(3, 9, 9) for _ in range(4)],
            [{"boxes": torch.randn(2, 4)} for _ in range(4)],
        ),
        RIGHT,
    ),
    "images and targets in lists of several lengths": (
        Detector,
        lambda: (
            [torch.randn(3, 9, 9) for _ in range(4)],
            [{"boxes": torch.randn(n, 4)} for n in (2, 1, 4, 3)],
        ),
        RIGHT,
    ),
    # ------------------------------------------------------------------- means, sums, counts
    "a mean": (lambda: Net(lambda h: h.square().mean()), None, RIGHT),
    "a sum": (lambda: Net(lambda h: h.square().sum()), None, RIGHT),
    "a sum of zeros": (
        lambda: Net(lambda h: h.square().sum()),
        lambda: (torch.zeros(N, D),),
        RIGHT,
    ),
    "a sum in train mode only": (lambda: Trains(lambda h: h), lambda: (rows(), CLASSES), RIGHT),
    "a mean for each column": (lambda: Net(lambda h: h.mean(0)), None, RIGHT),
    "a sum for each column": (lambda: Net(lambda h: h.sum(0)), None, RIGHT),
    "a histogram": (
        lambda: Net(lambda h: (h.sum(1), F.one_hot(h.argmax(1), D).sum(0))),
        None,
        RIGHT,
    ),
    "how many rows": (lambda: Net(lambda h: (h, h.shape[0])), None, RIGHT),
    "how many are right": (
        lambda: Net(lambda h, y: (h, (h[:, :3].argmax(1) == y % 3).sum())),
        lambda: (rows(), CLASSES),
        RIGHT,
    ),
    "how many are right, as a float": (
        lambda: Net(lambda h, y: (h, (h[:, :3].argmax(1) == y % 3).float().sum())),
        lambda: (rows(), CLASSES),
        RIGHT,
    ),
    "the share that is right": (
        lambda: Net(lambda h, y: (h, (h[:, :3].argmax(1) == y % 3).float().mean())),
        lambda: (rows(), CLASSES),
        RIGHT,
    ),
    "a penalty on weights": (
        lambda: WithItsWeights(lambda h, net: (h, net.a.weight.square().sum())),
        None,
        RIGHT,
    ),
    "a table among the outputs": (
        lambda: WithItsWeights(lambda h, net: (h, net.table * 2)),
        None,
        RIGHT,
    ),
    "a root of the number of rows": (
        lambda: Net(lambda h: (h, h.shape[0] ** 0.5)),
        None,
        "depends on the batch size",
    ),
    "the largest value": (lambda: Net(lambda h: (h, h.max())), None, WARNED),
    "the largest class": (lambda: Net(lambda h: (h, h.argmax())), None, "BatchError"),
    "the largest of each column": (lambda: Net(lambda h: (h, h.amax(0))), None, NO_WAY),
    "the spread of the batch": (lambda: Net(lambda h: (h, h.std(0).mean())), None, WARNED),
    "a median": (lambda: Net(huber_of_median), None, WARNED),
    "a norm": (lambda: Net(lambda h: h.norm()), None, WARNED),
    "in-batch negatives": (lambda: Net(contrast), None, WARNED),
    "a router's loss": (lambda: Net(router), None, WARNED),
    "a masked mean": (lambda: Net(masked), lambda: (rows(), MASK), WARNED),
    "a loss over tokens": (lambda: Tokens(per_token), lambda: (IDS[:, :3], LABELS), WARNED),
    "a perplexity": (
        lambda: Tokens(lambda h, y: per_token(h, y).exp()),
        lambda: (IDS[:, :3], LABELS.clamp(min=0)),
        WARNED,
    ),
    "a covariance": (lambda: Net(lambda h: (h, torch.cov(h.t()))), None, NO_WAY),
    "weights that sum to one": (
        lambda: Net(lambda h, w: (h.sum(1) * w / w.sum()).sum()),
        lambda: (rows(), torch.rand(N)),
        WARNED,
    ),
    # ------------------------------------------------------------------------------- objects
    "an object with a size": (
        lambda: Net(lambda h: SimpleNamespace(y=h, size=h.shape)),
        None,
        RIGHT,
    ),
}


def tensors(value):
    return [leaf for _, leaf in leaves(value)]


def compared(output, expected):
    ours, theirs = tensors(output), tensors(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients(model, output):
    scalars = [
        t.float().square().sum() for t in tensors(output) if getattr(t, "requires_grad", False)
    ]
    model.zero_grad()
    torch.stack(scalars).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CASES)
def test_each_is_right_or_said(name):
    torch.manual_seed(0)
    make, inputs, fate = CASES[name]
    model = make()
    args = inputs() if inputs is not None else (rows(),)
    twin = copy.deepcopy(model) if not isinstance(model, Net) else model
    with (
        fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        if fate in (RIGHT, WARNED):
            output, expected = pipe(*args), twin(*args)
            told = [w.message for w in said if isinstance(w.message, fxpipe.BatchWarning)]
            assert bool(told) == (fate == WARNED), told
            if fate == RIGHT:
                compared(output, expected)
                compared(gradients(model, output), gradients(twin, expected))
            else:
                assert "outside of the model" in str(told[0]) and "chunks=1" in str(told[0])
                parts = [twin(*part) for part in zip(*(arg.chunk(2) for arg in args), strict=True)]
                for one, first, second in zip(*map(tensors, (output, *parts)), strict=True):
                    if not one.ndim:
                        torch.testing.assert_close(one, (first + second) / 2)
        else:
            with pytest.raises(Exception) as error:
                pipe(*args)
            assert fate in f"{type(error.value).__name__}: {error.value}"
            assert any(
                word in str(error.value) for word in ("in_dims", "out_dims", "chunks=1", "tracer=")
            )


def test_the_report_says_which_dimension_has_been_found():
    make, inputs, _ = CASES["time-major encoder"]
    with fxpipe.compile(make(), ["cpu"] * 2, chunks=2, example_inputs=inputs()) as pipe:
        assert "the batch is found by the check: src along dimension 1" in str(pipe.report())


def test_there_are_sixty_of_them():
    assert len(CASES) >= 60
