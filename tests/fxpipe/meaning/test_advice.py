"""Arguments that are not cut as they are: the advice that a message gives, which works."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.messages import advice_on
from fxpipe.meaning.said import INFER, Input

TWO = ["cpu", "cpu"]
IDS = torch.arange(40).reshape(8, 5) % 7
LENGTHS = [5, 2, 3, 4, 1, 5, 2, 3]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return self.layer(packed)[1][0]


class Folded(nn.Module):
    """Takes several rows in a row as one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, batch_size=None):
        h = self.b(self.a(x).relu())
        return h.view(x.shape[0] // 5 if batch_size is None else batch_size, 5, 4).mean(1)


def test_a_number_of_rows_as_an_argument_is_named():
    pipe = fxpipe.compile(Folded(), TWO, chunks=4)
    with pytest.raises(
        fxpipe.BatchError,
        match=r"batch_size is 16 for each micro-batch as well: .* leave it out.* x.shape\[0\]$",
    ):
        pipe(torch.randn(80, 4), 16)


@pytest.mark.filterwarnings("ignore")
def test_numbers_in_a_list_are_to_be_a_tensor():
    model = Reader()
    with pytest.raises(
        fxpipe.BatchError,
        match=r"lengths is a list of 8 numbers, which has no batch dimension.*give it as a tensor, "
        r"torch.tensor\(lengths\)$",
    ):
        fxpipe.compile(model, TWO, chunks=2)(IDS, LENGTHS)
    lengths = torch.tensor(LENGTHS)
    found = fxpipe.compile(model, TWO, chunks=2)(IDS, lengths)
    torch.testing.assert_close(found, model(IDS, lengths))


class ByText(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, texts=None):
        y = self.b(self.a(x))
        lengths = [] if texts is None else [[float(len(str(each)))] for each in texts]
        return y * torch.tensor(lengths) if lengths else y


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("texts", "said"),
    [(["a", "b", "c", "d"], "a list of 4 strings"), (numpy.ones(4), "an ndarray")],
)
def test_what_has_no_tensors_is_not_cut(texts, said):
    x = torch.ones(4, 6)
    with pytest.raises(fxpipe.BatchError, match=f"texts is {said}, which has no batch dimension"):
        fxpipe.compile(ByText(), TWO, chunks=2)(x, texts)
    for in_dims, dim in ({"x": 0, "texts": "list"}, "'list'"), ((0, 0), "0"):
        pipe = fxpipe.compile(ByText(), TWO, chunks=2, in_dims=in_dims)
        with pytest.raises(
            fxpipe.BatchError, match=f"in_dims says {dim} for texts, which is {said}, and only "
        ):
            pipe(x, texts)
        pipe(x, None)  # an argument that is left out has nothing to be cut


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(8, 4, padding_idx=7), nn.Linear(4, 4)

    def forward(self, ids, offsets=None):
        return self.layer(self.table(ids, offsets))


@pytest.mark.parametrize("total", [20, 19])
def test_bags_are_to_be_rows_of_ids(total):
    ids, offsets, model = torch.arange(total) % 7, torch.tensor([0, 3, 5, 8]), Bags()
    with pytest.raises(
        fxpipe.BatchError, match="give ids of two dimensions and no offsets, with a row for each"
    ):
        fxpipe.compile(model, TWO, chunks=2)(ids, offsets)
    ends = [*offsets.tolist()[1:], total]
    bags = [ids[a:b] for a, b in zip(offsets.tolist(), ends, strict=True)]
    rows = nn.utils.rnn.pad_sequence(bags, batch_first=True, padding_value=7)
    found = fxpipe.compile(model, TWO, chunks=2)(rows)
    torch.testing.assert_close(found, model(ids, offsets))


class Returned(nn.Module):
    """Returns the lengths of rows beside what it computes of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x, lengths):
        return self.second(torch.relu(self.first(x))), lengths


def masked_mean(output, y, lengths):
    mask = (torch.arange(output.shape[1]) < lengths[:, None])[..., None]
    return ((output - y).square() * mask).sum() / mask.sum()


def test_lengths_that_a_loss_takes_from_the_output_are_to_be_in_the_target():
    torch.manual_seed(0)
    model, lengths = Returned(), torch.tensor(LENGTHS)
    x, y = torch.randn(8, 5, 3), torch.randn(8, 5, 4)

    def of_output(output, y):
        return masked_mean(output[0], y, output[1])

    pipe = fxpipe.compile(model, TWO, chunks=2, loss_fn=of_output)
    with pytest.warns(
        fxpipe.BatchWarning,
        match=r"by lengths or a mask, put these into the target, and count them: "
        r"target=\(y, lengths\) and loss_weight=lambda target: target\[1\].sum\(\)",
    ):
        pipe.step(x, lengths, target=y)

    def of_target(output, target):
        return masked_mean(output[0], *target)

    pipe = fxpipe.compile(
        model, TWO, chunks=2, loss_fn=of_target, loss_weight=lambda target: target[1].sum()
    )
    loss = pipe.step(x, lengths, target=(y, lengths))
    torch.testing.assert_close(loss, of_output(model(x, lengths), y))


@pytest.mark.parametrize(("said", "is_advised"), [(INFER, True), (0, False)])
def test_a_list_is_advised_where_in_dims_does_not_say_anything_of_it(said, is_advised):
    names = "labels[0].boxes", "labels[1].boxes"
    inputs = [Input(name, torch.ones(2, 4), said) for name in names]
    advice = advice_on(nn.Identity(), {"labels": []}, inputs)
    assert ('in_dims={"labels": "list"}' in advice) == is_advised
