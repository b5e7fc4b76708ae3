"""Where the memory of lanes is known, the model is cut so that a training step fits."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import ops
from fxpipe.ir.graph import STAGE
from fxpipe.ir.text import human_bytes
from fxpipe.schedule import named
from tests.zoo import gradients, mean_loss, outputs_of_loop, same, step_of_loop


class Heavy(nn.Module):
    """Two tables that take no time, as their gradients are sparse, and much memory, and layers that
    are the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = (nn.Embedding(5_000, 32, sparse=True) for _ in range(2))
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

    def forward(self, tokens):
        return self.layers(self.embed(tokens) + self.table(tokens))


TOKENS = torch.arange(64).reshape(16, 4)
TABLE = 5_000 * 32 * 4 * 4  # with its gradient and Adam's two states


def compiled(model, memory, **options):
    options = {"chunks": 4, "loss_fn": lambda output, _: output.square().mean(), **options}
    return fxpipe.compile(model, ["cpu"] * 2, memory=memory, example_inputs=(TOKENS,), **options)


def test_a_model_that_only_fits_with_an_uneven_cut_is_cut_so_and_trains_as_ever():
    model = Heavy()
    with compiled(copy.deepcopy(model), None) as free:
        assert max(free.timeline().peak_memory) > 2 * TABLE, "both tables are in one stage"
    limit = 1.6 * TABLE
    own = copy.deepcopy(model)
    with compiled(own, limit) as pipe:
        assert max(pipe.timeline().peak_memory) <= limit
        assert f" of {human_bytes(round(limit))}, " in pipe.report()
        assert pipe.stages[0].contains == "embed"
        pipe(TOKENS).square().mean().backward()
        torch.cat(outputs_of_loop(model, (TOKENS,), 4)).square().mean().backward()
        dense, wanted = ([g.to_dense() for g in gradients(each)] for each in (own, model))
        assert same(dense, wanted)


def test_memory_is_one_figure_or_one_for_each_lane():
    with compiled(Heavy(), [f"{int(1.5 * TABLE)}B", "1GiB"]) as pipe:
        peaks = pipe.timeline().peak_memory
        assert peaks[0] <= 1.5 * TABLE
    with compiled(Heavy(), ["1GiB", None]) as pipe:
        assert "of 1.0 GiB, " in pipe.report()


def test_what_an_optimizer_keeps_decides_what_fits():
    without = 2 * TABLE / 4 * 2 * 1.2  # both tables, with their gradients
    with compiled(Heavy(), without, optimizer="sgd", partition=["layers"]):
        pass
    with pytest.warns(UserWarning, match="the partition that has been given is predicted not to"):
        compiled(Heavy(), without, optimizer="adamw", partition=["layers"]).close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, None])
def test_what_does_not_fit_is_refused_with_calls_that_would_fit(loss_fn):
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.zeros(4096, 32)
    options = {"chunks": 8, "example_inputs": (x,), "loss_fn": loss_fn}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as free:
        limit = 0.4 * max(free.timeline().peak_memory)
    with pytest.raises(fxpipe.DoesNotFit) as error:
        fxpipe.compile(model, ["cpu"] * 2, memory=limit, **options)
    message = str(error.value)
    assert re.search(r"device 0 needs [\d.]+ MiB and has [\d.]+ MiB, [\d.]+ .iB short", message)
    ways = (
        message.partition("it would fit with ")[2].replace(" or with ", ", with ").split(", with ")
    )
    # Without a loss there are no steps, and so none in the order of another schedule.
    assert len(ways) == (2 if loss_fn is None else 3)
    assert ("schedule=" in message) == (loss_fn is not None)
    for way in ways:
        given, devices = dict(options), 2
        for part in way.split(" and "):
            if part.endswith(" devices"):
                devices = int(part.split()[0])
            else:
                name, _, value = part.partition("=")
                given[name] = eval(value)
        with fxpipe.compile(model, ["cpu"] * devices, memory=limit, **given) as pipe:
            assert max(pipe.timeline().peak_memory) <= limit * (1 + 1e-9), way


