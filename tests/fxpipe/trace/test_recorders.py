"""Hooks that record what a model gives are part of it; other hooks look at it from outside."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.trace import trace
from tests.fxpipe.trace.small import BOTH, run, x
from tests.zoo import same


class Recorded(nn.Module):
    """Gives what its layers have given, by hooks on them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.seen: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(self.record)

    def record(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layers(x)
        seen = tuple(self.seen)
        self.seen.clear()
        if len(seen) != len(self.layers):
            raise ValueError("nobody has recorded")
        return y.tanh(), *seen


class Optional(Recorded):
    """Runs without its hooks too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layers(x)
        seen = tuple(self.seen)
        self.seen.clear()
        return y.tanh(), *seen


class Lazy(Optional):
    """Puts the hooks on its layers when it is called first, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer._forward_hooks.clear()
        self.is_hooked = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if not self.is_hooked:
            for layer in self.layers:
                layer.register_forward_hook(self.record)
            self.is_hooked = True
        return super().forward(x)


@pytest.mark.covering(1)
@BOTH
@pytest.mark.parametrize("called_first", [False, True])
@pytest.mark.parametrize("kind", [Recorded, Optional, Lazy])
def test_what_hooks_record_is_part_of_the_output(
    tracer: str, called_first: bool, kind: type[nn.Module]
) -> None:
    model = kind()
    if called_first:
        model(x())
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer) as pipe:
        for _ in range(2):
            found = pipe(x(6))
            parts = [model(part) for part in x(6).chunk(2)]
            wanted = [torch.cat(each) for each in zip(*parts, strict=True)]
            assert len(found) == 5
            assert same([y.detach() for y in found], [y.detach() for y in wanted])
        found[2].sum().backward()
        assert model.layers[1].weight.grad is not None and model.layers[2].weight.grad is None
    assert model.seen == []


class Two(nn.Module):
    """Two modules that put hooks on their layers, each with a flag that says whether it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Lazy(), Lazy()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, *seen = self.first(x)
        return (*self.second(y), *seen)


def test_flags_that_say_that_hooks_are_there_keep_no_module_whole() -> None:
    """A flag alone, where the other module has its hooks already, is a state that no call finds."""
    model = Two()
    traced = trace(model, (x(),), tracer="export")
    names = {str(node.target) for node in traced.graph_module.graph.nodes}
    assert {"first.layers.0.weight", "second.layers.0.weight"} <= names
    assert same(run(traced, x(3)), model(x(3)))


@BOTH
def test_hooks_that_only_look_are_not_called_while_the_model_is_compiled(tracer: str) -> None:
    model, looked = Recorded(), []
    model.layers[1].register_forward_hook(lambda *_: looked.append("called"))
    with pytest.warns(UserWarning, match=r"hooks on 'layers.1' .*will not be called"):
        traced = trace(model, (x(),), tracer=tracer)
    assert looked == []
    assert same(run(traced, x(3)), model(x(3)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asked_before", [True, False])
def test_hidden_states_of_transformers_whether_or_not_they_have_been_asked_for_before(
    asked_before: bool,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(32, (4, 8))
    model = transformers.GPT2LMHeadModel(config).eval()
    if asked_before:
        model(ids, output_hidden_states=True, output_attentions=True)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        found = pipe(ids, output_hidden_states=True, output_attentions=True)
        wanted = model(ids, output_hidden_states=True, output_attentions=True)
        assert len(found.hidden_states) == 3 and len(found.attentions) == 2
        torch.testing.assert_close(found.hidden_states, wanted.hidden_states)
        torch.testing.assert_close(found.attentions, wanted.attentions)
        assert pipe(ids).hidden_states is None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("called_before", [True, False])
def test_a_depth_estimator_which_reads_what_has_been_recorded_of_its_backbone(
    called_before: bool,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DPTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=8, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False,
    )  # fmt: skip
    pixels = torch.randn(4, 3, 32, 32)
    model = transformers.DPTForDepthEstimation(config).eval()
    if called_before:
        model(pixels)
    with fxpipe.compile(model, ["cpu"] * 2, chunks=2) as pipe:
        found = pipe(pixels).predicted_depth
        wanted = torch.cat([model(part).predicted_depth for part in pixels.chunk(2)])
        torch.testing.assert_close(found, wanted)


class Gated(nn.Module):
    """Inner modules with hooks that change what these are given, and what they give."""

    def __init__(self, kept_whole: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = Branching() if kept_whole else nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


class Branching(nn.Module):
    """Goes another way for other values, so that it is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.abs().sum() > 0 else x


def halve(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] / 2,)


def halve_with_kwargs(
    _: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor], dict[str, Any]]:
    return (args[0] / 2,), kwargs


def double(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2 + 1


def double_with_kwargs(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output * 2 + 1


HOOKS = {
    "pre": lambda module: module.register_forward_pre_hook(halve),
    "pre_kwargs": lambda module: module.register_forward_pre_hook(
        halve_with_kwargs, with_kwargs=True
    ),
    "forward": lambda module: module.register_forward_hook(double),
    "forward_kwargs": lambda module: module.register_forward_hook(
        double_with_kwargs, with_kwargs=True
    ),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kept_whole", [False, True])
@pytest.mark.parametrize("tracer", ["auto", "export"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_changes_what_a_module_gives_is_part_of_the_model(
    kind: str, tracer: str, kept_whole: bool
) -> None:
    model, x = Gated(kept_whole).eval(), torch.randn(4, 8)
    HOOKS[kind](model.gate)
    HOOKS[kind](model.first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*stages can be at most")
        pipe = fxpipe.compile(model, ["cpu"] * 2, chunks=2, tracer=tracer, example_inputs=(x,))
    y = torch.cat([model(part) for part in x.chunk(2)])
    torch.testing.assert_close(pipe(x), y)
