"""A loss must not share Python objects or buffers with stages that run at the same time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe

CHUNKS = 4
TWO = ["cpu"] * 2
LAST: Any = None
FEATURES: dict[str, Tensor] = {}
LossFn = Callable[[Tensor, Tensor], Tensor]
Made = tuple[nn.Module, LossFn]


def x() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def stepped(model: nn.Module, loss: LossFn, devices: list[str] = TWO, **more: Any) -> None:
    options = dict(chunks=CHUNKS, schedule="1f1b") | more
    with fxpipe.compile(model, devices, loss_fn=loss, **options) as pipe:
        pipe.step(x(), target=x())


def stepped_in_a_loop(model: nn.Module, loss: LossFn) -> None:
    for part in x().chunk(CHUNKS):
        (loss(model(part), part) / CHUNKS).backward()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(6, 6), nn.Tanh())))


def penalty_of(feature: Tensor) -> Tensor:
    return feature.square().mean()


def by_a_dict() -> Made:
    model, kept = layers(), dict[str, Tensor]()
    model[0].register_forward_hook(lambda module, args, output: kept.update(h=output))
    return model, lambda output, target: F.mse_loss(output, target) + penalty_of(kept["h"])


def by_a_dict_in_a_global_variable() -> Made:
    model = layers()
    model[0].register_forward_hook(lambda module, args, output: FEATURES.update(h=output))
    return model, lambda output, target: F.mse_loss(output, target) + penalty_of(FEATURES["h"])


def by_an_attribute_of_a_module() -> Made:
    model = layers()
    model[0].register_forward_hook(lambda module, args, output: setattr(module, "h", output))
    return model, lambda output, target: F.mse_loss(output, target) + penalty_of(model[0].h)


def by_an_attribute_of_the_model() -> Made:
    model = layers()
    model[0].register_forward_hook(lambda module, args, output: setattr(model, "h", output))
    return model, lambda output, target: F.mse_loss(output, target) + penalty_of(model.h)


def by_a_global_variable() -> Made:
    model = layers()

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        global LAST
        LAST = output

    model[0].register_forward_hook(keep)
    return model, lambda output, target: F.mse_loss(output, target) + penalty_of(LAST)


def by_a_partial_function() -> Made:
    model, kept = layers(), dict[str, Tensor]()

    def keep(where: dict[str, Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
        where["h"] = output

    model[0].register_forward_hook(partial(keep, kept))
    return model, lambda output, target: F.mse_loss(output, target) + penalty_of(kept["h"])


def by_a_tensor() -> Made:
    model, mean = layers(), torch.zeros(6)
    model[0].register_forward_hook(lambda module, args, output: average(mean, output))
    return model, lambda output, target: F.mse_loss(output, target) * (1 + penalty_of(mean))


def by_a_buffer() -> Made:
    model = layers()
    model.register_buffer("mean", torch.zeros(6))
    model[0].register_forward_hook(lambda module, args, output: average(model.mean, output))
    return model, lambda output, target: F.mse_loss(output, target) * (1 + penalty_of(model.mean))


def average(mean: Tensor, output: Tensor) -> None:
    mean.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)


class Extractor:
    def __init__(self, module: nn.Module) -> None:
        self.h: Any = None
        module.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.h = output

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + penalty_of(self.h)


def by_an_object() -> Made:
    model = layers()
    return model, Extractor(model[0]).loss


class Keeps(nn.Module):
    """A module that is kept whole, as it branches by values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if bool((x > 100).any()):
            return x
        self.seen[:] = [x]
        self.calls += 1
        return x + 1


class WithLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeps, self.layers, self.rate = Keeps(), layers(), 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.keeps(x))

    def with_what_is_kept(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + self.penalty()

    def penalty(self) -> Tensor:
        return sum((penalty_of(each) for each in self.keeps.seen), torch.zeros(()))

    def with_its_rate(self, output: Tensor, target: Tensor) -> Tensor:
        return self.rate * F.mse_loss(output, target)


def by_a_module_that_is_kept_whole() -> Made:
    model = WithLosses()
    return model, model.with_what_is_kept


WAYS = [
    by_a_dict,
    by_a_dict_in_a_global_variable,
    by_an_attribute_of_a_module,
    by_an_attribute_of_the_model,
    by_a_global_variable,
    by_an_object,
    by_a_partial_function,
    by_a_tensor,
    by_a_buffer,
    by_a_module_that_is_kept_whole,
]


@pytest.mark.parametrize("make", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_reads_what_hooks_and_kept_modules_leave_is_refused(
    make: Callable[[], Made],
) -> None:
    model, loss = make()
    with pytest.raises(fxpipe.BatchError, match=r"loss_fn reads .*(changes while|sets in)"):
        stepped(model, loss)


@pytest.mark.filterwarnings("ignore")
def test_it_is_said_what_it_reads_and_what_changes_that() -> None:
    words = r"loss_fn reads the variable kept around .*, which 0 \(or a hook on it\) changes"
    with pytest.raises(fxpipe.BatchError, match=words):
        stepped(*by_a_dict())
    with pytest.raises(fxpipe.BatchError, match=r"loss_fn reads 0\.h, which 0 "):
        stepped(*by_an_attribute_of_a_module())


def test_it_is_refused_where_the_graph_is_from_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(fxpipe.BatchError, match="loss_fn reads the variable kept"):
            stepped(*by_a_dict(), cache=tmp_path)


@pytest.mark.parametrize("check", ["warn", False])
def test_it_is_warned_of_whatever_the_user_accepts(check: Any) -> None:
    model, loss = by_a_dict()
    model(x())  # so that there is something to read
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(RuntimeError):  # the graph of another micro-batch may be gone
            stepped(model, loss, check=check)
    assert any("loss_fn reads the variable kept" in str(each.message) for each in caught)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", WAYS[:3])
def test_in_one_stage_it_is_right(make: Callable[[], Made], checkpoint: str) -> None:
    (model, loss), (plain, plain_loss) = make(), make()
    stepped_in_a_loop(plain, plain_loss)
    expected = [p.grad for p in plain.parameters()]
    stepped(model, loss, ["cpu"], checkpoint=checkpoint)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.filterwarnings("ignore")
def test_one_micro_batch_is_refused_where_a_gradient_would_be_lost() -> None:
    model, kept = layers(), dict[str, Tensor]()
    model[4].register_forward_hook(lambda module, args, output: kept.update(h=output))
    with pytest.raises(ValueError, match="depends on a tensor within a stage"):
        stepped(
            model,
            lambda output, target: F.mse_loss(output, target) + penalty_of(kept["h"]),
            **{"chunks": 1, "checkpoint": "always", "partition": ["2"]},
        )


@pytest.mark.filterwarnings("error")
def test_what_hooks_record_for_others_is_no_matter() -> None:
    model, kept = layers(), dict[int, Tensor]()
    for number, module in enumerate(model):
        module.register_forward_hook(
            lambda module, args, output, number=number: kept.update({number: output})
        )
    stepped(model, F.mse_loss)


@pytest.mark.filterwarnings("ignore")
def test_a_method_of_the_model_may_leave_alone_what_the_forward_keeps() -> None:
    model = WithLosses()
    stepped(model, model.with_its_rate)
    stepped(model, lambda output, target: model.with_its_rate(output, target))


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))  # for losses only

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def of_latents(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + penalty_of(self.encoder(output))

    def of_encoders_first(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + penalty_of(self.encoder[0](output))

    def of_decoders_norm(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + penalty_of(self.decoder(output[:, :4]))

    def of_a_critic(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + penalty_of(self.critic(output))

    def of_statistics(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + penalty_of(self.encoder[1].running_mean + output[:, :1])

    def resetting(self, output: Tensor, target: Tensor) -> Tensor:
        self.encoder[1].running_mean = torch.zeros(8)
        return F.mse_loss(output, target)


CUT = {"partition": ["decoder_0"], "check": "warn"}
"""A cut between encoder and decoder. What batch norms make of micro-batches is only warned of."""


def told(name: str, **more: Any) -> list[str]:
    """The warnings of a step with this loss that are about what it shares with the forward."""
    model = AutoEncoder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(model, getattr(model, name), **{**CUT, **more})
    said = [str(each.message) for each in caught]
    return [each.split(":")[0] for each in said if each.startswith("loss_fn and the forward")]


@pytest.mark.parametrize("name", ["of_latents", "of_statistics", "resetting"])
def test_a_loss_that_shares_buffers_with_an_earlier_stage_is_told_of(name: str) -> None:
    (text,) = told(name)
    assert "both use encoder.1.running_mean" in text


def test_so_is_one_that_shares_what_is_updated_once_for_the_mini_batch() -> None:
    (text,) = told("of_latents", deferred_batch_norm=True)
    assert "both use encoder.1.running_mean" in text


def test_it_is_refused_as_other_losses_are() -> None:
    model = AutoEncoder()
    with pytest.raises(fxpipe.BatchError, match=r"both use encoder\.1\.running_mean"):
        stepped(model, model.of_latents, **{**CUT, "check": True})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("of_encoders_first", {}),  # parameters of an earlier stage
        ("of_decoders_norm", {}),  # buffers of the last stage, in whose lane the loss runs
        ("of_a_critic", {}),  # buffers of the loss alone
        ("of_latents", {"devices": ["cpu"], "partition": "auto"}),  # one stage
        ("of_encoders_first", {"schedule": "gpipe", "checkpoint": "always"}),
    ],
)
def test_other_modules_of_the_model_may_be_called_and_all_is_as_in_a_loop(
    name: str, more: dict[str, Any]
) -> None:
    model = AutoEncoder()
    plain = copy.deepcopy(model)
    stepped_in_a_loop(plain, getattr(plain, name))
    assert told(name, **more) == []
    stepped(model, getattr(model, name), **{**CUT, **more})
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
