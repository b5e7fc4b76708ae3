"""Models of real size for the benchmarks, each with a mini-batch of so many rows.

Made under ``torch.device("meta")``, models and mini-batches take no memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.nets import UNet

Made = tuple[nn.Module, dict[str, Any]]


def tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    """Numbers of random tokens."""
    return torch.randint(vocabulary, (rows, length))


def gpt2(rows: int, length: int = 1024) -> Made:
    """GPT-2 small, of 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return GPT2LMHeadModel(config), {"input_ids": tokens(rows, length, config.vocab_size)}


def vit_l16(rows: int) -> Made:
    """ViT-L/16, of 304 million parameters, and pictures of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(rows, 3, 224, 224)}


def resnet152(rows: int) -> Made:
    """ResNet-152, of 60 million parameters, and pictures of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[3, 8, 36, 3])
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(rows, 3, 224, 224)}


def unet(rows: int) -> Made:
    """The U-Net of torchgpipe's benchmarks, with B = 5 and C = 64, and pictures of 192 x 192."""
    return UNet(5, 64), {"x": torch.randn(rows, 3, 192, 192)}


def llama_1b(rows: int, length: int = 2048, tied: bool = False) -> Made:
    """A Llama of the shape of Llama 3.2 1B, in bfloat16; ``tied``: its head is the embedding's
    weight, as that model's is."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    return _llama(rows, length, num_attention_heads=32, tie_word_embeddings=tied, **shape)


def llama_70b(rows: int, length: int = 4096) -> Made:
    """A Llama of the shape of Llama 3 70B, in bfloat16."""
    shape = {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
    return _llama(rows, length, num_attention_heads=64, max_position_embeddings=8192, **shape)


def _llama(rows: int, length: int, **shape: Any) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, num_key_value_heads=8, use_cache=False, dtype="bfloat16", **shape
    )
    ids = tokens(rows, length, config.vocab_size)
    return LlamaForCausalLM(config).bfloat16(), {"input_ids": ids}


def t5(rows: int, length: int = 512) -> Made:
    """A T5 of the shape of T5 base."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, use_cache=False)
    ids = tokens(rows, length, config.vocab_size)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "decoder_input_ids": ids}


def mixtral(rows: int, length: int = 1024) -> Made:
    """A Mixtral of eight layers with eight experts each, in bfloat16."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        use_cache=False,
        dtype="bfloat16",
    )
    ids = tokens(rows, length, config.vocab_size)
    return MixtralForCausalLM(config).bfloat16(), {"input_ids": ids}
