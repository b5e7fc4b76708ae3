"""Numbers that a loss reads are noticed when they change its meaning, also long after its check."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import time
import types
import warnings
from collections import deque

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.meaning.errors import BatchWarning
from fxpipe.meaning.numbers_read import NumbersRead, NumberWatch, TensorRead, TextsGiven

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x):
        mu = self.down(x)
        return {"reconstruction": self.up(mu), "mu": mu}


def loss_of(output, x, beta):
    return F.mse_loss(output["reconstruction"], x) + beta * output["mu"].square().sum()


BETA = 0.0
SETTINGS = {"beta": 0.0}
CONFIG = types.SimpleNamespace(loss=types.SimpleNamespace(beta=0.0))


def of_global():
    def loss_fn(output, x):
        return loss_of(output, x, BETA)

    return loss_fn, lambda value: globals().update(BETA=value)


def weight():
    return BETA


def of_global_in_another_function():
    def loss_fn(output, x):
        return loss_of(output, x, weight())

    return loss_fn, lambda value: globals().update(BETA=value)


def of_closure():
    beta = 0.0

    def inner(output, x):
        return loss_of(output, x, beta)

    def loss_fn(output, x):
        return inner(output, x)

    def change(value):
        nonlocal beta
        beta = value

    return loss_fn, change


def of_settings():
    return lambda o, x: loss_of(o, x, SETTINGS["beta"]), lambda v: SETTINGS.update(beta=v)


def of_nested_settings():
    def change(value):
        CONFIG.loss = types.SimpleNamespace(beta=value)

    return lambda o, x: loss_of(o, x, CONFIG.loss.beta), change


class Loss:
    beta = 0.0

    def __call__(self, output, x):
        return self.of(output, x)

    def of(self, output, x):
        return loss_of(output, x, self.beta)


def of_object():
    loss = Loss()
    return loss, lambda value: setattr(loss, "beta", value)


def of_class():
    class Own(Loss):
        pass

    return Own(), lambda value: setattr(Own, "beta", value)


def of_method():
    loss = Loss()
    return loss.of, lambda value: setattr(loss, "beta", value)


class ModuleLoss(nn.Module):
    def __init__(self, beta):
        super().__init__()
        if isinstance(beta, torch.Tensor):
            self.register_buffer("beta", beta)
        else:
            self.beta = beta

    def forward(self, output, x):
        return loss_of(output, x, self.beta)


def of_module():
    loss = ModuleLoss(0.0)
    return loss, lambda value: setattr(loss, "beta", value)


def of_buffer():
    loss = ModuleLoss(torch.tensor(0.0))
    return loss, lambda value: loss.beta.fill_(value)


def of_partial():
    loss = functools.partial(loss_of, beta=0.0)
    return loss, lambda value: loss.keywords.update(beta=value)


def of_default():
    def loss_fn(output, x, beta=0.0):
        return loss_of(output, x, beta)

    return loss_fn, lambda value: setattr(loss_fn, "__defaults__", (value,))


def of_list():
    weights = [1.0, 0.0]
    return (
        lambda o, x: weights[0] * loss_of(o, x, weights[1]),
        lambda v: weights.__setitem__(1, v),
    )


def of_nothing():
    beta = None

    def loss_fn(output, x):
        return loss_of(output, x, 0.0 if beta is None else beta)

    def change(value):
        nonlocal beta
        beta = value or None

    return loss_fn, change


class Named:
    """A loss that is told by words what to do."""

    def __init__(self):
        self.phase, self.parts, self.hidden = "autoencoder", set(), 0.0
        self.queue, self.more = deque([0.0]), _nothing

    @property
    def beta(self):
        return self.hidden


def _nothing(output):
    return 0.0


def _squares(output):
    return 0.5 * output["mu"].square().sum()


def of_text():
    own = Named()
    return (
        lambda o, x: loss_of(o, x, 0.5 if own.phase == "both" else 0.0),
        lambda v: setattr(own, "phase", "both" if v else "autoencoder"),
    )


def of_set():
    own = Named()
    return (
        lambda o, x: loss_of(o, x, 0.5 if "squares" in own.parts else 0.0),
        lambda v: own.parts.add("squares") if v else own.parts.clear(),
    )


def of_property():
    own = Named()
    return lambda o, x: loss_of(o, x, own.beta), lambda v: setattr(own, "hidden", v)


def of_queue():
    own = Named()
    return lambda o, x: loss_of(o, x, own.queue[-1]), own.queue.append


def of_numpy():
    settings = {"beta": np.float32(0)}
    return (
        lambda o, x: loss_of(o, x, float(settings["beta"])),
        lambda v: settings.update(beta=np.float32(v)),
    )


def of_another_function():
    own = Named()
    return (
        lambda o, x: loss_of(o, x, 0.0) + own.more(o),
        lambda v: setattr(own, "more", _squares if v else _nothing),
    )


def of_a_function_with_another_number():
    own = Named()
    return (
        lambda o, x: loss_of(o, x, own.more(o)),
        lambda v: setattr(own, "more", (lambda o: 0.5) if v else (lambda o: 0.0)),
    )


class InSlots:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 0.0

    def __call__(self, output, x):
        return loss_of(output, x, self.beta)


@dataclasses.dataclass(slots=True)
class SlotsOfData:
    beta: float = 0.0


def of_slots():
    own = types.SimpleNamespace(settings=InSlots())
    return lambda o, x: loss_of(o, x, own.settings.beta), lambda v: setattr(own.settings, "beta", v)


def of_a_callable_with_slots():
    own = InSlots()
    return own, lambda value: setattr(own, "beta", value)


def of_slots_of_data():
    own = SlotsOfData()
    return lambda o, x: loss_of(o, x, own.beta), lambda v: setattr(own, "beta", v)


def _with_a_key(settings):
    return lambda v: settings.update(squares=v) if v else settings.pop("squares", None)


def of_a_key_with_a_default():
    own = {"mse": 1.0}
    return lambda o, x: loss_of(o, x, own.get("squares", 0.0)), _with_a_key(own)


def of_a_key_that_is_there():
    own = {"mse": 1.0}

    def change(value):
        if value:
            own["squares"] = torch.ones(3)
        else:
            own.pop("squares", None)

    return lambda o, x: loss_of(o, x, 0.5 if "squares" in own else 0.0), change


def of_all_entries():
    own = {"mse": 1.0}

    def loss_fn(output, x):
        of = {"mse": loss_of(output, x, 0.0), "squares": output["mu"].square().sum()}
        return sum(weight * of[name] for name, weight in own.items())

    return loss_fn, _with_a_key(own)


class Phase(enum.Enum):
    FIRST = "first"
    BOTH = "both"


def of_enumeration():
    own = {"phase": Phase.FIRST}
    return (
        lambda o, x: loss_of(o, x, 0.5 if own["phase"] is Phase.BOTH else 0.0),
        lambda v: own.update(phase=Phase.BOTH if v else Phase.FIRST),
    )


KINDS = [each for name, each in list(globals().items()) if name.startswith("of_")]


def told(call):
    """The warnings of a call about what micro-batches mean."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, BatchWarning)]


