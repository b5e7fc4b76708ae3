"""The models that the zoo compiles: real ones, from three libraries, made small.

An entry says how to build a model with random weights and how to make a batch for it. Nothing else
is done to a model but that its dropout is off, so that two ways to run it can be compared. The
configurations are the libraries' own but for sizes; caches, attention kernels and what is returned
are left as they are by default.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    name: str
    library: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    """The keyword arguments of one call, for a batch of that size."""
    options: dict[str, Any] = field(default_factory=dict)
    """What ``fxpipe.compile`` has to be told besides."""
    fast: bool = False
    """Whether it is compiled in every test run."""
    warm: bool = False
    """Whether it has to be called once in either mode ahead of being compiled."""


ENTRIES: list[Entry] = []


def entries() -> dict[str, Entry]:
    """All of them by name."""
    named = {entry.name: entry for entry in ENTRIES}
    assert len(named) == len(ENTRIES), "two models of one name"
    return named


# ------------------------------------------------------------------------------------------ inputs

VOCABULARY, LENGTH, IMAGE = 64, 8, 32


def tokens(batch: int) -> dict[str, Tensor]:
    """Token ids, and a mask: the last rows are padded at their end."""
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[batch // 2 :, -2:] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)), "attention_mask": mask}


def ids(batch: int) -> dict[str, Tensor]:
    """Token ids alone."""
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH))}


def labelled(batch: int) -> dict[str, Tensor]:
    """Token ids which are to be predicted, so that the model returns its loss."""
    given = tokens(batch)
    return {**given, "labels": given["input_ids"]}


def translated(batch: int) -> dict[str, Tensor]:
    """Token ids for an encoder, and others for its decoder."""
    return {**tokens(batch), "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH - 2))}


def pixels(batch: int) -> dict[str, Tensor]:
    """Images, as transformers names them."""
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE)}


def pictures_and_text(batch: int) -> dict[str, Tensor]:
    """Images with a text for each."""
    return {**tokens(batch), **pixels(batch)}


def sound(batch: int) -> dict[str, Tensor]:
    """Samples of a wave."""
    return {"input_values": torch.randn(batch, 400)}


def tensors(**shapes: tuple[int, ...]) -> Inputs:
    """Noise: for each argument a tensor of the shape, ahead of which stands the batch."""
    return lambda batch: {name: torch.randn(batch, *shape) for name, shape in shapes.items()}


def with_time(**shapes: tuple[int, ...]) -> Inputs:
    """Noise, and for each row a timestep of a diffusion."""
    return lambda batch: {
        **tensors(**shapes)(batch),
        "timestep": torch.randint(1000, (batch,)),
    }


# ----------------------------------------------------------------------------------------- building


def without_dropout(config: Any) -> None:
    """No randomness in the training of a Hugging Face model, nor of models within it."""
    for key, value in vars(config).items():
        if hasattr(value, "model_type"):
            without_dropout(value)
        elif isinstance(value, float) and any(word in key for word in ("drop", "jitter")):
            setattr(config, key, 0.0)
        elif isinstance(value, float) and key.startswith("mask_") and key.endswith("_prob"):
            setattr(config, key, 0.0)  # SpecAugment


def transformer(
    family: str,
    name: str,
    inputs: Inputs,
    fast: bool = False,
    options: dict[str, Any] | None = None,
    warm: bool = False,
    **sizes: Any,
) -> None:
    """A model from transformers, by the name of its class."""

    def build() -> nn.Module:
        kind = getattr(importlib.import_module("transformers"), name)
        config = kind.config_class(**sizes)
        without_dropout(config)
        return kind(config)

    ENTRIES.append(Entry(name, "transformers", family, build, inputs, options or {}, fast, warm))


def of(
    library: str,
    family: str,
    name: str,
    inputs: Inputs,
    kind: str | None = None,
    fast: bool = False,
    **sizes: Any,
) -> None:
    """A model from diffusers or monai, by the name of its class or a name of its own."""
    home = {"monai": "monai.networks.nets"}.get(library, library)

    def build() -> nn.Module:
        model = getattr(importlib.import_module(home), kind or name)(**sizes)
        for module in model.modules():
            for key, value in vars(module).items():
                if isinstance(value, float) and (key == "p" or "drop" in key):
                    setattr(module, key, 0.0)
        return model

    ENTRIES.append(Entry(name, library, family, build, inputs, fast=fast))


# --------------------------------------------------------------------------- transformers: encoders

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

transformer("encoder", "BertForMaskedLM", labelled, fast=True, **TEXT)
transformer("encoder", "RobertaForMaskedLM", labelled, **TEXT)
transformer("encoder", "AlbertForMaskedLM", labelled, **TEXT, embedding_size=16)
transformer("encoder", "DistilBertForMaskedLM", labelled, **TEXT | {"intermediate_size": None})
transformer("encoder", "ElectraForPreTraining", tokens, **TEXT, embedding_size=16)
transformer(
    "encoder",
    "DebertaForMaskedLM",
    labelled,
    **TEXT,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    type_vocab_size=0,
)
transformer(
    "encoder",
    "DebertaV2ForMaskedLM",
    labelled,
    **TEXT,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    type_vocab_size=0,
)
transformer("encoder", "MPNetForMaskedLM", labelled, **TEXT)
transformer("encoder", "ModernBertForMaskedLM", labelled, **TEXT)
transformer("encoder", "XLMRobertaModel", tokens, **TEXT)
transformer("encoder", "FNetForMaskedLM", ids, **TEXT)
transformer("encoder", "LongformerForMaskedLM", tokens, **TEXT, attention_window=4)
transformer("encoder", "EsmForMaskedLM", tokens, **TEXT, mask_token_id=3)

# --------------------------------------------------------------------------- transformers: decoders

CAUSAL = TEXT | {"num_key_value_heads": 2}

transformer("decoder", "GPT2LMHeadModel", labelled, fast=True, **TEXT | {"intermediate_size": None})
transformer(
    "decoder",
    "GPTNeoForCausalLM",
    labelled,
    **TEXT,
    attention_types=[[["global", "local"], 2]],
    window_size=4,
)
transformer("decoder", "GPTNeoXForCausalLM", labelled, **TEXT)
transformer(
    "decoder", "GPTJForCausalLM", labelled, **TEXT | {"intermediate_size": None}, rotary_dim=4
)
transformer("decoder", "GPTBigCodeForCausalLM", labelled, **TEXT | {"intermediate_size": None})
transformer(
    "decoder", "CodeGenForCausalLM", labelled, **TEXT | {"intermediate_size": None}, rotary_dim=4
)
transformer("decoder", "OPTForCausalLM", labelled, **TEXT, ffn_dim=64, word_embed_proj_dim=32)
transformer("decoder", "BloomForCausalLM", labelled, **TEXT)
transformer("decoder", "LlamaForCausalLM", labelled, fast=True, **CAUSAL)
transformer("decoder", "Qwen2ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "Qwen3ForCausalLM", labelled, **CAUSAL, head_dim=8)
transformer("decoder", "MistralForCausalLM", labelled, **CAUSAL, sliding_window=4)
transformer("decoder", "GemmaForCausalLM", labelled, **CAUSAL, head_dim=8)
transformer("decoder", "Gemma2ForCausalLM", labelled, **CAUSAL, head_dim=8, sliding_window=4)
transformer("decoder", "Gemma3ForCausalLM", labelled, **CAUSAL, head_dim=8, sliding_window=4)
transformer("decoder", "PhiForCausalLM", labelled, **TEXT)
transformer("decoder", "Phi3ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "StableLmForCausalLM", labelled, **CAUSAL)
transformer("decoder", "FalconForCausalLM", labelled, **TEXT)
transformer("decoder", "OlmoForCausalLM", labelled, **CAUSAL)
transformer("decoder", "Olmo2ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "GraniteForCausalLM", labelled, **CAUSAL)
transformer("decoder", "CohereForCausalLM", labelled, **CAUSAL)
transformer("decoder", "Starcoder2ForCausalLM", labelled, **CAUSAL)
transformer("decoder", "SmolLM3ForCausalLM", labelled, **CAUSAL)

# -------------------------------------------------------------------- transformers: encoder-decoder

PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}

transformer("encoder-decoder", "T5ForConditionalGeneration", labelled, fast=True, **T5)
transformer(
    "encoder-decoder",
    "MT5ForConditionalGeneration",
    translated,
    **T5,
    feed_forward_proj="gated-gelu",
)
transformer("encoder-decoder", "BartForConditionalGeneration", labelled, **PAIR)
transformer("encoder-decoder", "PegasusForConditionalGeneration", labelled, **PAIR)
transformer("encoder-decoder", "MBartForConditionalGeneration", labelled, **PAIR)
transformer("encoder-decoder", "MarianMTModel", translated, **PAIR)
transformer("encoder-decoder", "M2M100ForConditionalGeneration", translated, **PAIR)
transformer(
    "encoder-decoder",
    "ProphetNetForConditionalGeneration",
    translated,
    **{
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "encoder_ffn_dim": 64,
        "num_encoder_layers": 2,
        "num_encoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 32,
    },
)

# -------------------------------------------------------- transformers: mixtures, and state spaces

EXPERTS = CAUSAL | {"num_experts_per_tok": 2}

transformer("mixture of experts", "MixtralForCausalLM", labelled, **EXPERTS, num_local_experts=4)
transformer(
    "mixture of experts",
    "Qwen2MoeForCausalLM",
    labelled,
    **EXPERTS,
    num_experts=4,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
transformer(
    "mixture of experts",
    "Qwen3MoeForCausalLM",
    labelled,
    **EXPERTS,
    num_experts=4,
    moe_intermediate_size=16,
    head_dim=8,
)
transformer("mixture of experts", "OlmoeForCausalLM", labelled, **EXPERTS, num_experts=4)
transformer("mixture of experts", "GraniteMoeForCausalLM", labelled, **EXPERTS, num_local_experts=4)
transformer("mixture of experts", "PhimoeForCausalLM", labelled, **EXPERTS, num_local_experts=4)
transformer(
    "mixture of experts",
    "GptOssForCausalLM",
    labelled,
    **EXPERTS,
    num_local_experts=4,
    head_dim=8,
    sliding_window=4,
)
transformer(
    "mixture of experts",
    "SwitchTransformersForConditionalGeneration",
    translated,
    **T5,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
)
transformer("state space", "MambaForCausalLM", ids, **TEXT, state_size=4)
transformer(
    "state space",
    "Mamba2ForCausalLM",
    ids,
    **TEXT,
    state_size=8,
    num_heads=4,
    head_dim=16,
    n_groups=2,
)
transformer("state space", "FalconMambaForCausalLM", ids, **TEXT, state_size=4)
transformer(
    "state space",
    "RwkvForCausalLM",
    ids,
    warm=True,  # it scales its weights
    **TEXT,
    attention_hidden_size=32,
    use_cache=False,  # into which it writes, so that with it there is no backward in eval mode
)
transformer("state space", "RecurrentGemmaForCausalLM", labelled, **CAUSAL, lru_width=32)

# ---------------------------------------------------------------------- transformers: vision, audio

VISION = {
    "image_size": IMAGE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}

transformer("vision", "ViTForImageClassification", pixels, fast=True, **VISION)
transformer("vision", "DeiTForImageClassification", pixels, **VISION)
transformer("vision", "BeitForImageClassification", pixels, **VISION)
transformer("vision", "Dinov2ForImageClassification", pixels, **VISION)
transformer(
    "vision",
    "ViTMAEForPreTraining",
    lambda batch: {**pixels(batch), "noise": torch.rand(batch, 16)},
    **VISION,
    decoder_hidden_size=32,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=4,
    decoder_intermediate_size=64,
)
transformer(
    "vision",
    "SwinForImageClassification",
    pixels,
    image_size=IMAGE,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 2],
    window_size=4,
)
transformer(
    "vision",
    "ConvNextForImageClassification",
    pixels,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 2, 1],
)
transformer(
    "vision",
    "ResNetForImageClassification",
    pixels,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
)
transformer(
    "vision",
    "SegformerForSemanticSegmentation",
    pixels,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    decoder_hidden_size=16,
    num_attention_heads=[1, 2, 2, 4],
)
transformer(
    "vision",
    "MobileViTForImageClassification",
    pixels,
    image_size=IMAGE,
    hidden_sizes=[16, 16, 16],
    neck_hidden_sizes=[8, 8, 8, 8, 16, 16, 16],
    num_attention_heads=2,
)
transformer(
    "vision",
    "RegNetForImageClassification",
    pixels,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    groups_width=8,
)
transformer(
    "vision",
    "DPTForDepthEstimation",
    pixels,
    **VISION,
    neck_hidden_sizes=[8, 8, 8, 8],
    fusion_hidden_size=8,
    backbone_out_indices=[0, 1, 2, 3],
)

transformer("text and vision", "CLIPTextModel", tokens, **TEXT)
transformer("text and vision", "CLIPVisionModel", pixels, **VISION)
transformer("text and vision", "SiglipVisionModel", pixels, **VISION)
for name in "CLIPModel", "SiglipModel":
    transformer(
        "text and vision",
        name,
        pictures_and_text,
        # every image with every text, of a micro-batch
        options={"out_dims": {"logits_per_image": 0, "logits_per_text": 0}},
        text_config={**TEXT, "num_hidden_layers": 2},
        vision_config={**VISION, "num_hidden_layers": 2},
    )
transformer(
    "text and vision",
    "BlipForImageTextRetrieval",
    pictures_and_text,
    text_config={**TEXT, "num_hidden_layers": 2, "encoder_hidden_size": 32},
    vision_config={**VISION, "num_hidden_layers": 2},
)

WAVE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
transformer("audio", "Wav2Vec2Model", sound, **WAVE)
transformer("audio", "Wav2Vec2ForCTC", sound, **WAVE)
transformer("audio", "HubertModel", sound, **WAVE)
transformer("audio", "WavLMModel", sound, **WAVE)
transformer("audio", "UniSpeechModel", sound, **WAVE)
transformer(
    "audio",
    "WhisperForConditionalGeneration",
    lambda batch: {
        "input_features": torch.randn(batch, 8, 32),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (batch, LENGTH)),
    },
    **PAIR,
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=16,
)
transformer(
    "audio",
    "ASTForAudioClassification",
    lambda batch: {"input_values": torch.randn(batch, 24, 16)},
    **{k: v for k, v in VISION.items() if k != "image_size"} | {"patch_size": 2},
    max_length=24,
    num_mel_bins=16,
)
transformer("audio", "SEWModel", sound, **WAVE, squeeze_factor=1)

# --------------------------------------------------------------------------------------- diffusers

UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
PICTURE = (4, 16, 16)

of(
    "diffusers",
    "U-Net",
    "UNet2DModel",
    with_time(sample=(3, 16, 16)),
    **UNET,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
    fast=True,
)
of(
    "diffusers",
    "U-Net",
    "UNet2DConditionModel",
    with_time(sample=PICTURE, encoder_hidden_states=(5, 16)),
    **UNET,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=16,
    attention_head_dim=4,
)
of(
    "diffusers",
    "U-Net",
    "UNet1DModel",
    with_time(sample=(2, 32)),
    sample_size=32,
    block_out_channels=(32, 32),
    extra_in_channels=64,
    norm_num_groups=8,
    down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
    up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
)
of(
    "diffusers",
    "U-Net",
    "UNet3DConditionModel",
    with_time(sample=(4, 2, 16, 16), encoder_hidden_states=(5, 16)),
    **UNET,
    down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
    up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    cross_attention_dim=16,
    attention_head_dim=4,
)
of(
    "diffusers",
    "U-Net",
    "UVit2DModel",
    lambda batch: {
        "input_ids": torch.randint(16, (batch, 8, 8)),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "pooled_text_emb": torch.randn(batch, 16),
        "micro_conds": torch.rand(batch, 5),
    },
    hidden_size=32,
    cond_embed_dim=16,
    micro_cond_encode_dim=2,
    micro_cond_embed_dim=10,
    encoder_hidden_size=16,
    vocab_size=17,
    codebook_size=16,
    in_channels=16,
    block_out_channels=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    block_num_heads=2,
    sample_size=8,
)

AUTOENCODER = {
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
of("diffusers", "autoencoder", "AutoencoderKL", tensors(sample=(3, 16, 16)), **AUTOENCODER)
of(
    "diffusers",
    "autoencoder",
    "VQModel",
    tensors(sample=(3, 16, 16)),
    **AUTOENCODER,
    num_vq_embeddings=16,
)
of(
    "diffusers",
    "autoencoder",
    "AutoencoderTiny",
    tensors(sample=(3, 16, 16)),
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    num_encoder_blocks=(1, 2),
    num_decoder_blocks=(2, 1),
)
of(
    "diffusers",
    "autoencoder",
    "AutoencoderDC",
    tensors(sample=(3, 16, 16)),
    in_channels=3,
    latent_channels=4,
    attention_head_dim=2,
    encoder_block_types=("ResBlock", "EfficientViTBlock"),
    decoder_block_types=("ResBlock", "EfficientViTBlock"),
    encoder_block_out_channels=(8, 8),
    decoder_block_out_channels=(8, 8),
    encoder_qkv_multiscales=((), (5,)),
    decoder_qkv_multiscales=((), (5,)),
    encoder_layers_per_block=(1, 1),
    decoder_layers_per_block=(1, 1),
    downsample_block_type="conv",
    upsample_block_type="interpolate",
    decoder_norm_types="rms_norm",
    decoder_act_fns="silu",
)

DIT = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "sample_size": 16,
    "patch_size": 4,
    "num_layers": 2,
}
of(
    "diffusers",
    "diffusion transformer",
    "DiTTransformer2DModel",
    lambda batch: {
        **with_time(hidden_states=PICTURE)(batch),
        "class_labels": torch.randint(10, (batch,)),
    },
    **DIT | {"num_layers": 4},
    in_channels=4,
    norm_num_groups=4,
)
of(
    "diffusers",
    "diffusion transformer",
    "PixArtTransformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16)),
    **DIT,
    in_channels=4,
    cross_attention_dim=32,
    caption_channels=16,
    norm_num_groups=4,
    use_additional_conditions=False,
)
of(
    "diffusers",
    "diffusion transformer",
    "SD3Transformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16), pooled_projections=(16,)),
    **DIT,
    in_channels=4,
    out_channels=4,
    joint_attention_dim=16,
    caption_projection_dim=32,
    pooled_projection_dim=16,
    pos_embed_max_size=8,
)
of(
    "diffusers",
    "diffusion transformer",
    "FluxTransformer2DModel",
    lambda batch: {
        **with_time(hidden_states=(16, 4), encoder_hidden_states=(5, 16), pooled_projections=(16,))(
            batch
        ),
        "timestep": torch.rand(batch),
        "img_ids": torch.arange(48.0).view(16, 3) % 4,
        "txt_ids": torch.zeros(5, 3),
    },
    patch_size=1,
    in_channels=4,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=16,
    pooled_projection_dim=16,
    axes_dims_rope=(2, 2, 4),
)
of(
    "diffusers",
    "diffusion transformer",
    "AuraFlowTransformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16)),
    sample_size=16,
    patch_size=4,
    in_channels=4,
    num_mmdit_layers=2,
    num_single_dit_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=16,
    caption_projection_dim=32,
    out_channels=4,
    pos_embed_max_size=16,
)
of(
    "diffusers",
    "diffusion transformer",
    "SanaTransformer2DModel",
    with_time(hidden_states=PICTURE, encoder_hidden_states=(5, 16)),
    in_channels=4,
    out_channels=4,
    num_attention_heads=4,
    attention_head_dim=8,
    num_layers=2,
    num_cross_attention_heads=4,
    cross_attention_head_dim=8,
    cross_attention_dim=32,
    caption_channels=16,
    sample_size=16,
)
of(
    "diffusers",
    "diffusion transformer",
    "HunyuanDiT2DModel",
    lambda batch: {
        **with_time(
            hidden_states=PICTURE, encoder_hidden_states=(5, 16), encoder_hidden_states_t5=(5, 16)
        )(batch),
        "timestep": torch.rand(batch),
        "text_embedding_mask": torch.ones(batch, 5),
        "text_embedding_mask_t5": torch.ones(batch, 5),
        "image_meta_size": torch.rand(batch, 6),
        "style": torch.zeros(batch, dtype=torch.long),
        "image_rotary_emb": (torch.randn(16, 8), torch.randn(16, 8)),
    },
    **DIT,
    in_channels=4,
    hidden_size=32,
    cross_attention_dim=16,
    cross_attention_dim_t5=16,
    pooled_projection_dim=16,
    text_len=5,
    text_len_t5=5,
)
of(
    "diffusers",
    "diffusion transformer",
    "CogVideoXTransformer3DModel",
    with_time(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(5, 16)),
    num_attention_heads=4,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    time_embed_dim=8,
    text_embed_dim=16,
    num_layers=2,
    sample_width=8,
    sample_height=8,
    sample_frames=5,
    patch_size=2,
    max_text_seq_length=5,
)
of(
    "diffusers",
    "diffusion transformer",
    "WanTransformer3DModel",
    with_time(hidden_states=(4, 2, 8, 8), encoder_hidden_states=(5, 16)),
    patch_size=(1, 2, 2),
    num_attention_heads=4,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=16,
    ffn_dim=32,
    num_layers=2,
    rope_max_seq_len=32,
)
of(
    "diffusers",
    "diffusion transformer",
    "LuminaNextDiT2DModel",
    lambda batch: {
        "hidden_states": torch.randn(batch, 4, 16, 16),
        "timestep": torch.rand(batch),
        "encoder_hidden_states": torch.randn(batch, 5, 16),
        "encoder_mask": torch.ones(batch, 5, dtype=torch.bool),
        "image_rotary_emb": torch.polar(torch.ones(16, 16, 4), torch.rand(16, 16, 4)),
        "cross_attention_kwargs": {},
    },
    sample_size=16,
    patch_size=2,
    in_channels=4,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    multiple_of=8,
    cross_attention_dim=16,
)

# ------------------------------------------------------------------------------------------- monai

FLAT, SOLID = tensors(x=(1, 32, 32)), tensors(x=(1, 16, 16, 16))
UNETS = {"in_channels": 1, "out_channels": 2}
DEEP = {"channels": (4, 8, 16), "strides": (2, 2)}


def solid(edge: int, name: str = "x") -> Inputs:
    """Volumes."""
    return tensors(**{name: (1, edge, edge, edge)})


of(
    "monai",
    "U-Net",
    "UNet 2D",
    FLAT,
    "UNet",
    spatial_dims=2,
    **UNETS,
    **DEEP,
    num_res_units=2,
    fast=True,
)
of("monai", "U-Net", "UNet 3D", SOLID, "UNet", spatial_dims=3, **UNETS, **DEEP, num_res_units=2)
of("monai", "U-Net", "BasicUNet", FLAT, spatial_dims=2, **UNETS, features=(4, 4, 8, 8, 16, 4))
of(
    "monai",
    "U-Net",
    "BasicUNetPlusPlus",
    FLAT,
    spatial_dims=2,
    **UNETS,
    features=(4, 4, 8, 8, 16, 4),
)
of("monai", "U-Net", "AttentionUnet", FLAT, spatial_dims=2, **UNETS, **DEEP)
of(
    "monai",
    "U-Net",
    "DynUNet",
    SOLID,
    spatial_dims=3,
    **UNETS,
    kernel_size=[3, 3, 3],
    strides=[1, 2, 2],
    upsample_kernel_size=[2, 2],
    filters=[4, 8, 16],
    deep_supervision=True,
)
of(
    "monai",
    "U-Net",
    "FlexibleUNet",
    tensors(inputs=(1, 32, 32)),
    **UNETS,
    backbone="efficientnet-b0",
    pretrained=False,
    decoder_channels=(16, 8, 8, 8, 8),
)
of(
    "monai",
    "U-Net",
    "UNETR",
    tensors(x_in=(1, 32, 32, 32)),
    **UNETS,
    img_size=(32, 32, 32),
    feature_size=4,
    hidden_size=24,
    mlp_dim=32,
    num_heads=4,
)
of(
    "monai",
    "U-Net",
    "SwinUNETR",
    tensors(x_in=(1, 64, 64)),
    **UNETS,
    feature_size=12,
    spatial_dims=2,
    depths=(1, 1, 1, 1),
    num_heads=(2, 2, 2, 2),
)
of(
    "monai",
    "segmentation",
    "SegResNet",
    SOLID,
    spatial_dims=3,
    init_filters=4,
    **UNETS,
    blocks_down=(1, 1, 1),
    blocks_up=(1, 1),
    norm=("GROUP", {"num_groups": 2}),
)
of(
    "monai",
    "segmentation",
    "SegResNetDS",
    FLAT,
    spatial_dims=2,
    init_filters=4,
    **UNETS,
    blocks_down=(1, 1, 1),
    dsdepth=2,
)
of("monai", "segmentation", "VNet", solid(16), **UNETS, spatial_dims=3)
of("monai", "segmentation", "HighResNet", FLAT, spatial_dims=2, **UNETS)
of(
    "monai",
    "segmentation",
    "MedNeXt",
    FLAT,
    spatial_dims=2,
    init_filters=4,
    **UNETS,
    encoder_expansion_ratio=2,
    decoder_expansion_ratio=2,
    bottleneck_expansion_ratio=2,
    blocks_down=(1, 1, 1, 1),
    blocks_bottleneck=1,
    blocks_up=(1, 1, 1, 1),
)
of(
    "monai",
    "classification",
    "DenseNet121",
    tensors(x=(1, 32, 32)),
    spatial_dims=2,
    **UNETS,
    init_features=8,
    growth_rate=4,
    block_config=(2, 2, 2),
)
of(
    "monai",
    "classification",
    "EfficientNetBN",
    tensors(inputs=(1, 32, 32)),
    spatial_dims=2,
    model_name="efficientnet-b0",
    in_channels=1,
    num_classes=2,
    pretrained=False,
)
of(
    "monai",
    "classification",
    "ViT 3D",
    solid(16),
    "ViT",
    in_channels=1,
    img_size=(16, 16, 16),
    patch_size=(8, 8, 8),
    hidden_size=24,
    mlp_dim=32,
    num_layers=4,
    num_heads=4,
    classification=True,
)
of(
    "monai",
    "autoencoder",
    "AutoEncoder",
    FLAT,
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    channels=(4, 8),
    strides=(2, 2),
)
of(
    "monai",
    "autoencoder",
    "VQVAE",
    tensors(images=(1, 16, 16)),
    spatial_dims=2,
    in_channels=1,
    out_channels=1,
    channels=(8, 8),
    num_res_channels=(8, 8),
    num_res_layers=1,
    downsample_parameters=((2, 4, 1, 1),) * 2,
    upsample_parameters=((2, 4, 1, 1, 0),) * 2,
    num_embeddings=16,
    embedding_dim=8,
)
