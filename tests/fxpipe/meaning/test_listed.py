"""Lists with one element for each row, as detection models take them."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.meaning.listed import Listed
from fxpipe.meaning.said import named_inputs


class Detects(nn.Module):
    """Stacks its images; gives boxes for each image, or the mean of the images' losses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 4)

    def forward(self, images, targets=None):
        h = self.c(self.b(self.a(torch.stack(images)).relu()).mean((2, 3)))
        if targets is None:
            return [{"boxes": row[None], "score": row.sum()} for row in h]
        boxes = [(h[i] - t["boxes"]).abs().mean() for i, t in enumerate(targets)]
        labels = [(h[i][t["labels"]] ** 2).mean() for i, t in enumerate(targets)]
        return {"boxes": sum(boxes) / len(boxes), "labels": sum(labels) / len(labels)}


class OneLoss(Detects):
    def forward(self, images, targets=None):
        output = super().forward(images, targets)
        return output if targets is None else sum(output.values())


def images(count):
    return [torch.randn(3, 9, 9) for _ in range(count)]


def targets(*counts):
    return [{"boxes": torch.randn(n, 4), "labels": torch.randint(0, 4, (n,))} for n in counts]


def losses(output, target):
    return sum(output.values())


def loop(model, x, y, size, loss=lambda output: output):
    """The loss and gradients of the loop over micro-batches, the last one's gradient first."""
    count = len(x) // size
    parts = [loss(model(x[i : i + size], y[i : i + size])) for i in range(0, len(x), size)]
    for part in reversed(parts):
        (part * (1 / count)).backward()
    return sum(part.detach() * (1 / count) for part in parts), taken(model)


def taken(model):
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return OneLoss()


def test_it_trains_as_the_loop_over_micro_batches(model):
    x, y = images(4), targets(2, 1, 4, 3)
    expected, gradients = loop(copy.deepcopy(model), x, y, 2)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        loss = pipe(x, y)
        loss.backward()
        assert torch.equal(loss, expected)
        assert same(taken(model), gradients)
        assert torch.equal(pipe.step(x, y), expected)
        for ours, theirs in zip(taken(model), gradients, strict=True):
            torch.testing.assert_close(ours, theirs)  # a step has an order of its own
        assert "images and targets along the list" in str(pipe.report())


def test_one_program_serves_targets_of_any_sizes(model):
    twin = copy.deepcopy(model)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        pipe(images(4), targets(2, 1, 4, 3))
        first = pipe.stage_graph
        x, y = images(4), targets(1, 5, 2, 2)
        loss = pipe(x, y)
        loss.backward()
        assert pipe.stage_graph is first
        expected, gradients = loop(twin, x, y, 2)
        assert torch.equal(loss, expected) and same(taken(model), gradients)


def test_a_list_among_the_outputs_is_joined(model):
    x = images(6)
    with torch.no_grad(), fxpipe.compile(model.eval(), ["cpu"] * 2, chunks=3) as pipe:
        output = pipe(x)
        expected = [row for i in (0, 2, 4) for row in model(x[i : i + 2])]
    assert len(output) == 6
    for ours, theirs in zip(output, expected, strict=True):
        assert same(ours.values(), theirs.values())


def test_a_dict_of_losses(model):
    torch.manual_seed(0)
    model = Detects()
    x, y = images(4), targets(2, 1, 4, 3)
    expected, gradients = loop(copy.deepcopy(model), x, y, 2, lambda o: sum(o.values()))
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=losses) as pipe:
        sum(pipe(x, y).values()).backward()
        for ours, theirs in zip(taken(model), gradients, strict=True):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(pipe.step(x, y), expected)
        for ours, theirs in zip(taken(model), gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("said", ["list", ("list", "list"), {"images": "list"}])
def test_in_dims_can_say_it(model, said):
    x, y = images(4), targets(2, 2, 2, 2)
    expected, gradients = loop(copy.deepcopy(model), x, y, 2)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, in_dims=said) as pipe:
        loss = pipe(x, y)
        loss.backward()
        assert torch.equal(loss, expected) and same(taken(model), gradients)


def test_what_is_no_list_is_not_said_to_be_one():
    with (
        fxpipe.compile(nn.Linear(4, 4), ["cpu"], in_dims="list", chunks=2) as pipe,
        pytest.raises(fxpipe.BatchError, match="in no list whose elements are built alike"),
    ):
        pipe(torch.zeros(4, 4))


def test_lists_of_several_lengths_are_not_cut(model):
    with (
        fxpipe.compile(model, ["cpu"] * 2, in_dims="list", chunks=2) as pipe,
        pytest.raises(fxpipe.BatchError, match="3 and 4 elements"),
    ):
        pipe(images(4), targets(2, 1, 1))


def test_a_target_of_as_many_rows_goes_with_the_list(model):
    x, y = images(4), torch.randn(4, 4)

    def loss_fn(output, target):
        boxes = torch.cat([each["boxes"] for each in output])
        return (boxes - target).square().mean()

    twin = copy.deepcopy(model)
    expected = sum(loss_fn(twin(x[i : i + 2]), y[i : i + 2]) for i in (0, 2)) / 2
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, loss_fn=loss_fn) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y), expected.detach())
    expected.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# ------------------------------------------------------------------ lists in the target of a step


