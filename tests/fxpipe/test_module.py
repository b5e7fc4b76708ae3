"""As an nn.Module a pipeline is the model: parameters, states, modes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from tests.zoo import MLP, MODELS, ResNet, loop, loss_of, same

TWO = ["cpu", "cpu"]


def test_parameters_state_dict_and_modes_are_the_models():
    model = ResNet()
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        x = torch.randn(4, 3, 8, 8)
        pipe(x)
        names = [name for name, _ in pipe.named_parameters()]
        assert names == [name for name, _ in model.named_parameters()]
        assert all(p is q for p, q in zip(pipe.parameters(), model.parameters(), strict=True))
        assert list(pipe.state_dict()) == list(model.state_dict())
        pipe.eval()
        assert not model.training and not model.layers[0].bn1.training
        expected = torch.cat([model(part) for part in x.chunk(2)])
        assert same(pipe(x), expected)
        pipe.train()
        assert model.training and pipe.training
        count = model.stem[1].num_batches_tracked.item()
        pipe(x)
        assert model.stem[1].num_batches_tracked == count + 2


def test_an_optimizer_made_before_works_after():
    model, twin = MLP(), MLP()
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
    with fxpipe.compile(model, TWO, chunks=3) as pipe:
        for _ in range(3):
            x = torch.randn(6, 12)
            pipe.zero_grad()
            loss_of(pipe(x)).backward()
            loop(twin, (x,), 3)
            for optimizer in optimizers:
                optimizer.step()
            assert same(list(model.parameters()), list(twin.parameters()))


def test_a_state_dict_travels_both_ways_also_when_assigned():
    model, other = (MODELS["transformer"][0]() for _ in range(2))
    tokens = torch.randint(11, (4, 6))
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(tokens)
        for assign in False, True:
            other = MODELS["transformer"][0]()
            pipe.load_state_dict(other.state_dict(), strict=True, assign=assign)
            expected = torch.cat([other(part) for part in tokens.chunk(2)])
            assert same(pipe(tokens), expected)
            fresh = MODELS["transformer"][0]()
            fresh.load_state_dict(pipe.state_dict(), strict=True)


def test_dtypes_may_change_and_devices_may_not():
    model = MODELS["transformer"][0]()
    tokens = torch.randint(11, (4, 6))
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        pipe(tokens)
        assert pipe.double()(tokens).dtype == torch.float64
        with pytest.raises(RuntimeError, match="cannot be moved to meta: its stages are on cpu"):
            pipe.to("meta")
        assert pipe(tokens).dtype == torch.float64


class Named(MLP):
    """A parameter and a buffer that the graph holds by name."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(12))
        self.register_buffer("shift", torch.zeros(12))

    def forward(self, x):
        return super().forward(x) * self.gain + self.shift


def test_tensors_that_are_exchanged_are_seen_at_the_next_call():
    model, x = Named(), torch.randn(4, 12)
    with fxpipe.compile(model, TWO, chunks=2, example_inputs=(x,)) as pipe:
        new = {name: p.detach() * 2 for name, p in model.named_parameters()}
        expected = torch.func.functional_call(model, new, (x,))
        torch.testing.assert_close(torch.func.functional_call(pipe, new, (x,)), expected)
        torch.testing.assert_close(pipe(x), model(x))
        model.shift = torch.ones(12)
        model.gain = nn.Parameter(torch.full((12,), 3.0))
        torch.testing.assert_close(pipe(x), model(x))
        pipe(x).sum().backward()
        assert model.gain.grad is not None
        model.layers[0] = nn.Linear(12, 12)
        torch.testing.assert_close(pipe(x), model(x))


class WithNames(MLP):
    """Its attributes are called like those of a pipeline."""

    def __init__(self):
        super().__init__()
        self.chunks, self.step, self.stages = 5, 0, nn.ModuleList([nn.Linear(12, 12)])
        self.scale = 2.0

    def forward(self, x):
        return self.stages[0](super().forward(x)) * self.scale + self.chunks


