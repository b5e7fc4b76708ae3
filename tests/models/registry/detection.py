"""Models of transformers that detect, segment and match what images show."""

from __future__ import annotations

import torch

from tests.models.registry.entry import (
    IMAGE,
    pixels,
    tensors,
    transformer,
)
from tests.models.registry.vision import VISION

SMALL_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
}
SMALL_SWIN = {
    "model_type": "swin",
    "image_size": IMAGE,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {**SMALL_RESNET, "out_features": ["stage4"]},
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 5,
}
LARGE = tensors(pixel_values=(3, 2 * IMAGE, 2 * IMAGE))

transformer("detection and segmentation", "DetrForObjectDetection", pixels, **DETR)
transformer("detection and segmentation", "ConditionalDetrForObjectDetection", pixels, **DETR)
transformer(
    "detection and segmentation",
    "DeformableDetrForObjectDetection",
    LARGE,
    **DETR | {"backbone_config": {**SMALL_RESNET, "out_features": ["stage2", "stage3", "stage4"]}},
)
transformer(
    "detection and segmentation",
    "YolosForObjectDetection",
    pixels,
    **VISION | {"image_size": [IMAGE, IMAGE]},
    num_detection_tokens=4,
)
transformer(
    "detection and segmentation",
    "MaskFormerForInstanceSegmentation",
    LARGE,
    backbone_config={**SMALL_SWIN, "image_size": 2 * IMAGE},
    decoder_config={
        "model_type": "detr",
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 32,
        "num_queries": 4,
    },
    fpn_feature_size=32,
    mask_feature_size=32,
)
transformer(
    "detection and segmentation",
    "SuperPointForKeypointDetection",
    pixels,
    encoder_hidden_sizes=[8, 8, 8, 8],
    decoder_hidden_size=8,
    descriptor_decoder_dim=8,
)
transformer(
    "detection and segmentation",
    "SamModel",
    lambda batch: {**pixels(batch), "input_points": torch.rand(batch, 1, 2, 2) * IMAGE},
    vision_config={
        **VISION,
        "output_channels": 16,
        "mlp_dim": 64,
        "window_size": 2,
        "global_attn_indexes": [1, 3],
        "num_pos_feats": 8,
    },
    prompt_encoder_config={
        "hidden_size": 16,
        "image_size": IMAGE,
        "patch_size": 8,
        "mask_input_channels": 4,
    },
    mask_decoder_config={
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": 16,
    },
)
transformer(
    "detection and segmentation",
    "UperNetForSemanticSegmentation",  # in train mode its auxiliary head's output is of no use
    LARGE,
    backbone_config=SMALL_SWIN,
    hidden_size=16,
    auxiliary_in_channels=32,
    auxiliary_channels=16,
    pool_scales=[1, 2],
)
