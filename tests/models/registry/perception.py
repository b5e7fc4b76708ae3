"""Models of transformers that see and hear."""

from __future__ import annotations

import torch

from tests.models.registry.entry import (
    IMAGE,
    LENGTH,
    VOCABULARY,
    pictures_and_text,
    pixels,
    sound,
    tokens,
    transformer,
)
from tests.models.registry.text import PAIR, TEXT

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