def box_loss(output, targets):
    """The mean over the rows of a loss of several boxes each."""
    losses = [(o["boxes"] - t["boxes"]).abs().mean() for o, t in zip(output, targets, strict=True)]
    return torch.stack(losses).mean()


def row_loss(output, targets):
    """The same of one tensor with all rows."""
    return box_loss([{"boxes": row} for row in output], targets)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def slices(target, first, end):
    return target[first:end]


def stepped(model, loss_fn, x, target, cuts, part_of=slices):
    """A step beside the loop over micro-batches: rows ``cuts[i]`` to ``cuts[i + 1]`` each."""
    twin, rows = copy.deepcopy(model), cuts[-1]
    for first, end in reversed(list(itertools.pairwise(cuts))):
        loss = loss_fn(twin(x[first:end]), part_of(target, first, end))
        (loss * ((end - first) / rows)).backward()
    expected = taken(twin)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=len(cuts) - 1, loss_fn=loss_fn) as pipe:
        for _ in range(2):
            model.zero_grad()
            pipe.step(x, target=target)
        for ours, theirs in zip(taken(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("counts", [(2, 1, 4, 3), (4, 4, 4, 4)])
def test_a_list_of_targets_goes_with_a_list_of_inputs(model, counts):
    """Although four boxes might be four rows as well."""
    stepped(model, box_loss, images(4), targets(*counts), (0, 2, 4))


@pytest.mark.covering(1)
@pytest.mark.parametrize("counts", [(2, 1, 4, 3, 2), (5, 5, 5, 5, 5)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_targets_goes_with_the_rows_of_a_tensor(counts, kind):
    stepped(two_layers(), row_loss, torch.randn(5, 4), kind(targets(*counts)), (0, 3, 5))


def test_elements_of_the_target_need_not_be_alike():
    target = targets(2, 1, 4, 3)
    target[1]["mask"] = torch.ones(3)
    stepped(two_layers(), row_loss, torch.randn(4, 4), target, (0, 2, 4))


def of_both(target, first, end):
    return tuple(each[first:end] for each in target)


def test_lists_in_a_pair_are_rows_though_the_pair_has_as_many_elements():
    def loss_fn(output, target):
        boxes, factors = target
        rows = zip(output, boxes, factors, strict=True)
        return torch.stack([(o - b).abs().mean() * f for o, b, f in rows]).mean()

    target = [torch.randn(3, 4), torch.randn(1, 4)], [0.5, 2.0]
    stepped(two_layers(), loss_fn, torch.randn(2, 4), target, (0, 1, 2), of_both)


def test_a_pair_of_tensors_with_two_rows_is_no_list_of_rows():
    def loss_fn(output, target):
        first, second = target
        return (output - first).square().mean() + (output * second).mean()

    target = torch.randn(2, 4), torch.randn(2, 4)
    stepped(two_layers(), loss_fn, torch.randn(2, 4), target, (0, 1, 2), of_both)


def test_words_for_each_row_go_with_the_rows():
    def loss_fn(output, words):
        factors = torch.tensor([len(word) for word in words])
        return (output.square().mean(1) * factors).mean()

    target = ["a", "few", "words", "for", "rows"]
    stepped(two_layers(), loss_fn, torch.randn(5, 4), target, (0, 3, 5))


def test_a_list_that_all_micro_batches_share_stays_whole():
    def loss_fn(output, classes):
        return (output * torch.tensor(classes)).square().mean()

    target = [1.0, 2.0, 3.0, 4.0]
    stepped(two_layers(), loss_fn, torch.randn(4, 4), target, (0, 2, 4), lambda t, a, b: t)


def boxes_in(targets):
    return sum(len(t["boxes"]) for t in targets)


def test_a_weight_may_be_that_of_a_list_of_targets():
    def loss_fn(output, targets):
        rows = zip(output, targets, strict=True)
        return sum((o - t["boxes"]).abs().mean(1).sum() for o, t in rows) / boxes_in(targets)

    model, x, target = two_layers(), torch.randn(4, 4), targets(2, 1, 4, 3)
    expected = loss_fn(model(x), target)
    options = {"chunks": 2, "loss_fn": loss_fn, "loss_weight": boxes_in}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        torch.testing.assert_close(pipe.step(x, target=target), expected.detach())


def test_a_list_that_cannot_be_cut_evenly_says_how_it_runs(model):
    with fxpipe.compile(model.eval(), ["cpu"] * 2, chunks=2) as pipe, torch.no_grad():
        with pytest.warns(UserWarning, match="images has 5 elements, which cannot be cut into 2"):
            assert len(pipe(images(5))) == 5
        assert "one micro-batch, stage after stage" in pipe.report()


class Weighs(Detects):
    def forward(self, images, scale):
        h = self.b(self.a(torch.stack(images)).relu()).mean((2, 3))
        return self.c(h) * scale[:, None]


def test_tensors_beside_the_list_are_cut_along_their_rows():
    model, x, scale = Weighs(), images(4), torch.rand(4)
    with torch.no_grad(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        expected = torch.cat([model(x[i : i + 2], scale[i : i + 2]) for i in (0, 2)])
        assert torch.equal(pipe(x, scale), expected)


class TakesMany(Detects):
    def forward(self, *images):
        return self.c(self.b(self.a(torch.stack(images)).relu()).mean((2, 3)))


def test_images_may_be_arguments_of_their_own():
    model, x = TakesMany(), images(4)
    with torch.no_grad(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        for _ in range(2):
            assert torch.equal(pipe(*x), torch.cat([model(*x[:2]), model(*x[2:])]))


class TakesLevels(nn.Module):
    """Adds up what it makes of a list of tensors, which all rows of another input share."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, levels):
        return self.b(self.a(x)) * sum(level.sum() for level in levels)


def test_a_list_with_one_tensor_at_several_places_is_named_as_others_are():
    one, other = torch.randn(4, 6), torch.randn(2, 6)
    inputs = named_inputs(Detections(), ([one, one, other],), {}, {"images": [0, None, 0]})
    said = [(each.name, each.said) for each in inputs]
    assert said == [("images[0]", 0), ("images[1]", None), ("images[2]", 0)]
    call = Detections(), ([one, one, one],), {}
    listed = Listed.of(*call, named_inputs(*call, None))
    assert listed is not None and listed.names_have == "images has"


def test_a_list_beside_a_batch_of_another_size_is_shared():
    model, x, levels = TakesLevels(), torch.randn(6, 4), [torch.rand(n) for n in (2, 3, 5, 7)]
    with torch.no_grad(), fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        assert torch.equal(pipe(x, levels), torch.cat([model(part, levels) for part in x.chunk(2)]))
        assert "ops_scatter(x, 0, 2)" in pipe.code


class Mixes(Detects):
    def forward(self, images, targets=None):
        h = self.a(torch.stack(images)).mean((2, 3))
        return [row + h.mean(0) for row in h]


def test_rows_that_see_each_other_are_refused(model):
    with (
        fxpipe.compile(Mixes(), ["cpu"] * 2, chunks=2, in_dims="list") as pipe,
        pytest.raises(fxpipe.BatchError, match="depends on which other rows") as error,
    ):
        pipe(images(4))
    assert "images[*] along the list" in str(error.value)


class Iterates(Detects):
    """What runs through the rows of a tensor is traced by torch.export only."""

    def forward(self, images, targets):
        h = self.a(torch.stack(images)).mean((2, 3))
        rows = [(row - t["boxes"]).abs().mean() for row, t in zip(h, targets, strict=True)]
        return sum(rows) / len(rows)


def test_an_exported_graph_is_for_elements_of_one_size_at_each_place():
    with fxpipe.compile(Iterates(), ["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(fxpipe.BatchError, match="pad them to one shape, or give chunks=1"):
            pipe(images(4), targets(2, 1, 4, 3))
        x, y = images(4), targets(2, 1, 2, 1)
        expected = (pipe.module(x[:2], y[:2]) + pipe.module(x[2:], y[2:])) / 2
        torch.testing.assert_close(pipe(x, y), expected)


class Detections(nn.Module):
    """Finds two boxes in each image of a batch, and returns a list with a dict for each image."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4, 8)

    def forward(self, images):
        images = torch.stack(images) if isinstance(images, list) else images
        boxes = self.b(torch.relu(self.a(images)).mean((2, 3))).unflatten(1, (2, 4))
        return {"found": [{"boxes": each, "scores": each.sum(1)} for each in boxes]}


@pytest.mark.parametrize("check", [True, "warn", False])
def test_a_list_with_an_element_for_each_row_of_a_tensor_is_refused_with_what_to_give(check):
    """Elements of different images would be averaged, in lists of as many as a micro-batch has."""
    pipe = fxpipe.compile(Detections(), ["cpu"] * 2, chunks=4, check=check)
    with pipe, pytest.raises(fxpipe.BatchError) as refused:
        pipe(torch.randn(8, 3, 6, 6))
    assert re.fullmatch(
        r"output\.found is a list that has one element for each row \(.* elements of different "
        r"rows: give list\(images\), with one element for each row, to a model that takes lists "
        r"\(by torch\.stack\(images\), say\), and in_dims={\"images\": \"list\"}; or return "
        r"tensors whose first dimension is the batch; or give chunks=1",
        str(refused.value),
    )


def test_that_works():
    model, x = Detections(), torch.randn(8, 3, 6, 6)
    for given in ({"chunks": 4, "in_dims": {"images": "list"}}, {"chunks": 1}):
        with fxpipe.compile(model, ["cpu"] * 2, **given) as pipe:
            found = pipe(list(x) if "in_dims" in given else x)
            torch.testing.assert_close(found, model(x))
