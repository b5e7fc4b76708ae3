"""Models of transformers that classify and map images and videos."""

from __future__ import annotations

import torch

from tests.models.registry.entry import (
    IMAGE,
    pixels,
    tensors,
    transformer,
)

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

transformer(
    "vision",
    "PoolFormerForImageClassification",
    pixels,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
)
transformer(
    "vision",
    "PvtV2ForImageClassification",
    pixels,
    image_size=IMAGE,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
)
transformer(
    "vision",
    "FocalNetForImageClassification",
    pixels,
    image_size=IMAGE,
    patch_size=2,
    embed_dim=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    focal_levels=[1, 1],
    focal_windows=[3, 3],
)
transformer(
    "vision",
    "BitForImageClassification",
    pixels,
    embedding_size=8,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    num_groups=4,
)
transformer(
    "vision",
    "GLPNForDepthEstimation",
    pixels,
    hidden_sizes=[8, 16, 16, 32],
    depths=[1, 1, 1, 1],
    decoder_hidden_size=16,
    num_attention_heads=[1, 2, 2, 4],
)


FRAMES = tensors(pixel_values=(4, 3, IMAGE, IMAGE))

transformer(
    "video", "VideoMAEForVideoClassification", FRAMES, **VISION, num_frames=4, tubelet_size=2
)
transformer(
    "video",
    "VivitForVideoClassification",
    FRAMES,
    **{key: value for key, value in VISION.items() if key != "patch_size"},
    num_frames=4,
    tubelet_size=[2, 8, 8],
)
transformer("video", "TimesformerForVideoClassification", FRAMES, **VISION, num_frames=4)
