"""What a step refuses, and what it says where something fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.schedule import Schedule
from tests.fxpipe.step.compiled import compiled
from tests.zoo import MLP, gradients, mean_loss, same


def test_an_array_of_another_library_is_refused_as_a_target():
    with compiled() as pipe, pytest.raises(TypeError, match=r"a numpy.ndarray of shape \(4,\)"):
        pipe.step(torch.randn(4, 12), target={"y": torch.randn(4).numpy()})


@pytest.mark.parametrize(
    "options, call, message",
    [
        (
            {"loss_fn": lambda o, t: o},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            r"the loss of micro-batch 0 is a tensor of shape \(1, 12\): a scalar tensor is needed",
        ),
        (
            {"loss_fn": lambda o, t: 3},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "the loss of micro-batch 0 is an int: a scalar",
        ),
        (
            {"loss_fn": lambda o, t: torch.view_as_complex(o.reshape(-1, 2)).mean()},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "the loss of micro-batch 0 is of torch.complex64: a real number is needed",
        ),
        (
            {"loss_fn": lambda o, t: o.detach().sum()},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "does not depend on any parameter",
        ),
        (
            {},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(5)),
            r"the target has a tensor of shape \(5,\), and the batch has 4 rows",
        ),
        (
            {"loss_fn": None},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "a target is given, but no loss_fn",
        ),
        (
            {"loss_fn": None},
            lambda p: p.step(torch.randn(4, 12)),
            r"needs a loss, and MLP returns a tensor of shape \(4, 12\): give compile\(loss_fn=",
        ),
        (
            {"loss_fn": None, "loss_weight": fxpipe.loss_weight.tokens()},
            lambda p: p.step(torch.randn(4, 12)),
            r"returns a tensor of shape \(4, 12\), and loss_weight= only says what a loss counts",
        ),
        (
            {},
            lambda p: p.measure(torch.randn(4, 12), target=torch.randn(4), rounds=0),
            "rounds is 0: give the number of steps to measure, 1 or more",
        ),
        (
            {"schedule": Schedule.from_text("0F0 0B0 \n 1B0 1F0"), "chunks": 1},
            lambda p: p.step(torch.randn(4, 12), target=torch.randn(4)),
            "deadlock: lane 1 waits",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, call, message):
    with compiled(**options) as pipe, pytest.raises(ValueError, match=message):
        call(pipe)


class Fails(nn.Module):
    """Fails in its third backward."""

    count: ClassVar[int] = 0
    ahead: ClassVar[Callable[[], object]] = int  # called just before the failure

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(Third.apply(self.a(x))))


class Third(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        Fails.count += 1
        if Fails.count == 3:
            Fails.ahead()
            raise ArithmeticError("the third time")
        return grad


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_a_backward_that_fails_is_said_and_the_next_step_works(schedule):
    model, x, target = Fails(), torch.randn(8, 12), torch.randn(8)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4, schedule=schedule, loss_fn=mean_loss) as pipe:
        Fails.count = 100
        pipe.step(x, target=target)
        wanted = gradients(model)
        Fails.count = 0
        with pytest.raises(ArithmeticError, match="the third time") as caught:
            pipe.step(x, target=target)
        assert "stage" in caught.value.__notes__[0] and "micro-batch 2" in caught.value.__notes__[0]
        model.zero_grad()
        Fails.count = 100
        pipe.step(x, target=target)
    assert same(gradients(model), wanted)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv"])
def test_a_step_that_fails_leaves_no_gradients_where_it_was_to_zero_them(schedule):
    """A loop that goes on with the next batch would train with them."""
    model, x, target = Fails(), torch.randn(8, 12), torch.randn(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"chunks": 4, "schedule": schedule, "loss_fn": mean_loss}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        Fails.count = 100
        pipe.step(x, target=target, optimizer=optimizer, zero_grad=True)
        Fails.count = 0
        with pytest.raises(ArithmeticError):
            pipe.step(x, target=target, optimizer=optimizer, zero_grad=True)
        assert all(p.grad is None for p in model.parameters())
        Fails.count = 0
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(x, target=target)
    has_some = any(p.grad is not None for p in model.parameters())
    assert has_some == any("set gradients to None" in note for note in caught.value.__notes__)


def test_where_the_target_has_been_forgotten_the_error_says_so():
    with compiled() as pipe, pytest.raises(TypeError) as caught:
        pipe.step(torch.randn(4, 12))
    assert caught.value.__notes__[0] == (
        "no target= was given, so that loss_fn was called with None for it: give one, as in "
        "pipe.step(x, target=y)"
    )


def test_where_the_target_of_a_loss_weight_has_been_forgotten_the_error_says_so():
    tokens = fxpipe.loss_weight.tokens(ignore_index=0)
    with compiled(loss_weight=tokens) as pipe, pytest.raises(AttributeError) as caught:
        pipe.step(torch.randn(4, 12))
    assert caught.value.__notes__[0] == (
        "no target= was given, so that loss_weight was called with None for it: give one, as in "
        "pipe.step(x, target=y)"
    )


def test_where_a_loss_fails_the_error_says_what_it_was_given():
    """The caller sees the mini-batch, of which it is given a part."""
    shapes = "the output is a tensor of shape (1, 12), and the target is a tuple with (1,), (1, 5)"
    pipe = compiled(loss_fn=lambda output, target: output @ target[1])
    with pipe, pytest.raises(RuntimeError) as caught:
        pipe.step(torch.randn(4, 12), target=(torch.randn(4), torch.randn(4, 5)))
    assert f"called for each micro-batch; here {shapes}" in caught.value.__notes__[0]


def test_where_a_loss_asks_for_what_a_dict_lacks_the_error_names_its_keys():
    pipe = compiled(loss_fn=lambda output, target: (output - target["y"]).square().mean())
    with pipe, pytest.raises(KeyError) as caught:
        pipe.step(torch.randn(4, 12), target={"labels": torch.randn(4, 12), "mask": torch.ones(4)})
    said = "the target is a dict with 'labels' (1, 12), 'mask' (1,)"
    assert said in caught.value.__notes__[0]


class Heads(MLP):
    """Returns its outputs in a dict."""

    def forward(self, x):
        return {"logits": super().forward(x), "hidden": x}


def test_where_a_loss_is_not_made_for_the_dict_of_a_model_the_error_names_its_keys():
    pipe = fxpipe.compile(Heads(), ["cpu"] * 2, chunks=4, loss_fn=F.mse_loss)
    with pipe, pytest.raises(Exception) as caught:
        pipe.step(torch.randn(4, 12), target=torch.randn(4, 12))
    said = (
        "the output is a dict with 'logits' (1, 12), 'hidden' (1, 12), and the target is a tensor"
    )
    assert said in caught.value.__notes__[0]


class Pictures(MLP):
    """Takes an argument beside its input."""

    def forward(self, image, tokens):
        return super().forward(image) + tokens


@pytest.mark.parametrize(
    "given, said",
    [
        ({"toks": 1}, "toks= is given to the model: did you mean tokens=?"),
        ({"tagret": 1}, "tagret= is given to the model: did you mean target=?"),
        ({"lr": 1}, "lr= is given to the model, which takes no such argument"),
    ],
)
def test_a_misspelled_argument_is_named_also_where_another_one_is_missing_for_it(given, said):
    pipe = fxpipe.compile(Pictures(), ["cpu"] * 2, loss_fn=F.mse_loss)
    with pipe, pytest.raises(TypeError, match="missing a required argument: 'tokens'") as caught:
        pipe.step(torch.randn(4, 12), **given)
    assert said in caught.value.__notes__


def test_a_misspelled_argument_of_a_call_is_named_too():
    with fxpipe.compile(Pictures(), ["cpu"] * 2) as pipe, pytest.raises(TypeError) as caught:
        pipe(torch.randn(4, 12), toks=1)
    assert caught.value.__notes__ == ["toks= is given to the model: did you mean tokens=?"]


def test_to_measure_a_model_without_a_loss_it_is_compiled_without_training():
    """A step is measured, and it has to have a loss."""
    x = torch.randn(4, 12)
    with compiled(loss_fn=None) as pipe:
        with pytest.raises(ValueError, match="a training step needs a loss, and MLP ret") as caught:
            pipe.measure(x)
        assert caught.value.__notes__ == [
            "measure() measures a training step; to measure calls, compile the model with "
            "training=False"
        ]
        assert pipe(x).shape == (4, 12)
    with compiled(loss_fn=None, training=False, schedule="gpipe") as pipe:
        pipe.measure(x, rounds=1)


def test_a_loss_for_each_row_is_one_of_micro_batches_of_one_row():
    class OfRows(MLP):
        def forward(self, x):
            return super().forward(x).square().mean(1)

    model, x = OfRows(), torch.randn(4, 12)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=4) as pipe:
        pipe.step(x)
    found = gradients(model)
    model.zero_grad()
    model(x).mean().backward()
    torch.testing.assert_close(found, gradients(model))


def test_where_the_target_is_given_without_its_name_the_error_says_so():
    with compiled() as pipe, pytest.raises(TypeError, match="too many positional") as caught:
        pipe.step(torch.randn(4, 12), torch.randn(4))
    assert caught.value.__notes__ == ["the target is given by its name: step(x, target=y)"]


def test_in_inference_mode_there_is_no_step():
    with compiled() as pipe, torch.inference_mode(), pytest.raises(RuntimeError, match="outside"):
        pipe.step(torch.randn(4, 12), target=torch.randn(4))


def test_without_gradients_there_is_no_step():
    with compiled() as pipe:
        before = gradients(pipe.module)
        with torch.no_grad(), pytest.raises(RuntimeError, match="outside of no_grad"):
            pipe.step(torch.randn(4, 12), target=torch.randn(4))
        assert same(gradients(pipe.module), before), "none"
        with torch.no_grad():  # which leaves the gradients as they are
            pipe.measure(torch.randn(4, 12), target=torch.randn(4), rounds=1)
        assert same(gradients(pipe.module), before)


def test_a_target_that_is_a_list_of_numbers_is_said_in_a_few_words():
    """Each number is a value of the step graph, so that the code of a node may be very long."""
    pipe = compiled(loss_weight=lambda target: torch.isnan(target).sum())
    with pipe, pytest.raises(TypeError) as caught:
        pipe.step(torch.randn(4, 12), target=torch.randn(4, 100).tolist())
    assert all(len(note) < 300 for note in caught.value.__notes__)


@pytest.mark.parametrize("schedule, fails", [("gpipe", True), ("1f1b", False)])
def test_a_loss_that_writes_to_its_target_is_told_of_where_that_spoils_the_backward(
    schedule, fails
):
    """Autograd counts the writes to all parts of a target together, so that the loss of the next
    micro-batch spoils the backward of this one, unless that has run by then."""

    def loss_of(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, target["y"].mul_(0.5))

    model, x, y = MLP(), torch.randn(6, 12), torch.randn(6, 12)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=3, schedule=schedule, loss_fn=loss_of) as pipe:
        if not fails:
            target = {"y": y.clone()}
            pipe.step(x, target=target)
            assert same(target["y"], y * 0.5)
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            pipe.step(x, target={"y": y})
    assert any("loss_fn writes to its target" in note for note in raised.value.__notes__)


class Clamped(nn.Module):
    """Bounds its scale in place, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.tensor(7.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=5)
        return self.b(torch.tanh(self.a(x))) * self.scale


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_parameter_that_the_forward_writes_to_is_blamed_for_a_spoilt_backward(checkpoint):
    options = {"chunks": 2, "loss_fn": mean_loss, "checkpoint": checkpoint}
    with (
        fxpipe.compile(Clamped(), ["cpu"] * 2, **options) as pipe,
        pytest.raises(RuntimeError, match=r"inplace operation|needed for the backward") as raised,
    ):
        pipe.step(torch.randn(4, 12), target=torch.randn(4))
    assert any(
        "the forward writes to scale in place, in" in note for note in raised.value.__notes__
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_that_fails_says_how_many_parameters_have_been_stepped(schedule, monkeypatch):
    model, x, target = Fails(), torch.randn(8, 12), torch.randn(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"chunks": 4, "schedule": schedule, "loss_fn": mean_loss, "partition": ["b"]}

    def notes_of_a_failure(**given: Any) -> list[str]:
        Fails.count = -1  # the last backward of the first stage fails
        with pytest.raises(ArithmeticError) as caught:
            pipe.step(x, target=target, **given)
        return [note for note in caught.value.__notes__ if "have been stepped" in note]

    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        Fails.count = 100
        pipe.step(x, target=target)
        assert not notes_of_a_failure(optimizer=optimizer, max_grad_norm=1.0)
        before = model.b.bias.detach().clone()

        def until_the_last_stage_has_been_stepped() -> None:
            ends = time.monotonic() + 20
            while same(model.b.bias, before) and time.monotonic() < ends:
                time.sleep(0.01)
            time.sleep(0.1)  # the optimizer notes what it has stepped behind that

        monkeypatch.setattr(Fails, "ahead", until_the_last_stage_has_been_stepped)
        (note,) = notes_of_a_failure(optimizer=optimizer)
    assert note.startswith("2 parameters have been stepped already"), "weight and bias of b"


def test_a_target_that_is_not_written_to_is_not_blamed_for_a_spoilt_backward():
    class Spoilt(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).exp()

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        output.mul_(2)  # the backward of exp needs its result
        return F.mse_loss(output, target)

    with (
        fxpipe.compile(Spoilt(), ["cpu"] * 2, chunks=3, loss_fn=loss_of, check=False) as pipe,
        pytest.raises(RuntimeError, match="modified by an inplace operation") as raised,
    ):
        pipe.step(torch.randn(6, 12), target=torch.randn(6, 12))
    assert not any("target" in note for note in raised.value.__notes__)
