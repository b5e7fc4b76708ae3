"""Where parameters and buffers live."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import fxpipe
from fxpipe.compiler.placement import homes_of
from fxpipe.ir.graph import stages_of
from passes import PartitionError
from tests.zoo import MODELS, gradients, mean_loss, outputs_of_loop, same


def test_every_parameter_and_buffer_lives_on_the_device_of_its_stage():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.gain, self.unused = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
            self.register_buffer("shift", torch.zeros(4))

        def forward(self, x):
            return self.b(self.norm(self.a(x)) * self.gain) + self.shift

    model = Model()
    pipe = fxpipe.compile(
        model, ["cpu", "cpu"], partition=["norm"], example_inputs=(torch.ones(4, 4),), chunks=2
    )
    homes = homes_of(stages_of(pipe.stage_graph), [torch.device("cpu"), torch.device("cuda:0")])
    tensors = (*model.named_parameters(), *model.named_buffers())
    where = {name: str(homes.get(id(tensor))) for name, tensor in tensors}
    assert {name for name, device in where.items() if device == "cpu"} == {"a.weight", "a.bias"}
    assert where["unused.weight"] == where["unused.bias"] == "None", "they stay where they are"
    assert where["gain"] == where["shift"] == where["norm.running_mean"] == "cuda:0"


# Another name of the one device that there is: tensors are never there, and are brought.
TWO = ["cpu", "cpu:0"]


def test_a_buffer_that_stages_on_two_devices_read_is_on_both_and_remains_the_models():
    model = MODELS["transformer"][0]()
    x = torch.randint(11, (2, 6))
    with fxpipe.compile(model, TWO, chunks=2) as pipe, torch.no_grad():
        pipe(x)
        own = [dict(stage.module.named_buffers()) for stage in pipe.stages]
        assert model.mask is own[0]["mask"] and model.mask is not own[1]["mask"]
        assert torch.equal(own[0]["mask"], own[1]["mask"])
        again = dict(pipe.stages[1].module.named_buffers())["mask"]
        pipe(x)
        assert again is dict(pipe.stages[1].module.named_buffers())["mask"], "brought once"
        assert same(pipe(x), torch.cat(outputs_of_loop(model, (x,), 2)))
        for change in (
            lambda: model.mask.fill_(0.5),
            lambda: setattr(model, "mask", torch.zeros_like(model.mask)),
            lambda: model.load_state_dict(model.state_dict() | {"mask": model.mask + 0.25}),
        ):
            before = pipe(x)
            change()
            assert same(pipe(x), torch.cat(outputs_of_loop(model, (x,), 2)))
            assert not same(pipe(x), before)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb_h1"},
        {"schedule": "1f1b", "checkpoint": "always", "checkpoint_segments": 2},
        {"schedule": "zbv", "checkpoint": "always", "checkpoint_segments": 2},
    ],
    ids=["backward in halves", "segments", "both"],
)
def test_what_a_pass_makes_of_a_stage_reads_the_replicas_of_the_stage(options):
    """Such as a stage whose backward runs in halves, or a segment. Each time the model's buffer is
    another one, they read the new values."""
    model = MODELS["transformer"][0]()
    x, target = torch.randint(11, (4, 6)), torch.randn(4)
    with fxpipe.compile(model, TWO, chunks=2, loss_fn=mean_loss, **options) as pipe:
        pipe.step(x, target=target)
        made = [(p, m) for p, m in pipe.step_graph.named_children() if isinstance(m, GraphModule)]
        own = {f"stage_{stage.index}": stage.module for stage in pipe.stages}
        assert dict(made).keys() - own.keys()
        for path, graph in made:
            if any(node.target == "mask" for node in graph.graph.find_nodes(op="get_attr")):
                assert graph.mask is own[path[: len("stage_0")]].mask
        for change in (
            lambda: model.mask.fill_(0.5),
            lambda: setattr(model, "mask", torch.zeros_like(model.mask)),
        ):
            change()
            model.zero_grad()
            found = [pipe.step(x, target=target), *gradients(model)]
            model.zero_grad()
            pairs = zip(x.chunk(2), target.chunk(2), strict=True)
            losses = [mean_loss(model(a), b) / 2 for a, b in pairs]
            sum(losses).backward()
            assert same(found, [sum(losses).detach(), *gradients(model)])


def test_a_module_with_buffers_that_is_called_on_two_devices_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4, affine=False).eval()

        def forward(self, x):
            return self.norm(self.b(self.norm(self.a(x))))

    with pytest.raises(
        PartitionError, match=r"norm\.running_mean is of a module that is called by"
    ):
        fxpipe.compile(Model().eval(), TWO, partition=["b"], example_inputs=(torch.ones(4, 4),))


def test_parameters_of_one_memory_are_not_copied_to_two_devices():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight.data = model[0].weight.data
    inputs = {"example_inputs": (torch.ones(4, 4),)}
    with pytest.raises(PartitionError, match=r"0\.weight and 2\.weight share one memory, and get "):
        fxpipe.compile(model, TWO, partition=["2"], **inputs)
    fxpipe.compile(model, TWO, partition=["2"], training=False, **inputs).close()
    model[2].weight = model[0].weight
    fxpipe.compile(model, TWO, partition=["2"], **inputs).close()


def test_masks_of_one_memory_may_be_copied_to_two_devices():
    class Masked(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", mask)

        def forward(self, x):
            return self.layer(x) * self.mask

    mask = torch.ones(2, 4)
    model, x = (
        nn.Sequential(Masked(mask[0]), Masked(mask[:1]), Masked(mask[0, :])),
        torch.ones(4, 4),
    )
    with fxpipe.compile(model, TWO, chunks=2, partition=["1"]) as pipe, torch.no_grad():
        assert same(pipe(x), torch.cat(outputs_of_loop(model, (x,), 2)))
