"""Graphs of models of transformers, as :func:`fxpipe.compile` makes them on lanes of the CPU. They
have a tied weight, a value that all layers of a decoder use, and running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

import fxpipe

Made = tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]]]


def gpt2() -> Made:
    """GPT-2, whose head is the embedding's weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=4, n_head=2)
    return GPT2LMHeadModel(config), lambda batch: _tokens(batch, "input_ids", "labels")


def t5() -> Made:
    """T5, whose decoder uses the encoder's result in each of its layers."""
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=31, decoder_start_token_id=0, use_cache=False, **small)
    return T5ForConditionalGeneration(config), lambda batch: _tokens(batch, "input_ids", "labels")


def resnet() -> Made:
    """A ResNet with its batch norms."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], num_labels=2)
    return ResNetForImageClassification(config), lambda batch: {
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": torch.randint(2, (batch,)),
    }


def _tokens(batch: int, *names: str) -> dict[str, torch.Tensor]:
    return dict.fromkeys(names, torch.randint(31, (batch, 6)))


MODELS: dict[str, Callable[[], Made]] = {"GPT-2": gpt2, "T5": t5, "ResNet": resnet}


def _compiled(name: str, chunks: int, lanes: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    pipe = fxpipe.compile(
        model, ["cpu"] * lanes, chunks=chunks, deferred_batch_norm=True, **options
    )
    return pipe, batch(2 * chunks)


def pipeline_graph(name: str, checkpoint: str, segments: int) -> fx.GraphModule:
    """The pipeline graph of a model on four lanes."""
    options = {"checkpoint": checkpoint, "checkpoint_segments": segments}
    pipe, batch = _compiled(name, 3, 4, **options)
    with pipe:
        pipe.prepare(**batch)
        return pipe.graph_module


def step_graph(
    name: str, schedule: str, checkpoint: str, segments: int, chunks: int, lanes: int
) -> fx.GraphModule:
    """The step graph of a model in four stages, with its optimizer."""
    options = {"checkpoint": checkpoint, "checkpoint_segments": segments}
    pipe, batch = _compiled(name, chunks, lanes, stages=4, schedule=schedule, **options)
    with pipe:
        pipe.step(**batch, optimizer=torch.optim.SGD(pipe.parameters(), 0.1))
        return pipe.step_graph
