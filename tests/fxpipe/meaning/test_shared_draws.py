"""Random numbers that the model draws once, and each micro-batch anew: for an input as large as the
batch that all micro-batches share."""

from __future__ import annotations

import linecache
import re
import warnings

import pytest
import torch
from torch import fx, nn

import fxpipe
import passes
from fxpipe.meaning.shared_draws import draws_for_shared

TWO = ["cpu", "cpu"]
IMAGES, TEXTS = torch.randn(8, 6), torch.randn(8, 5)


class Towers(nn.Module):
    """Scores each text with each image. The batch is cut along the texts, whose rows are those of
    the scores, and every micro-batch computes the tower of all images."""

    def __init__(self, image=0.5, text=0.0):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 4), nn.Dropout(image), nn.Linear(4, 4))
        self.text = nn.Sequential(nn.Linear(5, 4), nn.Dropout(text), nn.Linear(4, 4))

    def forward(self, images, texts):
        return self.text(texts) @ self.image(images).T


class Features(Towers):
    """What a user is told to make of it."""

    def forward(self, images, texts):
        return self.image(images), self.text(texts)


def said(model, *inputs, **options):
    """The warnings of a pipeline that is called twice with these inputs."""
    options = {"chunks": 2, **options}
    pipe = fxpipe.compile(model, TWO, **options)
    with warnings.catch_warnings(record=True) as told, pipe:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe(*inputs)
    return told


def test_a_tower_with_dropout_that_all_micro_batches_share_is_told_once_at_the_users_line():
    (told,) = said(Towers(), IMAGES, TEXTS)
    assert issubclass(told.category, fxpipe.BatchWarning) and told.filename == __file__
    text = str(told.message)
    assert text.startswith(
        "the model draws random numbers for what it computes of images (8, 6) alone (at "
    )
    assert (
        "), and all micro-batches share images, with as many rows as the batch (texts along "
        "dimension 0): each micro-batch draws its own for all of images, as a " in text
    )
    (number,) = re.findall(rf"{re.escape(__file__)}:(\d+): return self\.text\(texts\) @ ", text)
    assert "self.image(images).T" in linecache.getline(__file__, int(number))


def test_each_micro_batch_has_a_mask_of_its_own_then_as_in_the_loop():
    """All texts are alike, so that all rows of the model's scores are, and the pipeline's are in
    each micro-batch."""
    model, texts = Towers(), TEXTS[:1].expand(8, -1)
    with pytest.warns(fxpipe.BatchWarning), fxpipe.compile(model, TWO, chunks=2) as pipe:
        scores = pipe(IMAGES, texts)
    first, second = scores[:4], scores[4:]
    # Equal rows of a product differ by rounding errors, of values near zero by large parts of them.
    assert torch.allclose(first, first[:1].expand(4, -1), atol=1e-5)
    assert torch.allclose(second, second[:1].expand(4, -1), atol=1e-5)
    assert not torch.allclose(first, second, atol=1e-3), "the masks are two"


@pytest.mark.parametrize("front_end", ["symbolic", "export"])
def test_any_front_end_tells_of_it(front_end):
    (told,) = said(Towers(), IMAGES, TEXTS, tracer=front_end)
    assert f"{__file__}:" in str(told.message)


@pytest.mark.parametrize(
    "draw",
    [
        lambda images: images + 0.1 * torch.randn_like(images),
        lambda images: images[torch.randperm(images.shape[0])],
        lambda images: images * torch.empty_like(images).bernoulli_(0.5),
        lambda images: nn.functional.dropout(images[:4], 0.5).repeat(2, 1),
    ],
)
def test_whatever_draws_them(draw):
    class Draws(Towers):
        def forward(self, images, texts):
            return super().forward(draw(images), texts)

    (told,) = said(Draws(image=0.0), IMAGES, TEXTS)
    assert "share images" in str(told.message)


def test_a_module_that_is_kept_whole_may_draw_them():
    class Recurrent(Towers):
        def __init__(self):
            super().__init__(image=0.0)
            self.rnn = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, images, texts):
            return super().forward(self.rnn(images[:, None])[0][:, 0], texts)

    (told,) = said(Recurrent(), IMAGES, TEXTS)
    assert "share images" in str(told.message)


class Masked(Towers):
    def forward(self, images, mask, texts):
        return super().forward(images * mask.T, texts)


def test_all_such_inputs_are_named_whichever_dimension_is_as_large_as_the_batch():
    (told,) = said(Masked(), IMAGES, torch.ones(6, 8), TEXTS)
    assert "of images (8, 6) and mask (6, 8) alone (at" in str(told.message)
    assert "share images and mask, with as many rows as the batch (texts al" in str(told.message)