def test_names_of_a_pipeline_are_the_pipelines_and_the_models_are_at_the_model():
    model, x = WithNames(), torch.randn(6, 12)
    with fxpipe.compile(model, TWO, chunks=3, example_inputs=(x,)) as pipe:
        assert pipe.chunks == 3 and pipe.module.chunks == 5
        assert len(pipe.stages) == 2 and pipe.module.stages is model.stages
        pipe.module.chunks = 7
        assert same(pipe(x), torch.cat([model(part) for part in x.chunk(3)]))


@pytest.mark.parametrize("name", ["chunks", "step", "stages", "graph", "losses", "module"])
def test_names_of_a_pipeline_cannot_be_set(name):
    model = WithNames()
    with fxpipe.compile(model, TWO) as pipe:
        before = getattr(model, name, None)
        with pytest.raises(AttributeError, match=f"'{name}' is a name of every Pipeline and"):
            setattr(pipe, name, before)
        assert getattr(model, name, None) is before
        pipe.scale, pipe.note, pipe._note = 3.0, "of the model", "of other code"
        assert model.scale == 3.0 and model.note == "of the model"
        assert pipe._note == "of other code" and not hasattr(model, "_note")


def test_where_to_set_a_name_of_a_pipeline_is_said():
    with fxpipe.compile(WithNames(), TWO) as pipe:
        with pytest.raises(AttributeError) as error:
            pipe.chunks = 4
        assert str(error.value) == (
            "'chunks' is a name of every Pipeline and cannot be set; the WithNames has a 'chunks' "
            "too: set pipe.module.chunks"
        )
        with pytest.raises(AttributeError, match=r"with the WithNames, set pipe\.module\.code$"):
            pipe.code = "x"


class KeepsPartsOfItsOwn(nn.Module):
    """Defines methods of ``nn.Module`` anew, and has an attribute, and another one, in its class
    only."""

    gain, calls = 1.0, 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def train(self, mode: bool = True) -> KeepsPartsOfItsOwn:
        super().train(mode)
        self.norm.eval()
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.last.parameters(recurse)

    @property
    def twice(self) -> float:
        return self.gain / 2

    @twice.setter
    def twice(self, value: float) -> None:
        self.gain = value * 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.norm(self.first(x))) * self.gain
        return -x if getattr(self, "is_negative", False) else x


def test_methods_that_a_model_defines_anew_are_called() -> None:
    model, roots = KeepsPartsOfItsOwn(), []
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        assert pipe.train() is pipe and model.training and not model.norm.training
        pipe(torch.randn(4, 4))
        assert model.norm.running_mean.count_nonzero() == 0
        assert all(p is q for p, q in zip(pipe.parameters(), model.last.parameters(), strict=True))
        assert pipe.apply(roots.append) is pipe and roots[-1] is model


@pytest.mark.parametrize("name, value", [("gain", 3.0), ("twice", 3.0), ("is_negative", True)])
def test_an_attribute_that_is_set_at_the_pipeline_is_the_models(name: str, value: object) -> None:
    """It may be in the model's class so far, be a property, or be nowhere yet."""
    model, x = KeepsPartsOfItsOwn().eval(), torch.randn(4, 4)
    with fxpipe.compile(model, TWO, chunks=2) as pipe:
        before = pipe(x)
        setattr(pipe, name, value)
        assert getattr(model, name) == getattr(pipe, name) == value
        after = pipe(x)
        assert not same(after, before)
        assert same(after, torch.cat([model(part) for part in x.chunk(2)]))


class Seq2Seq(MLP):
    """A model with a method that a data collator of transformers looks for, and another one."""

    def prepare_decoder_input_ids_from_labels(self, labels):
        return labels.roll(1, -1)

    def save_pretrained(self, path):
        raise NotImplementedError


def test_other_code_sees_the_name_and_the_helpers_of_the_model():
    # transformers.Trainer knows by the name whether labels have to be shifted, and
    # DataCollatorForSeq2Seq asks for the method, and leaves the decoder's inputs out without it.
    pipe = fxpipe.compile(Seq2Seq(), TWO, chunks=2)
    assert pipe._get_name() == "Seq2Seq" and repr(pipe).startswith("Pipeline(")
    labels = torch.tensor([[1, 2, 3]])
    assert same(pipe.prepare_decoder_input_ids_from_labels(labels), torch.tensor([[3, 1, 2]]))
    assert not hasattr(pipe, "save_pretrained"), "it would save a model whose stages are elsewhere"
