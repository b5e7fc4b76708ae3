"""A model is cut so that it fits; where it cannot, what would help is said."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.ir.progress import listening
from fxpipe.ir.text import human_bytes
from tests.fxpipe.planning.plans import FREE_LINKS, on_meta
from tests.zoo import MODELS, UNet


class Wide(nn.Module):
    """Two layers that compute little and hold much, as they only touch the rows that they look up,
    then eight that are the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, 64, sparse=True)
        self.table = nn.Embedding(10_000, 64, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, tokens):
        x = self.embed(tokens) + self.table(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


TOKENS = torch.zeros(64, 8, dtype=torch.long)


TABLES = 2 * 10_000 * 64 * 4 * 4  # two of them, with gradients and Adam's two states


def test_a_model_that_only_fits_with_an_uneven_cut_is_cut_so():
    model, x = on_meta(Wide(), TOKENS)
    roomy = fxpipe.plan(model, [FREE_LINKS] * 2, example_inputs=x, chunks=4)
    assert roomy.stages[0].state_bytes >= TABLES
    small, large = FREE_LINKS.with_memory(0.75 * TABLES), FREE_LINKS.with_memory(2 * TABLES)
    plan = fxpipe.plan(model, [small, large], example_inputs=x, chunks=4)
    assert plan.fits
    assert not roomy.stages[0].memory <= 0.75 * TABLES
    assert plan.stages[0].nodes == ("embed",), "one table here, all else there"
    slowest = [max(stage.seconds for stage in p.stages) for p in (roomy, plan)]
    assert slowest[0] < slowest[1], "that is the price"


def test_a_model_that_cannot_fit_is_refused_with_what_is_short_and_what_would_help():
    model, x = on_meta(Wide(), TOKENS)
    short = FREE_LINKS.with_memory(0.4 * TABLES)
    with pytest.raises(fxpipe.DoesNotFit) as error:
        fxpipe.plan(model, [short] * 2, example_inputs=x, chunks=4)
    message = str(error.value)
    assert "device 0 needs " in message
    assert f"and has {human_bytes(0.4 * TABLES)}, " in message
    assert (
        "; nothing that was tried makes it fit (schedule, chunks, checkpoint, up to 8 devices): "
        "give devices with more memory"
    ) in message, "a table is larger than a device"


def deep(memory, **options):
    """The plan for 24 layers that keep much more than their parameters are."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, x = on_meta(nn.Sequential(*layers), torch.zeros(4096, 32))
    options = {"devices": 2, "chunks": 8, **options}
    device = FREE_LINKS if memory is None else FREE_LINKS.with_memory(memory)
    return fxpipe.plan(model, [device] * options.pop("devices"), example_inputs=x, **options)


@pytest.mark.parametrize(
    ("part", "singles"),
    [
        (0.4, {'schedule="1f1b"', 'checkpoint="except_last"', "3 devices"}),
        pytest.param(0.1, set(), marks=pytest.mark.long),  # no change alone is enough
        pytest.param(0.05, set(), marks=pytest.mark.long),
    ],
)
def test_what_would_fit_is_said_and_does(part, singles):
    memory = part * deep(None, devices=1).memory[0]
    with pytest.raises(fxpipe.DoesNotFit) as error:
        deep(memory)
    _, _, said = str(error.value).partition("; it would fit with ")
    ways = re.split(", with | or with ", said)
    assert {way for way in ways if " and " not in way} == singles
    for way in ways:
        parts = [p if "=" in p else f"devices={p.split()[0]}" for p in way.split(" and ")]
        assert deep(memory, **eval(f"dict({','.join(parts)})")).fits
    for one in ({"schedule": "1f1b"}, {"checkpoint": "always"}, {"chunks": 4096}):
        if not singles:
            with pytest.raises(fxpipe.DoesNotFit):
                deep(memory, **one)


def test_each_option_that_is_tried_is_told_while_the_advice_is_made(caplog):
    memory, parts = 0.4 * deep(None, devices=1).memory[0], []
    with (
        caplog.at_level(logging.INFO, "fxpipe.plan"),
        listening(parts.append),
        pytest.raises(fxpipe.DoesNotFit),
    ):
        deep(memory)
    assert parts.index("what would fit") < parts.index('schedule="1f1b"')
    first, *tried = [r.getMessage() for r in caplog.records if r.name == "fxpipe.plan"]
    assert first == "other options are tried, to say with which the model would fit"
    assert 'schedule="1f1b": fits' in tried
    assert "chunks=16: does not fit" in tried


def test_checkpoints_take_time_and_save_memory():
    model, x = on_meta(UNet(8, 3), torch.zeros(16, 3, 16, 16))
    kept, again = (
        fxpipe.plan(model, ["p40"] * 2, example_inputs=x, chunks=8, checkpoint=mode)
        for mode in ("never", "always")
    )
    assert sum(s.activation_bytes for s in again.stages) < sum(
        s.activation_bytes for s in kept.stages
    )
    assert sum(s.compute_s for s in again.stages) > sum(s.compute_s for s in kept.stages)


def test_a_stage_that_runs_again_alone_has_less_memory_and_less_work():
    model, x = on_meta(UNet(8, 3), torch.zeros(16, 3, 16, 16))
    kept, again, first = (
        fxpipe.plan(
            model, ["p40"] * 2, example_inputs=x, chunks=8, checkpoint=mode, schedule="1f1b"
        )
        for mode in ("never", "always", ["always", "never"])
    )
    # The first stage computes a third more, so that the cut gives it fewer nodes.
    assert len(first.stages[0].nodes) < len(kept.stages[0].nodes)
    assert kept.stages[1].seconds < first.stages[1].seconds < again.stages[1].seconds
    assert first.stages[0].activation_bytes < kept.stages[0].activation_bytes
    assert "checkpoint: always, never" in str(first)
    with pytest.raises(ValueError, match="checkpoint has 2 modes, and there are 3 stages"):
        fxpipe.plan(model, ["p40"] * 3, example_inputs=x, checkpoint=["always", "never"])


def test_activations_of_one_stage_are_those_of_saved_tensor_hooks():
    make, inputs = MODELS["transformer"]
    model, x = make(), inputs(4)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*x)
    for tensor in (*model.parameters(), *model.buffers()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    plan = fxpipe.plan(model, ["p40"], example_inputs=x)
    expected = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert plan.stages[0].activation_bytes == expected