def test_those_that_are_said_to_be_shared_are_left_out():
    (told,) = said(Masked(), IMAGES, torch.ones(6, 8), TEXTS, in_dims={"mask": None})
    assert "share images, with as many rows as the batch (texts al" in str(told.message)


def test_a_list_with_an_element_for_each_row_is_a_batch_too():
    class Found(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, images, queries):
            queries = self.dropout(queries).T
            return [queries @ self.layer(image) for image in images]

    images = [torch.randn(4) for _ in range(8)]
    (told,) = said(Found(), images, torch.randn(4, 8), in_dims={"images": "list"})
    assert "share queries, with as many rows as the batch (images[0] along" in str(told.message)


# ------------------------------------------------------------------------------- where it is silent


def test_without_draws_nothing_is_said():
    assert not said(Towers(image=0.0), IMAGES, TEXTS)
    assert not said(Towers().eval(), IMAGES, TEXTS)


def test_draws_for_the_rows_that_are_cut_are_as_ever():
    class Scores(Towers):
        def forward(self, images, texts):
            return nn.functional.dropout(super().forward(images, texts), 0.5)

    assert not said(Towers(image=0.0, text=0.5), IMAGES, TEXTS)
    assert not said(Scores(image=0.0), IMAGES, TEXTS)


def test_draws_for_anything_else_that_is_shared_are_as_ever():
    class Drawn(Towers):
        def forward(self, images, texts, table):
            noise = nn.functional.dropout(table, 0.5) + torch.rand(4)
            return self.image(images) @ (self.text(texts) + noise).T

    assert not said(Drawn(image=0.0), IMAGES, TEXTS, torch.ones(4))


def test_what_rows_have_been_written_to_depends_on_them():
    class Written(nn.Module):
        def forward(self, images, texts):
            own, both = images.clone(), images.clone()
            both[:, :5].add_(texts)
            return nn.functional.dropout(both, 0.5), nn.functional.dropout(own, 0.5)

    gm = passes.Alias((IMAGES, TEXTS))(fx.symbolic_trace(Written()))
    assert not draws_for_shared(gm.graph, [0, 0], {0, 1})
    (node,) = draws_for_shared(gm.graph, [None, 0], {0}).values()
    assert node.all_input_nodes[0].name == "clone", "the copy without texts"


def test_a_table_is_no_batch():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x, positions):
            return self.layer(x + self.dropout(positions)) + self.dropout(x)

    x = torch.randn(8, 3, 4)
    assert not said(Positions(), x, torch.randn(3, 4)), "the rows of the batch are others"
    assert not said(Towers(), IMAGES[:5], TEXTS), "so are those of five images"


def test_who_says_that_an_input_is_shared_knows():
    assert not said(Towers(), IMAGES, TEXTS, in_dims={"images": None})


def test_nothing_is_said_of_one_micro_batch_or_without_a_check():
    class Columns(Towers):
        def forward(self, columns, texts):
            return super().forward(columns.T, texts)

    said_of = {"in_dims": {"texts": 0}, "out_dims": 0}
    assert said(Columns(), IMAGES.T, TEXTS, **said_of)
    assert not said(Columns(), IMAGES.T, TEXTS, **said_of, chunks=1)
    assert not said(Columns(), IMAGES.T, TEXTS, **said_of, check=False)


# ---------------------------------------------------------------------------- that the advice works


def test_the_other_tower_can_be_shared_if_it_draws_none():
    model = Towers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fxpipe.compile(model, TWO, chunks=2, in_dims={"images": 0}) as pipe:
            assert pipe(IMAGES, TEXTS).shape == (8, 8)
    assert "all micro-batches share texts" in pipe.report()
    (told,) = said(Towers(text=0.5), IMAGES, TEXTS, in_dims={"images": 0})
    assert "share texts, with as" in str(told.message), "it draws some, too"


def test_features_of_both_towers_have_one_mask_for_each_row_and_the_loss_is_computed_outside():
    model = Features(text=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fxpipe.compile(model, TWO, chunks=2) as pipe:
            images, texts = pipe(IMAGES, TEXTS)
            nn.functional.cross_entropy(images @ texts.T, torch.arange(8)).backward()
    assert images.shape == texts.shape == (8, 4)
    assert all(p.grad is not None for p in model.parameters())


def test_a_cache_on_disk_lets_it_be_told_in_each_process(tmp_path):
    for state in "kept in the cache", "from the cache":
        pipe = fxpipe.compile(Towers(), TWO, chunks=2, cache=tmp_path)
        with pytest.warns(fxpipe.BatchWarning) as told, pipe:
            pipe(IMAGES, TEXTS)
        assert pipe.compilations[0].cache == state and len(told) == 1
