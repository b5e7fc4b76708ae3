"""Arguments that a call changes and returns: lists, dicts and objects, whose tensors go from call
to call."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.runtime.apart import Apart

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Past:
    def __init__(self):
        self.sums = {}
        self.seen = []


@dataclass(slots=True)
class Slots:
    sums: dict = field(default_factory=dict)
    seen: list = field(default_factory=list)


class Running(nn.Module):
    """Each layer adds what it has seen in earlier calls."""

    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x, past):
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            past.sums[i] = past.sums[i] + x if i in past.sums else x
            x = x + past.sums[i]
        past.seen.append(x)
        return {"out": x, "past": past}

    def generate(self, x, past, steps):
        for _ in range(steps):
            output = self(x, past)
            x, past = output["out"], output["past"]
        return x


def piped(model, **options):
    return fxpipe.compile(model, ["cpu", "cpu"], **{"chunks": 3, "training": False, **options})


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", [Past, Slots])
@pytest.mark.parametrize("training", [True, False])
def test_the_callers_object_gets_what_the_model_puts_into_it(kind, training):
    torch.manual_seed(0)
    model = Running()
    ours, theirs = kind(), kind()
    sums, seen = ours.sums, ours.seen
    with torch.no_grad(), piped(model, training=training) as pipe:
        for _ in range(3):
            output, expected = pipe(X, ours), model(X, theirs)
            assert output["past"] is ours and ours.sums is sums and ours.seen is seen
            torch.testing.assert_close(output["out"], expected["out"])
    assert len(seen) == 3 and sorted(sums) == [0, 1, 2, 3]
    for one, other in zip(
        [*seen, *sums.values()], [*theirs.seen, *theirs.sums.values()], strict=True
    ):
        torch.testing.assert_close(one + 0, other)


def test_its_tensors_are_in_the_micro_batches_parts_where_no_gradients_are_recorded():
    past = Past()
    with piped(Running()) as pipe:
        with torch.no_grad():
            pipe(X, past)
            assert all(type(each) is Apart and each.is_in_parts for each in past.sums.values())
            assert type(past.seen[0]) is Tensor, "it is an output, too"
        pipe(X, past)
        assert all(type(each) is Tensor and each.requires_grad for each in past.sums.values())


class InPlace(nn.Module):
    """Writes to what it has kept, and moves it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, past):
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i in past.sums:
                x = past.sums[i].add_(x) * 2
            else:
                past.sums[i] = x + 1
        past.seen = [past.sums[3], past.sums[0]]
        return x, past


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_tensor_that_is_written_to_stays_the_callers_own(chunks):
    model, ours, theirs = InPlace(), Past(), Past()
    with torch.no_grad(), piped(model, chunks=chunks) as pipe:
        pipe(X, ours), model(X, theirs)
        kept = dict(ours.sums)
        for _ in range(2):
            torch.testing.assert_close(pipe(X, ours)[0], model(X, theirs)[0])
        assert all(ours.sums[i] is kept[i] for i in range(4))
        assert ours.seen[0] is kept[3] and ours.seen[1] is kept[0]
        assert all(type(each) is Tensor or each.is_in_parts for each in kept.values())
    for i in range(4):
        torch.testing.assert_close(ours.sums[i] + 0, theirs.sums[i])