def pipeline(loss_fn=None, model=None, **options):
    return fxpipe.compile(
        model or Autoencoder(),
        ["cpu", "cpu"],
        chunks=4,
        schedule="1f1b",
        loss_fn=loss_fn,
        **options,
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_number_that_is_zero_no_more_is_noticed_wherever_the_loss_reads_it(kind):
    loss_fn, change = kind()
    change(0.0)
    with pipeline(loss_fn) as pipe:
        assert told(lambda: pipe.step(X, target=X)) == []
        change(0.5)
        (text,) = told(lambda: pipe.step(X, target=X))
        assert "the loss is neither a mean over the rows nor a sum" in text
        assert told(lambda: pipe.step(X, target=X)) == []
    change(0.0)


def test_the_reduction_of_a_loss_is_noticed():
    loss_fn = nn.MSELoss()
    model = nn.Linear(4, 4)
    with fxpipe.compile(model, ["cpu"], chunks=4, schedule="1f1b", loss_fn=loss_fn) as pipe:
        assert told(lambda: pipe.step(X, target=X)) == []
        loss_fn.reduction = "sum"
        (text,) = told(lambda: pipe.step(X, target=X))
        assert "the loss is a sum over the rows by now" in text


def loss_with_beta_in_the_target(output, target):
    return loss_of(output, target["x"], target["beta"])


def test_a_number_in_the_target_is_noticed():
    with pipeline(loss_with_beta_in_the_target) as pipe:
        for beta, count in ((0.0, 0), (0.3, 1), (0.31, 0)):
            target = {"x": X, "beta": beta}
            assert len(told(lambda target=target: pipe.step(X, target=target))) == count


@dataclasses.dataclass
class Wanted:
    x: torch.Tensor
    beta: float


def test_a_number_in_an_object_that_is_the_target_is_noticed():
    with pipeline(lambda output, wanted: loss_of(output, wanted.x, wanted.beta)) as pipe:
        for beta, count in ((0.0, 0), (0.3, 1), (0.31, 0)):
            assert len(told(lambda beta=beta: pipe.step(X, target=Wanted(X, beta)))) == count


@pytest.mark.parametrize("phases", [("first", "both"), (Phase.FIRST, Phase.BOTH)])
def test_a_text_in_the_target_is_noticed(phases):
    def loss_fn(output, target):
        return loss_of(output, target["x"], 0.5 if target["phase"] == phases[1] else 0.0)

    with pipeline(loss_fn) as pipe:
        for phase, count in ((0, 0), (1, 1), (0, 0), (1, 0)):
            target = {"x": X, "phase": phases[phase]}
            assert len(told(lambda target=target: pipe.step(X, target=target))) == count


def test_texts_that_are_data_cost_few_checks():
    texts = TextsGiven()
    found = [texts.numbers_in([f"{i}.png", "mean"]) for i in range(100)]
    watch = NumberWatch(found[0])
    assert sum(watch.is_new(each) for each in found[1:]) <= 8
    assert {each[1] for each in found} == {1.0}


class OwnLoss(Autoencoder):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.tensor(0.0))

    def forward(self, x, scale=None):
        beta = self.beta if scale is None else scale
        return loss_of(super().forward(x), x, beta)


