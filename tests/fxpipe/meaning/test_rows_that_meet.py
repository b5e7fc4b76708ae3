"""Models in which rows see each other where numbers in them are equal: the edges of a graph that
meet at a node, the items of a query, the tokens of a document. Of a few rows that is rare."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.meaning.sample import MIXED, WHOLE, sampled

TWO = ["cpu", "cpu"]


class Graph(nn.Module):
    """Two rounds of messages along the edges of one graph. Of a few edges hardly any two meet, and
    then what it computes of each is a term of a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, nodes, edges):
        def sent(values):
            return torch.zeros_like(values).index_add(0, edges[1], values[edges[0]])

        return sent(self.second(sent(self.first(nodes)).relu()))


class Edges(Graph):
    """The same, with a number for each edge."""

    def forward(self, nodes, edges):
        found = super().forward(nodes, edges)
        return (found[edges[0]] * found[edges[1]]).sum(1)


class Packed(nn.Module):
    """Attention among the tokens of each document."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, document):
        scores = self.q(x) @ self.k(x).T
        is_other = document[:, None] != document[None]
        return scores.masked_fill(is_other, -1e9).softmax(-1) @ self.v(x)


class Ranked(nn.Module):
    """A softmax over the items of each query."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x, query):
        weight = self.score(x)[:, 0].exp()
        return weight / torch.zeros(1000).index_add(0, query, weight)[query]


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [Graph, Edges])
def test_the_edges_of_one_graph_are_not_cut_into_micro_batches(kind: type[Graph], seed: int):
    torch.manual_seed(seed)
    nodes, edges = torch.randn(200, 8), torch.randint(200, (2, 800))
    with (
        fxpipe.compile(kind(), TWO, chunks=4) as pipe,
        pytest.raises(fxpipe.BatchError, match="edges along dimension"),
    ):
        pipe(nodes, edges)


@pytest.mark.covering(1)
@pytest.mark.parametrize("groups", [3, 16, 40])
@pytest.mark.parametrize("kind", [Packed, Ranked])
def test_rows_of_equal_numbers_that_see_each_other_are_refused(kind: type[nn.Module], groups: int):
    torch.manual_seed(groups)
    x, numbers = torch.randn(64, 8), torch.randint(groups, (64,))
    with (
        fxpipe.compile(kind(), TWO, chunks=4) as pipe,
        pytest.raises(fxpipe.BatchError, match="depends on which other rows there are"),
    ):
        pipe(x, numbers)


def test_rows_of_equal_numbers_that_do_not_see_each_other_are_cut():
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.of_class = nn.Linear(8, 8), nn.Embedding(40, 8)

        def forward(self, x, number):
            return self.layer(x) * self.of_class(number)

    model, x, numbers = Conditioned(), torch.randn(64, 8), torch.randint(40, (64,))
    with fxpipe.compile(model, TWO, chunks=4) as pipe:
        torch.testing.assert_close(pipe(x, numbers), model(x, numbers))


def test_a_sample_of_rows_with_several_numbers_each_keeps_them():
    edges = torch.arange(100).view(50, 2)
    found: Tensor
    (found,) = sampled([edges], [0], (1, 3), WHOLE, 0)
    assert all(row in edges.tolist() for row in found.tolist())


class Nearby(nn.Module):
    """The sum over the rows within a distance, or their mean with weights that fall off with it."""

    def __init__(self, weight):
        super().__init__()
        self.layer, self.weight = nn.Linear(3, 3), weight

    def forward(self, x):
        return self.weight(torch.cdist(x, x)) @ self.layer(x)


@pytest.mark.parametrize(
    "weight",
    [
        lambda distance: (distance < 0.3).float(),
        lambda distance: (distance < 1).float(),
        lambda distance: (-20 * distance.square()).softmax(1),
        lambda distance: (-distance / 0.1).softmax(1),
    ],
    ids=["within 0.3", "within 1", "kernel", "exponential"],
)
def test_rows_that_see_those_near_them_are_refused(weight):
    torch.manual_seed(0)
    with (
        fxpipe.compile(Nearby(weight), TWO, chunks=4) as pipe,
        pytest.raises(fxpipe.BatchError, match="depends on which other rows there are"),
    ):
        pipe(torch.randn(64, 3))


@pytest.mark.parametrize("sizes", [(1, 2), (1, 3), (3, 2)])
def test_of_twins_one_row_of_the_second_part_is_near_one_of_the_first(sizes: tuple[int, int]):
    x = torch.randn(50, 8)
    (found,) = sampled([x], [0], sizes, MIXED, 0, has_twins=True)
    distances = torch.cdist(*found.split(sizes))
    assert 0 < distances.min() < 0.05 * distances.max()


class Beside(nn.Module):
    """Centres one input, whose rows meet so, and has another one that is apart from it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.first, self.second = nn.Linear(6, 3), nn.Linear(4, 3)

    def forward(self, x, y):
        x = self.norm(x)
        return {"a": self.first(x - x.mean(0)).tanh(), "b": self.second(y)}


class Towers(nn.Module):
    """Compares each row of one input with all rows of another, and returns these as well."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 3), nn.Linear(4, 3)

    def forward(self, image, text):
        image, text = self.image(image), self.text(text)
        return {"text": text - text.mean(0), "image": image, "scores": image @ text.T}


def test_an_input_whose_rows_meet_is_not_given_up_for_one_that_is_apart_from_it():
    pipe = fxpipe.compile(Beside(), TWO, chunks=4)
    with pytest.raises(fxpipe.BatchError, match=r"output.a, .* depends on which other rows"):
        pipe(torch.randn(8, 6), torch.randn(8, 4))


def test_an_input_that_each_row_of_another_one_needs_whole_is_shared():
    model, image, text = Towers(), torch.randn(8, 6), torch.randn(8, 4)
    output = fxpipe.compile(model, TWO, chunks=4)(image, text)
    expected = [model(part, text) for part in image.chunk(4)]
    assert torch.equal(output["text"], expected[0]["text"])
    assert torch.equal(output["scores"], torch.cat([each["scores"] for each in expected]))