class Shifting(nn.Module):
    """Keeps the last two of its hidden states, in boxes."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, boxes):
        h = self.inner(x).tanh()
        boxes.append([h])
        if len(boxes) > 2:
            boxes.pop(0)
        return self.outer(sum(box[0] for box in boxes)), boxes


def test_what_is_moved_stays_the_callers_own():
    model, ours, theirs = Shifting(), [], []
    with torch.no_grad(), piped(model) as pipe:
        for _ in range(4):
            before = list(ours)
            torch.testing.assert_close(pipe(X, ours)[0], model(X, theirs)[0])
            assert all(one is other for one, other in zip(ours[:-1], before[-1:], strict=False))
        assert len(ours) == 2 and ours[0] is before[1]


def test_another_number_of_rows_is_cut_anew():
    model, past, theirs = Running(), Past(), Past()
    with torch.no_grad(), piped(model) as pipe:
        pipe(X, past), model(X, theirs)
        for some in (past, theirs):
            some.sums = {i: each[:4] for i, each in some.sums.items()}
            some.seen.clear()
        torch.testing.assert_close(pipe(X[:4], past)["out"], model(X[:4], theirs)["out"])


def test_generate_is_the_models_own_and_calls_the_pipeline():
    model = Running()
    with torch.no_grad(), piped(model) as pipe:
        past = Past()
        found = pipe.generate(X, past, steps=3)
        torch.testing.assert_close(found, model.generate(X, Past(), steps=3))
        assert len(past.seen) == 3 and type(past.sums[0]) is Apart


def test_a_model_without_generate_has_none():
    with piped(nn.Linear(4, 4)) as pipe:
        assert not hasattr(pipe, "generate")
        with pytest.raises(AttributeError, match="Linear has no attribute 'generate'"):
            pipe.generate(X)


class Lists(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.inner, self.returns = nn.Linear(4, 4), returns

    def forward(self, x, seen):
        h = self.inner(x)
        seen.append(h)
        return (h * 2, seen) if self.returns else h * 2


def test_a_list_that_is_changed_and_returned_is_the_callers():
    model, seen, theirs = Lists(returns=True), [], []
    with torch.no_grad(), piped(model) as pipe:
        for _ in range(2):
            output, expected = pipe(X, seen), model(X, theirs)
            assert output[1] is seen
            torch.testing.assert_close(output[0], expected[0])
    for one, other in zip(seen, theirs, strict=True):
        torch.testing.assert_close(one + 0, other)


def test_a_list_that_is_changed_and_not_returned_is_refused():
    why = "Lists puts a tensor into the argument seen, a list, and does .* return seen as well"
    why += r".* a copy of its own, seen = list\(seen\)"
    with piped(Lists(returns=False)) as pipe, pytest.raises(RuntimeError, match=why):
        pipe(X, [])


class Batch:
    def __init__(self, x):
        self.x = x


class Noting(nn.Module):
    """Leaves what it has computed in the object that it is given."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, batch):
        batch.hidden = self.inner(batch.x)
        return self.outer(batch.hidden)


def test_a_tensor_that_becomes_an_attribute_of_an_argument_and_is_not_returned_is_said():
    model, batch = Noting(), Batch(X)
    said = "Noting puts a tensor into the argument batch, a Batch, as a new attribute"
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe, pytest.warns(match=said):
        output = pipe(batch)
    assert not hasattr(batch, "hidden")
    parts = [model(Batch(x)) for x in X.chunk(2)]
    assert torch.equal(output, torch.cat(parts))


class Context:
    """An object with the attributes that it is given."""

    def __init__(self, **given):
        vars(self).update(given)


class OfContext(nn.Module):
    """Does with its context what it is given as ``act``, and scales by what that gives."""

    def __init__(self, act, returns=False):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.returns = act, returns

    def forward(self, x, context):
        y = self.outer(self.inner(x) * self.act(x, context))
        return (y, context) if self.returns else y


def count(x, context):
    context.calls = getattr(context, "calls", 0) + 1
    return context.calls


def note_rows(x, context):
    context.rows = x.shape[0]
    return 2.0


def keep(x, context):
    context.x = x * 2
    return context.x


def test_a_new_attribute_by_which_the_model_goes_is_refused_and_an_old_one_counts():
    model, context = OfContext(count), Context(name="a")
    with piped(model) as pipe:
        with pytest.raises(
            RuntimeError, match=r"makes context\.calls, a new attribute of an argum"
        ):
            pipe(X, context)
        assert vars(context) == {"name": "a"}
        ours, theirs = Context(calls=0), Context(calls=0)
        for calls in (1, 2, 3):
            torch.testing.assert_close(pipe(X, ours), model(X, theirs))
            assert ours.calls == calls