def test_a_buffer_of_a_model_that_returns_its_loss_is_noticed():
    model = OwnLoss()
    with pipeline(model=model) as pipe:
        assert told(lambda: pipe.step(X)) == []
        model.beta.fill_(1.0)
        (text,) = told(lambda: pipe.step(X))
        assert "output is neither a mean over the rows nor a sum" in text
        assert told(lambda: pipe.step(X)) == []


def of_target(pipe, beta):
    return told(lambda: pipe.step(X, target={"x": X, "beta": torch.tensor(beta)}))


def of_input(pipe, beta):
    return told(lambda: pipe.step(X, scale=torch.tensor(beta)))


@pytest.mark.parametrize(
    ("call", "options"),
    [(of_target, {"loss_fn": loss_with_beta_in_the_target}), (of_input, {"model": OwnLoss()})],
)
def test_a_tensor_that_is_given_is_another_number_in_the_check_and_noticed_later(call, options):
    with pipeline(**options) as pipe:
        assert [len(call(pipe, beta)) for beta in (0.0, 0.6, 0.7)] == [1, 0, 0]
    with pipeline(**options) as pipe:
        assert [len(call(pipe, beta)) for beta in (1e-9, 0.5, 0.6)] == [0, 1, 0]


def test_a_buffer_of_a_model_by_which_outputs_mix_rows_is_noticed():
    class Mixes(Autoencoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("beta", torch.tensor(0.0))

        def forward(self, x):
            h = super().forward(x)["reconstruction"]
            return h - self.beta * h.mean(0)

    model = Mixes()
    with pipeline(model=model) as pipe:
        assert told(lambda: pipe(X)) == []
        model.beta.fill_(1.0)
        (text,) = told(lambda: pipe(X))
        assert "depends on which other rows there are" in text


@pytest.mark.parametrize("counts", [(8, 8, 8, 8, 8), (8, 3, 8, 3, 8), (8, 3, 8, 8, 3)])
def test_a_mean_that_becomes_a_sum_and_a_mean_again_is_said_and_put_together_as_what_it_is(counts):
    share = 0.0

    def loss_fn(output, x):
        rows = (output["reconstruction"] - x).square().sum(1)
        return (1 - share) * rows.mean() + share * rows.sum()

    said = []
    with pipeline(loss_fn) as pipe:
        for share, rows in zip((0.0, 1.0, 1.0, 0.0, 0.0), counts, strict=True):  # noqa: B007
            x, found = X[:rows], []
            said += told(lambda x=x, found=found: found.append(pipe.step(x, target=x)))
            torch.testing.assert_close(found[0], loss_fn(pipe.module(x), x).detach())
    for text, now, word in zip(said, ("sum", "mean"), ("sum", "rows"), strict=True):
        assert f"the loss is a {now} over the rows by now" in text
        assert f"from this call on it is put together as a {now}" in text
        assert f"loss_weight={word!r}" in text


def test_a_number_is_noticed_again_where_it_was_another_one_with_targets_of_another_kind():
    share = 0.0

    def loss_fn(output, x):
        x = x["x"] if isinstance(x, dict) else x
        rows = (output["reconstruction"] - x).square().sum(1)
        return (1 - share) * rows.mean() + share * rows.sum()

    with pipeline(loss_fn) as pipe:
        steps = [(0.0, X), (1.0, {"x": X}), (0.0, {"x": X}), (1.0, X), (0.0, X), (1.0, X)]
        for share, target in steps:  # noqa: B007
            found = []
            told(lambda target=target, found=found: found.append(pipe.step(X, target=target)))
            torch.testing.assert_close(found[0], loss_fn(pipe.module(X), target).detach())


class MeanOrSum(Autoencoder):
    """A model that returns its loss, by a number that it has or is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.tensor(0.0))

    def forward(self, x, share=None):
        share = self.share if share is None else share
        rows = (super().forward(x)["reconstruction"] - x).square().sum(1)
        return (1 - share) * rows.mean() + share * rows.sum()


def test_so_it_is_with_a_model_that_returns_its_loss(tmp_path):
    said = []
    with pipeline(model=MeanOrSum(), cache=tmp_path) as pipe:
        for share in (0.0, 1.0, 1.0, 0.0, 1.0):
            pipe.module.share.fill_(share)
            expected = pipe.module(X).detach()
            for call in (pipe, pipe.step):
                found = []
                said += told(lambda call=call, found=found: found.append(call(X)))
                torch.testing.assert_close(found[0].detach(), expected)
    for text, now in zip(said, ("sum", "mean"), strict=True):
        assert f"output is a {now} over the rows by now" in text
        assert f"from this call on it is put together as a {now}" in text


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_number_that_is_given_and_makes_a_mean_a_sum_is_told_of(has_cache, tmp_path):
    """The check takes other numbers near it, of which it is neither."""
    options = {"cache": tmp_path} if has_cache else {}
    for shares in ((1e-9, 1.0), (1.0,)):  # the second pipeline begins where the first one ends
        with pipeline(model=MeanOrSum(), **options) as pipe:
            for share in shares:
                said = told(lambda pipe=pipe, share=share: pipe.step(X, torch.tensor(share)))
                assert any("neither a mean over the rows" in each for each in said) == (share == 1)


def test_a_tensor_without_dimensions_is_no_mask_if_it_is_one():
    target = {"x": X, "beta": torch.tensor(1.0)}
    with pipeline(lambda output, y: F.mse_loss(output["mu"], y["x"][:, :3] * y["beta"])) as pipe:
        assert told(lambda: pipe.step(X, target=target)) == []


def test_nothing_is_told_of_a_number_that_leaves_the_loss_a_mean():
    scale = 0.1

    def loss_fn(output, x):
        return scale * F.mse_loss(output["reconstruction"], x)

    with pipeline(loss_fn) as pipe:
        for scale in (0.1, 1.0, 100.0, 0.001):  # noqa: B007
            assert told(lambda: pipe.step(X, target=X)) == []


def test_nothing_is_looked_at_without_a_check():
    loss_fn, change = of_closure()
    with pipeline(loss_fn, check=False) as pipe:
        pipe.step(X, target=X)
        change(0.5)
        assert told(lambda: pipe.step(X, target=X)) == []


# ------------------------------------------------------------------------------------- the watch


def checks(values):
    """How often numbers are new while one takes these values."""
    first, *more = values
    watch = NumberWatch([first])
    return sum(watch.is_new([value]) for value in more)


def test_a_schedule_costs_a_logarithmic_number_of_checks():
    assert checks([step / 10_000 for step in range(10_001)]) <= 15
    assert checks(range(100_000)) <= 18  # a counter of steps
    assert checks([math.cos(step / 1000) for step in range(3142)]) <= 25


def test_a_number_that_goes_to_and_fro_is_checked_once():
    assert checks([0.0, 1.0] * 1000) == 1
    assert checks([(step % 100) / 100 for step in range(1000)]) <= 8
    assert checks([0.99, 1.01] * 100) == 0


@pytest.mark.parametrize(
    ("before", "after", "is_new"),
    [
        (0.0, 1e-9, True),
        (1.0, 1.9, False),
        (1.0, 2.1, True),
        (1.0, 0.4, True),
        (1.0, -1.0, True),
        (1.0, math.inf, True),
        (math.nan, 1.0, True),
        (math.nan, math.nan, False),
        (None, 1.0, True),
        (0.0, 0.0, False),
    ],
)
def test_what_counts_as_another_number(before, after, is_new):
    assert NumberWatch([before]).is_new([after]) == is_new


def test_a_looped_object_and_a_large_model_in_a_closure_are_followed():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    box = types.SimpleNamespace(beta=0.0)
    box.own = box

    def loss_fn(output, x):
        return box.own.beta * sum(p.sum() for p in model.parameters())

    numbers = NumbersRead(loss_fn)
    before = numbers.values()
    box.beta = 10**400  # too large for a float
    assert [each for each in numbers.values() if each not in before] == [math.inf]


def test_a_look_takes_microseconds():
    numbers = NumbersRead(of_object()[0])
    watch = NumberWatch(numbers.values())
    begin = time.perf_counter()
    for _ in range(1000):
        watch.is_new(numbers.values())
    assert time.perf_counter() - begin < 0.1  # 100 us each, on a slow machine


class OnADevice:
    """What TensorRead asks of a tensor, counting how often the host waits for the number."""

    is_cpu = is_meta = False

    def __init__(self):
        self.waits = self._version = 0
        self.number = 0.0

    def numel(self):
        return 1

    def is_inference(self):
        return False

    def item(self):
        self.waits += 1
        return self.number

    def fill_(self, number):
        self.number, self._version = number, self._version + 1


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr("fxpipe.meaning.numbers_read.Tensor", OnADevice)
    return OnADevice()


def test_the_host_waits_for_a_device_only_where_a_tensor_has_been_written_to(device):
    read = TensorRead(lambda: device)
    assert [read() for _ in range(100)] == [0.0] * 100
    assert device.waits == 1
    device.fill_(0.5)
    assert (read(), device.waits) == (0.5, 2)


def test_a_tensor_that_is_written_to_in_each_step_is_read_more_and_more_rarely(device):
    read, found = TensorRead(lambda: device), []
    for step in range(1000):
        device.fill_(float(step))
        found.append(read())
    assert device.waits < 15
    assert all(found[step] >= step / 4 for step in range(4, 1000))


def test_a_check_in_the_cache_on_disk_is_not_one_of_another_number(tmp_path):
    for beta, count in ((0.0, 0), (1.0, 1)):
        model = OwnLoss()
        model.beta.fill_(beta)
        with pipeline(model=model, cache=tmp_path) as pipe:
            assert len(told(lambda pipe=pipe: pipe.step(X))) == count