def test_without_a_loss_the_order_of_a_schedule_is_said_not_to_be_what_runs():
    """A backward of the user's own comes after all forwards, which keep more than 1F1B does."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.zeros(4096, 32)
    options = {"chunks": 8, "example_inputs": (x,), "memory": "64MiB"}
    with pytest.warns(UserWarning, match='schedule="1f1b" is the order of pipe.step, and there is'):
        fxpipe.compile(model, ["cpu"] * 2, schedule="1f1b", **options).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxpipe.compile(model, ["cpu"] * 2, **options).close()
        fxpipe.compile(model, ["cpu"] * 2, schedule="1f1b", loss_fn=mean_loss, **options).close()


def test_numbers_of_micro_batches_that_the_model_refuses_are_not_advised():
    """A batch norm takes no single row in training."""
    layers = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(6))
    model, x = nn.Sequential(*layers), torch.randn(32, 4)
    options = {"chunks": 2, "schedule": "1f1b", "loss_fn": mean_loss, "example_inputs": (x,)}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as free:
        limit = 0.35 * max(free.timeline().peak_memory)
    with pytest.raises(fxpipe.DoesNotFit) as error:
        fxpipe.compile(model, ["cpu"] * 2, memory=limit, **options)
    assert "chunks=32" not in str(error.value), "so few bytes are enough for single rows only"


def test_what_is_needed_only_while_it_runs_counts():
    """The result of the wide layer lives for a moment, and no cut keeps it for the backward."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            wide = self.a(x)[:, None].expand(-1, 64, -1) + torch.ones(64, 8)
            return self.b(wide.mean(1))

    model, x = Wide(), torch.randn(32, 8)
    options = {"chunks": 1, "example_inputs": (x,)}
    with fxpipe.compile(model, ["cpu"] * 2, **options) as pipe:
        needed = max(pipe.timeline().peak_memory)
    assert needed > 32 * 64 * 8 * 4
    with pytest.raises(fxpipe.DoesNotFit):
        fxpipe.compile(model, ["cpu"] * 2, memory=32 * 64 * 8 * 4, **options)
    fxpipe.compile(model, ["cpu"] * 2, memory=needed, **options).close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunks", [4, "auto"])
def test_where_nothing_fits_as_a_whole_stages_are_recomputed_in_segments(chunks):
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(16))
    model, x, target = nn.Sequential(*layers), torch.randn(4, 64, 32), torch.randn(4)
    given = {"schedule": "1f1b", "loss_fn": mean_loss, "optimizer": "sgd", "example_inputs": (x,)}
    with fxpipe.compile(copy.deepcopy(model), ["cpu"] * 2, chunks=4, **given) as pipe:
        limit = 0.7 * max(pipe.timeline().peak_memory)
    given |= {"chunks": chunks, "memory": limit, "checkpoint": "auto"}
    own = copy.deepcopy(model)
    with pytest.raises(fxpipe.DoesNotFit):
        fxpipe.compile(own, ["cpu"] * 2, **given, checkpoint_segments=1)
    with fxpipe.compile(own, ["cpu"] * 2, **given) as pipe:
        assert max(pipe.timeline().peak_memory) <= limit
        assert "(checkpoint): always in 2 segments, never." in str(pipe.explain())
        order = named("1f1b", lanes=2, microbatches=4)
        found = [pipe.step(x, target=target), gradients(own)]
        wanted = step_of_loop(model, (x,), target, pipe, order, 4, mean_loss)
        assert same(found, list(wanted))
        again = pipe.graph_module.graph.find_nodes(op="call_function", target=ops.checkpoint)
        assert [node.meta[STAGE] for node in again] == [0] * 4 * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "much"}, "memory is 'much': give bytes above zero"),
        ({"memory": [1]}, r"memory is \[1\]: give one figure for all of the 2 lanes"),
        ({"optimizer": "adm"}, "optimizer is 'adm': give one of"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fxpipe.compile(Heavy(), ["cpu"] * 2, **options)