def test_a_new_attribute_of_an_object_that_is_returned_is_the_callers():
    model = OfContext(count, returns=True)
    ours, theirs = Context(name="a"), Context(name="a")
    with piped(model) as pipe:
        for calls in (1, 2, 3):
            output, returned = pipe(X, ours)
            torch.testing.assert_close(output, model(X, theirs)[0])
            assert returned is ours and ours.calls == calls


def test_a_new_attribute_that_makes_no_difference_is_said():
    context = Context(name="a")
    said = r"makes context\.rows, a new attribute of an argument; a pipeline does not"
    with piped(OfContext(note_rows)) as pipe, pytest.warns(match=said):
        pipe(X, context)
    assert vars(context) == {"name": "a"}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_number_that_the_model_sets_is_that_of_each_size(is_new):
    context = Context(rows=0)
    with piped(OfContext(note_rows)) as pipe:
        for rows in (4, 4, 2, 4):
            context = Context(rows=0) if is_new else context
            pipe(X[:rows], context)
            assert context.rows == rows


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("act", [count, note_rows, keep])
def test_an_object_that_holds_nothing_is_not_filled(act, returns):
    context = Context()
    with piped(OfContext(act, returns)) as pipe:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"context, a Context, holds nothing .*= None"):
                pipe(X, context)
            assert not vars(context)


def test_an_object_that_holds_nothing_stays_the_same_one():
    nothing = Context()
    model = OfContext(lambda x, context: 2.0 if context is nothing else 3.0)
    with piped(model) as pipe:
        for context in (nothing, Context(), nothing):
            torch.testing.assert_close(pipe(X, context), model(X, context))


class Popping(nn.Module):
    """Takes the target out of its batch, and notes that it has."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, batch):
        target = batch.pop("target")
        batch["calls"] = batch.get("calls", 0) + 1
        batch["order"].append(batch["order"].pop(0))
        return (self.inner(batch["x"]) - target).square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_what_the_model_takes_out_of_an_argument_or_moves_in_it_needs_not_be_returned(training):
    model = Popping()
    ours, theirs = ({"x": X, "target": X + 1, "order": [X + 2, X + 3]} for _ in range(2))
    before = list(ours["order"])
    with torch.no_grad(), piped(model, training=training) as pipe:
        for calls in (1, 2):
            torch.testing.assert_close(pipe(ours), model(theirs))
            assert ours.keys() == theirs.keys() and ours["calls"] == calls
            assert all(a is b for a, b in zip(ours["order"], before[calls % 2 :], strict=False))
            ours["target"] = theirs["target"] = X - 1
    assert ours["order"][0] is before[0] and ours["x"] is X


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, past):
        past["h"], past["calls"] = self.inner(x).tanh() * 2, past["calls"] + 1
        return past["h"], past

    def generate(self, x, past):
        return self(x, past)[0]


def test_a_number_that_changes_with_each_call_is_refused_where_a_text_is_continued():
    past = {"calls": 0}
    with torch.no_grad(), piped(Counting()) as pipe:
        assert pipe(X, past)[1] is past and past["calls"] == 1
        with pytest.raises(RuntimeError, match=r"past\.calls is a number that each call of Count"):
            pipe.generate(X, past)


class Encoding(nn.Linear):
    """A model whose ``generate`` would call an encoder."""

    class config:
        is_encoder_decoder = True


def test_an_encoder_that_several_devices_share_is_refused():
    from fxpipe.pipeline import _refuse_an_encoder

    _refuse_an_encoder(Encoding(4, 4), ["cpu", "cpu"])
    with pytest.raises(NotImplementedError, match="Encoding calls its encoder by itself, whose"):
        _refuse_an_encoder(Encoding(4, 4), ["cuda:0", "cuda:1"])
